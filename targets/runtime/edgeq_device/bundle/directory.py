"""List and hash a bundle that is a directory, and refuse links, pipes and devices in it."""

from __future__ import annotations

import os
import stat
from pathlib import Path, PurePosixPath
from typing import Dict, Mapping, Optional

from edgeq_device.bundle.content import DISK_FULL, check_content, open_sink
from edgeq_device.bundle.manifest import FileRecord
from edgeq_device.bundle.names import check_file_names
from edgeq_device.errors import AGAIN, BundleError, OutputError
from edgeq_device.system.files import open_file
from edgeq_device.system.places import SET_TMPDIR
from edgeq_device.system.unchanged import HashedFolder, identify, identify_root


def list_directory(root: Path) -> Dict[str, int]:
    """Return the size in bytes of every file under `root`, by relative POSIX path.

    Raises:
        BundleError: there is a link, a device, a pipe, or a name that a bundle may not contain.
    """
    sizes: Dict[str, int] = {}
    # A list instead of recursion, because the sender chose how deep the folders nest.
    pending = [root]
    while pending:
        folder = pending.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                name = Path(entry.path).relative_to(root).as_posix()
                # Do not follow links: the file behind one can be exchanged after the check.
                mode = entry.stat(follow_symlinks=False).st_mode
                if stat.S_ISDIR(mode):
                    pending.append(Path(entry.path))
                elif stat.S_ISREG(mode):
                    sizes[name] = entry.stat(follow_symlinks=False).st_size
                else:
                    kind = "a link" if stat.S_ISLNK(mode) else "not a regular file"
                    raise BundleError(f"{root}: {name!r} is {kind}; a bundle contains only files", AGAIN)
    check_file_names(sorted(sizes), str(root))
    return sizes


def check_directory(root: Path, records: Mapping[str, FileRecord], to: Optional[Path] = None) -> HashedFolder:
    """Hash every file of a bundle's directory. If `to` is given, copy the files there at the same time.

    Returns:
        A record with which files of `root` can be checked when they are opened later.

    Raises:
        BundleError: the files do not match the manifest.
        OutputError: the disk of `to` is full.
    """
    folders = {str(parent) for name in records for parent in PurePosixPath(name).parents}
    name = "."
    try:
        # Folders before files: a file that is added meanwhile then changes its folder's identity.
        identities = {name: identify((root / name).lstat()) for name in sorted(folders)}
        identities["."] = identify_root(root)
        for name, record in sorted(records.items()):
            with open_file(root / name, follow=False) as stream, open_sink(to, name) as sink:
                # Identify the open file, not its path, which may lead to another file by now.
                identities[name] = identify(os.fstat(stream.fileno()))
                check_content(stream, record, f"{root}: {name}", sink)
    except OSError as error:
        if to is not None and error.errno in DISK_FULL:
            raise OutputError(f"{root}: {name} cannot be copied into {to} ({error.strerror})", SET_TMPDIR) from error
        raise BundleError(f"{root}: {name} cannot be read ({error.strerror})") from error
    return HashedFolder(root, identities)
