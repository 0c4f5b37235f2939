"""What surrounds a measurement: clock, temperature, load, memory, and the cores it may run on.

Everything is read from the files in which Linux shows it; on other systems, and in containers that hide them, a
reading is absent, never guessed. All readers take the root of the file system, so that recorded machines can be
replayed.

Precedence over other processes while something is timed, where the system grants it.

On Linux a thread of niceness -20 that is ready to run gets a core before ordinary ones, nearly always at once: beside
busy processes its latencies are those of a machine that is its own. Only root, or who has CAP_SYS_NICE or a limit for
it, may ask for that; for all others nothing changes. Others wait for the seconds that the timing takes.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

from edgeq_device.errors import UsageError

ROOT = Path("/")


def read_text(path: Path, limit: int = 1 << 20) -> Optional[str]:
    """The text of a small system file, or None where it does not exist or may not be read."""
    try:
        with path.open("rb") as file:
            return file.read(limit).decode("utf-8", "replace")
    except OSError:
        # Absent on this system, or present and refusing (thermal zones that are switched off answer EINVAL).
        return None


def _number(text: Optional[str]) -> Optional[float]:
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None


def read_frequencies(root: Path = ROOT) -> Dict[int, float]:
    """MHz now by logical core, from cpufreq, else from /proc/cpuinfo."""
    found = {}
    for path in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_cur_freq"):
        khz = _number(read_text(path))
        if khz:
            found[int(path.parent.parent.name[3:])] = khz / 1e3
    if found:
        return dict(sorted(found.items()))
    info = read_text(root / "proc/cpuinfo") or ""
    return {i: float(mhz) for i, mhz in enumerate(re.findall(r"^cpu MHz\s*:\s*([0-9.]+)", info, re.M)) if float(mhz)}


def read_governors(root: Path = ROOT) -> Tuple[str, ...]:
    """The distinct cpufreq governors in use, sorted."""
    paths = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor")
    texts = (read_text(path) for path in paths)
    return tuple(sorted({t.strip() for t in texts if t and t.strip()}))


def read_temperatures(root: Path = ROOT) -> Dict[str, float]:
    """Degrees Celsius by thermal zone, as "zone0 (cpu-thermal)"."""
    found = {}
    for path in sorted((root / "sys/class/thermal").glob("thermal_zone[0-9]*")):
        millidegrees = _number(read_text(path / "temp"))
        if millidegrees is None or not -50e3 < millidegrees < 250e3:
            continue
        kind = (read_text(path / "type") or "").strip()
        found[f"{path.name[len('thermal_') :]}{f' ({kind})' if kind else ''}"] = millidegrees / 1e3
    return found


def read_throttle_count(root: Path = ROOT) -> Optional[int]:
    """How often cores were throttled for heat since the start, summed; None where it is not counted."""
    paths = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/thermal_throttle/core_throttle_count")
    counts = [n for n in (_number(read_text(path)) for path in paths) if n is not None]
    return int(sum(counts)) if counts else None


def read_quota_throttles(root: Path = ROOT) -> Optional[int]:
    """In how many periods the container's CPU quota held its processes back; None where there is no such count."""
    for place in ("sys/fs/cgroup/cpu.stat", "sys/fs/cgroup/cpu/cpu.stat"):
        match = re.search(r"^nr_throttled (\d+)", read_text(root / place) or "", re.M)
        if match:
            return int(match.group(1))
    return None


def read_load(root: Path = ROOT) -> Optional[float]:
    """The load average of the last minute: processes running or waiting for a core."""
    text = read_text(root / "proc/loadavg")
    return _number(text.split()[0]) if text and text.split() else None


@dataclass(frozen=True)
class CpuTimes:
    """Clock ticks since the start over all cores: everything, work (not idle, not stolen), stolen by the host."""

    total: int
    work: int
    stolen: int


def read_cpu_times(root: Path = ROOT) -> Optional[CpuTimes]:
    """Clock ticks of all cores since the start of the system, from /proc/stat; None where it is not there."""
    match = re.match(r"cpu +([0-9 ]+)\n", read_text(root / "proc/stat") or "")
    if not match:
        return None
    # user nice system idle iowait irq softirq steal; guest times, which follow, are in user already.
    ticks = [int(t) for t in match.group(1).split()[:8]]
    ticks += [0] * (8 - len(ticks))
    return CpuTimes(sum(ticks), sum(ticks) - ticks[3] - ticks[4] - ticks[7], ticks[7])


def read_runnable(root: Path = ROOT) -> Optional[int]:
    """How many threads of the whole machine run or wait for a core just now, this one included, from /proc/stat."""
    match = re.search(r"^procs_running (\d+)$", read_text(root / "proc/stat") or "", re.M)
    return int(match.group(1)) if match else None


