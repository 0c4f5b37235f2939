"""Check the shared assets of a bundle, whose folders are named after the hash of their content."""

from __future__ import annotations

import hashlib
from typing import Dict, Mapping

from edgeq_device.bundle.manifest import FileRecord
from edgeq_device.errors import AGAIN, BundleError


def check_assets(records: Mapping[str, FileRecord], context: str) -> None:
    """Check that the directory of each shared asset is named after the hash of its content, as the format requires."""
    assets: Dict[str, Dict[str, str]] = {}
    for name, record in records.items():
        if name.startswith("shared_assets/"):
            # A file directly in shared_assets/ has no folder; the empty name matches no hash.
            _, folder, inner = name.split("/", 2) if name.count("/") >= 2 else ("", "", "")
            assets.setdefault(folder, {})[inner] = record.sha256
    for folder, members in sorted(assets.items()):
        if folder != f"sha256-{hash_directory(members)}":
            raise BundleError(f"{context}: shared asset {folder!r} does not have the hash in its name", AGAIN)


def hash_directory(members: Mapping[str, str]) -> str:
    """Return the hash that the format assigns to a directory: the sha256 of lines `<sha256> <relative path>`, sorted by
    path.
    """
    # Two spaces, as sha256sum prints them: the format defines this text byte by byte.
    text = "".join(f"{members[name]}  {name}\n" for name in sorted(members))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
