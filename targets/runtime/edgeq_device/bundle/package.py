"""Open a bundle, which is a directory or an `.edgeq` zip. Everything is checked before anything is loaded.

The checks include the models: each must take its weights only from files of the bundle. onnxruntime 1.23 reads external
data from any path that a model names, and treats some names as addresses in memory. So every model of a bundle is
checked before onnxruntime opens it.
"""

from __future__ import annotations

import hashlib
import math
import re
import shutil
import zipfile
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Callable, Dict, Mapping, Optional, Sequence, Tuple, Union

from edgeq_device.bundle.archive import extract_files, list_archive
from edgeq_device.bundle.assets import check_assets
from edgeq_device.bundle.content import check_listing, read_unlisted
from edgeq_device.bundle.directory import check_directory, list_directory
from edgeq_device.bundle.manifest import MANIFEST, FileRecord, Manifest, parse_manifest
from edgeq_device.bundle.names import check_file_name
from edgeq_device.bundle.variants import load_variants
from edgeq_device.engines.catalog import find_plugin
from edgeq_device.engines.variant import EXTERNAL_FOLDER, Variant
from edgeq_device.errors import AGAIN, BundleError, OutputError, UsageError
from edgeq_device.model.onnxfile import ELEMENT_BITS, ExternalTensor, read_onnx
from edgeq_device.system.files import open_file
from edgeq_device.system.places import make_temporary_folder
from edgeq_device.system.plainjson import parse_json
from edgeq_device.system.unchanged import HashedFolder
from edgeq_device.trust.signature import SIGNATURE

SUFFIX = ".onnx"
_KEYS = frozenset({"location", "offset", "length", "checksum"})
# onnxruntime treats a name with this beginning as an address in memory.
_ADDRESS = "_ORT_MEM"


def check_models(variants: Sequence[Variant], root: Path, files: Mapping[str, FileRecord], context: str) -> None:
    """Check the model of each variant of the bundle under `root`. `files` contains the records of the bundle's
    manifest.

    Raises:
        BundleError: a model is not an ONNX file or contains compiled code; its external data are not entirely inside
            one of the bundle's files; or their size does not match the shape and type of the tensor.
    """
    # Variants often share a model, which is then checked once.
    models: Dict[Tuple[str, str, bool], None] = {}
    for variant in variants:
        if variant.model is not None:
            named = variant.session_options.get(EXTERNAL_FOLDER, variant.model.parent)
            model, folder = (Path(place).relative_to(root).as_posix() for place in (variant.model, named))
            engine = find_plugin(variant.ep)
            if engine is None or not engine.suffix:
                models[model, folder, engine is not None and engine.compiled] = None
            elif not model.endswith(engine.suffix):
                raise BundleError(
                    f"{context}: {model} does not have the suffix of {engine.name} ({engine.suffix})", AGAIN
                )
    for model, folder, compiled in models:
        _check_model(model, folder, root, files, f"{context}: {model}", compiled)


def _check_model(
    model: str, folder: str, root: Path, files: Mapping[str, FileRecord], context: str, compiled: bool
) -> None:
    if not model.endswith(SUFFIX):
        raise BundleError(f"{context} does not have the suffix {SUFFIX}, by which onnxruntime knows an ONNX file")
    in_folder = PurePosixPath(folder) / PurePosixPath(model).name
    if str(in_folder) != model and str(in_folder) in files:
        raise BundleError(
            f"{context} and {in_folder}, among its external data, would be the same file in one folder", AGAIN
        )
    onnx_file = read_onnx(root / model, context)
    if onnx_file.has_context and not (compiled and not onnx_file.context_outside):
        raise BundleError(f"{context} contains code compiled for one device (EPContext), which a bundle may not", AGAIN)
    for tensor in onnx_file.external:
        _check_tensor(tensor, folder, files, f"{context}: external tensor {tensor.name!r}")


def _check_tensor(tensor: ExternalTensor, folder: str, files: Mapping[str, FileRecord], context: str) -> None:
    unknown = sorted(set(tensor.entries) - _KEYS)
    if unknown:
        raise BundleError(f"{context} has the unknown key {unknown[0][:60]!r} in its external data", AGAIN)
    location = tensor.entries.get("location", "")
    if _ADDRESS in location.upper():
        raise BundleError(f"{context} has the location {location[:60]!r}, an address in memory", AGAIN)
    file = f"{folder}/{check_file_name(location, context)}"
    if file not in files:
        raise BundleError(f"{context} needs {location!r}, which is not in the bundle as {file!r}", AGAIN)
    if tensor.data_type not in ELEMENT_BITS:
        raise BundleError(f"{context} has the data type {tensor.data_type}, which cannot be external", AGAIN)
    # Elements of fewer than 8 bits are packed, so the last byte may be partly empty.
    size = (math.prod(tensor.dims) * ELEMENT_BITS[tensor.data_type] + 7) // 8
    offset = _parse_number(tensor.entries.get("offset", "0"), "offset", context)
    length = _parse_number(tensor.entries.get("length", str(size)), "length", context)
    if length != size:
        raise BundleError(f"{context} has {length} bytes, but its shape and type need {size}", AGAIN)
    if offset + size > files[file].size:
        raise BundleError(
            f"{context} needs bytes {offset} to {offset + size} of {location!r}, which has {files[file].size}", AGAIN
        )


