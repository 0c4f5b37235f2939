"""Semantic segmentation: a class for each pixel.

    map [1, C, h, w] or [1, h, w, C]: logits or probabilities of C classes, at any resolution
    map [1, 1, h, w] or [1, h, w]: one logit or probability of the foreground (class 1)
    map [1, h, w] or [1, 1, h, w] of whole numbers: classes, after an arg-max in the graph

Logits are resized bilinearly to the stored image (align_corners False) before classes are compared; class numbers take
the nearest pixel. A model with several such outputs, such as drivable area and lanes, has the roles map, map2, map3 …;
the answer's `map` is the first, `maps` has the others. The auxiliary output of torchvision's models (aux) is not read.
"""

from __future__ import annotations

from typing import Any, Optional

import numpy as np

from edgeq_device.answers.answer import Answer
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.head import Head
from edgeq_device.answers.raster import (
    find_layout,
    find_maps,
    find_single_maps,
    order_axes,
    pick_class,
    pick_nearest,
    score_scale,
    to_probabilities,
    to_stored,
)
from edgeq_device.prepare.frame import Frame

# Ignored pixels are 255, and no data set has as many classes as pixels.
_MOST_CLASSES = 4096


def decode(outputs: Outputs, head: Head, frame: Frame) -> Answer:
    """Return the class of each pixel of the stored image."""
    maps = {
        name: _read_classes(outputs[name], head, frame) for role, name in sorted(head.outputs.items(), key=_number_role)
    }
    (_, first), *others = maps.items()
    return Answer("semantic", map=first, maps=dict(others))


def _number_role(item: Any) -> int:
    return int(item[0][3:] or 1)


def _read_classes(array: Any, head: Head, frame: Frame) -> Any:
    values = order_axes(array, head.parameters.get("layout"))
    if len(values) > 1:
        return pick_class(values, frame)
    scores = head.parameters.get("scores")
    if values.dtype.kind in "iub" or scores == "classes":
        return pick_nearest(values[0], frame).astype(np.int64)
    probabilities = to_probabilities(to_stored(values[0], frame), scores)
    return (probabilities > head.thresholds.get("confidence", 0.5)).astype(np.int64)


def fit(view: View) -> Optional[Fit]:
    """Accept maps of whole numbers in the size of the input, and maps with as many channels as classes are stated, or
    whose channels sum to 1. If the family is named, accept any map.
    """
    maps = {name: array for name, array in find_maps(view.outputs, "fiub").items() if not name.startswith("aux")}
    maps = {name: array for name, array in maps.items() if view.named or _is_evident(array, view)}
    if not maps or view.keypoints is not None:
        return None
    # Outputs of other kinds next to a map belong to another family, such as a detector with masks.
    further = [name for name in view.outputs if name not in maps and not name.startswith("aux")]
    if further and not view.named:
        return None
    layout = find_layout(next(iter(maps.values())), view.classes)
    single = list(find_single_maps(maps).values())
    scores = {"scores": _find_scale(single[0])} if single else {}
    roles = {f"map{number or ''}": name for number, name in zip((0, *range(2, len(maps) + 1)), maps)}
    return Fit(roles, {**layout, **scores})


def _find_scale(values: Any) -> str:
    # An arg-max may be followed by a cast to floats.
    whole = bool((values == np.rint(values)).all() and values.max() > 1)
    return "classes" if whole and values.min() >= 0 else score_scale(values)


def _is_evident(array: Any, view: View) -> bool:
    if array.dtype.kind in "iub":
        sides = array.shape[-2:] if array.ndim == 3 or array.shape[1] == 1 else array.shape[1:3]
        return tuple(sides[::-1]) == tuple(view.size) and array.min() >= 0 and array.max() < _MOST_CLASSES
    if array.ndim != 4:
        return False
    values = order_axes(array, find_layout(array, view.classes).get("layout"))
    # Several frames or a picture can have as many channels, but not more pixels than the input.
    if len(values) < 2 or values.shape[2] > view.size[0] or values.shape[1] > view.size[1]:
        return False
    sums = values.sum(axis=0)
    return view.classes == len(values) or bool(values.min() >= 0 and np.abs(sums - 1).max() < 1e-2)


FAMILY = Family(
    "semantic",
    "semantic",
    "maps [1, classes, h, w], or classes [1, h, w]",
    fit,
    decode=decode,
    thresholds={"confidence": 0.5},
)
