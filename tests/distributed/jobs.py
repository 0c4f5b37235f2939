"""Define jobs for the workers, in a module that workers can import."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeq.data.samples import SourceSamples
from edgeq.errors import DataError

_SAMPLE = SourceSamples._make_sample


@dataclass(frozen=True)
class Squares:
    """Square numbers, with faults.

    The number `deadly` kills its worker: once if `once` names a file, which is made then, else always. The number
    `waits` is not answered before that file exists. The number `wrong` is refused.
    """

    deadly: int | None = None
    once: Path | None = None
    waits: int | None = None
    wrong: int | None = None
    log: Path | None = None

    def open(self, stack: ExitStack) -> Callable[[int], int]:
        """Return the function that squares; see `edgeq.distributed.workers.WorkerJob`."""

        def run(number: int) -> int:
            if self.log is not None:
                with self.log.open("a") as log:
                    log.write(f"{number}\n")
            if number == self.deadly and (self.once is None or not self.once.exists()):
                if self.once is not None:
                    self.once.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            while number == self.waits and self.once is not None and not self.once.exists():
                time.sleep(0.01)
            if number == self.wrong:
                raise DataError(f"number {number} is wrong", "Give another")
            return number * number

        return run


def dies_at(place: int, once: Path) -> bool:
    """Kill this worker at sample `place` unless the file `once` exists. The worker makes this file before it dies."""

    def sample(samples: SourceSamples, index: int, record: Any) -> Any:
        if index == place and not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return _SAMPLE(samples, index, record)

    SourceSamples._make_sample = sample  # type: ignore[method-assign]
    return True


def lives() -> bool:
    """Undo `dies_at`."""
    SourceSamples._make_sample = _SAMPLE  # type: ignore[method-assign]
    return True


def ignores_interrupts() -> bool:
    """Return whether this process ignores Ctrl-C."""
    return signal.getsignal(signal.SIGINT) is signal.SIG_IGN
