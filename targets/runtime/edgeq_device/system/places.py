"""Make private folders, and drafts in them that are renamed when they are complete.

A private folder has a lock: a file next to it with the suffix LOCK. The process that made the folder holds the lock
until it ends, even if it is killed. So a later process can tell whether a folder is still in use. It removes folders of
processes that have ended.
"""

from __future__ import annotations

import atexit
import errno
import os
import re
import shutil
import signal
import stat
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Callable, Iterator, List, Optional, Tuple

from edgeq_device.errors import OutputError

try:
    import fcntl
except ImportError:  # on Windows, folders of killed processes stay
    fcntl = None  # type: ignore[assignment]

LOCK, STEM = ".edgeq-lock", 100
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF)
"""Errors of file systems without locks."""
SET_TMPDIR = "Free some space, or set TMPDIR to a larger place that can be written"


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
    # Nobody else removes what a killed process left.
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
