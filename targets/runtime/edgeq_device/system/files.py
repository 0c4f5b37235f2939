"""Open files of users: only regular files, which have an end."""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path

NOT_REGULAR = "it is a pipe, a socket or a device"


def open_file(path: Path, *, follow: bool = True) -> io.BufferedReader:
    """Open a regular file for reading.

    Anything else is refused, because a pipe can wait for ever, and a device can have no end.

    Args:
        follow: whether `path` may be a link. If not, a link is refused if the system supports that.

    Raises:
        OSError: the file cannot be opened, or is not a regular file.
    """
    # Without O_NONBLOCK, opening a pipe would wait for a writer.
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    descriptor = os.open(path, flags if follow else flags | getattr(os, "O_NOFOLLOW", 0))
    try:
        _check_regular(os.fstat(descriptor), path)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_file(path: Path) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: see `open_file`.
    """
    with open_file(path) as stream:
        return stream.read()


def check_file(path: Path) -> None:
    """Refuse a path that is not a regular file, before a library opens it by its name.

    Raises:
        OSError: the path cannot be read, or is not a regular file.
    """
    _check_regular(path.stat(), path)


def _check_regular(state: os.stat_result, path: Path) -> None:
    if stat.S_ISDIR(state.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(state.st_mode):
        raise OSError(errno.EINVAL, NOT_REGULAR, str(path))
