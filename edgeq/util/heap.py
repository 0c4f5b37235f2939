"""Return freed memory to the system."""

from __future__ import annotations

import ctypes
import os


def return_freed_memory() -> None:
    """Return the freed memory of this process to the system, where the C library has a function for it.

    glibc returns only the end of its heap by itself. Large arrays that are freed in another order than they were made
    leave gaps, which later arrays of other sizes do not fill.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(ctypes.c_size_t(0))
