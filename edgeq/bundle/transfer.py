"""Implement `edgeq push` and `edgeq pull`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from edgeq_device.bundle.package import Bundle
from edgeq_device.bundle.pull import ARTIFACT_TYPE, FILE_PATH, MANIFEST_TYPE, fetch
from edgeq_device.bundle.signature import check_signature
from edgeq_device.system.places import scratch_folder
from edgeq_device.trust.connection import LIMITS, Limits, ServerRequest, translate_errors
from edgeq_device.trust.keys import find_trust
from edgeq_device.trust.registry import OciRepository, parse_reference

from edgeq.bundle.verify import open_checked, read_contents, verify_chain
from edgeq.bundle.write import BUNDLE, write_archive
from edgeq.util.bundle_names import check_bundle_name, is_named_bundle
from edgeq.util.device_errors import device_errors
from edgeq.util.display import SILENT, Displayed, Progress
from edgeq.util.outputs import output_directory, output_file

_CONFIG_TYPE = "application/vnd.cncf.model.config.v1+json"
_KINDS = {
    "edgeq_device.zip": "code",
    "calibration.zip": "weight.config",
    ".py": "code",
    ".json": "weight.config",
    ".html": "doc",
    ".sig": "doc",
    ".npz": "dataset",
}
"""Type of a file in ModelPack, by the file's name or suffix. All other files are weights."""
_TITLE = "org.opencontainers.image.title"
"""The annotation from which `oras pull` takes a layer's path."""


@dataclass(frozen=True)
class Pushed(Displayed):
    """Report the result of `push_bundle`.

    Attributes:
        reference: the reference by digest, with which `pull` gets the same bytes.
        uploaded: number of bytes that were uploaded.
    """

    reference: str
    digest: str
    files: int
    bytes: int
    uploaded: int
    signed: bool


@dataclass(frozen=True)
class Pulled(Displayed):
    """Report the result of `pull_bundle`. `signer` is None if the user trusts no key."""

    output: Path
    reference: str
    manifest_sha256: str
    signer: Mapping[str, Any] | None


def push_bundle(path: str | Path, reference: str, *, limits: Limits = LIMITS, progress: Progress = SILENT) -> Pushed:
    """Upload the bundle at `path` with its signature. Each file becomes a layer. Files that the registry already has
    are skipped.

    Args:
        reference: HOST/REPOSITORY[:TAG].
        limits: minimum speed of the registry.

    Raises:
        UsageError: the reference is not valid.
        BundleError: `path` is not a bundle, or the bundle is damaged.
        RuntimeUnavailableError: the registry does not answer, is slower than `limits`, or refuses the upload.
    """
    with device_errors():
        # The bytes decide the digest, whatever the reference says.
        place = replace(parse_reference(reference), digest="")
        with open_checked(Path(path)) as bundle, progress.stage(f"pushing {path}"):
            blobs = _list_blobs(bundle)
            config = _format_json(_build_config(bundle, [digest for digest, _ in blobs.values()]))
            layers = [
                {**_build_descriptor(_find_kind(name), digest, content), "annotations": {FILE_PATH: name, _TITLE: name}}
                for name, (digest, content) in blobs.items()
            ]
            described = _build_descriptor(_CONFIG_TYPE, _hash(config), config)
            manifest = _format_json(
                {
                    "schemaVersion": 2,
                    "mediaType": MANIFEST_TYPE,
                    "artifactType": ARTIFACT_TYPE,
                    "config": described,
                    "layers": layers,
                    "annotations": {_TITLE: bundle.name},
                }
            )
            # A registry stores blobs by digest, so equal files are uploaded once.
            once = dict([*blobs.values(), (_hash(config), config)])
            registry = OciRepository(place, limits)
            registry.deadline.add_time(len(once), sum(map(_count_bytes, once.values())))
            sent = registry.map_items(lambda item: _upload(registry, *item), once.items())
            # The manifest comes last, because a registry refuses one whose blobs it lacks.
            digest, request = _hash(manifest), ServerRequest("PUT", {"Content-Type": MANIFEST_TYPE}, manifest)
            registry.send(request, f"manifests/{place.tag or digest}").body.close()
    total = sum(layer["size"] for layer in layers)
    return Pushed(
        str(replace(place, digest=digest)), digest, len(layers), total, sum(sent), bundle.signature is not None
    )


