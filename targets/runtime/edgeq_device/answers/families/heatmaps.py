"""HRNet, SimpleBaseline and ViTPose: the pose of one person, as one heatmap for each keypoint.

    heatmaps [1, K, h, w] (or [1, h, w, K]), where the model's input is 2, 4 or 8 times as large

A keypoint is at the highest value of its map, moved by a quarter of a cell towards the higher neighbour, in both
directions. Its score is the value. These models expect one person cut out of an image: here, the model's whole input is
the person's box. Other keypoints than COCO's 17 have no names. Source: leoxiaobin/deep-high-resolution-net.pytorch,
core/inference.py, get_final_preds.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import numpy as np

from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.head import Head
from edgeq_device.answers.objects import Objects
from edgeq_device.answers.points import COCO_POINTS, are_peaks, enclose_person

_FEWEST_POINTS, _STRIDES = 4, (2, 4, 8)


def candidates(outputs: Outputs, head: Head, size: Tuple[int, int]) -> Objects:
    """Return the person with its keypoints."""
    maps = _read_maps(outputs[head.outputs["heatmaps"]], head.parameters.get("layout") == "NHWC")
    count, height, width = maps.shape
    flat = maps.reshape(count, -1)
    best = flat.argmax(axis=1)
    y, x = np.divmod(best, width)
    place = np.stack([x, y], axis=1).astype(np.float64)
    every = np.arange(count)
    # The highest value at an edge has no neighbour on one side.
    for axis, at, end in ((0, x, width), (1, y, height)):
        inner = (at > 0) & (at < end - 1)
        shift = (0, 1) if axis == 0 else (1, 0)
        low, high = (
            maps[every, np.clip(y + sign * shift[0], 0, height - 1), np.clip(x + sign * shift[1], 0, width - 1)]
            for sign in (-1, 1)
        )
        place[:, axis] += np.where(inner, np.sign(high - low) / 4, 0)
    points = np.column_stack([place * np.divide(size, (width, height)), np.clip(flat[every, best], 0, 1)])
    return enclose_person(points, (0, 0, *size))


def _read_maps(array: Any, last: bool) -> Any:
    if array.ndim != 4 or len(array) != 1 or not array.size:
        raise ValueError("the heatmaps are not [1, K, h, w]")
    maps = np.asarray(array[0], np.float64)
    return maps.transpose(2, 0, 1) if last else maps


def fit(view: View) -> Optional[Fit]:
    """Accept one output of maps that are high at one place only."""
    ((name, array),) = view.outputs.items() if len(view.outputs) == 1 else (("", np.zeros(0)),)
    if array.ndim != 4 or len(array) != 1 or array.dtype.kind != "f":
        return None
    for last in (False, True):
        maps = _read_maps(array, last) if array.size else np.zeros((0, 1, 1))
        if tuple(view.size) not in [(maps.shape[2] * stride, maps.shape[1] * stride) for stride in _STRIDES]:
            continue
        if len(maps) < _FEWEST_POINTS or (view.keypoints is not None and view.keypoints[0] != len(maps)):
            continue
        if view.forced or (are_peaks(maps.reshape(len(maps), -1)) and np.abs(maps).max() < 2):
            return Fit({"heatmaps": name}, {"layout": "NHWC"} if last else {})
    return None


FAMILY = Family(
    "heatmaps",
    "pose",
    "heatmaps [1, K, h, w] of one person",
    fit,
    candidates=candidates,
    thresholds={"confidence": 0.0, "limit": 1},
    keypoint_names=COCO_POINTS,
    preprocess="imagenet-resized",
)
