"""M-LSD: straight line segments, as objects with two keypoints, start and end.

    centres [1, n, 2]: row and column in the map, integers; scores [1, n];
    displacements [1, h, w, 4]: x, y of the start and x, y of the end, relative to the centre, in cells of the map

Positions in the map times the ratio of the input's size to the map's are pixels of the model's input. A segment is
dropped if it is shorter than the threshold "length" in cells. Source: navervision/mlsd, utils.py, pred_lines.
"""

from __future__ import annotations

from typing import Optional, Tuple

import numpy as np

from edgeq_device.answers.checks import are_scores
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.head import Head
from edgeq_device.answers.objects import Objects

_LENGTH = 20.0


def candidates(outputs: Outputs, head: Head, size: Tuple[int, int]) -> Objects:
    """Return the segments. A segment's box encloses it."""
    displacements = np.asarray(outputs[head.outputs["displacements"]], np.float64)[0]
    y, x = np.asarray(outputs[head.outputs["centres"]], np.int64).reshape(-1, 2).T
    scores = np.asarray(outputs[head.outputs["scores"]], np.float64).reshape(-1)
    height, width = displacements.shape[:2]
    if len(x) and (min(x.min(), y.min()) < 0 or x.max() >= width or y.max() >= height):
        raise ValueError("a centre lies outside the map")
    offsets = displacements[y, x].reshape(-1, 2, 2)
    ends = (np.stack([x, y], axis=-1)[:, None] + offsets) * np.divide(size, (width, height))
    boxes = np.concatenate([ends.min(axis=1), ends.max(axis=1)], axis=1)
    points = np.concatenate([ends, np.broadcast_to(scores[:, None, None], (len(ends), 2, 1))], axis=-1)
    length = np.linalg.norm(offsets[:, 0] - offsets[:, 1], axis=1)
    segments = Objects(boxes, scores, np.zeros(len(scores), np.int64), keypoints=points)
    return segments.take(length > head.thresholds.get("length", _LENGTH))


def fit(view: View) -> Optional[Fit]:
    """Accept integers [1, n, 2] within the map, scores [1, n] and displacements [1, h, w, 4]."""
    roles = {}
    for name, array in view.outputs.items():
        if array.ndim == 3 and array.shape[2] == 2 and array.dtype.kind in "iu":
            roles["centres"] = name
        elif array.ndim == 2 and array.dtype.kind == "f":
            roles["scores"] = name
        elif array.ndim == 4 and len(array) == 1 and array.shape[3] == 4 and array.dtype.kind == "f":
            roles["displacements"] = name
    if len(view.outputs) != 3 or len(roles) != 3:
        return None
    centres, scores, field = (view.outputs[roles[role]] for role in ("centres", "scores", "displacements"))
    inside = centres.size and centres.min() >= 0 and (centres < field.shape[1:3]).all()
    return Fit(roles) if inside and centres.shape[:2] == scores.shape and are_scores(scores) else None


FAMILY = Family(
    "mlsd",
    "pose",
    "centres [1, n, 2], scores [1, n] and displacements [1, h, w, 4]",
    fit,
    candidates=candidates,
    thresholds={"confidence": 0.1, "length": _LENGTH, "limit": 200},
    keypoint_names=("start", "end"),
)