def pull_bundle(
    reference: str,
    output: str | Path,
    *,
    trust: str | Path | None = None,
    require_signature: bool = False,
    force: bool = False,
    limits: Limits = LIMITS,
    progress: Progress = SILENT,
) -> Pulled:
    """Download the bundle at `reference` (HOST/REPOSITORY@sha256:…) and write it to `output`.

    Args:
        output: a directory, or a file that ends in ".edgeq".
        trust, require_signature: the same as in `edgeq.verify`.
        limits: minimum speed of the registry.

    Raises:
        UsageError: the reference is not valid, or has no digest.
        RuntimeUnavailableError: the registry does not answer, is slower than `limits`, or does not have the bundle.
        BundleError: the received data do not have that digest, are not a bundle, or are not signed as required.
        OutputError: `output` exists (without `force`), or cannot be written.
    """
    with device_errors():
        place, output = parse_reference(reference), Path(output)
        check_bundle_name(output)
        archived = is_named_bundle(output)
        trusted = find_trust(Path(trust) if trust is not None else None, required=require_signature)
        with progress.stage(f"pulling {reference}"), ExitStack() as stack:
            if archived:
                draft = stack.enter_context(output_file(output, force=force))
                folder = stack.enter_context(scratch_folder("edgeq-"))
            else:
                folder = stack.enter_context(output_directory(output, force=force, check=BUNDLE.check))
            fetch(place, folder, limits)
            with open_checked(folder) as bundle:
                signer = check_signature(bundle, trusted, verify_chain)
                digest = bundle.manifest_sha256
                if archived:
                    write_archive(read_contents(bundle), draft)
    return Pulled(output, str(place), digest, signer.to_dict() if signer is not None else None)


def _list_blobs(bundle: Bundle) -> dict[str, tuple[str, bytes | Path]]:
    """Return the digest and the content of every file of a bundle, sorted and keyed by path inside the bundle."""
    return {
        name: (_hash(content) if isinstance(content, bytes) else f"sha256:{bundle.files[name].sha256}", content)
        for name, content in read_contents(bundle).items()
    }


def _upload(registry: OciRepository, digest: str, content: bytes | Path) -> int:
    """Upload one blob unless the registry has it already. Return the number of uploaded bytes."""
    # A bundle's weights rarely change between two pushes.
    if registry.has(f"blobs/{digest}"):
        return 0
    with (
        registry.send(ServerRequest("POST", body=b""), "blobs/uploads/") as begun,
        translate_errors(str(registry.reference)),
    ):
        place = begun.find_location()
    # The upload's address may have a query already.
    target = f"{place.target}{'&' if '?' in place.target else '?'}digest={digest}"
    upload = ServerRequest("PUT", {"Content-Type": "application/octet-stream"}, content)
    registry.send(upload, replace(place, target=target)).body.close()
    return _count_bytes(content)


def _build_config(bundle: Bundle, digests: Sequence[str]) -> dict[str, Any]:
    """Return the description of a model in the ModelPack format."""
    licence = bundle.metadata.get("license")
    return {
        "descriptor": {"name": bundle.name, **({"licenses": [licence]} if isinstance(licence, str) else {})},
        "config": {"format": "onnx"},
        "modelfs": {"type": "layers", "diffIds": list(digests)},
    }


def _find_kind(name: str) -> str:
    return f"application/vnd.cncf.model.{_KINDS.get(name) or _KINDS.get(PurePosixPath(name).suffix, 'weight')}.v1.raw"


def _build_descriptor(media_type: str, digest: str, content: bytes | Path) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": digest, "size": _count_bytes(content)}


def _count_bytes(content: bytes | Path) -> int:
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def _hash(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _format_json(value: Mapping[str, Any]) -> bytes:
    # Sorted keys, so that a bundle always has the same digest.
    return json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=True).encode("utf-8")
