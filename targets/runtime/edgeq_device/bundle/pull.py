"""Pull a bundle from an OCI registry, where each of its files is a layer of a model in the layout of ModelPack."""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Tuple

from edgeq_device.bundle.content import check_content
from edgeq_device.bundle.manifest import MAX_FILES, MAX_SIZE, FileRecord
from edgeq_device.bundle.names import check_file_names
from edgeq_device.bundle.package import open_bundle
from edgeq_device.bundle.signature import check_signature
from edgeq_device.errors import BundleError, OutputError, UsageError
from edgeq_device.system.places import PrivateFolder, name_stage, remove_ended
from edgeq_device.system.plainjson import parse_json
from edgeq_device.trust.connection import LIMITS, Limits, ServerRequest
from edgeq_device.trust.keys import Trust
from edgeq_device.trust.registry import ArtifactReference, OciRepository

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
ARTIFACT_TYPE = "application/vnd.cncf.model.manifest.v1+json"
FILE_PATH = "org.cncf.model.filepath"
# The distribution specification requires every registry to accept a manifest of this size.
_MAX_MANIFEST = 4 * 1024 * 1024
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


def pull(reference: ArtifactReference, output: Path, trust: Optional[Trust] = None, limits: Limits = LIMITS) -> str:
    """Write the bundle at `reference` to the directory `output`, after all checks of `open_bundle`.

    Returns:
        The sha256 of the bundle's manifest.

    Raises:
        UsageError: the reference has no digest.
        OutputError: `output` exists or cannot be written.
        RuntimeUnavailableError: the registry does not answer, is slower than `limits`, or does not have the bundle.
        BundleError: the received data do not match the digest, are not a bundle, or are not signed as `trust` demands.
    """
    # A dangling link does not "exist", but would redirect the bundle.
    if output.exists() or output.is_symlink():
        raise OutputError(f"{output} exists already", "Choose another output")
    # A pull that was killed may have left its draft here.
    remove_ended(output)
    private = PrivateFolder(output.absolute().with_name(name_stage(output)))
    folder = private.path
    try:
        try:
            private.create()
        except OSError as error:
            raise OutputError(f"{output} cannot be written ({error.strerror})") from error
        fetch(reference, folder, limits)
        with open_bundle(folder) as bundle:
            check_signature(bundle, trust)
            digest = bundle.manifest_sha256
        # The draft was private; the bundle is for all users of the device.
        folder.chmod(0o755)
        # Only a bundle that passed all checks gets its name.
        folder.rename(output)
    except OSError as error:
        raise OutputError(f"{output} cannot be written ({error.strerror})") from error
    finally:
        private.remove()
    return digest


def fetch(reference: ArtifactReference, folder: Path, limits: Limits = LIMITS) -> None:
    """Write the files of the artifact at `reference` into `folder`. Check each file against the size and hash in the
    artifact's manifest.

    `open_bundle` checks the content of the files later.
    """
    if not reference.digest:
        raise UsageError(f"{reference} has no digest", "Add the @sha256:… that `edgeq push` prints")
    registry = OciRepository(reference, limits)
    request = ServerRequest("GET", {"Accept": MANIFEST_TYPE}, max_bytes=_MAX_MANIFEST)
    with registry.send(request, f"manifests/{reference.digest}") as answer:
        # Read one byte too many: a longer manifest, cut off, could otherwise match.
        data = answer.body.read(_MAX_MANIFEST + 1)
    if f"sha256:{hashlib.sha256(data).hexdigest()}" != reference.digest:
        raise BundleError(
            f"{reference}: the manifest that the registry sent does not have that digest", "Do not use this registry"
        )
    layers = read_layers(parse_json(data, str(reference)), str(reference))
    total = sum(record.size for record in layers.values())
    if total > shutil.disk_usage(folder).free:
        raise OutputError(f"{reference} takes {total} bytes, more than is free in {folder.parent}", "Free some space")
    # The time limit grows with the size that the manifest announces.
    registry.deadline.add_time(len(layers), total)

    def fetch_file(item: Tuple[str, FileRecord]) -> None:
        """Fetch one file of the bundle, and check it while writing it."""
        name, record = item
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        answer = registry.send(ServerRequest("GET", max_bytes=record.size), f"blobs/sha256:{record.sha256}")
        # "x", so that no layer replaces the file of another.
        with answer, (folder / name).open("xb") as sink:
            check_content(answer.body, record, f"{reference}: {name}", sink)

    registry.map_items(fetch_file, layers.items())


def read_layers(manifest: Mapping[str, Any], title: str) -> Dict[str, FileRecord]:
    """Return the size and hash of each layer, keyed by its path inside the bundle."""
    layers = manifest.get("layers")
    if manifest.get("artifactType") != ARTIFACT_TYPE or not isinstance(layers, list) or len(layers) > MAX_FILES:
        raise BundleError(f"{title} is not a model in the layout of ModelPack", "Push it with edgeq push")
    records: Dict[str, FileRecord] = {}
    names = []
    for layer in layers:
        layer = layer if isinstance(layer, dict) else {}
        annotations, size = layer.get("annotations"), layer.get("size")
        name = annotations.get(FILE_PATH) if isinstance(annotations, dict) else None
        match = _DIGEST.fullmatch(str(layer.get("digest")))
        if not isinstance(name, str) or match is None or type(size) is not int or not 0 <= size <= MAX_SIZE:
            raise BundleError(f"{title}: a layer has no path, size or sha256", "Push it with edgeq push")
        # Archived layers would have to be unpacked before they can be checked.
        if not str(layer.get("mediaType")).endswith(".raw"):
            raise BundleError(f"{title}: {name!a} is an archive", "edgeq accepts only layers that are files")
        names.append(name)
        records[name] = FileRecord(match.group(1), size)
    check_file_names(names, title)
    return records
