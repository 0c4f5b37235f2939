"""Read a bundle's metadata and check them key by key.

The format is ONNX Runtime's model package. The reader accepts the part of the format that edgeq writes (portable
layout, components as directories) and refuses the rest. It ignores what packagers record: additional_metadata, the keys
of executor_info.edgeq, and other executors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Mapping

from edgeq_device.bundle.names import check_file_name, check_file_names, is_plain_name
from edgeq_device.errors import BundleError
from edgeq_device.trust.signature import SHA256, SIGNATURE

MANIFEST = "manifest.json"
# The version of ONNX Runtime's package format, then the version of edgeq's own part in it.
SCHEMA_VERSION = "1.0"
BUNDLE_SCHEMA = "1.1"
# Bundles stay on devices for years, so all earlier schemas are read, too.
_BUNDLE_SCHEMAS = ("1.0", BUNDLE_SCHEMA)
# Far above real bundles; an untrusted manifest must not cost much memory or time.
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
    # An unknown key might tell another reader to load something else, so none is ignored.
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
    # The manifest lists neither itself nor the signature, but no listed file may take their names.
    check_file_names([MANIFEST, SIGNATURE, *entries], context)
    for name, entry in entries.items():
        record = require_object(entry, f"{context}: file {name!r}")
        sha256, size = record.get("sha256"), record.get("size")
        if set(record) != {"sha256", "size"} or not isinstance(sha256, str) or not SHA256.fullmatch(sha256):
            raise BundleError(f"{context}: file {name!r} has no proper sha256 and size")
        # In Python, True is an int.
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= MAX_SIZE:
            raise BundleError(f"{context}: file {name!r} has no proper size")
        records[name] = FileRecord(sha256, size)
    return records


def resolve_reference(reference: str, directory: str, context: str) -> str:
    """Return the path inside the bundle to which a payload's `reference` leads.

    `sha256:<hex>[/sub/path]` refers to a shared asset. Any other reference is relative to `directory`, the variant's
    path inside the bundle.
    """
    # Shared assets lie at the top of the bundle, outside of the variant's directory.
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
