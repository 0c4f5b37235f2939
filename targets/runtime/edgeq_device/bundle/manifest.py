"""Read a bundle's metadata, check them key by key, and compare the files with them. Every file must be present, all
hashes must be correct, and there may be no other files that could be loaded.

The format is ONNX Runtime's model package. The reader accepts the part of the format that edgeq writes (portable
layout, components as directories) and refuses the rest. It ignores what packagers record: additional_metadata, the keys
of executor_info.edgeq, and other executors.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import stat
import zipfile
import zlib
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, ContextManager, Dict, Iterable, List, Mapping, Optional, Set, Tuple

from edgeq_device.errors import AGAIN, BundleError, OutputError
from edgeq_device.system.files import open_file
from edgeq_device.system.places import SET_TMPDIR
from edgeq_device.system.plainjson import MAX_BYTES
from edgeq_device.trust.signature import SHA256, SIGNATURE

MAX_NAME = 512
MAX_FOLDERS = 20_000
"""Maximum number of folders in all file names together. Unpacking a bundle creates each of them."""
# Control characters, line breaks, bidirectional-text marks, lone surrogates, and characters that Windows reserves.
_CONTROL_OR_RESERVED = re.compile('[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\\\\:*?"<>|]')
# Windows treats these names as devices, in every folder and with every suffix.
_RESERVED = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9\u00b9\u00b2\u00b3])", re.IGNORECASE)
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")


def check_file_name(name: str, context: str) -> str:
    """Return `name` if it is a relative POSIX path that stays inside the bundle on every operating system.

    Raises:
        BundleError: the name is absolute or too long, or contains `..`, a backslash, a drive, a device name or a
            control character.
    """
    if not name or len(name) > MAX_NAME:
        raise BundleError(f"{context}: file name {name[:60]!r} is empty or longer than {MAX_NAME} characters", AGAIN)
    if _CONTROL_OR_RESERVED.search(name):
        raise BundleError(f"{context}: file name {name!r} has a character that is not allowed", AGAIN)
    if name.startswith("/"):
        raise BundleError(f"{context}: file name {name!r} is absolute", AGAIN)
    for part in name.split("/"):
        if part in ("", ".", ".."):
            raise BundleError(f"{context}: file name {name!r} is not a plain path inside the bundle", AGAIN)
        if part[-1] in ". ":
            raise BundleError(f"{context}: file name {name!r} ends in a dot or a space, which Windows drops", AGAIN)
        if _RESERVED.fullmatch(part.partition(".")[0].rstrip()):
            raise BundleError(f"{context}: file name {name!r} is the name of a device on Windows", AGAIN)
    return name


def check_file_names(names: Iterable[str], context: str) -> None:
    """Refuse a set of names if two of them mean the same file, or if one is both a file and a directory.

    The comparison ignores case, because Windows and macOS do.
    """
    names_by_folded: Dict[str, str] = {}
    for name in names:
        folded = check_file_name(name, context).casefold()
        if folded in names_by_folded:
            raise BundleError(f"{context}: {name!r} occurs twice (the other is {names_by_folded[folded]!r})")
        names_by_folded[folded] = name
    folders: Set[str] = set()
    for name in names_by_folded:
        parent = name.rpartition("/")[0]
        while parent and parent not in folders:
            folders.add(parent)
            parent = parent.rpartition("/")[0]
        if len(folders) > MAX_FOLDERS:
            raise BundleError(f"{context}: the files are in more than {MAX_FOLDERS} folders")
    for name in sorted(folders & names_by_folded.keys()):
        inside = next(
            names_by_folded[name_below] for name_below in names_by_folded if name_below.startswith(f"{name}/")
        )
        raise BundleError(f"{context}: {names_by_folded[name]!r} is both a file and the directory of {inside!r}")


def is_plain_name(name: object) -> bool:
    """Return whether `name` can name a component or a variant. It may contain letters, digits and `._+-`, and has at
    most 100 characters.
    """
    return isinstance(name, str) and _PLAIN.fullmatch(name) is not None


MANIFEST = "manifest.json"
SCHEMA_VERSION = "1.0"
BUNDLE_SCHEMA = "1.1"
_BUNDLE_SCHEMAS = ("1.0", BUNDLE_SCHEMA)
MAX_FILES = 20_000
MAX_SIZE = 1 << 44

_MANIFEST_KEYS = frozenset(
    {
        "schema_version",
        "package_name",
        "package_version",
        "description",
        "layout",
        "components",
        "shared_assets",
        "additional_metadata",
    }
)


@dataclass(frozen=True)
class FileRecord:
    """Hold the manifest's entry for one file: its sha256 in lower-case hex and its size in bytes."""

    sha256: str
    size: int


