"""Renames that replace nothing by accident: onto a free name alone, and two names exchanged in one step."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

# renameat2(2) of Linux and renamex_np(2) of macOS, with their flags for the two.
_HERE = -100
_FREE = {"renameat2": 1, "renamex_np": 4}
_EXCHANGED = {"renameat2": 2, "renamex_np": 2}
_LACKING = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)


def move_new(source: Path, place: Path) -> None:
    """Rename `source` to `place`, where nothing may be. Of two processes that do so, one succeeds.

    Raises:
        FileExistsError: something is at `place`; both stay as they are.
    """
    if os.name == "nt":
        source.rename(place)  # Windows refuses by itself
    elif not _renamed(source, place, "free"):
        _move_without_flags(source, place)


def exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step, so that neither is ever missing; False where the system cannot."""
    return os.name != "nt" and _renamed(one, other, "exchanged")


def _renamed(source: Path, place: Path, how: str) -> bool:
    """Whether the system has this kind of rename, and has done it."""
    try:
        import ctypes
    except ImportError:  # a Python without it
        return False
    library = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(source), os.fsencode(place)
    flags = _FREE if how == "free" else _EXCHANGED
    name = next((name for name in flags if hasattr(library, name)), None)
    if name is None:
        return False
    sys.audit("os.rename", source, place, -1, -1)  # as os.rename does
    given = (_HERE, names[0], _HERE, names[1]) if name == "renameat2" else names
    if getattr(library, name)(*given, flags[name]) == 0:
        return True
    number = ctypes.get_errno()
    if number in _LACKING:  # an older kernel, or a file system that cannot
        return False
    raise OSError(number, os.strerror(number), str(place))


def _move_without_flags(source: Path, place: Path) -> None:
    try:
        if source.is_dir() and not source.is_symlink():
            source.rename(place)  # takes the place of an empty directory at most
            return
        os.link(source, place, follow_symlinks=False)
    except OSError as error:
        taken = error.errno in (errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR, errno.EEXIST)
        if not taken and error.errno not in (*_LACKING, errno.EMLINK):
            raise
        if not os.path.lexists(place):
            source.rename(place)  # neither links nor flags: what appears between the two lines is replaced
            return
        if not os.path.samestat(os.lstat(source), os.lstat(place)):  # else a kill came before the next line
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(place)) from error
    source.unlink()
