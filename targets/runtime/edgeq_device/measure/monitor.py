"""Record clocks, temperatures and load during a measurement, and note what may have changed the figures."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Dict, List, Optional

from edgeq_device.measure import environment
from edgeq_device.measure.load import CompetingLoad
from edgeq_device.system.features import ROOT

CLOCK_MOVED = 0.05
"""Relative change of the clock that is worth a note."""
WARMED_C = 10.0
"""Rise in degrees Celsius that is worth a note."""
_INTERVAL_S = 0.5
DISTURBED = 0.1
"""Smallest share of the machine's time that others used, and smallest load per core before the start, worth a note."""


class Monitor:
    """Record clocks, temperatures and load during a measurement. Call `sample` between bursts.

    The monitor reads at most twice a second, because each reading takes time. Create it after the warm-up: idle cores
    have a low clock, and the rise from there would look like a disturbance.
    """

    def __init__(self, *, root: Path = ROOT, load_before: Optional[float] = None) -> None:
        self._root = root
        self.load_before = load_before
        self.mhz: List[float] = []
        self.celsius: Dict[str, List[float]] = {}
        self._competing = CompetingLoad(root=root)
        self._throttles_first = environment.read_throttle_count(root)
        self._quota_first = environment.read_quota_throttles(root)
        self._take_reading()

    def sample(self) -> None:
        """Read clocks and temperatures, unless the last reading is less than half a second old."""
        if time.monotonic() - self._last_reading >= _INTERVAL_S:
            self._take_reading()

    def _take_reading(self) -> None:
        frequencies = environment.read_frequencies(self._root)
        if frequencies:
            # Record the highest clock, which is that of the core that has just worked. The clocks of idle cores carry
            # no information.
            self.mhz.append(max(frequencies.values()))
        for zone, celsius in environment.read_temperatures(self._root).items():
            self.celsius.setdefault(zone, []).append(celsius)
        self._last_reading = time.monotonic()

    def finish(self) -> Dict[str, Any]:
        """Take a last reading and return the whole record under stable names. A value is None if the system does not
        report it.
        """
        self._take_reading()
        return {
            "clock_mhz": _summarize_range(self.mhz),
            "temperature_c": {zone: _summarize_range(values) for zone, values in sorted(self.celsius.items())},
            "load_before": self.load_before,
            "others_share": self._competing.measure_share(),
            "stolen_share": self._competing.measure_stolen_share(),
            "thermal_throttles": _subtract(self._throttles_first, environment.read_throttle_count(self._root)),
            "quota_throttles": _subtract(self._quota_first, environment.read_quota_throttles(self._root)),
        }


def _summarize_range(values: List[float]) -> Optional[Dict[str, float]]:
    return {"first": values[0], "last": values[-1], "min": min(values), "max": max(values)} if values else None


def _subtract(start: Optional[int], end: Optional[int]) -> Optional[int]:
    return None if start is None or end is None else end - start


def describe_environment(readings: Dict[str, Any], cores: int) -> List[str]:
    """Return one sentence for each recorded condition that may have changed the figures. `readings` is the record that
    `Monitor.finish` returns.

    Args:
        cores: number of logical cores that the load is compared with.
    """
    notes = []
    mhz = readings["clock_mhz"]
    if mhz and mhz["max"] > 0 and (mhz["max"] - mhz["min"]) / mhz["max"] > CLOCK_MOVED:
        notes.append(f"the clock varied between {mhz['min']:.0f} and {mhz['max']:.0f} MHz during the measurement")
    for zone, celsius in readings["temperature_c"].items():
        if celsius["max"] - celsius["first"] >= WARMED_C:
            notes.append(f"{zone} warmed from {celsius['first']:.0f} to {celsius['max']:.0f} degrees C")
    if readings["thermal_throttles"]:
        notes.append(f"cores were throttled for heat {readings['thermal_throttles']} times during the measurement")
    if readings["quota_throttles"]:
        notes.append(f"the container's CPU quota throttled the process in {readings['quota_throttles']} periods")
    load = readings["load_before"]
    # Below 0.5, the load is noise of the system itself.
    if load is not None and load > max(0.5, DISTURBED * cores):
        cores_text = f"{cores} core{'s' if cores > 1 else ''}"
        notes.append(f"the machine was loaded before the start (load average {load:.1f} on {cores_text})")
    if readings["others_share"] is not None and readings["others_share"] > DISTURBED:
        notes.append(f"other processes used {readings['others_share']:.0%} of the machine during the measurement")
    # Even one percent means that another machine runs on these cores.
    if readings["stolen_share"] is not None and readings["stolen_share"] > 0.01:
        notes.append(f"the virtual machine's host took {readings['stolen_share']:.0%} of the processor time")
    return notes
