"""Files and folders that the runner makes: a draft that is renamed to its place, and a temporary folder."""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

from edgeq_device.errors import OutputError

SET_TMPDIR = "Free some space, or set TMPDIR to a larger place that can be written"


@contextmanager
def draft_of(place: Path) -> Iterator[Path]:
    """An empty file beside `place`, to be written and renamed there; removed where that does not come about.

    It has the mode that the umask gives, which tempfile's files (0600) have not.
    """
    draft = place.absolute().with_name(f".{place.name}.{os.urandom(4).hex()}.partial")
    os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        yield draft
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def temporary_folder(name: str, what: str) -> Path:
    """A new folder for the user alone, whose name begins with `name`.

    Args:
        what: what it is for, at the beginning of a message.

    Raises:
        OutputError: there is no place for one.
    """
    try:
        return Path(tempfile.mkdtemp(prefix=name))
    except OSError as error:
        raise OutputError(f"{what}: no temporary folder can be made ({error.strerror or error})", SET_TMPDIR) from error
