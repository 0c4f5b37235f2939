"""Depth: how far each pixel is away.

    depth [1, h, w], [1, 1, h, w] or [1, h, w, 1]

The parameter "quantity" says what the values are: "inverse" for relative inverse depth, where near is large and neither
scale nor offset is known (MiDaS, Depth Anything), or "metric" for metres (ZoeDepth, Depth Anything metric, Metric3D).
The values cannot show it, so "inverse" is assumed unless a file or the user states "metric".
"""

from __future__ import annotations

from typing import Optional

from edgeq_device.answers.answer import Answer
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.head import Head
from edgeq_device.answers.raster import find_single_maps, read_single, to_stored
from edgeq_device.prepare.frame import Frame

_QUANTITIES = ("inverse", "metric")


def decode(outputs: Outputs, head: Head, frame: Frame) -> Answer:
    """Return the depth of each pixel of the stored image in the model's unit, float64 [H, W]."""
    if head.parameters.get("quantity", "inverse") not in _QUANTITIES:
        raise ValueError(f"the quantity is {head.parameters['quantity']!r}")
    array = outputs[head.outputs["depth"]]
    return Answer("depth", map=to_stored(read_single(array), frame))


def fit(view: View) -> Optional[Fit]:
    """Accept the map of one channel whose name contains "depth" or "disparity", or the only one if the family is
    named.
    """
    maps = find_single_maps(view.outputs)
    names = [name for name in maps if "depth" in name.lower() or "disparity" in name.lower()]
    names = names or (list(maps) if view.named else [])
    quantity = view.hints.get("quantity", "inverse")
    return Fit({"depth": names[0]}, {"quantity": quantity}) if len(names) == 1 and quantity in _QUANTITIES else None


FAMILY = Family("depth", "depth", "depth [1, h, w] or [1, 1, h, w]", fit, decode=decode)
