"""Which runs other processes disturbed, and how busy those kept the machine meanwhile.

Linux counts for every thread how long it was ready to run and had no core (/proc/PID/task/TID/schedstat). A run during
which no thread of this process waited took what it takes on a quiet machine, but for what shares caches and clock; a
median over such runs is right even where a competitor takes every second time slice. The shortest run of all is not: it
may be the one that had the other hyperthread to itself, as no other run of either model had.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Callable, Dict, List, Optional, Tuple

import numpy as np

from edgeq_device import environment
from edgeq_device.environment import ROOT, Precedence

_SHARE = 0.02
"""A wait that is shorter than this share of the stretch in which it ended disturbs nothing."""
_OVERHEAD = 0.05
"""Share of the time that looking may take; between runs, but it cools the caches."""
_FEW_THREADS = 8
_ANSWERED_S = 0.002
"""By then a process that has answered waits for the next request: for up to 1 ms it is still on its core."""
_PAUSE_S, _PATIENCE = 0.002, 15
"""Workers look for more work for a millisecond (`session_options.BRIEF_SPIN`) before they sleep."""


class Waits:
    """The times at which threads of this process waited for a core.

    Args:
        root: of the file system, for tests.
        clock: seconds.
        sleep: takes seconds.
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
        self._own = str(threading.get_native_id())
        self._files: Dict[str, int] = {}
        self._waited: Dict[str, int] = {}
        self._looked = self._next = 0.0
        self._stretches: List[Tuple[float, float]] = []
        self.known = False

    def start(self) -> None:
        """Begin anew; threads that were started since are followed too."""
        self.known = self._open()
        self._stretches = []
        self._read()
        self._looked = self._next = self._clock()

    def look(self, now: float) -> None:
        """Note waits that ended since the last look. Call it after each run; it does not look more often than pays."""
        if not self.known or now < self._next:
            return
        before, self._looked = self._looked, now
        own, workers = self._read()
        if max(own, workers) > _SHARE * (now - before):
            # This thread was on its core at the last look. A worker may have been waiting then, and when it has its
            # core at last, what ran without it all that time was disturbed.
            self._stretches.append((before - workers, now))
        self._next = now + (self._clock() - now) / _OVERHEAD if len(self._files) > _FEW_THREADS else now

    def disturbed(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """bool[n]: which of the runs since `start` overlap with a wait; empty where nothing is known.

        Args:
            starts, ends: float64[n]: seconds of the clock.
        """
        if not self.known:
            return np.empty(0, bool)
        if not self._all_asleep():
            return np.ones(len(starts), bool)
        self._next = 0.0
        self.look(self._clock())
        found = np.zeros(len(starts), bool)
        for first, last in self._stretches:
            found |= (starts < last) & (ends > first)
        return found

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _open(self) -> bool:
        try:
            names = {task.name for task in self._tasks.iterdir()}
        except OSError:
            return False  # not Linux, or hidden
        for name in names - set(self._files):
            try:
                self._files[name] = os.open(self._tasks / name / "schedstat", os.O_RDONLY)
            except OSError:
                continue  # the thread has ended
        for name in set(self._files) - names:
            os.close(self._files.pop(name))
            self._waited.pop(name, None)
        return any(self._figures(file)[0] > 0 for file in self._files.values())

    def _read(self) -> Tuple[float, float]:
        """Seconds that this thread, and of the others the one that waited longest, waited since the last reading."""
        own = workers = 0
        for name, file in self._files.items():
            total = self._figures(file)[1]
            waited = total - self._waited.get(name, total)
            self._waited[name] = total
            if name == self._own:
                own = waited
            else:
                workers = max(workers, waited)
        return own / 1e9, workers / 1e9

    def _all_asleep(self) -> bool:
        """Wait until no other thread is ready to run, since a wait is counted only when it has ended; False where one
        neither goes to sleep nor runs."""
        ran = {name: self._figures(file)[0] for name, file in self._files.items() if name != self._own}
        for _ in range(_PATIENCE):
            self._sleep(_PAUSE_S)
            ran = {name: before for name, before in ran.items() if self._is_ready(name)}
            if not ran:
                return True
        spun_ns = _PATIENCE * _PAUSE_S * 1e9 / 2
        return all(self._figures(self._files[name])[0] - before > spun_ns for name, before in ran.items())

    def _is_ready(self, name: str) -> bool:
        # The state follows the program's name, which may hold anything, brackets included.
        state = (environment.read_text(self._tasks / name / "stat") or "").rpartition(")")[2].split()
        return state[:1] == ["R"]

    @staticmethod
    def _figures(file: int) -> Tuple[int, int]:
        """Nanoseconds on a core, and of waiting for one; zeros where the kernel does not count, or the thread ended."""
        try:
            figures = os.pread(file, 64, 0).split()
        except OSError:
            return 0, 0
        return (int(figures[0]), int(figures[1])) if len(figures) >= 2 else (0, 0)


class Others:
    """How much of the machine others use, from now on, and how much they want.

    Args:
        cores: of the machine.
    """

    def __init__(
        self,
        *,
        root: Path = ROOT,
        own_cpu_s: Callable[[], float] = time.process_time,
        cores: Optional[int] = None,
    ) -> None:
        self._root = root
        self._cores = cores or os.cpu_count() or 1
        self._wanted: List[float] = []
        self._own_cpu_s = own_cpu_s
        self._own_first = own_cpu_s()
        self._first = environment.read_cpu_times(root)

    def share(self) -> Optional[float]:
        """The share of the machine's time that other processes used, 0 to 1; None where the system does not say."""
        own = (self._own_cpu_s() - self._own_first) * _ticks_per_second()
        found = self._share_of("work", own)
        return None if found is None else min(1.0, max(0.0, found))

    def stolen_share(self) -> Optional[float]:
        """The share that a virtual machine's host took."""
        return self._share_of("stolen")

    def _share_of(self, kind: str, without: float = 0.0) -> Optional[float]:
        """The share of one kind of the ticks since the beginning, less some that are known."""
        last = environment.read_cpu_times(self._root)
        if self._first is None or last is None or last.total <= self._first.total:
            return None
        ticks = getattr(last, kind) - getattr(self._first, kind) - without
        return float(ticks / (last.total - self._first.total))

    def look(self) -> None:
        """Count who wants a core just now. Call it while no other thread of this process does."""
        runnable = environment.read_runnable(self._root)
        if runnable is not None:
            self._wanted.append(min(1.0, max(0, runnable - 1) / self._cores))

    def busy(self) -> float:
        """The share that others used, or wanted and did not get since this process has precedence, and what the host
        took; 0 where the system does not say."""
        wanted = sum(self._wanted) / len(self._wanted) if self._wanted else 0.0
        return min(1.0, max(self.share() or 0.0, wanted) + (self.stolen_share() or 0.0))


class Watch:
    """Both for one measurement, which takes precedence over others meanwhile, as far as its clock is the machine's: on
    another one nothing is known."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._real = clock is time.perf_counter
        self._elsewhere_s = 0.0
        self._answered = False
        self.waits = Waits()
        self._precedence = Precedence()
        self._others = Others(own_cpu_s=lambda: time.process_time() + self._elsewhere_s)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *error: object) -> None:
        self._precedence.release()
        self.waits.close()

    def look_around(self) -> None:
        """See `Others.look`."""
        if self._real:
            if self._answered:
                time.sleep(_ANSWERED_S)
                self._answered = False
            self._others.look()

    def start(self) -> None:
        """A turn begins."""
        if self._real:
            self._precedence.take()
            self.waits.start()

    def used_elsewhere(self, cpu_s: float) -> None:
        """Count processor time of a runner in another process, which has just answered, as this one's."""
        self._elsewhere_s += cpu_s
        self._answered = cpu_s > 0

    def busy(self) -> float:
        """See `Others.busy`."""
        return self._others.busy() if self._real else 0.0

    def stolen(self) -> float:
        """Of that, what a virtual machine's host took."""
        return min(self.busy(), self._others.stolen_share() or 0.0)


def _ticks_per_second() -> float:
    return float(os.sysconf("SC_CLK_TCK")) if hasattr(os, "sysconf") else 100.0
