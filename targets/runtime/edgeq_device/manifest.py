"""The bundle's metadata: manifest.json and component.json, checked key by key. No file is touched here.

The format is ONNX Runtime's model package; the reader takes the part of it that edgeq writes (portable layout,
components as directories) and refuses the rest, but for what packagers record: additional_metadata, the keys of
executor_info.edgeq, and other executors, which nothing here goes by."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Dict, Iterable, List, Mapping, Optional, Set, Tuple, Union

from edgeq_device.errors import AGAIN, BundleError
from edgeq_device.signature import SHA256, SIGNATURE

MAX_NAME = 512
MAX_FOLDERS = 20_000
"""Of all names together: each becomes a directory where the bundle is unpacked."""
# Control characters, line breaks, marks of direction, lone surrogates, and what Windows reserves.
_CONTROL_OR_RESERVED = re.compile('[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\\\\:*?"<>|]')
# Windows takes these for devices, in every folder and with every suffix.
_DEVICES_OF_NAMES = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9\u00b9\u00b2\u00b3])", re.IGNORECASE)
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")


def check_file_name(name: str, where: str) -> str:
    """`name` if it is a relative POSIX path that stays inside the bundle on every operating system.

    Raises:
        BundleError: absolute, `..`, a backslash, a drive or a device name, a control character, or too long.
    """
    if not name or len(name) > MAX_NAME:
        raise BundleError(f"{where}: file name {name[:60]!r} is empty or longer than {MAX_NAME} characters", AGAIN)
    if _CONTROL_OR_RESERVED.search(name):
        raise BundleError(f"{where}: file name {name!r} has a character that is not allowed", AGAIN)
    if name.startswith("/"):
        raise BundleError(f"{where}: file name {name!r} is absolute", AGAIN)
    for part in name.split("/"):
        if part in ("", ".", ".."):
            raise BundleError(f"{where}: file name {name!r} is not a plain path inside the bundle", AGAIN)
        if part[-1] in ". ":
            raise BundleError(f"{where}: file name {name!r} ends in a dot or a space, which Windows drops", AGAIN)
        if _DEVICES_OF_NAMES.fullmatch(part.partition(".")[0].rstrip()):
            raise BundleError(f"{where}: file name {name!r} is that of a device on Windows", AGAIN)
    return name


def check_file_names(names: Iterable[str], where: str) -> None:
    """Refuse a set of names in which two would meet in one file, or one would be a file and a directory at once.

    Names are compared without case, as Windows and macOS compare them.
    """
    seen: Dict[str, str] = {}
    for name in names:
        folded = check_file_name(name, where).casefold()
        if folded in seen:
            raise BundleError(f"{where}: {name!r} is there twice (the other is {seen[folded]!r})")
        seen[folded] = name
    folders: Set[str] = set()
    for name in seen:
        parent = name.rpartition("/")[0]
        while parent and parent not in folders:
            folders.add(parent)
            parent = parent.rpartition("/")[0]
        if len(folders) > MAX_FOLDERS:
            raise BundleError(f"{where}: the files lie in more than {MAX_FOLDERS} folders")
    for name in sorted(folders & seen.keys()):
        inside = next(seen[other] for other in seen if other.startswith(f"{name}/"))
        raise BundleError(f"{where}: {seen[name]!r} is both a file and the directory of {inside!r}")


def is_plain_name(name: object) -> bool:
    """Whether `name` can name a component or a variant: letters, digits and `._+-`, at most 100 characters."""
    return isinstance(name, str) and _PLAIN.fullmatch(name) is not None


MANIFEST = "manifest.json"
COMPONENT = "component.json"
SCHEMA_VERSION = "1.0"
BUNDLE_SCHEMA = "1.0"
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
_COMPONENT_KEYS = frozenset({"component_name", "variants", "additional_metadata"})
_VARIANT_KEYS = frozenset(
    {"variant_directory", "ep", "device", "compatibility_string", "executor_info", "additional_metadata"}
)
_ORT_KEYS = frozenset({"model_file", "session_options", "provider_options"})
_DEVICES = ("cpu", "gpu", "npu")


@dataclass(frozen=True)
class FileRecord:
    """The manifest's entry of one file: sha256 in lower-case hex, size in bytes."""

    sha256: str
    size: int


