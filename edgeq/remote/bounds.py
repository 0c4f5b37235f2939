"""Limits on what a board, which is not trusted, may send, and on how long it may take.

Code takes each from this module when it needs it (`bounds.ANSWER_S`), so that there is one place to change it.
"""

from __future__ import annotations

from typing import Annotated

from edgeq_device.budget import largest_sample
from edgeq_device.frames import FrameLimits
from msgspec import Meta

# Seconds.
ANSWER_S = 120.0
"""For a request to the program that holds the board. Hashing a gigabyte on a slow card takes a minute."""
LEAST_BYTES_PER_S = 1 << 14
"""A request that carries a file has more time, by this rate."""
COMMAND_S = 60.0
"""For sending edgeq's program to the board."""
REQUEST_S = 900.0
"""For a request to the program that runs models: opening a large model on a slow board takes minutes."""
VERIFY_S = 1800.0
"""For the bundle's own runner."""
INSTALL_S = 3600.0
"""For pip on the board."""
BENCH_S = 900.0
"""For what a benchmark does besides its runs: opening, warming up, measuring memory."""
BENCH_FACTOR = 20.0
"""For its runs: this many times their duration."""
ALIVE_S = 15.0
"""Between signs of life to the board, and for it to end what runs there behind a session."""
EXIT_S = 5.0
"""For a process to end after its output has."""

# Bytes and counts.
ANSWER_BYTES = 1 << 21
"""Bytes of one answer, and of the standard output of one command."""
VALUES = 1 << 17
"""Values in one answer: its objects take far more memory than its text."""
ARRAYS = 1 << 12
"""Arrays in one answer."""
SYSTEM_FILES = 1 << 11
KERNELS, KERNEL_VALUES = 1 << 17, 1 << 12
"""Runs of kernels in a profile, and values in each."""
SHOWN = 300
"""Characters of a message of the board's."""
TABLE = 1 << 16
"""Characters of a benchmark's tables."""

_ON_ONE_LINE = r"^[^\n\t]*$"
Line = Annotated[str, Meta(max_length=SHOWN, pattern=_ON_ONE_LINE, description="a short text on one line")]
Text = Annotated[str, Meta(max_length=1 << 12, pattern=_ON_ONE_LINE, description="a text on one line")]
SystemFile = Annotated[str, Meta(max_length=1 << 13, description="a small file of the system")]


def frame_limits(*, arrays: bool) -> FrameLimits:
    """Return the limits of one answer of the program that runs models.

    Args:
        arrays: whether the request asks for any. All of them together take at most half of the budget's `sample`.
    """
    total = largest_sample() // 2 if arrays else 0
    return FrameLimits(text=ANSWER_BYTES, values=VALUES, arrays=ARRAYS, total=total)


def brief(text: object) -> str:
    """Return a text of the board's on one line, cut where it is too long to be read."""
    line = " ".join(str(text)[: 4 * SHOWN].split())
    return line if len(line) <= SHOWN else f"{line[: SHOWN - 1]}…"
