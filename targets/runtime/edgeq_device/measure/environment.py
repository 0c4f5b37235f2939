"""Read the conditions of a measurement: clock, temperature, load, memory, and the cores that may be used.

All readings come from the files in which Linux shows them. On other systems, and in containers that hide these files, a
reading is absent; it is never guessed. All functions that read take the root of the file system as an argument, so
recorded machines can be replayed.

`Precedence` gives this process precedence over others during a timing, if the user asks for it and the system permits
it. On Linux, a ready thread of niceness -20 gets a core before ordinary threads do, nearly always immediately. Such a
niceness needs root, CAP_SYS_NICE or a limit that permits it; otherwise nothing changes. Other processes wait while the
timing lasts, so the figures of another measurement next to this one would be wrong: that is not the default.

`Waits` finds the runs that other processes disturbed, and `CompetingLoad` measures how busy these processes kept the
machine. For every thread, Linux counts how long it was ready to run but had no core (/proc/PID/task/TID/schedstat). A
run in which no thread of this process waited takes as long as on a quiet machine, apart from effects of shared caches
and the shared clock. So the median of such runs is correct even if a competitor takes every second time slice. The
shortest run is not reliable: it may be the only one during which the core's other hyperthread was idle.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

from edgeq_device.errors import UsageError
from edgeq_device.measure.features import ROOT, read_allowed_cores, read_text

if TYPE_CHECKING:
    import numpy as np


def _parse_number(text: Optional[str]) -> Optional[float]:
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None


def read_frequencies(root: Path = ROOT) -> Dict[int, float]:
    """Return the present clock of each logical core in MHz, keyed by core number. The values come from cpufreq, or else
    from /proc/cpuinfo.
    """
    mhz_by_core = {}
    for path in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_cur_freq"):
        khz = _parse_number(read_text(path))
        if khz:
            mhz_by_core[int(path.parent.parent.name[3:])] = khz / 1e3
    if mhz_by_core:
        return dict(sorted(mhz_by_core.items()))
    info = read_text(root / "proc/cpuinfo") or ""
    return {i: float(mhz) for i, mhz in enumerate(re.findall(r"^cpu MHz\s*:\s*([0-9.]+)", info, re.M)) if float(mhz)}


def read_governors(root: Path = ROOT) -> Tuple[str, ...]:
    """Return the distinct cpufreq governors in use, sorted."""
    paths = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor")
    texts = (read_text(path) for path in paths)
    return tuple(sorted({t.strip() for t in texts if t and t.strip()}))


def read_temperatures(root: Path = ROOT) -> Dict[str, float]:
    """Return degrees Celsius, keyed by thermal zone. A zone is named like "zone0 (cpu-thermal)"."""
    celsius_by_zone = {}
    for path in sorted((root / "sys/class/thermal").glob("thermal_zone[0-9]*")):
        millidegrees = _parse_number(read_text(path / "temp"))
        if millidegrees is None or not -50e3 < millidegrees < 250e3:
            continue
        kind = (read_text(path / "type") or "").strip()
        celsius_by_zone[f"{path.name[len('thermal_') :]}{f' ({kind})' if kind else ''}"] = millidegrees / 1e3
    return celsius_by_zone


def read_throttle_count(root: Path = ROOT) -> Optional[int]:
    """Return how often cores were throttled for heat since the system started, summed over the cores. Return None if
    the system does not count this.
    """
    paths = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/thermal_throttle/core_throttle_count")
    counts = [n for n in (_parse_number(read_text(path)) for path in paths) if n is not None]
    return int(sum(counts)) if counts else None


def read_quota_throttles(root: Path = ROOT) -> Optional[int]:
    """Return the number of periods in which the container's CPU quota throttled its processes. Return None if the
    system does not count them.
    """
    for place in ("sys/fs/cgroup/cpu.stat", "sys/fs/cgroup/cpu/cpu.stat"):
        match = re.search(r"^nr_throttled (\d+)", read_text(root / place) or "", re.M)
        if match:
            return int(match.group(1))
    return None


def read_load(root: Path = ROOT) -> Optional[float]:
    """Return the load average of the last minute: the number of processes that run or wait for a core."""
    text = read_text(root / "proc/loadavg")
    return _parse_number(text.split()[0]) if text and text.split() else None


@dataclass(frozen=True)
class CpuTimes:
    """Count clock ticks of all cores since the system started: all ticks, the ticks spent on work (neither idle nor
    stolen), and the ticks that the host stole.
    """

    total: int
    work: int
    stolen: int


def read_cpu_times(root: Path = ROOT) -> Optional[CpuTimes]:
    """Return clock ticks of all cores since the system started, from /proc/stat, or None if that file is missing."""
    match = re.match(r"cpu +([0-9 ]+)\n", read_text(root / "proc/stat") or "")
    if not match:
        return None
    # The columns are user nice system idle iowait irq softirq steal. The guest times that follow are already counted in
    # user.
    ticks = [int(t) for t in match.group(1).split()[:8]]
    ticks += [0] * (8 - len(ticks))
    return CpuTimes(sum(ticks), sum(ticks) - ticks[3] - ticks[4] - ticks[7], ticks[7])


def read_runnable(root: Path = ROOT) -> Optional[int]:
    """Return how many threads of the whole machine run or wait for a core now, including this one, from /proc/stat."""
    match = re.search(r"^procs_running (\d+)$", read_text(root / "proc/stat") or "", re.M)
    return int(match.group(1)) if match else None


def read_memory(root: Path = ROOT, process: str = "self") -> Tuple[Optional[int], Optional[int]]:
    """Return the resident memory (RSS) of a process in bytes: its present value and its peak so far. `process` is
    "self" or a process id; only Linux reports the memory of another process.
    """
    status = read_text(root / "proc" / process / "status")
    if status is not None:
        values = dict(re.findall(r"^(VmRSS|VmHWM):\s+(\d+) kB", status, re.M))
        now, peak = (int(values[k]) * 1024 if k in values else None for k in ("VmRSS", "VmHWM"))
        return now, peak
    if sys.platform == "win32" or process != "self":
        return None, None
    import resource

    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return None, usage if sys.platform == "darwin" else usage * 1024


def read_cpu_name(root: Path = ROOT) -> str:
    """Return the processor's name from /proc/cpuinfo or from Windows, or else the name of its architecture."""
    info = read_text(root / "proc/cpuinfo") or ""
    match = re.search(r"^(?:model name|Model|Hardware|cpu model)\s*:\s*(.+)$", info, re.M)
    return match.group(1).strip() if match else os.environ.get("PROCESSOR_IDENTIFIER") or platform.machine()