@dataclass(frozen=True)
class Manifest:
    """manifest.json: `components` maps a name to its directory, `files` a relative path to its record."""

    name: str
    description: str
    components: Mapping[str, str]
    edgeq: Mapping[str, Any]
    files: Mapping[str, FileRecord]


@dataclass(frozen=True)
class VariantBody:
    """One variant of component.json, options and references as they stand there.

    `edgeq` is the inline object, or the name of a file in the variant directory."""

    name: str
    directory: str
    ep: str
    model_file: Optional[str]
    session_options: Mapping[str, str]
    provider_options: Mapping[str, str]
    edgeq: Union[Mapping[str, Any], str]


def parse_manifest(values: Mapping[str, Any], where: str) -> Manifest:
    """Check manifest.json. `where` names it in messages.

    Raises:
        BundleError: an unknown key, another schema version, or a value of the wrong form.
    """
    _known(values, _MANIFEST_KEYS, where)
    version = values.get("schema_version")
    if version != SCHEMA_VERSION:
        raise BundleError(
            f"{where}: schema_version is {version!r}, this reader takes {SCHEMA_VERSION!r}",
            "Use the edgeq version that made the bundle, or a newer one",
        )
    if values.get("layout", "portable") != "portable":
        raise BundleError(f"{where}: layout is {values['layout']!r}; a bundle is 'portable'")
    if values.get("shared_assets"):
        raise BundleError(f"{where}: shared_assets moves assets to places of its own, which a bundle does not")
    for key in ("package_name", "package_version", "description"):
        if key in values and not isinstance(values[key], str):
            raise BundleError(f"{where}: {key} is not a string")
    metadata = _object(values.get("additional_metadata"), f"{where}: additional_metadata")
    edgeq = _object(metadata.get("edgeq"), f"{where}: additional_metadata.edgeq")
    if edgeq.get("bundle_schema") != BUNDLE_SCHEMA:
        raise BundleError(
            f"{where}: edgeq bundle schema is {edgeq.get('bundle_schema')!r}, this reader takes {BUNDLE_SCHEMA!r}",
            "Use the edgeq version that made the bundle, or a newer one",
        )
    components: Dict[str, str] = {}
    for name, place in _object(values.get("components"), f"{where}: components").items():
        if not is_plain_name(name) or not isinstance(place, str):
            raise BundleError(f"{where}: component {name!r} is not a plain name with the path of a directory")
        components[name] = check_file_name(place, where)
    if not components:
        raise BundleError(f"{where}: there is no component")
    return Manifest(
        name=values.get("package_name", ""),
        description=values.get("description", ""),
        components=components,
        edgeq={key: value for key, value in edgeq.items() if key != "files"},
        files=_parse_files(edgeq.get("files"), where),
    )


def _parse_files(values: object, where: str) -> Dict[str, FileRecord]:
    records: Dict[str, FileRecord] = {}
    entries = _object(values, f"{where}: additional_metadata.edgeq.files")
    if len(entries) > MAX_FILES:
        raise BundleError(f"{where}: more than {MAX_FILES} files")
    check_file_names([MANIFEST, SIGNATURE, *entries], where)
    for name, entry in entries.items():
        record = _object(entry, f"{where}: file {name!r}")
        sha256, size = record.get("sha256"), record.get("size")
        if set(record) != {"sha256", "size"} or not isinstance(sha256, str) or not SHA256.fullmatch(sha256):
            raise BundleError(f"{where}: file {name!r} has no proper sha256 and size")
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= MAX_SIZE:
            raise BundleError(f"{where}: file {name!r} has no proper size")
        records[name] = FileRecord(sha256, size)
    return records


