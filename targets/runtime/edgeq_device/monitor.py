"""Watching the system during a measurement while it runs, and saying afterwards what may have disturbed it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

from edgeq_device import environment
from edgeq_device.disturbance import Others
from edgeq_device.environment import ROOT

CLOCK_MOVED = 0.05
"""Relative change of the clock that is worth a note."""
WARMED_C = 10.0
"""Rise in degrees Celsius that is worth a note."""
DISTURBED = 0.1
"""Share of the machine's time used by others, or load per core before the start, that is worth a note."""


class Monitor:
    """Call `sample` between bursts; it reads at most twice a second, as reading takes time too.

    Make it when the warm-up is over: idle cores clock low, and that would look like movement.
    """

    def __init__(
        self,
        *,
        root: Path = ROOT,
        clock: Callable[[], float] = time.monotonic,
        own_cpu_s: Callable[[], float] = time.process_time,
        load_before: Optional[float] = None,
    ) -> None:
        self._root = root
        self._clock = clock
        self._interval_s = 0.5
        self.load_before = load_before
        self.mhz: List[float] = []
        self.celsius: Dict[str, List[float]] = {}
        self._others = Others(root=root, own_cpu_s=own_cpu_s)
        self._throttles_first = environment.read_throttle_count(root)
        self._quota_first = environment.read_quota_throttles(root)
        self._read()

    def sample(self) -> None:
        """Read clocks and temperatures, unless the last reading is less than half a second old."""
        if self._clock() - self._last >= self._interval_s:
            self._read()

    def _read(self) -> None:
        frequencies = environment.read_frequencies(self._root)
        if frequencies:
            # The core that has just worked is at the top; the idle ones carry no information.
            self.mhz.append(max(frequencies.values()))
        for zone, celsius in environment.read_temperatures(self._root).items():
            self.celsius.setdefault(zone, []).append(celsius)
        self._last = self._clock()

    def finish(self) -> Dict[str, Any]:
        """The last reading, and everything that was seen, under stable names; null where the system reports none."""
        self._read()
        return {
            "clock_mhz": _range(self.mhz),
            "temperature_c": {zone: _range(values) for zone, values in sorted(self.celsius.items())},
            "load_before": self.load_before,
            "others_share": self._others.share(),
            "stolen_share": self._others.stolen_share(),
            "thermal_throttles": _difference(self._throttles_first, environment.read_throttle_count(self._root)),
            "quota_throttles": _difference(self._quota_first, environment.read_quota_throttles(self._root)),
        }


def _range(values: List[float]) -> Optional[Dict[str, float]]:
    if not values:
        return None
    return {"first": values[0], "last": values[-1], "min": min(values), "max": max(values)}


def _difference(first: Optional[int], last: Optional[int]) -> Optional[int]:
    return None if first is None or last is None else last - first


def environment_notes(seen: Dict[str, Any], cores: int) -> List[str]:
    """What in `Monitor.finish`'s record may have moved the figures, one sentence each.

    Args:
        cores: logical cores that the load is held against.
    """
    notes = []
    mhz = seen["clock_mhz"]
    if mhz and mhz["max"] > 0 and (mhz["max"] - mhz["min"]) / mhz["max"] > CLOCK_MOVED:
        notes.append(f"the clock moved between {mhz['min']:.0f} and {mhz['max']:.0f} MHz during the measurement")
    for zone, celsius in seen["temperature_c"].items():
        if celsius["max"] - celsius["first"] >= WARMED_C:
            notes.append(f"{zone} warmed from {celsius['first']:.0f} to {celsius['max']:.0f} degrees C")
    if seen["thermal_throttles"]:
        notes.append(f"cores were throttled for heat {seen['thermal_throttles']} times during the measurement")
    if seen["quota_throttles"]:
        notes.append(f"the container's CPU quota held the process back in {seen['quota_throttles']} periods")
    load = seen["load_before"]
    if load is not None and load > max(0.5, DISTURBED * cores):
        where = f"{cores} core{'s' if cores > 1 else ''}"
        notes.append(f"the machine was loaded before the start (load average {load:.1f} on {where})")
    if seen["others_share"] is not None and seen["others_share"] > DISTURBED:
        notes.append(f"other processes used {seen['others_share']:.0%} of the machine during the measurement")
    if seen["stolen_share"] is not None and seen["stolen_share"] > 0.01:
        notes.append(f"the virtual machine's host took {seen['stolen_share']:.0%} of the processor time")
    return notes
