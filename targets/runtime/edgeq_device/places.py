"""Place files of the runner: tables next to its code, a draft that is renamed to its place, and a temporary folder."""

from __future__ import annotations

import atexit
import errno
import json
import os
import pkgutil
import shutil
import signal
import stat
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, Tuple

from edgeq_device.errors import OutputError

SET_TMPDIR = "Free some space, or set TMPDIR to a larger place that can be written"
_SET_CACHE = "Set XDG_CACHE_HOME to a folder that only you can write"


@contextmanager
def draft_of(place: Path) -> Iterator[Path]:
    """Return an empty file next to `place`, to be written and renamed there; removed where that does not happen.

    It has the mode that the umask gives, which tempfile's files (0600) have not.
    """
    draft = place.absolute().with_name(f".{place.name}.{os.urandom(4).hex()}.partial")
    os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        yield draft
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def temporary_folder(name: str, what: str) -> Tuple[Path, Callable[[], None]]:
    """Return a new folder for the user alone, whose name begins with `name`, and what removes it.

    It is removed at the end of the process at the latest: a signal can unwind the stack between any two steps of the
    caller. A process that was forked from this one leaves it. On Windows a file that ONNX Runtime still maps cannot be
    removed; the system's clean-up takes it later.

    Args:
        what: what it is for, at the beginning of a message.

    Raises:
        OutputError: there is no place for one.
    """

    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)
        atexit.unregister(remove)

    with _signals_wait():
        try:
            folder = Path(tempfile.mkdtemp(prefix=name))
        except OSError as error:
            raise OutputError(
                f"{what}: no temporary folder can be made ({error.strerror or error})", SET_TMPDIR
            ) from error
        atexit.register(remove)
    return folder, remove


def private_cache(program: str, *names: str) -> Path:
    """Return the folder of these names, one in the other, in the user's cache (XDG_CACHE_HOME); make what is missing.

    What lies there was put there by this user: each folder is not a link and the user's own, and those below `program`
    are nobody else's to write.

    Raises:
        OutputError: there is no cache, or somebody else could write in it.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111  # there may be no home
    if not os.path.isabs(base):  # noqa: PTH117
        raise OutputError("there is no folder for a cache", _SET_CACHE)
    place = Path(base)
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(place, place.stat(), 0 if place.stat().st_mode & stat.S_ISVTX else stat.S_IWOTH)
        for name in (program, *names):
            place = place / name
            place.mkdir(mode=0o700, exist_ok=True)
            _check_private(place, place.lstat(), stat.S_IWOTH | (stat.S_IWGRP if place.name != program else 0))
    except OSError as error:
        raise OutputError(f"{place} cannot be made ({error.strerror})", _SET_CACHE) from error
    if not os.access(place, os.W_OK):
        raise OutputError(f"{place} cannot be written", _SET_CACHE)
    return place


def _check_private(place: Path, found: os.stat_result, refused: int) -> None:
    """Refuse what is not a folder, another user's folder, and one of a mode with any bit of `refused`."""
    if not stat.S_ISDIR(found.st_mode):
        raise OutputError(f"{place} is a link or a file", "Move it")
    if hasattr(os, "geteuid") and (found.st_mode & refused or found.st_uid not in (os.geteuid(), 0)):
        raise OutputError(f"{place} can be written by others", _SET_CACHE)


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Signals that come meanwhile are handled afterwards, where the system can hold them back."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# renameat2(2) of Linux and renamex_np(2) of macOS, with their flags.
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
        return
    if _renamed(source, place, _FREE):
        return
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


def exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step, so that neither is ever missing; False where the system cannot."""
    return os.name != "nt" and _renamed(one, other, _EXCHANGED)


def _renamed(source: Path, place: Path, flags: Mapping[str, int]) -> bool:
    """Return whether the system has this kind of rename, and has done it."""
    try:
        import ctypes
    except ImportError:  # a Python without it
        return False
    library = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(source), os.fsencode(place)
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


def own_table(name: str) -> Any:
    """Return the content of a JSON file of this package, whether that lies in a folder or runs out of a zip."""
    data = pkgutil.get_data("edgeq_device", name)
    assert data is not None, "the loaders of folders and of zips both give data"
    return json.loads(data)