def parse_component(values: Mapping[str, Any], where: str) -> Tuple[VariantBody, ...]:
    """Check component.json; variants in the order in which they are written, which is their order of preference."""
    _known(values, _COMPONENT_KEYS, where)
    variants = _object(values.get("variants"), f"{where}: variants")
    if not variants:
        raise BundleError(f"{where}: there is no variant")
    return tuple(_parse_variant(name, body, where) for name, body in variants.items())


def _parse_variant(name: str, values: object, where: str) -> VariantBody:
    if not is_plain_name(name):
        raise BundleError(f"{where}: variant name {name[:100]!r} is not a plain name")
    where = f"{where}: variant {name}"
    body = _object(values, where)
    _known(body, _VARIANT_KEYS, where)
    directory, ep = body.get("variant_directory", name), body.get("ep")
    if not isinstance(directory, str):
        raise BundleError(f"{where}: variant_directory is not a string")
    if not isinstance(ep, str) or not is_plain_name(ep):
        raise BundleError(f"{where}: ep does not name an execution provider")
    if "device" in body and body["device"] not in _DEVICES:
        raise BundleError(f"{where}: device is not one of {', '.join(_DEVICES)}")
    executors = _object(body.get("executor_info"), f"{where}: executor_info")
    edgeq = executors.get("edgeq")
    if not isinstance(edgeq, (dict, str)):
        raise BundleError(f"{where}: executor_info.edgeq is neither an object nor a file name")
    ort = _object(executors.get("ort", {}), f"{where}: executor_info.ort")
    _known(ort, _ORT_KEYS, f"{where}: executor_info.ort")
    model_file = ort.get("model_file")
    if model_file is not None and not isinstance(model_file, str):
        raise BundleError(f"{where}: model_file is not a string")
    return VariantBody(
        name=name,
        directory=check_file_name(directory, where),
        ep=ep,
        model_file=model_file,
        session_options=_strings(ort.get("session_options", {}), f"{where}: session_options"),
        provider_options=_strings(ort.get("provider_options", {}), f"{where}: provider_options"),
        edgeq=edgeq,
    )


def resolve_reference(reference: str, directory: str, where: str) -> str:
    """The path inside the bundle that a payload's `reference` means.

    `sha256:<hex>[/sub/path]` is a shared asset, anything else is relative to `directory` (the variant's, as a path
    inside the bundle).
    """
    if reference.startswith("sha256:"):
        digest, _, remaining = reference[len("sha256:") :].partition("/")
        if not SHA256.fullmatch(digest):
            raise BundleError(f"{where}: {reference!r} is not a proper shared-asset reference")
        asset = f"shared_assets/sha256-{digest}"
        return check_file_name(f"{asset}/{remaining}", where) if remaining else asset
    return check_file_name(f"{directory}/{check_file_name(reference, where)}", where)


def strings_in(values: Mapping[str, Any], key: str, where: str) -> List[str]:
    """The list of strings under `key`; empty where it is absent."""
    found = values.get(key, [])
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise BundleError(f"{where}: {key} is not a list of strings")
    return list(found)


def _known(values: Mapping[str, Any], keys: "frozenset[str]", where: str) -> None:
    unknown = sorted(set(values) - keys)
    if unknown:
        raise BundleError(f"{where}: unknown key {unknown[0][:100]!r}")


def _object(value: object, where: str) -> Dict[str, Any]:
    if not isinstance(value, dict):
        raise BundleError(f"{where} is missing or not an object")
    return value


def _strings(value: object, where: str) -> Dict[str, str]:
    values = _object(value, where)
    if not all(isinstance(item, str) for item in values.values()):
        raise BundleError(f"{where} holds something that is not a string")
    return values


# What exporters write for a size that is free: no name, so that two of them need not be equal.
_PLACEHOLDER = re.compile(r"\s*([?*]|-?\d+|none|null|any|unknown|dynamic|unk__.*)?\s*", re.IGNORECASE)


def is_name(text: str) -> bool:
    """Whether sizes of this name are equal, and not only free."""
    return _PLACEHOLDER.fullmatch(text) is None
