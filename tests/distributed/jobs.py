"""Jobs for the workers of tests, in a module that workers can import."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from edgeq.errors import DataError


@dataclass(frozen=True)
class Squares:
    """Squares of numbers. A worker dies of the number `deadly`: once where `once` names a file to make, else always."""

    deadly: int | None = None
    once: Path | None = None
    wrong: int | None = None
    log: Path | None = None

    def open(self, stack: ExitStack) -> Callable[[int], int]:
        """See `edgeq.distributed.job.Job`."""

        def run(number: int) -> int:
            if self.log is not None:
                with self.log.open("a") as log:
                    log.write(f"{number}\n")
            if number == self.deadly and (self.once is None or not self.once.exists()):
                if self.once is not None:
                    self.once.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if number == self.wrong:
                raise DataError(f"number {number} is wrong", "Give another")
            return number * number

        return run


def ignores_interrupts() -> bool:
    """Whether Ctrl-C does nothing to this process."""
    return signal.getsignal(signal.SIGINT) is signal.SIG_IGN
