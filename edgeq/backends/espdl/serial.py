"""Read what a chip printed while it checked a model: the runtime's lines, and those of the project's main.cpp.

EDGEQ start file=SHA256 chip=NAME
I (512) dl::Model: Testing output NAME.
E (516) dl::Model: Test output NAME does not match
EDGEQ end passed=0 microseconds=9120
"""

from __future__ import annotations

import re

from edgeq.backends.base import SerialLog

# The monitor colours the lines of ESP-IDF.
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_START = re.compile(r"EDGEQ start file=([0-9a-f]{64}) chip=([a-z0-9-]{1,40})\s*$")
_TESTED = re.compile(r"Testing output (.{1,400})\.\s*$")
_DIFFERS = re.compile(r"Test output (.{1,400}) does not match\s*$")
_END = re.compile(r"EDGEQ end passed=([01]) microseconds=([0-9]{1,15})\s*$")


def read_serial_log(text: str) -> SerialLog | None:
    """Return the last check that a chip's output contains; None if it has none."""
    log: SerialLog | None = None
    tensors: list[str] = []
    different, ended = "", False
    for line in _COLOUR.sub("", text).splitlines():
        if start := _START.search(line):
            # A chip that restarts begins its check again.
            log, tensors, different, ended = SerialLog(False, start[1], start[2]), [], "", False
        elif tested := _TESTED.search(line):
            tensors.append(tested[1])
        elif differs := _DIFFERS.search(line):
            different = differs[1]
        elif log is not None and (end := _END.search(line)):
            ended, passed = True, end[1] == "1" and not different
            log = SerialLog(passed, log.file, log.chip, microseconds=int(end[2]))
    if log is None:
        return None
    reason = f"tensor {different!r} has other values on the chip" if different else ""
    if not ended:
        reason = reason or "the output ends before the check does"
    elif not log.passed:
        reason = reason or "the chip reports a failure and names no tensor"
    return SerialLog(not reason, log.file, log.chip, reason, tuple(tensors), log.microseconds)
