"""Rename files in one step: never over another file, or in exchange with it."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Mapping

# renameat2(2) of Linux and renamex_np(2) of macOS, each with two flags: one refuses to replace, the other exchanges.
_HERE = -100
_FREE = {"renameat2": 1, "renamex_np": 4}
_EXCHANGED = {"renameat2": 2, "renamex_np": 2}
_LACKING = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)


def move_new(source: Path, place: Path) -> None:
    """Rename `source` to `place`, which must not exist. If two processes do this at the same time, only one succeeds.

    Raises:
        FileExistsError: `place` exists. Neither path is changed.
    """
    if os.name == "nt":
        source.rename(place)  # Windows itself refuses to replace a file
        return
    if _try_rename(source, place, _FREE):
        return
    try:
        if source.is_dir() and not source.is_symlink():
            source.rename(place)  # this replaces at most an empty directory
            return
        os.link(source, place, follow_symlinks=False)
    except OSError as error:
        is_taken = error.errno in (errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR, errno.EEXIST)
        if not is_taken and error.errno not in (*_LACKING, errno.EMLINK):
            raise
        if not os.path.lexists(place):
            source.rename(place)  # without links or flags, a file that appears between these two lines is replaced
            return
        # if both are the same file, an earlier call was killed after it had made the link
        if not os.path.samestat(os.lstat(source), os.lstat(place)):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(place)) from error
    source.unlink()


def exchange(left_path: Path, right_path: Path) -> bool:
    """Exchange the names of two files in one step, so that neither name is ever missing. Return False if the system
    cannot do that.
    """
    return os.name != "nt" and _try_rename(left_path, right_path, _EXCHANGED)


def _try_rename(source: Path, place: Path, flags: Mapping[str, int]) -> bool:
    """Try a rename with `flags`. Return False if the system does not support it."""
    try:
        import ctypes
    except ImportError:  # a Python without ctypes
        return False
    library = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(source), os.fsencode(place)
    name = next((name for name in flags if hasattr(library, name)), None)
    if name is None:
        return False
    sys.audit("os.rename", source, place, -1, -1)  # `os.rename` does the same
    arguments = (_HERE, names[0], _HERE, names[1]) if name == "renameat2" else names
    if getattr(library, name)(*arguments, flags[name]) == 0:
        return True
    number = ctypes.get_errno()
    if number in _LACKING:  # an old kernel, or a file system without support
        return False
    raise OSError(number, os.strerror(number), str(place))
