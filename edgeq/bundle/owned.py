"""What makes a folder a bundle that edgeq wrote, and may so replace."""

from __future__ import annotations

import re
from pathlib import Path

from edgeq_device.errors import DeviceError
from edgeq_device.manifest import MANIFEST, FileRecord, parse_manifest
from edgeq_device.plainjson import MAX_BYTES, parse_json
from edgeq_device.signature import SIGNATURE, parse_signature

from edgeq.bundle.read import opened
from edgeq.errors import EdgeqError, OutputError
from edgeq.ownership import Judge, Ownership, as_listed, is_plain, shown

# Python writes these beside the runner's modules when those are imported.
_COMPILED = re.compile(r"(?P<folder>(?:.*/)?)__pycache__/(?P<module>[^/.]+)\.[^/]+\.pyc")


def _judge(folder: Path) -> Judge | None:
    records = _records(folder / MANIFEST)
    if records is None:
        return None
    digests = {name: record.sha256 for name, record in records.items()}

    def judge(name: str) -> bool:
        """Whether `name` has the hash that the manifest states, or is what Python compiled from such a module."""
        compiled = _COMPILED.fullmatch(name)
        if compiled is not None:
            return f"{compiled['folder']}{compiled['module']}.py" in digests
        return (
            name == MANIFEST or as_listed(folder, digests, name) or (name == SIGNATURE and is_signature(folder / name))
        )

    return judge


def is_signature(path: Path) -> bool:
    """Whether the file is a signature, as `edgeq sign` and others write it, which can be made again."""
    if not is_plain(path) or path.stat().st_size > MAX_BYTES:
        return False
    try:
        parse_signature(path.read_bytes(), str(path))
    except DeviceError:
        return False
    return True


def _records(manifest: Path) -> dict[str, FileRecord] | None:
    if not is_plain(manifest) or manifest.stat().st_size > MAX_BYTES:
        return None
    try:
        return dict(parse_manifest(parse_json(manifest.read_bytes(), str(manifest)), str(manifest)).files)
    except (DeviceError, RecursionError):
        return None


def check_archive(path: Path) -> None:
    """Refuse a place that holds anything but a bundle in one file.

    Raises:
        OutputError: it does.
    """
    if not path.exists() and not path.is_symlink():
        return
    try:
        with opened(path):
            whole = is_plain(path)
    except EdgeqError:
        whole = False
    if not whole:
        raise OutputError(f"{shown(path)} is no bundle that edgeq wrote", "Move it, or choose another output")


BUNDLE = Ownership("bundle", _judge)
"""Its manifest is one of edgeq's, and every file in it has the hash that the manifest states."""