@dataclass(frozen=True)
class Manifest:
    """Hold manifest.json. `components` maps a name to its directory, and `files` maps a relative path to its record."""

    name: str
    components: Mapping[str, str]
    edgeq: Mapping[str, Any]
    files: Mapping[str, FileRecord]


def parse_manifest(values: Mapping[str, Any], context: str) -> Manifest:
    """Check manifest.json and return its content. Messages call the file `context`.

    Raises:
        BundleError: the file has an unknown key, another schema version, or a value of the wrong form.
    """
    check_keys(values, _MANIFEST_KEYS, context)
    version = values.get("schema_version")
    if version != SCHEMA_VERSION:
        raise BundleError(
            f"{context}: schema_version is {version!r}, this reader takes {SCHEMA_VERSION!r}",
            "Use the edgeq version that made the bundle, or a newer one",
        )
    if values.get("layout", "portable") != "portable":
        raise BundleError(f"{context}: layout is {values['layout']!r}; a bundle is 'portable'")
    if values.get("shared_assets"):
        raise BundleError(f"{context}: shared_assets moves assets elsewhere, which a bundle may not")
    for key in ("package_name", "package_version", "description"):
        if key in values and not isinstance(values[key], str):
            raise BundleError(f"{context}: {key} is not a string")
    metadata = require_object(values.get("additional_metadata"), f"{context}: additional_metadata")
    edgeq = require_object(metadata.get("edgeq"), f"{context}: additional_metadata.edgeq")
    if edgeq.get("bundle_schema") not in _BUNDLE_SCHEMAS:
        raise BundleError(
            f"{context}: bundle schema is {edgeq.get('bundle_schema')!r}, this reader takes up to {BUNDLE_SCHEMA!r}",
            "Use the edgeq version that made the bundle, or a newer one",
        )
    components: Dict[str, str] = {}
    for name, place in require_object(values.get("components"), f"{context}: components").items():
        if not is_plain_name(name) or not isinstance(place, str):
            raise BundleError(f"{context}: component {name!r} is not a plain name with the path of a directory")
        components[name] = check_file_name(place, context)
    if not components:
        raise BundleError(f"{context}: there is no component")
    return Manifest(
        name=values.get("package_name", ""),
        components=components,
        edgeq={key: value for key, value in edgeq.items() if key != "files"},
        files=_parse_files(edgeq.get("files"), context),
    )


def _parse_files(values: object, context: str) -> Dict[str, FileRecord]:
    records: Dict[str, FileRecord] = {}
    entries = require_object(values, f"{context}: additional_metadata.edgeq.files")
    if len(entries) > MAX_FILES:
        raise BundleError(f"{context}: more than {MAX_FILES} files")
    check_file_names([MANIFEST, SIGNATURE, *entries], context)
    for name, entry in entries.items():
        record = require_object(entry, f"{context}: file {name!r}")
        sha256, size = record.get("sha256"), record.get("size")
        if set(record) != {"sha256", "size"} or not isinstance(sha256, str) or not SHA256.fullmatch(sha256):
            raise BundleError(f"{context}: file {name!r} has no proper sha256 and size")
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= MAX_SIZE:
            raise BundleError(f"{context}: file {name!r} has no proper size")
        records[name] = FileRecord(sha256, size)
    return records


def resolve_reference(reference: str, directory: str, context: str) -> str:
    """Return the path inside the bundle to which a payload's `reference` leads.

    `sha256:<hex>[/sub/path]` refers to a shared asset. Any other reference is relative to `directory`, the variant's
    path inside the bundle.
    """
    if reference.startswith("sha256:"):
        digest, _, remaining = reference[len("sha256:") :].partition("/")
        if not SHA256.fullmatch(digest):
            raise BundleError(f"{context}: {reference!r} is not a proper shared-asset reference")
        asset = f"shared_assets/sha256-{digest}"
        return check_file_name(f"{asset}/{remaining}", context) if remaining else asset
    return check_file_name(f"{directory}/{check_file_name(reference, context)}", context)