def _parse_number(text: str, field: str, context: str) -> int:
    # 19 digits suffice for 63 bits, and Python refuses to read thousands.
    if not (text.isascii() and text.isdigit() and len(text) <= 19):
        raise BundleError(f"{context} has the {field} {text[:40]!r}", AGAIN)
    return int(text)


MAIN = "model"
FLOAT = "float32"
COPIED = 1 << 28
"""Largest size in bytes of a directory whose files are copied while they are hashed, and opened from the copy. Copying
takes less time than hashing. The copy fits into the memory of small boards, whose temporary folder may be in memory."""
# A copy may take this share of the free space; other programs need the rest.
_SHARE_OF_FREE = 1 / 4
_ZIP = b"PK\x03\x04"
# Tag of the first field of an ONNX model. Every writer puts this field first.
_IR_VERSION = b"\x08"
_FIX = "Name what `edgeq package` wrote: a directory, or an .edgeq file"


@dataclass(frozen=True)
class Bundle:
    """Hold an opened, checked bundle. Close it (or use `with`), because its files may be in a temporary directory.

    Attributes:
        source: path that was opened.
        root: directory with the files. It is `source` itself, or a private directory with a copy or with the content of
            a zip.
        manifest: bytes of the manifest.
        metadata: additional_metadata.edgeq without the file list.
        extra: files at the top of the directory that are not part of the bundle. They are not read.
        signature: bytes of the signature, unverified (see `edgeq_device.trust.keys`); None if there is no signature.
    """

    source: Path
    root: Path
    name: str
    manifest: bytes = field(repr=False)
    components: Mapping[str, Tuple[Variant, ...]]
    metadata: Mapping[str, Any]
    files: Mapping[str, FileRecord]
    extra: Tuple[str, ...] = ()
    signature: Optional[bytes] = None
    _cleanup: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)

    @property
    def manifest_sha256(self) -> str:
        """Return the hash of the manifest. It identifies the whole bundle, because the manifest lists the hashes of all
        files.
        """
        return hashlib.sha256(self.manifest).hexdigest()

    @property
    def in_place(self) -> bool:
        """Return whether files are opened where they were hashed. Other users may be able to write there, but not to a
        private copy.
        """
        return self.root == self.source

    def facts(self) -> Dict[str, Any]:
        """Return the facts about the bundle as a whole, for the JSON output of `info` and `verify`."""
        return {
            "bundle": str(self.source),
            "name": self.name,
            "manifest_sha256": self.manifest_sha256,
            "files": len(self.files),
            "bytes": sum(record.size for record in self.files.values()),
            "extra_files": list(self.extra),
            "opened": "in place" if self.in_place else "copy",
        }

    def close(self) -> None:
        """Remove the bundle's temporary directory, if it has one. A second call does nothing."""
        self._cleanup()

    def __enter__(self) -> Bundle:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def open_bundle(path: Union[str, Path], *, expect: Optional[str] = None) -> Bundle:
    """Check names, sizes, hashes and every key of the bundle at `path` (a directory or a zip), and open it.

    Args:
        expect: sha256 of the manifest in hex, as the sender of the bundle stated it. Another manifest is refused.

    Raises:
        UsageError: `expect` is not a sha256.
        BundleError: a check failed. Nothing of the bundle was loaded.
        OutputError: a zip cannot be unpacked, because the temporary folder is full or there is none.
    """
    source = Path(path)
    if expect is not None and not re.fullmatch(r"[0-9a-fA-F]{64}", expect):
        raise UsageError(f"{expect!r} is not a sha256", "Give 64 hexadecimal digits, as `info` and `verify` print them")
    if source.is_dir():
        return _open_directory(source, expect)
    if not source.is_file():
        raise BundleError(f"{source} does not exist", "Name a bundle directory or an .edgeq file")
    return _open_archive(source, expect)


def path_next_to(source: Path, suffix: str) -> Path:
    """Return the path next to the bundle at `source` whose name is the bundle's name with `suffix`."""
    place = source.absolute()
    if place.name == "..":  # FOLDER/.. has no name of its own, and a path next to it would be in FOLDER
        place = place.resolve()
    return place.with_name(place.name + suffix)


