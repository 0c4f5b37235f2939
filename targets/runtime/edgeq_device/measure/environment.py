"""Read the conditions of a measurement: clock, temperature, throttling, load and memory.

All readings come from the files in which Linux shows them. On other systems, and in containers that hide these files, a
reading is absent; it is never guessed. All functions that read take the root of the file system as an argument, so
recorded machines can be replayed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Dict, Optional, Tuple

from edgeq_device.system.features import ROOT, read_text

if TYPE_CHECKING:
    pass


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
        # 0 means that the driver does not know the clock.
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
        # Sensors that are switched off report temperatures that no machine survives.
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
    # The first is cgroup v2, the second v1.
    for place in ("sys/fs/cgroup/cpu.stat", "sys/fs/cgroup/cpu/cpu.stat"):
        match = re.search(r"^nr_throttled (\d+)", read_text(root / place) or "", re.M)
        if match:
            return int(match.group(1))
    return None


def read_load(root: Path = ROOT) -> Optional[float]:
    """Return the load average of the last minute: the number of processes that run or wait for a core."""
    text = read_text(root / "proc/loadavg")
    return _parse_number(text.split()[0]) if text and text.split() else None


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
    # macOS counts in bytes, other systems in kilobytes.
    return None, usage if sys.platform == "darwin" else usage * 1024