def read_strings(values: Mapping[str, Any], key: str, context: str) -> List[str]:
    """Return the list of strings under `key`, or an empty list if the key is absent."""
    strings = values.get(key, [])
    if not isinstance(strings, list) or not all(isinstance(item, str) for item in strings):
        raise BundleError(f"{context}: {key} is not a list of strings")
    return list(strings)


def check_keys(values: Mapping[str, Any], keys: "frozenset[str]", context: str) -> None:
    """Refuse keys that are not in `keys`.

    Raises:
        BundleError: a key is unknown; the message names it.
    """
    unknown = sorted(set(values) - keys)
    if unknown:
        raise BundleError(f"{context}: unknown key {unknown[0][:100]!r}")


def require_object(value: object, context: str) -> Dict[str, Any]:
    """Return `value` if it is a JSON object.

    Raises:
        BundleError: the value is missing or is not an object.
    """
    if not isinstance(value, dict):
        raise BundleError(f"{context} is missing or not an object")
    return value


def read_texts(value: object, context: str) -> Dict[str, str]:
    """Return `value` if it is a JSON object whose values are all strings.

    Raises:
        BundleError: the value is not such an object.
    """
    values = require_object(value, context)
    if not all(isinstance(item, str) for item in values.values()):
        raise BundleError(f"{context} contains a value that is not a string")
    return values


Identity = Tuple[int, ...]
# number of items at the start of a folder's identity that stay the same when files are added to it
_PLACE = 2


@dataclass(frozen=True)
class Hashed:
    """Record the state of the files and folders in a bundle's directory when the files were hashed.

    Attributes:
        root: the bundle's directory.
        identities: identity of each file and folder, by its path relative to `root`; "." is `root` itself.
    """

    root: Path
    identities: Mapping[str, Identity]

    def check(self) -> None:
        """Refuse the directory if a file or folder in it was changed, replaced or moved after the files were hashed.

        Raises:
            BundleError: a file or folder differs; the message names the first.
        """
        for name, recorded in self.identities.items():
            try:
                now = identify((self.root / name).lstat())
            except OSError as error:
                raise BundleError(f"{self.root}: {name} was removed since it was hashed", AGAIN) from error
            if now[: len(recorded)] != recorded:
                raise BundleError(f"{self.root}: {name} was changed since it was hashed", AGAIN)


def identify(state: os.stat_result) -> Identity:
    """Return numbers that identify the state of a file or folder. They change when a file is written, replaced, linked
    or moved, or when the entries of a folder change.
    """
    return (state.st_dev, state.st_ino, state.st_mode, state.st_size, state.st_mtime_ns, state.st_ctime_ns)


def identify_root(root: Path) -> Identity:
    """Return numbers that change when another folder replaces `root`, but not when files are added to it."""
    return identify(root.lstat())[:_PLACE]


MAX_TOTAL = 1 << 40
# Deflate reaches 1032:1, but real bundles stay under 10:1. Small archives are not checked: zeros in a tiny model
# compress well.
MAX_RATIO = 200
SMALL = 64 * 1024 * 1024
_CHUNK = 1024 * 1024
_LOADABLE = re.compile(r"\.(py\w*|pth|so(\.[\d.]+)?|dylib|dll|onnx|ort|data)$", re.IGNORECASE)
# These errors come only from writing. Any other error may come from a damaged archive.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNWRITABLE = (*_FULL, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)


def list_directory(root: Path) -> Dict[str, int]:
    """Return the size in bytes of every file under `root`, by relative POSIX path.

    Raises:
        BundleError: there is a link, a device, a pipe, or a name that a bundle may not contain.
    """
    sizes: Dict[str, int] = {}
    pending = [root]
    while pending:
        folder = pending.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                name = Path(entry.path).relative_to(root).as_posix()
                mode = entry.stat(follow_symlinks=False).st_mode
                if stat.S_ISDIR(mode):
                    pending.append(Path(entry.path))
                elif stat.S_ISREG(mode):
                    sizes[name] = entry.stat(follow_symlinks=False).st_size
                else:
                    kind = "a link" if stat.S_ISLNK(mode) else "not a regular file"
                    raise BundleError(f"{root}: {name!r} is {kind}; a bundle contains only files", AGAIN)
    check_file_names(sorted(sizes), str(root))
    return sizes


