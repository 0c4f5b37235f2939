from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from edgeq.util.heap import return_freed_memory


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the memory of the process from /proc")
def test_the_gaps_between_arrays_are_returned() -> None:
    # Each is below the size that is mapped alone, and every second one stays.
    arrays = [np.ones(2**13) for _ in range(2**11)]
    del arrays[::2]
    before = resident_bytes()
    return_freed_memory()
    assert before - resident_bytes() > 2**24