def read_memory(root: Path = ROOT) -> Tuple[Optional[int], Optional[int]]:
    """Bytes of this process that are in memory (RSS): now, and at most so far."""
    status = read_text(root / "proc/self/status")
    if status is not None:
        values = dict(re.findall(r"^(VmRSS|VmHWM):\s+(\d+) kB", status, re.M))
        now, peak = (int(values[k]) * 1024 if k in values else None for k in ("VmRSS", "VmHWM"))
        return now, peak
    if sys.platform == "win32":
        return None, None
    import resource

    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return None, usage if sys.platform == "darwin" else usage * 1024


def cpu_name(root: Path = ROOT) -> str:
    """The processor's name as /proc/cpuinfo states it, else what Python's `platform` reports."""
    info = read_text(root / "proc/cpuinfo") or ""
    match = re.search(r"^(?:model name|Model|Hardware|cpu model)\s*:\s*(.+)$", info, re.M)
    return match.group(1).strip() if match else platform.processor() or platform.machine()


def allowed_cores() -> Tuple[int, ...]:
    """The logical cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def parse_cores(text: str) -> Tuple[int, ...]:
    """Core numbers from "0,2,4-7".

    Raises:
        UsageError: anything else.
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
    """Keep this thread, and those started inside (open sessions inside too), on these cores; none: change nothing.

    Raises:
        UsageError: the system cannot pin, or the process may not use one of the cores.
    """
    if not cores:
        yield
        return
    if not hasattr(os, "sched_setaffinity"):
        raise UsageError(f"{platform.system()} does not let a process choose its cores", "Leave out --pin")
    before = os.sched_getaffinity(0)
    missing = sorted(set(cores) - before)
    if missing:
        may = ",".join(map(str, sorted(before)))
        raise UsageError(f"core {missing[0]} is not available to this process", f"Choose from {may}")
    os.sched_setaffinity(0, set(cores))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def describe_machine(root: Path = ROOT) -> Dict[str, Any]:
    """The machine under stable names, for a report."""
    return {
        "cpu": cpu_name(root),
        "architecture": platform.machine(),
        "system": platform.system(),
        "logical_cores": os.cpu_count(),
        "allowed_cores": list(allowed_cores()),
        "governors": list(read_governors(root)),
    }


SETTING = "EDGEQ_NICE"
"""Environment variable: the niceness while something is timed, 0 to leave it alone."""
_MOST = -20


class Precedence:
    """Niceness of this process's threads. One that its user has made nicer than others stays so.

    Args:
        root: of the file system, for tests.
        get, give: niceness of a thread by its number, as `os.getpriority` and `os.setpriority` have it.

    Raises:
        UsageError: `EDGEQ_NICE` is no whole number from -20 to 0.
    """

    def __init__(
        self,
        *,
        root: Path = ROOT,
        get: Optional[Callable[[int], int]] = None,
        give: Optional[Callable[[int, int], None]] = None,
    ) -> None:
        self._tasks = root / "proc/self/task"
        self._nice = wanted_niceness()
        self._get = get or _get
        self._give = give or _give
        self._before: Dict[int, int] = {}
        self._possible = self._nice != 0 and hasattr(os, "setpriority")

    def take(self) -> None:
        """Change the threads that there are and have not been changed yet."""
        if not self._possible:
            return
        try:
            threads = sorted(int(task.name) for task in self._tasks.iterdir())
        except OSError:
            self._possible = False  # not Linux, or hidden
            return
        first = next(iter(self._before.values()), None)
        for thread in threads:
            if thread in self._before:
                continue
            try:
                before = self._get(thread)
                if first is not None and before == self._nice:  # started since, by a thread that has precedence
                    before = first
                if before <= 0:
                    self._give(thread, self._nice)
                    self._before[thread] = before
            except ProcessLookupError:
                continue  # it has ended
            except PermissionError:
                self._possible = False
                return

    def release(self) -> None:
        """Give every thread its own niceness back."""
        for thread, before in self._before.items():
            try:
                self._give(thread, before)
            except ProcessLookupError:
                continue
        self._before.clear()


def wanted_niceness() -> int:
    """What `EDGEQ_NICE` says, the utmost precedence where it says nothing.

    Raises:
        UsageError: it is no whole number from -20 to 0.
    """
    text = os.environ.get(SETTING, "").strip()
    try:
        nice = int(text or _MOST)
    except ValueError:
        nice = 1
    # A positive one could not be given back without the right to take precedence.
    if _MOST <= nice <= 0:
        return nice
    raise UsageError(f"{SETTING}={text} gives no precedence", f"Give a whole number from {_MOST} to 0, 0 for none")


def _get(thread: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, thread)


def _give(thread: int, nice: int) -> None:
    os.setpriority(os.PRIO_PROCESS, thread, nice)