def _open_directory(root: Path, expect: Optional[str]) -> Bundle:
    try:
        sizes = list_directory(root)
        if MANIFEST not in sizes:
            raise BundleError(f"{root} is not a bundle: it has no {MANIFEST}", _FIX)
        with open_file(root / MANIFEST, follow=False) as stream:
            data = read_unlisted(stream, f"{root}: {MANIFEST}")
        signature = None
        if SIGNATURE in sizes:
            with open_file(root / SIGNATURE, follow=False) as stream:
                signature = read_unlisted(stream, f"{root}: {SIGNATURE}")
    except OSError as error:
        raise BundleError(f"{root} cannot be read ({error.strerror}: {error.filename})") from error
    # Before the manifest is parsed: of an unexpected bundle, nothing else is read.
    _check_expected(data, expect, root)
    manifest = parse_manifest(parse_json(data, f"{root}: {MANIFEST}"), f"{root}: {MANIFEST}")
    extra = check_listing(sizes, manifest.files, str(root), in_use=True)
    check_assets(manifest.files, str(root))
    copy, cleanup = _make_copy_folder(root, sum(record.size for record in manifest.files.values()))
    try:
        try:
            hashed = check_directory(root, manifest.files, copy)
        except OutputError:
            cleanup()
            copy, hashed = None, check_directory(root, manifest.files)
        if copy is not None:
            return _assemble(root, copy, data, manifest, cleanup, extra=extra, signature=signature)
        bundle = _assemble(root, root, data, manifest, cleanup, hashed, extra=extra, signature=signature)
        # A file may have changed while the variants were read.
        hashed.check()
        return bundle
    except BaseException:
        cleanup()
        raise


def _make_copy_folder(root: Path, size: int) -> Tuple[Optional[Path], Callable[[], None]]:
    """Make a private folder for a copy of `size` bytes. Return the folder, or None if the copy is too large. Also
    return a function that removes the folder.
    """
    if size > COPIED:
        return None, lambda: None
    try:
        folder, remove = make_temporary_folder("edgeq-bundle-", f"{root} cannot be copied")
    except OutputError:
        return None, lambda: None
    if size > shutil.disk_usage(folder).free * _SHARE_OF_FREE:
        remove()
        return None, remove
    return folder, remove


def _open_archive(source: Path, expect: Optional[str]) -> Bundle:
    try:
        archive = zipfile.ZipFile(source)
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError) as error:
        # Users give the model itself, or a download that was cut off; the first bytes tell which.
        with open_file(source) as stream:
            head = stream.read(len(_ZIP))
        problem, fix = "it is not a zip archive" if head else "it is empty", _FIX
        if head == _ZIP:
            problem, fix = f"it is a zip archive that is damaged or cut off ({error})", "Get it again"
        elif head[:1] == _IR_VERSION:
            problem = "it looks like an ONNX model"
            fix = f"{_FIX}; `bench`, `eval` and `compare` also take .onnx models"
        raise BundleError(f"{source} is not a bundle: {problem}", fix) from error
    except OSError as error:
        raise BundleError(f"{source} cannot be read ({error.strerror or error})") from error
    with archive:
        entries = list_archive(archive, str(source))
        if MANIFEST not in entries:
            raise BundleError(f"{source} is not a bundle: it has no {MANIFEST} at its top", _FIX)
        data = _read_entry(archive, entries[MANIFEST], source)
        _check_expected(data, expect, source)
        signature = _read_entry(archive, entries[SIGNATURE], source) if SIGNATURE in entries else None
        manifest = parse_manifest(parse_json(data, f"{source}: {MANIFEST}"), f"{source}: {MANIFEST}")
        # Compare names and sizes first, so that a wrong archive is not unpacked.
        check_listing({name: info.file_size for name, info in entries.items()}, manifest.files, str(source))
        check_assets(manifest.files, str(source))
        root, cleanup = make_temporary_folder("edgeq-bundle-", f"{source} cannot be unpacked")
        try:
            extract_files(archive, entries, manifest.files, root)
            return _assemble(source, root, data, manifest, cleanup, signature=signature)
        except BaseException:
            cleanup()
            raise


def _check_expected(manifest: bytes, expect: Optional[str], source: Path) -> None:
    """Compare the sha256 of a manifest with `expect`, if that is given."""
    actual = hashlib.sha256(manifest).hexdigest()
    if expect is not None and actual != expect.lower():
        raise BundleError(
            f"{source} is another bundle: its manifest has the sha256 {actual}, not {expect.lower()}",
            "Get it again from where it was made",
        )


def _read_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, source: Path) -> bytes:
    try:
        with archive.open(entry) as stream:
            return read_unlisted(stream, f"{source}: {entry.filename}")
    except BundleError:
        raise
    except Exception as error:  # a damaged entry raises zlib.error, BadZipFile, RuntimeError and others
        raise BundleError(f"{source}: {entry.filename} cannot be unpacked ({error})") from error


def _assemble(
    source: Path,
    root: Path,
    data: bytes,
    manifest: Manifest,
    cleanup: Callable[[], None],
    hashed: Optional[HashedFolder] = None,
    **more: Any,
) -> Bundle:
    sha256, engines = hashlib.sha256(data).hexdigest(), path_next_to(source, ".engines")
    components = {
        name: tuple(
            replace(variant, bundle=sha256, old_engines=engines, hashed=hashed)
            for variant in load_variants(name, place, root, manifest.files, str(source))
        )
        for name, place in manifest.components.items()
    }
    check_models(
        [variant for variants in components.values() for variant in variants], root, manifest.files, str(source)
    )
    return Bundle(
        source=source,
        root=root,
        name=manifest.name,
        manifest=data,
        components=components,
        metadata=manifest.edgeq,
        files=manifest.files,
        _cleanup=cleanup,
        **more,
    )
