"""YOLOv8, 9, 11 and 12 cut before their decoding, as Rockchip's model zoo and other forks export them.

    for each stride: boxes [1, 4 * bins, h, w], scores [1, C, h, w] (and the sum of scores [1, 1, h, w])
    or for each stride: [1, 4 * bins + C, h, w]

The boxes are the logits of distributions over distances of 0 to bins - 1 strides from the centre of a cell to the left,
top, right and bottom. Scores are before or after their sigmoid. Channels may be the last axis.
Source: Ultralytics, nn/modules/head.py; airockchip/rknn_model_zoo, examples/yolov8.
"""

from __future__ import annotations

from typing import Any, List, Optional, Tuple

import numpy as np

from edgeq_device.answers.checks import are_scores
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.grids import add_distances, expect_distances, lay_cells, read_levels, sigmoid
from edgeq_device.answers.head import Head
from edgeq_device.answers.objects import Objects, pick_best_class

_BINS = 16


def candidates(outputs: Outputs, head: Head, size: Tuple[int, int]) -> Objects:
    """Return the best class of each cell."""
    bins = int(head.parameters.get("bins", _BINS))
    boxes, scores = [], []
    named = {name: outputs[name] for name in head.outputs.values()}
    for stride, distances, logits, _ in _read_levels(named, bins, size):
        cells, _step = lay_cells(size, (stride,))
        reach = expect_distances(distances.reshape(4 * bins, -1).T, bins)
        boxes.append(add_distances(cells + 0.5, reach) * stride)
        scores.append(logits.reshape(len(logits), -1).T)
    values = np.concatenate(scores)
    return pick_best_class(np.concatenate(boxes), sigmoid(values) if head.parameters["scores"] == "logits" else values)


def _read_levels(outputs: Outputs, bins: int, size: Tuple[int, int]) -> List[Tuple[int, Any, Any, List[str]]]:
    """Return stride, distributions [4 * bins, h, w], scores [C, h, w] and names of each level, by stride."""
    groups: Any = {}
    for name, (stride, level) in read_levels(outputs, size).items():
        groups.setdefault(stride, []).append((name, level))
    levels = []
    for stride, parts in sorted(groups.items()):
        names = [name for name, _ in parts]
        arrays = [level for _, level in parts]
        if len(arrays) == 1:
            arrays = [arrays[0][: 4 * bins], arrays[0][4 * bins :]]
        box = next((place for place, array in enumerate(arrays) if len(array) == 4 * bins), None)
        if box is None:
            raise ValueError(f"no output of stride {stride} has {4 * bins} channels")
        distances = arrays.pop(box)
        # The sum of the scores, which lets programs skip cells early, comes last.
        if not 1 <= len(arrays) <= 2 or not len(arrays[0]) or (len(arrays) == 2 and len(arrays[1]) != 1):
            raise ValueError(f"stride {stride} has no scores")
        levels.append((stride, distances, arrays[0], names))
    if not levels or len({len(scores) for _, _, scores, _ in levels}) != 1:
        raise ValueError("the levels have different numbers of classes")
    return levels


def fit(view: View) -> Optional[Fit]:
    """Accept levels of distributions and scores. Few cells see an object, so the median of each class is low."""
    bins = int(view.hints.get("bins", _BINS))
    try:
        levels = _read_levels(view.outputs, bins, view.size)
    except ValueError:
        return None
    scores = [level for _, _, level, _ in levels]
    if len(levels) < 2 or view.classes not in (None, len(scores[0])):
        return None
    probabilities = all(map(are_scores, scores))
    middle = 0.5 if probabilities else 0.0
    low = all(np.median(level.reshape(len(level), -1), axis=1).max() < middle for level in scores)
    if not view.forced and not low:
        return None
    names = [name for _, _, _, parts in levels for name in parts]
    roles = {f"level{number}": name for number, name in enumerate(names)}
    return Fit(roles, {"bins": bins, "scores": "probabilities" if probabilities else "logits"})


FAMILY = Family(
    "yolov8-raw",
    "detect",
    "for each stride [1, 4 * bins, h, w] and [1, classes, h, w]",
    fit,
    candidates=candidates,
    thresholds={"confidence": 0.25, "iou": 0.7, "limit": 300},
    preprocess="yolo",
)
