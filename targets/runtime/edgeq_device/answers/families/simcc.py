"""SimCC (RTMPose): the pose of one person, as one row of values over x and one over y for each keypoint.

    x [1, K, s W], y [1, K, s H], where the model's input is W x H, and s is often 2

A keypoint is at the highest value of its rows, divided by s, in pixels of the model's input. Its score is the smaller
of both values. These models expect one person cut out of an image: here, the model's whole input is the person's box.
Other keypoints than COCO's 17 have no names. Source: open-mmlab/mmpose, codecs/utils/post_processing.py.
"""

from __future__ import annotations

from typing import Optional, Tuple

import numpy as np

from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.head import Head
from edgeq_device.answers.objects import Objects
from edgeq_device.answers.points import COCO_POINTS, are_peaks, enclose_person

_SPLITS = (1, 1.5, 2, 3, 4)


def candidates(outputs: Outputs, head: Head, size: Tuple[int, int]) -> Objects:
    """Return the person with its keypoints."""
    x, y = (np.asarray(outputs[head.outputs[role]], np.float64) for role in ("x", "y"))
    if x.ndim != 3 or y.ndim != 3 or len(x) != 1 or x.shape[:2] != y.shape[:2] or not x.size or not y.size:
        raise ValueError("the rows are not [1, K, s W] and [1, K, s H]")
    place = [rows[0].argmax(axis=1) * side / rows.shape[2] for rows, side in ((x, size[0]), (y, size[1]))]
    score = np.clip(np.minimum(x[0].max(axis=1), y[0].max(axis=1)), 0, 1)
    return enclose_person(np.column_stack([*place, score]), (0, 0, *size))


def fit(view: View) -> Optional[Fit]:
    """Accept two outputs of K rows, as long as the input's width and height times the same number, with one peak in
    each row. For a square input, the names decide, then their order.
    """
    names = sorted(view.outputs, key=lambda name: "y" in name.lower())
    if len(names) != 2 or not all(view.size):
        return None
    for pair in (names, names[::-1]):
        x, y = (view.outputs[name] for name in pair)
        if x.ndim != 3 or y.ndim != 3 or len(x) != 1 or x.shape[:2] != y.shape[:2] or x.dtype.kind != "f":
            return None
        split = x.shape[2] / view.size[0]
        if (
            split not in _SPLITS
            or y.shape[2] != split * view.size[1]
            or (view.keypoints or x.shape[1:])[0] != x.shape[1]
        ):
            continue
        if view.forced or (x.shape[1] > 1 and are_peaks(x[0]) and are_peaks(y[0])):
            return Fit({"x": pair[0], "y": pair[1]})
    return None


FAMILY = Family(
    "simcc",
    "pose",
    "x [1, K, s W] and y [1, K, s H] of one person",
    fit,
    candidates=candidates,
    thresholds={"confidence": 0.0, "limit": 1},
    keypoint_names=COCO_POINTS,
    preprocess="imagenet-resized",
)
