"""Find the runs that other processes disturbed.

For every thread, Linux counts how long it was ready to run but had no core (/proc/PID/task/TID/schedstat). A run in
which no thread of this process waited takes as long as on a quiet machine, apart from effects of shared caches and the
shared clock. So the median of such runs is correct even if a competitor takes every second time slice. The shortest run
is not reliable: it may be the only one during which the core's other hyperthread was idle.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Dict, List, Tuple

from edgeq_device.system.features import ROOT, read_text

if TYPE_CHECKING:
    import numpy as np


_SHARE = 0.02
"""Shortest wait that counts, as a share of the time between two looks. Shorter waits do not disturb the runs."""
_OVERHEAD = 0.05
"""Share of the time that `look` may take. `look` interrupts no run, but displaces the model's data in the caches."""
_FEW_THREADS = 8
_PAUSE_S, _PATIENCE = 0.002, 15
"""Seconds of one pause, and maximum number of pauses. Workers spin for a millisecond before they sleep."""


class Waits:
    """Record the times at which threads of this process waited for a core.

    Args:
        root: root of the file system, for tests.
        clock: function that returns seconds.
        sleep: function that sleeps for a number of seconds.
    """

    def __init__(
        self,
        *,
        root: Path = ROOT,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._tasks = root / "proc/self/task"
        self._clock = clock
        self._sleep = sleep
        self._own_thread = str(threading.get_native_id())
        self._files: Dict[str, int] = {}
        self._waited: Dict[str, int] = {}
        self._looked = self._next = 0.0
        self._stretches: List[Tuple[float, float]] = []
        self.is_known = False

    def start(self) -> None:
        """Start a new record, which includes threads that have started since the last one."""
        self.is_known = self._open_files()
        self._stretches = []
        self._read_waits()
        self._looked = self._next = self._clock()

    def look(self, now: float) -> None:
        """Record the waits that ended since the last look. Call this after each run; the method itself limits how often
        it reads.
        """
        if not self.is_known or now < self._next:
            return
        previous, self._looked = self._looked, now
        own_s, workers_s = self._read_waits()
        if max(own_s, workers_s) > _SHARE * (now - previous):
            # This thread had a core at the last look, but a worker may have been waiting. The wait is counted only when
            # the worker gets its core, and it disturbed all runs in between.
            self._stretches.append((previous - workers_s, now))
        self._next = now + (self._clock() - now) / _OVERHEAD if len(self._files) > _FEW_THREADS else now

    def find_disturbed(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Return bool[n], which is True for each run since `start` that overlaps with a wait. Return an empty array if
        waits are not known.

        Args:
            starts, ends: float64[n], start and end of each run in seconds of the clock.
        """
        import numpy as np  # imported here, because boards are described without numpy

        if not self.is_known:
            return np.empty(0, bool)
        if not self._wait_until_asleep():
            return np.ones(len(starts), bool)
        self._next = 0.0
        self.look(self._clock())
        overlaps = np.zeros(len(starts), bool)
        for begin, end in self._stretches:
            overlaps |= (starts < end) & (ends > begin)
        return overlaps

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _open_files(self) -> bool:
        try:
            names = {task.name for task in self._tasks.iterdir()}
        except OSError:
            return False  # the system is not Linux, or hides the folder
        for name in names - set(self._files):
            try:
                self._files[name] = os.open(self._tasks / name / "schedstat", os.O_RDONLY)
            except OSError:
                continue  # the thread has ended
        for name in set(self._files) - names:
            os.close(self._files.pop(name))
            self._waited.pop(name, None)
        return any(self._read_figures(file)[0] > 0 for file in self._files.values())

    def _read_waits(self) -> Tuple[float, float]:
        """Return the seconds that this thread has waited since the last reading, and the seconds of whichever other
        thread waited longest.
        """
        own_ns = workers_ns = 0
        for name, file in self._files.items():
            total = self._read_figures(file)[1]
            waited = total - self._waited.get(name, total)
            self._waited[name] = total
            if name == self._own_thread:
                own_ns = waited
            else:
                workers_ns = max(workers_ns, waited)
        return own_ns / 1e9, workers_ns / 1e9

    def _wait_until_asleep(self) -> bool:
        """Pause until no other thread of this process is ready to run, because the kernel counts a wait only after it
        has ended. Return False if a thread stays ready to run without getting a core.
        """
        ran = {name: self._read_figures(file)[0] for name, file in self._files.items() if name != self._own_thread}
        for _ in range(_PATIENCE):
            self._sleep(_PAUSE_S)
            # The state comes after the program's name, which may contain any character, even brackets.
            stats = {name: (read_text(self._tasks / name / "stat") or "").rpartition(")")[2] for name in ran}
            ran = {name: on_core_ns for name, on_core_ns in ran.items() if stats[name].split()[:1] == ["R"]}
            if not ran:
                return True
        spun_ns = _PATIENCE * _PAUSE_S * 1e9 / 2
        return all(self._read_figures(self._files[name])[0] - on_core_ns > spun_ns for name, on_core_ns in ran.items())

    @staticmethod
    def _read_figures(file: int) -> Tuple[int, int]:
        """Return how many nanoseconds a thread spent on a core, and how many it waited for one. Both are 0 if the
        kernel does not count them or the thread has ended.
        """
        try:
            figures = os.pread(file, 64, 0).split()
        except OSError:
            return 0, 0
        return (int(figures[0]), int(figures[1])) if len(figures) >= 2 else (0, 0)
