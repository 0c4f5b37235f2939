"""Run many command lines, each in a process that a server forks, so that none pays for imports and each can be ended.

The server is a process of its own (`python -m tests.cli.forked`), because a test's process may have threads.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.cli.process import environment

_MEMORY = 4 << 30
"""Limit in bytes of each process, so that a file without an end does not take the machine's memory."""
_AT_ONCE = 2


@dataclass(frozen=True)
class Ended:
    """Hold the end of one command line. `code` is None if it had to be killed after the limit."""

    arguments: tuple[str, ...]
    code: int | None
    err: str
    seconds: float

    @property
    def lines(self) -> list[str]:
        """Return the lines on stderr that report an error."""
        return [line for line in self.err.splitlines() if line.startswith("edgeq: ")]


def run_each(cases: Sequence[Sequence[str]], cwd: Path, *, seconds: float, **changes: str) -> list[Ended]:
    """Run the command lines in `cwd`, and kill each that takes longer than `seconds`."""
    server = subprocess.run(
        [sys.executable, "-m", "tests.cli.forked", str(seconds)],
        cwd=cwd,
        env=environment(EDGEQ_BUDGET="off", **changes),
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=True,
    )
    ended = {number: rest for number, *rest in map(json.loads, server.stdout.splitlines())}
    return [Ended(tuple(case), *ended[number]) for number, case in enumerate(cases)]


def main() -> None:
    from edgeq.cli import FILES

    for module in (*(f"edgeq.cli.{file}" for file in FILES), *_IMPORTED):
        importlib.import_module(module)
    for line in _run(json.load(sys.stdin), float(sys.argv[1])):
        print(json.dumps(line), flush=True)


_IMPORTED = (
    "onnx",
    "onnxruntime",
    "edgeq.jobs.quantize",
    "edgeq.jobs.package",
    "edgeq.jobs.tune",
    "edgeq.jobs.calibrate",
)


def _run(cases: Sequence[Sequence[str]], seconds: float) -> Iterator[tuple[int, int | None, str, float]]:
    """Yield the number, the exit code, the standard error and the seconds of each case."""
    waiting = list(enumerate(cases))[::-1]
    running: dict[int, tuple[int, int, float]] = {}
    while waiting or running:
        while waiting and len(running) < _AT_ONCE:
            number, case = waiting.pop()
            printed = os.memfd_create("printed")
            process = os.fork()
            if not process:
                _child(case, printed)
            running[os.pidfd_open(process)] = process, printed, time.monotonic(), number
        ready, _, _ = select.select(list(running), [], [], 0.1)
        for handle, (process, printed, began, number) in list(running.items()):
            took = time.monotonic() - began
            if handle not in ready and took <= seconds:
                continue
            with suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)
            _, status = os.waitpid(process, 0)
            code = os.waitstatus_to_exitcode(status) if handle in ready else None
            os.lseek(printed, 0, os.SEEK_SET)
            with os.fdopen(printed, encoding="utf-8", errors="replace") as stream:
                yield number, code, stream.read(), took
            os.close(handle)
            del running[handle]


def _child(case: Sequence[str], printed: int) -> None:
    code = 99
    try:
        os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(0, 1)
        os.dup2(printed, 2)
        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
        from edgeq.cli import group

        group.main(list(case), prog_name="edgeq")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 98
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