def parse_cores(text: str) -> Tuple[int, ...]:
    """Return core numbers from a text such as "0,2,4-7".

    Raises:
        UsageError: the text has another form.
    """
    cores: List[int] = []
    for part in text.split(","):
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
    missing = sorted(set(cores) - allowed)
    if missing:
        may = ",".join(map(str, sorted(allowed)))
        raise UsageError(f"core {missing[0]} is not available to this process", f"Choose from {may}")
    os.sched_setaffinity(0, set(cores))
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def describe_machine(root: Path = ROOT) -> Dict[str, Any]:
    """Return a description of the machine under stable names, for a report."""
    return {
        "cpu_name": read_cpu_name(root),
        "architecture": platform.machine(),
        "os": platform.system(),
        "threads": os.cpu_count(),
        "allowed_cores": list(read_allowed_cores()),
        "governors": list(read_governors(root)),
    }


SETTING = "EDGEQ_NICE"
"""Environment variable that sets the niceness during a timing. Without it, or with 0, the niceness does not change."""
_MOST = -20


class Precedence:
    """Set the niceness of this process's threads. Threads to which the user gave a positive niceness keep it.

    Args:
        root: root of the file system, for tests.

    Raises:
        UsageError: `EDGEQ_NICE` is not a whole number from -20 to 0.
    """

    def __init__(self, *, root: Path = ROOT) -> None:
        self._tasks = root / "proc/self/task"
        self._nice = read_niceness()
        self._niceness_by_thread: Dict[int, int] = {}
        self._possible = self._nice != 0 and hasattr(os, "setpriority")

    def take(self) -> None:
        """Set the niceness of all present threads that have not been changed yet."""
        if not self._possible:
            return
        try:
            threads = sorted(int(task.name) for task in self._tasks.iterdir())
        except OSError:
            self._possible = False  # the system is not Linux, or hides the file
            return
        original = next(iter(self._niceness_by_thread.values()), None)
        for thread in threads:
            if thread in self._niceness_by_thread:
                continue
            try:
                niceness = os.getpriority(os.PRIO_PROCESS, thread)
                # the thread started after an earlier call, and inherited precedence
                if original is not None and niceness == self._nice:
                    niceness = original
                if niceness <= 0:
                    os.setpriority(os.PRIO_PROCESS, thread, self._nice)
                    self._niceness_by_thread[thread] = niceness
            except ProcessLookupError:
                continue  # the thread has ended
            except PermissionError:
                self._possible = False
                return

    def release(self) -> None:
        """Restore the former niceness of every thread."""
        for thread, niceness in self._niceness_by_thread.items():
            try:
                os.setpriority(os.PRIO_PROCESS, thread, niceness)
            except ProcessLookupError:
                continue
        self._niceness_by_thread.clear()


