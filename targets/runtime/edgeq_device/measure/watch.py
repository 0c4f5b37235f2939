"""Watch the machine during one measurement: waits, competing processes, and precedence over them."""

from __future__ import annotations

import time
from typing import Callable

from edgeq_device.measure.load import CompetingLoad
from edgeq_device.measure.precedence import Precedence
from edgeq_device.measure.waits import Waits

_ANSWERED_S = 0.002
"""Seconds after which a process that has answered is asleep. It stays on its core for up to 1 ms."""


class MachineWatch:
    """Record waits and the activity of other processes during one measurement. Take precedence over those processes
    meanwhile if `EDGEQ_NICE` is set. Do nothing if the clock is not the machine's, as in tests.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        # A test's clock does not advance with the machine, so its waits would mean nothing.
        self._real = clock is time.perf_counter
        self._outside_s = 0.0
        self._answered = False
        self.waits = Waits()
        self._precedence = Precedence()
        self._competing = CompetingLoad(own_cpu_s=lambda: time.process_time() + self._outside_s)

    def __enter__(self) -> MachineWatch:
        return self

    def __exit__(self, *error: object) -> None:
        self._precedence.release()
        self.waits.close()

    def look_around(self) -> None:
        """See `CompetingLoad.look`."""
        if self._real:
            if self._answered:
                # Until it sleeps, the process that answered counts as one that wants a core.
                time.sleep(_ANSWERED_S)
                self._answered = False
            self._competing.look()

    def start(self) -> None:
        """Begin a turn."""
        if self._real:
            self._precedence.take()
            self.waits.start()

    def add_outside_time(self, cpu_s: float) -> None:
        """Count processor time of a runner in another process as time of this process. Call this just after the other
        process has answered.
        """
        self._outside_s += cpu_s
        self._answered = cpu_s > 0

    def measure_busy(self) -> float:
        """See `CompetingLoad.measure_busy`."""
        return self._competing.measure_busy() if self._real else 0.0

    def measure_stolen(self) -> float:
        """Return the part of `measure_busy` that a virtual machine's host took."""
        return min(self.measure_busy(), self._competing.measure_stolen_share() or 0.0)
