"""Mark folders that edgeq wrote, and recognise its files later by their SHA-256.

A folder without a format of its own contains a marker, which names the kind of the folder and may list its files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgeq_device.system.files import open_file, read_file

from edgeq import __version__

MARKER = ".edgeq"
"""The file that names the kind of the folder that it is in. edgeq writes this file before all others."""
SCHEMA = 1
# Bounds what is read into memory. A marker has about 100 bytes for each file that it lists.
_MOST_BYTES = 1 << 24


def write_marker(folder: Path, kind: str, files: Mapping[str, str] | None = None) -> None:
    """Mark `folder` as written by edgeq, unless it already has a marker.

    Args:
        kind: kind of folder.
        files: sha256 of each file that edgeq wrote in the folder, by relative path, if known.
    """
    marker = {"kind": kind, "schema": SCHEMA, "edgeq": __version__, **({} if files is None else {"files": dict(files)})}
    place = folder / MARKER
    # A run that was killed while writing left the marker empty.
    if is_plain(place) and not place.stat().st_size:
        place.unlink()
    if not place.exists():
        # "x" fails if a file has appeared here in the meantime.
        with place.open("x", encoding="utf-8") as stream:
            stream.write(json.dumps(marker, indent=1) + "\n")


def read_marker(folder: Path, kind: str) -> Mapping[str, Any] | None:
    """Return the contents of the marker in `folder`. Return None if there is no marker, or if its kind or schema
    differs.
    """
    marker = read_object(folder / MARKER)
    return marker if marker is not None and (marker.get("kind"), marker.get("schema")) == (kind, SCHEMA) else None


def is_marker(folder: Path, kind: str) -> bool:
    """Return whether `folder` has a marker of this kind. An empty marker counts, because a run may be killed while
    writing it.
    """
    place = folder / MARKER
    return is_plain(place) and (not place.stat().st_size or read_marker(folder, kind) is not None)


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a regular file, or None if there is no such file or it contains something else."""
    if not is_plain(path) or path.lstat().st_size > _MOST_BYTES:
        return None
    try:
        record = json.loads(read_file(path))
    # A deeply nested file makes the parser run out of stack.
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def is_plain(path: Path) -> bool:
    """Return whether `path` is a regular file and not a link."""
    return not path.is_symlink() and path.is_file()


def as_listed(folder: Path, files: Mapping[str, str], name: str) -> bool:
    """Return whether the file `name` in `folder` has the sha256 that `files` lists for it."""
    return name in files and is_plain(folder / name) and sha256(folder / name) == files[name]


def sha256(path: Path) -> str:
    """Return the SHA-256 hash of a file's content in lower-case hex.

    Raises:
        OSError: the file cannot be read.
    """
    with open_file(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
