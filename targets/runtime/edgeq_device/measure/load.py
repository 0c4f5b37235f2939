"""Measure how busy other processes keep the machine."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, List, Optional

from edgeq_device.system.features import ROOT, read_text


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
    # Old kernels lack the last columns.
    ticks += [0] * (8 - len(ticks))
    return CpuTimes(sum(ticks), sum(ticks) - ticks[3] - ticks[4] - ticks[7], ticks[7])


def read_runnable(root: Path = ROOT) -> Optional[int]:
    """Return how many threads of the whole machine run or wait for a core now, including this one, from /proc/stat."""
    match = re.search(r"^procs_running (\d+)$", read_text(root / "proc/stat") or "", re.M)
    return int(match.group(1)) if match else None


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
        # 100 is what Linux has used for decades.
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
