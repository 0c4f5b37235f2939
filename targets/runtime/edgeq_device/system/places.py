"""Find places for the runner's files: tables next to its code, drafts that are renamed when complete, and private
folders.

A private folder has a lock: a file next to it with the suffix LOCK. The process that made the folder holds the lock
until it ends, even if it is killed. So a later process can tell whether a folder is still in use. It removes folders of
processes that have ended.
"""

from __future__ import annotations

import atexit
import errno
import json
import os
import pkgutil
import re
import shutil
import signal
import stat
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Iterator, List, Mapping, Optional, Tuple

from edgeq_device.errors import OutputError

try:
    import fcntl
except ImportError:  # on Windows, folders of killed processes stay
    fcntl = None  # type: ignore[assignment]

LOCK, STEM = ".edgeq-lock", 100
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF)
"""Errors of file systems without locks."""
SET_TMPDIR = "Free some space, or set TMPDIR to a larger place that can be written"
_SET_CACHE = "Set XDG_CACHE_HOME to a folder that only you can write"


@contextmanager
def make_draft(place: Path) -> Iterator[Path]:
    """Return an empty file in a private folder next to `place`. The caller writes the file and renames it to `place`.

    The mode of the file follows the umask, unlike the mode of tempfile's files (0600).
    """
    remove_ended(place)
    folder = PrivateFolder(place.absolute().with_name(name_stage(place)))
    try:
        folder.create()
        draft = folder.path / place.name
        os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        yield draft
    finally:
        folder.remove()


def make_temporary_folder(name: str, purpose: str) -> Tuple[Path, Callable[[], None]]:
    """Create a folder whose name begins with `name` and which only the user can read. Return the folder and a function
    that removes it.

    If the caller does not get to call that function, because a signal unwinds its stack first, the folder is removed
    when the process ends. A process forked from this one does not remove it. On Windows, a file that ONNX Runtime still
    maps cannot be removed; the system's clean-up removes it later.

    Args:
        purpose: beginning of the error message, which names the work that needs the folder.

    Raises:
        OutputError: no folder can be made.
    """

    try:
        return make_scratch(name)
    except OSError as error:
        raise OutputError(
            f"{purpose}: no temporary folder can be made ({error.strerror or error})", SET_TMPDIR
        ) from error


@contextmanager
def scratch_folder(name: str, parent: Optional[Path] = None) -> Iterator[Path]:
    """Yield a new folder whose name begins with `name`, and remove it afterwards. Only the user can read it.

    Args:
        parent: the folder to make it in; None for the folder for temporary files.

    Raises:
        OSError: no folder can be made.
    """
    folder, remove = make_scratch(name, parent)
    try:
        yield folder
    finally:
        remove()


def make_scratch(name: str, parent: Optional[Path] = None) -> Tuple[Path, Callable[[], None]]:
    """Make the folder of `scratch_folder`, and remove folders of killed processes next to it. Return the folder and a
    function that removes it. It is also removed when the process ends.

    Raises:
        OSError: no folder can be made.
    """
    parent = parent or Path(tempfile.gettempdir())
    for abandoned in _find_locked(parent):
        remove_abandoned(abandoned)
    with _delay_signals():
        folder = PrivateFolder(parent / f"{name}{os.urandom(4).hex()}")
        try:
            folder.create()
        except BaseException:
            folder.remove()
            raise

        def remove() -> None:
            folder.remove()
            atexit.unregister(remove)

        atexit.register(remove)
    return folder.path, remove


class PrivateFolder:
    """Create a folder that only this user can read, hold its lock, and remove both.

    Args:
        path: the folder. It is created by `create`, so that a signal cannot come between the folder and this object.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._owner, self._lock = os.getpid(), _lock_path(path)
        self._descriptor: Optional[int] = None

    def create(self) -> None:
        """Create the folder.

        Raises:
            OSError: the folder cannot be created.
        """
        # The lock comes first, so no kill can leave a folder without a lock.
        self._descriptor = _new_lock(self._lock)
        self.path.mkdir(mode=0o700)

    def remove(self) -> None:
        """Remove the folder and the lock. A process forked from the creator removes nothing."""
        if os.getpid() != self._owner:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Release the lock. Remove it if there is no folder."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            if not os.path.lexists(self.path):
                self._lock.unlink(missing_ok=True)
            os.close(descriptor)


def remove_abandoned(folder: Path) -> None:
    """Remove a private folder and its lock if the process that made the folder has ended.

    Nothing is removed if the process still runs, or if the folder or the lock is a link or belongs to another user.
    """
    lock = _lock_path(folder)
    if fcntl is None:
        return
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # another process has just removed it, or it belongs to another user
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_mine(os.fstat(descriptor), stat.S_ISREG) and os.path.samestat(os.fstat(descriptor), lock.lstat()):
            if os.path.lexists(folder) and _is_mine(folder.lstat(), stat.S_ISDIR):
                shutil.rmtree(folder, ignore_errors=True)
            if not os.path.lexists(folder):
                lock.unlink()
    except OSError:  # the process still runs, or the file system has no locks
        return
    finally:
        os.close(descriptor)


def name_stage(path: Path) -> str:
    """Return a new name for the private folder of the output `path`."""
    return f".{path.name[:STEM]}.{os.urandom(8).hex()}.partial"


def is_stage(name: str, path: Path) -> bool:
    """Return whether `name_stage` gives names such as `name` to the private folders of the output `path`."""
    return re.fullmatch(rf"\.{re.escape(path.name[:STEM])}\.[0-9a-f]{{16}}\.partial", name) is not None


def remove_ended(path: Path, keep: Callable[[Path], bool] = lambda folder: False) -> None:
    """Remove the private folders of the output `path` whose processes have ended.

    Args:
        keep: function that returns whether a folder contains files that are still needed.
    """
    for folder in _find_locked(path.absolute().parent):
        if is_stage(folder.name, path) and not keep(folder):
            remove_abandoned(folder)


def _find_locked(parent: Path) -> List[Path]:
    """Return the private folders in `parent` that have a lock."""
    try:
        with os.scandir(parent) as entries:
            return [parent / entry.name[: -len(LOCK)] for entry in entries if entry.name.endswith(LOCK)]
    except OSError:  # the folder does not exist, or cannot be read
        return []


def _lock_path(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}{LOCK}")


def _is_mine(state: os.stat_result, is_kind: Callable[[int], bool]) -> bool:
    return is_kind(state.st_mode) and state.st_uid == os.geteuid()


def _new_lock(lock: Path) -> Optional[int]:
    """Create the file `lock` and return its descriptor, which holds the lock. Return None if there are no locks here.

    The descriptor is not inherited by programs that this process starts.
    """
    while fcntl is not None:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:
                return descriptor
        except OSError as error:
            os.close(descriptor)
            lock.unlink(missing_ok=True)
            if error.errno not in NO_LOCKS:
                raise
            return None
        os.close(descriptor)  # another process removed the file before it was locked
    return None


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


@contextmanager
def _delay_signals() -> Iterator[None]:
    """Delay signals until the end of the block, if the system can block them."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


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


def read_table(name: str) -> Any:
    """Return the content of a JSON file of edgeq_device, such as "bundle/options.json". The package may be a folder or
    a zip.
    """
    data = pkgutil.get_data("edgeq_device", name)
    assert data is not None, "the loaders of folders and of zips both give data"
    return json.loads(data)
