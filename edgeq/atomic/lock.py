"""One process at a time in a folder, as far as the system and the file system can lock one."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edgeq.errors import OutputError

try:
    import fcntl
except ImportError:  # Windows: without a lock
    fcntl = None  # type: ignore[assignment]

_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF)


@contextmanager
def alone_in(folder: Path, *, busy: str = "") -> Iterator[None]:
    """Hold the lock of a folder or a file. Programs that are started do not inherit it; it ends with the process.

    A process that holds it and asks for it again waits for itself: nothing inside the block may do so.

    Args:
        busy: what to say, instead of waiting, where another process holds it.

    Raises:
        OutputError: another one does, and `busy` says something.
    """
    handle = _opened(folder) if fcntl is not None else None
    try:
        if handle is not None:
            _lock(handle, busy)
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _opened(folder: Path) -> int | None:
    try:
        return os.open(folder, os.O_RDONLY)
    except OSError:  # not readable, or not there: what follows says so
        return None


def _lock(handle: int, busy: str) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy else 0))
    except BlockingIOError as error:
        raise OutputError(busy, "Wait until it has ended, or choose another output") from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