def read_niceness() -> int:
    """Return the niceness in `EDGEQ_NICE`, or 0 if the variable is not set.

    Raises:
        UsageError: the value is not a whole number from -20 to 0.
    """
    text = os.environ.get(SETTING, "").strip()
    try:
        nice = int(text or 0)
    except ValueError:
        nice = 1
    # Refuse a positive niceness: a process that may not take precedence could not undo it.
    if _MOST <= nice <= 0:
        return nice
    raise UsageError(f"{SETTING}={text} gives no precedence", f"Give a whole number from {_MOST} to 0, 0 for none")


_SHARE = 0.02
"""Shortest wait that counts, as a share of the time between two looks. Shorter waits do not disturb the runs."""
_OVERHEAD = 0.05
"""Share of the time that `look` may take. `look` interrupts no run, but displaces the model's data in the caches."""
_FEW_THREADS = 8
_ANSWERED_S = 0.002
"""Seconds after which a process that has answered is asleep. It stays on its core for up to 1 ms."""
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


class CompetingLoad:
    """Measure how much of the machine's time other processes use from now on, and how much they would like to use."""

    def __init__(self, *, root: Path = ROOT, own_cpu_s: Callable[[], float] = time.process_time) -> None:
        self._root = root
        self._cores = os.cpu_count() or 1
        self._demand: List[float] = []
        self._own_cpu_s = own_cpu_s
        self._own_first = own_cpu_s()
        self._start = read_cpu_times(root)

    def measure_share(self) -> Optional[float]:
        """Return the share of the machine's time that other processes used, 0 to 1, or None if the system does not
        report it.
        """
        ticks_per_s = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
        work_share = self._measure_share_of("work", (self._own_cpu_s() - self._own_first) * ticks_per_s)
        return None if work_share is None else min(1.0, max(0.0, work_share))

    def measure_stolen_share(self) -> Optional[float]:
        """Return the share of the machine's time that a virtual machine's host took, or None if the system does not
        report it.
        """
        return self._measure_share_of("stolen")

    def _measure_share_of(self, kind: str, without: float = 0.0) -> Optional[float]:
        """Return the share of one kind of ticks among all ticks since the start. Subtract `without` ticks from the
        count of that kind.
        """
        now = read_cpu_times(self._root)
        if self._start is None or now is None or now.total <= self._start.total:
            return None
        ticks = getattr(now, kind) - getattr(self._start, kind) - without
        return float(ticks / (now.total - self._start.total))

    def look(self) -> None:
        """Count the threads that want a core now. Call this while no other thread of this process wants one."""
        runnable = read_runnable(self._root)
        if runnable is not None:
            self._demand.append(min(1.0, max(0, runnable - 1) / self._cores))

    def measure_busy(self) -> float:
        """Return the share of the machine's time that others used or wanted, plus the share that a virtual machine's
        host took. Others may want a core and not get it, because this process has precedence. Return 0 if the system
        does not report it.
        """
        mean_demand = sum(self._demand) / len(self._demand) if self._demand else 0.0
        return min(1.0, max(self.measure_share() or 0.0, mean_demand) + (self.measure_stolen_share() or 0.0))


class MachineWatch:
    """Record waits and the activity of other processes during one measurement. Take precedence over those processes
    meanwhile if `EDGEQ_NICE` is set. Do nothing if the clock is not the machine's, as in tests.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
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
        """See `CompetingLoad.busy`."""
        return self._competing.measure_busy() if self._real else 0.0

    def measure_stolen(self) -> float:
        """Return the part of `busy` that a virtual machine's host took."""
        return min(self.measure_busy(), self._competing.measure_stolen_share() or 0.0)