def list_archive(archive: zipfile.ZipFile, context: str) -> Dict[str, zipfile.ZipInfo]:
    """Return the entry of every file in the zip, by name.

    Raises:
        BundleError: a name is absolute, leads out of the archive or occurs twice; an entry is a directory, is a link or
            is encrypted; or the archive would grow out of proportion.
    """
    entries: Dict[str, zipfile.ZipInfo] = {}
    check_file_names([info.orig_filename for info in archive.infolist()], context)
    for info in archive.infolist():
        mode = info.external_attr >> 16
        if mode and not stat.S_ISREG(mode) and stat.S_IFMT(mode):
            kind = "a link" if stat.S_ISLNK(mode) else "not a regular file"
            raise BundleError(f"{context}: {info.filename!r} is {kind}; a bundle contains only files", AGAIN)
        if info.flag_bits & 0x1:
            raise BundleError(f"{context}: {info.filename!r} is encrypted")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise BundleError(f"{context}: {info.filename!r} is compressed by a method that a bundle does not use")
        entries[info.filename] = info
    total = sum(info.file_size for info in entries.values())
    packed = Path(context).stat().st_size
    if total > MAX_TOTAL or (total > SMALL and total > MAX_RATIO * packed):
        raise BundleError(f"{context} would grow from {packed} to {total} bytes, out of all proportion", AGAIN)
    return entries


def read_unlisted(stream: IO[bytes], title: str) -> bytes:
    """Return the content of the manifest or of the signature, which may have at most `MAX_BYTES` bytes.

    Raises:
        BundleError: the file is larger.
    """
    data = stream.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise BundleError(f"{title} is larger than {MAX_BYTES} bytes")
    return data


def is_harmless(name: str) -> bool:
    """Return whether an unlisted file with this relative name may be in a bundle's directory.

    It must be at the top, where users put outputs and notes. Its suffix must not be one that Python, a system's loader
    or ONNX Runtime would load.
    """
    return "/" not in name and _LOADABLE.search(name) is None


def check_listing(
    sizes: Mapping[str, int], records: Mapping[str, FileRecord], context: str, *, in_use: bool = False
) -> Tuple[str, ...]:
    """Compare names and sizes with the manifest before any content is read. `sizes` maps each name to its size in
    bytes.

    Args:
        in_use: True if users work in the directory, in which case other, harmless files are allowed.

    Returns:
        The sorted names of the other, harmless files.
    """
    declared = set(records) | {MANIFEST}
    missing, unlisted = sorted(declared - set(sizes)), sorted(set(sizes) - declared - {SIGNATURE})
    if missing:
        raise BundleError(f"{context}: {missing[0]} is missing{_count_more(missing)}", AGAIN)
    extra = [name for name in unlisted if not (in_use and is_harmless(name))]
    if extra:
        compiled = "__pycache__/" in extra[0]
        raise BundleError(
            f"{context}: {extra[0]} is not in the manifest{_count_more(extra)}",
            "Remove the __pycache__ folders, compiled code that no hash covers"
            if compiled
            else "Remove files that do not belong to the bundle, or get the bundle again",
        )
    for name, record in sorted(records.items()):
        if sizes[name] != record.size:
            raise BundleError(f"{context}: {name} has {sizes[name]} bytes, the manifest states {record.size}", AGAIN)
    return tuple(unlisted)


