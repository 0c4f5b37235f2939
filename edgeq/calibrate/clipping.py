"""What a range costs: the share of a tensor's power that clipping removes, and that rounding adds."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from edgeq.calibrate.linear import linear_of
from edgeq.calibrate.range_method import Grid
from edgeq.calibrate.ranges import Range
from edgeq.calibrate.statistics import Statistics


def clipped_power(statistics: Statistics, ranges: Mapping[str, Range]) -> dict[str, float]:
    """Tensor → power of the clipping error over the tensor's power, 0 to 1, from its histogram.

    sum n (x - clip(x))^2 / sum n x^2 over bins of n values around x. Ranges of tensors without statistics are left out.
    """
    found = {}
    for name, span in ranges.items():
        tensor = statistics.tensors.get(name)
        if tensor is None or not tensor.count:
            continue
        if span.low <= tensor.minimum and tensor.maximum <= span.high:
            found[name] = 0.0
            continue
        linear = linear_of(tensor.histogram)
        centres = linear.centres()
        power = float(np.sum(linear.counts * centres**2))
        cut = centres - np.clip(centres, span.low, span.high)
        found[name] = float(np.sum(linear.counts * cut**2)) / power if power else 0.0
    return found


def range_noise(statistics: Statistics, ranges: Mapping[str, Range], grid: Grid) -> dict[str, float]:
    """Tensor → power of the error of quantizing it over the tensor's power: what clipping removes, and a twelfth of the
    squared step."""
    found = clipped_power(statistics, ranges)
    for name, clipped in found.items():
        linear = linear_of(statistics.tensors[name].histogram)
        power = float(np.sum(linear.counts * linear.centres() ** 2)) / max(float(linear.counts.sum()), 1.0)
        step = float(grid.params(ranges[name].low, ranges[name].high).scale)
        found[name] = clipped + (step**2 / 12 / power if power else 0.0)
    return found
