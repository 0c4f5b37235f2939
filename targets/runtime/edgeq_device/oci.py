"""A bundle pulled from an OCI registry by its digest: every byte is held against that digest, so that the registry need
not be trusted. In the layout of CNCF ModelPack: each file is a layer, its path an annotation."""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Tuple

from edgeq_device.connection import LIMITS, Limits
from edgeq_device.contents import check_content
from edgeq_device.errors import BundleError, OutputError, UsageError
from edgeq_device.exchange import Request
from edgeq_device.manifest import MAX_FILES, MAX_SIZE, FileRecord
from edgeq_device.names import check_file_names
from edgeq_device.package import open_bundle
from edgeq_device.plainjson import parse_json
from edgeq_device.registry import Reference, Registry, parse_reference
from edgeq_device.trust import Trust, check_signature

__all__ = ["Reference", "fetch", "layers_of", "parse_reference", "pull"]

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
ARTIFACT_TYPE = "application/vnd.cncf.model.manifest.v1+json"
FILE_PATH = "org.cncf.model.filepath"
# What registries accept at least, by the distribution specification.
_MAX_MANIFEST = 4 * 1024 * 1024
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


def pull(reference: Reference, output: Path, trust: Optional[Trust] = None, limits: Limits = LIMITS) -> str:
    """Write the bundle at `reference` as the directory `output`, after every check that opening it makes.

    Returns:
        what the checks of it found: its manifest's sha256.

    Raises:
        UsageError: the reference has no digest.
        OutputError: there is something at `output`, or it cannot be written.
        RuntimeUnavailableError: the registry does not answer, is slower than `limits`, or does not have it.
        BundleError: what came is not what the digest says, no bundle, or not signed as `trust` wants it.
    """
    if output.exists() or output.is_symlink():
        raise OutputError(f"{output} exists already", "Choose another output")
    try:
        folder = Path(
            tempfile.mkdtemp(prefix=f".{output.name[:100]}.", suffix=".partial", dir=output.absolute().parent)
        )
    except OSError as error:
        raise OutputError(f"{output} cannot be written ({error.strerror})") from error
    try:
        fetch(reference, folder, limits)
        with open_bundle(folder) as bundle:
            check_signature(bundle, trust)
            digest = bundle.manifest_sha256
        folder.chmod(0o755)
        folder.rename(output)
    except OSError as error:
        raise OutputError(f"{output} cannot be written ({error.strerror})") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return digest


def fetch(reference: Reference, folder: Path, limits: Limits = LIMITS) -> None:
    """Write the files of the artifact at `reference` into `folder`, each of the size and hash that its manifest states.

    What they hold is for `open_bundle` to judge.
    """
    if not reference.digest:
        raise UsageError(f"{reference} has no digest", "Name it by @sha256:…, which `edgeq push` prints")
    registry = Registry(reference, limits)
    asked = Request("GET", {"Accept": MANIFEST_TYPE}, most=_MAX_MANIFEST)
    with registry.send(asked, f"manifests/{reference.digest}") as answer:
        data = answer.body.read(_MAX_MANIFEST + 1)
    if f"sha256:{hashlib.sha256(data).hexdigest()}" != reference.digest:
        raise BundleError(f"{reference}: what the registry sent does not have that digest", "Do not use this registry")
    layers = layers_of(parse_json(data, str(reference)), str(reference))
    needed = sum(record.size for record in layers.values())
    if needed > shutil.disk_usage(folder).free:
        raise OutputError(f"{reference} takes {needed} bytes, more than is free in {folder.parent}", "Free some space")
    registry.deadline.expect(len(layers), needed)

    def one(item: Tuple[str, FileRecord]) -> None:
        """Fetch one file of the bundle, checked while it is written."""
        name, record = item
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        answer = registry.send(Request("GET", most=record.size), f"blobs/sha256:{record.sha256}")
        with answer, (folder / name).open("xb") as sink:
            check_content(answer.body, record, f"{reference}: {name}", sink)

    registry.each(one, layers.items())


def layers_of(manifest: Mapping[str, Any], where: str) -> Dict[str, FileRecord]:
    """Path inside the bundle → size and hash of each layer."""
    layers = manifest.get("layers")
    if manifest.get("artifactType") != ARTIFACT_TYPE or not isinstance(layers, list) or len(layers) > MAX_FILES:
        raise BundleError(f"{where} is no model in the layout of ModelPack", "Push it with edgeq push")
    found: Dict[str, FileRecord] = {}
    names = []
    for layer in layers:
        layer = layer if isinstance(layer, dict) else {}
        annotations, size = layer.get("annotations"), layer.get("size")
        name = annotations.get(FILE_PATH) if isinstance(annotations, dict) else None
        match = _DIGEST.fullmatch(str(layer.get("digest")))
        if not isinstance(name, str) or match is None or type(size) is not int or not 0 <= size <= MAX_SIZE:
            raise BundleError(f"{where}: a layer has no path, size or sha256", "Push it with edgeq push")
        if not str(layer.get("mediaType")).endswith(".raw"):
            raise BundleError(f"{where}: {name!a} is an archive", "edgeq takes layers that are files")
        names.append(name)
        found[name] = FileRecord(match.group(1), size)
    check_file_names(names, where)
    return found
