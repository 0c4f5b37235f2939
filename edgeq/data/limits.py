"""Limit the sizes of what edgeq reads from data, so that a damaged or hostile file cannot fill the memory."""

from __future__ import annotations

from pathlib import Path

from edgeq_device.system.budget import VARIABLE, read_largest_sample
from edgeq_device.system.files import read_file

from edgeq.errors import DataError
from edgeq.util.record_files import is_longer

MAX_PIXELS = 1 << 26
"""Largest number of pixels of one image (64 M). Larger images may be decompression bombs."""

MAX_TEXT_BYTES = 1 << 26
"""Largest size in bytes of a file of labels or text lines."""

# The number of lines bounds memory that the size in bytes does not: a file of empty lines becomes millions of objects.
MAX_CELLS = 1 << 23
"""Largest number of lines and cells in a file of labels or text lines. Each line or cell becomes a Python object,
however short it is.
"""

# A comma or a tab ends a cell, and str.splitlines ends a line at each of the others.
_SEPARATORS = ",\t\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"

# A search that goes further has most likely left the data set, for example through a link to the root of the disk.
MAX_FILES = 10_000_000


def check_size(size: int, subject: str, fix: str, *, allowance: int = 0) -> None:
    """Refuse an allocation of more bytes than one sample may take.

    Args:
        subject: the beginning of the error message.
        allowance: size in bytes of the file that contains the sample. This many additional bytes are always allowed.

    Raises:
        DataError: `size` is larger than the limit.
    """
    # The limit is read at each call, because the user may set it in the environment of this run.
    limit = read_largest_sample()
    if size > limit + allowance:
        raise DataError(
            f"{subject}: {size} bytes, but a sample may take at most {limit}", f"{fix}; {VARIABLE} sets the limit"
        )


def read_text(path: Path, fix: str = "Split it") -> str:
    """Return the text of a UTF-8 file. The file's size and its number of lines and cells are limited.

    Raises:
        DataError: the file is too large (the advice is then `fix`) or cannot be read.
    """
    try:
        # The size is checked before the file is read, because reading already allocates it.
        if is_longer(path, MAX_TEXT_BYTES):
            raise DataError(f"{path} is larger than {MAX_TEXT_BYTES} bytes", fix)
        # Spreadsheet programs write a byte order mark and the line ends of Windows or of old Macs.
        text = read_file(path).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", "Check the file and its permissions") from error
    except ValueError as error:
        raise DataError(f"{path} is not UTF-8 text", "It is damaged or of another kind") from error
    # Counting is cheap and makes no objects, while splitting would already make one for each line.
    if sum(map(text.count, _SEPARATORS)) > MAX_CELLS:
        raise DataError(f"{path} has more than {MAX_CELLS} lines and cells", fix)
    return text
