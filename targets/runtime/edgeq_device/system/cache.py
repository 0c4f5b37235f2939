"""Make private folders in the user's cache, and find out who else could have written to a place."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Iterator

from edgeq_device.errors import OutputError

_SET_CACHE = "Set XDG_CACHE_HOME to a folder that only you can write"


def make_private_cache(program: str, *names: str) -> Path:
    """Return the nested folders `program`/`names` in the user's cache (XDG_CACHE_HOME). Create folders that are
    missing.

    Only this user can have put files into the returned folder. No folder below the cache is a link, each belongs to the
    user or to root, and nobody else can write to the folders below `program`.

    Raises:
        OutputError: there is no cache, or another user could write to it.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111  # there may be no home
    if not os.path.isabs(base):  # noqa: PTH117
        raise OutputError("there is no folder for a cache", _SET_CACHE)
    place = Path(base)
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in (program, *names):
            place = place / name
            place.mkdir(mode=0o700, exist_ok=True)
            if not stat.S_ISDIR(place.lstat().st_mode):
                raise OutputError(f"{place} is a link or a file", "Move it")
    except OSError as error:
        raise OutputError(f"{place} cannot be made ({error.strerror})", _SET_CACHE) from error
    if problem := describe_exposure(place):
        raise OutputError(problem, _SET_CACHE)
    if not os.access(place, os.W_OK):
        raise OutputError(f"{place} cannot be written", _SET_CACHE)
    return place


def describe_exposure(place: Path) -> str:
    """Return how another user could have changed or replaced the file or folder `place` or anything in it. Return "" if
    only this user and root can, if `place` does not exist, or on a system without such modes (Windows).

    Check this before you run or load a file from a cache. Links in `place` do not count: the files that they lead to
    are outside the cache.
    """
    if not hasattr(os, "geteuid"):
        return ""
    real = Path(os.path.realpath(place))
    trusted, group = (os.geteuid(), 0), _private_group()

    def is_open(state: os.stat_result) -> bool:
        writable = state.st_mode & (stat.S_IWOTH | (stat.S_IWGRP if state.st_gid != group else 0))
        return state.st_uid not in trusted or bool(writable and not stat.S_ISLNK(state.st_mode))

    def walk(path: str, state: os.stat_result) -> Iterator[str]:
        if is_open(state):
            yield path
        # Nobody else can reach the content of a folder that only its owner can enter.
        elif stat.S_ISDIR(state.st_mode) and state.st_mode & (stat.S_IXGRP | stat.S_IXOTH):
            with os.scandir(path) as entries:
                for entry in entries:
                    yield from walk(entry.path, entry.stat(follow_symlinks=False))

    try:
        for folder in real.parents:
            state = folder.stat()
            # In a sticky folder, such as /tmp, others cannot rename or remove the user's files.
            if is_open(state) and not (state.st_mode & stat.S_ISVTX and state.st_uid in trusted):
                return f"{folder} can be changed by others"
        path = next(walk(str(real), real.lstat()), None)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{error.filename} cannot be checked ({error.strerror})"
    return "" if path is None else f"{path} can be changed by others"


def _private_group() -> int:
    """Return the group that only this user is in, as most Linux systems make it for each user; -1 if there is none."""
    import grp
    import pwd

    try:
        user = pwd.getpwuid(os.geteuid())
        group = grp.getgrgid(user.pw_gid)
    except KeyError:  # a user without an entry, as in containers
        return -1
    # Containers put any user into root's group, without an entry.
    private = group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name} and user.pw_uid != 0
    return group.gr_gid if private else -1
