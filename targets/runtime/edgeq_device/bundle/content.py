"""Compare the files of a bundle with its manifest.

Every file must be present, all hashes must be correct, and there may be no other files that could be loaded.
"""

from __future__ import annotations

import errno
import hashlib
import re
from contextlib import nullcontext
from pathlib import Path
from typing import IO, ContextManager, Mapping, Optional, Tuple

from edgeq_device.bundle.manifest import MANIFEST, FileRecord
from edgeq_device.errors import AGAIN, BundleError
from edgeq_device.system.plainjson import MAX_BYTES
from edgeq_device.trust.signature import SIGNATURE

# How much of a small board's memory one read may take.
_CHUNK = 1024 * 1024
# Suffixes by which Python, a system's loader or ONNX Runtime picks up a file by itself.
_LOADABLE = re.compile(r"\.(py\w*|pth|so(\.[\d.]+)?|dylib|dll|onnx|ort|data)$", re.IGNORECASE)
# These errors come only from writing. Any other error may come from a damaged archive.
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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
    # Users keep outputs and notes in the folder, but nothing there may be loaded unasked.
    extra = [name for name in unlisted if not (in_use and is_harmless(name))]
    if extra:
        # Python writes this folder when somebody imports the modules of the bundle.
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


def open_sink(to: Optional[Path], name: str) -> ContextManager[Optional[IO[bytes]]]:
    """Open the new file `name` under `to`, or nothing if `to` is None."""
    if to is None:
        return nullcontext()
    (to / name).parent.mkdir(parents=True, exist_ok=True)
    return (to / name).open("xb")


def check_content(stream: IO[bytes], record: FileRecord, title: str, sink: Optional[IO[bytes]]) -> None:
    """Read a file to its end, write it to `sink` if there is one, and check it against its record.

    Raises:
        BundleError: the size or the hash differs. Nothing beyond the recorded size is written.
    """
    digest = hashlib.sha256()
    size = 0
    for chunk in iter(lambda: stream.read(_CHUNK), b""):
        size += len(chunk)
        # Stop at once: the file may be endless, or made to fill the disk.
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
