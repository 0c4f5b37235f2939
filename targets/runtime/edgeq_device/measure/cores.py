"""Name the cores on which a measurement runs, and keep its threads there."""

from __future__ import annotations

import os
import platform
import re
from contextlib import contextmanager
from typing import Iterator, List, Sequence, Tuple

from edgeq_device.errors import UsageError


def parse_cores(text: str) -> Tuple[int, ...]:
    """Return core numbers from a text such as "0,2,4-7".

    Raises:
        UsageError: the text has another form.
    """
    cores: List[int] = []
    for part in text.split(","):
        # Few digits, so that a typing error makes no list of billions.
        match = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part)
        if not match or (match.group(2) and int(match.group(2)) < int(match.group(1))):
            raise UsageError(f"{text!r} does not name cores", "Write them like 0,2,4-7")
        cores += range(int(match.group(1)), int(match.group(2) or match.group(1)) + 1)
    return tuple(sorted(set(cores)))


@contextmanager
def pinned(cores: Sequence[int]) -> Iterator[None]:
    """Keep this thread, and the threads that start in the block, on these cores. Open sessions in the block too,
    because they start threads. An empty list changes nothing.

    Raises:
        UsageError: the system cannot pin threads, or the process may not use one of the cores.
    """
    if not cores:
        yield
        return
    if not hasattr(os, "sched_setaffinity"):
        raise UsageError(f"{platform.system()} does not let a process choose its cores", "Leave out --pin")
    allowed = os.sched_getaffinity(0)
    # Linux would silently leave out cores that the process may not use.
    missing = sorted(set(cores) - allowed)
    if missing:
        may = ",".join(map(str, sorted(allowed)))
        raise UsageError(f"core {missing[0]} is not available to this process", f"Choose from {may}")
    os.sched_setaffinity(0, set(cores))
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