def check_directory(root: Path, records: Mapping[str, FileRecord], to: Optional[Path] = None) -> Hashed:
    """Hash every file of a bundle's directory. If `to` is given, copy the files there at the same time.

    Returns:
        A record with which files of `root` can be checked when they are opened later.

    Raises:
        BundleError: the files do not match the manifest.
        OutputError: the disk of `to` is full.
    """
    folders = {str(parent) for name in records for parent in PurePosixPath(name).parents}
    name = "."
    try:
        identities = {name: identify((root / name).lstat()) for name in sorted(folders)}
        identities["."] = identify_root(root)
        for name, record in sorted(records.items()):
            with open_file(root / name, follow=False) as stream, _open_sink(to, name) as sink:
                identities[name] = identify(os.fstat(stream.fileno()))
                check_content(stream, record, f"{root}: {name}", sink)
    except OSError as error:
        if to is not None and error.errno in _FULL:
            raise OutputError(f"{root}: {name} cannot be copied into {to} ({error.strerror})", SET_TMPDIR) from error
        raise BundleError(f"{root}: {name} cannot be read ({error.strerror})") from error
    return Hashed(root, identities)


def _open_sink(to: Optional[Path], name: str) -> ContextManager[Optional[IO[bytes]]]:
    """Open the new file `name` under `to`, or nothing if `to` is None."""
    if to is None:
        return nullcontext()
    (to / name).parent.mkdir(parents=True, exist_ok=True)
    return (to / name).open("xb")


def extract_files(
    archive: zipfile.ZipFile, entries: Mapping[str, zipfile.ZipInfo], records: Mapping[str, FileRecord], to: Path
) -> None:
    """Write the declared files of `archive` to `to`, and hash them at the same time. Stop at the first file of a wrong
    size.

    Raises:
        BundleError: the archive is damaged, or does not match the manifest.
        OutputError: the disk of `to` is full, or `to` cannot be written.
    """
    context = str(archive.filename)
    total = sum(record.size for record in records.values())
    if total > shutil.disk_usage(to).free:
        raise OutputError(f"{context}: unpacking takes {total} bytes, more than is free in {to.parent}", SET_TMPDIR)
    for name, record in sorted(records.items()):
        try:
            with archive.open(entries[name]) as stream, _open_sink(to, name) as sink:
                check_content(stream, record, f"{context}: {name}", sink)
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError) as error:
            raise BundleError(f"{context}: {name} cannot be unpacked ({error})", AGAIN) from error
        except OSError as error:
            problem = f"{context}: {name} cannot be unpacked into {to} ({error.strerror})"
            if error.errno in _UNWRITABLE:
                raise OutputError(problem, SET_TMPDIR) from error
            raise BundleError(problem) from error


def check_assets(records: Mapping[str, FileRecord], context: str) -> None:
    """Check that the directory of each shared asset is named after the hash of its content, as the format requires."""
    assets: Dict[str, Dict[str, str]] = {}
    for name, record in records.items():
        if name.startswith("shared_assets/"):
            _, folder, inner = name.split("/", 2) if name.count("/") >= 2 else ("", "", "")
            assets.setdefault(folder, {})[inner] = record.sha256
    for folder, members in sorted(assets.items()):
        if folder != f"sha256-{hash_directory(members)}":
            raise BundleError(f"{context}: shared asset {folder!r} does not have the hash in its name", AGAIN)


def hash_directory(members: Mapping[str, str]) -> str:
    """Return the hash that the format assigns to a directory: the sha256 of lines `<sha256> <relative path>`, sorted by
    path.
    """
    text = "".join(f"{members[name]}  {name}\n" for name in sorted(members))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def check_content(stream: IO[bytes], record: FileRecord, title: str, sink: Optional[IO[bytes]]) -> None:
    """Read a file to its end, write it to `sink` if there is one, and check it against its record.

    Raises:
        BundleError: the size or the hash differs. Nothing beyond the recorded size is written.
    """
    digest = hashlib.sha256()
    size = 0
    for chunk in iter(lambda: stream.read(_CHUNK), b""):
        size += len(chunk)
        if size > record.size:
            raise BundleError(f"{title} is larger than the {record.size} bytes that the manifest states", AGAIN)
        digest.update(chunk)
        if sink is not None:
            sink.write(chunk)
    if size != record.size:
        raise BundleError(f"{title} has {size} bytes, the manifest states {record.size}", AGAIN)
    if digest.hexdigest() != record.sha256:
        raise BundleError(f"{title} was changed: its sha256 is not the one in the manifest", AGAIN)


def _count_more(names: "list[str]") -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
