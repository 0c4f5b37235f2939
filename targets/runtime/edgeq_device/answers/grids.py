"""Lay out the cells and anchors of dense heads, and undo how such heads encode boxes and scores."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

Size = Tuple[int, int]
_STRIDES = (4, 8, 16, 32, 64, 128)
# The levels of YOLO-like models; of small ones, of P6 and of P2 variants.
_LEVELS = ((8, 16, 32), (8, 16, 32, 64), (4, 8, 16, 32), (16, 32))

ANCHORS: Mapping[str, Tuple[float, ...]] = {
    "yolov3-tiny": (10, 14, 23, 27, 37, 58, 81, 82, 135, 169, 344, 319),
    "yolov5": (10, 13, 16, 30, 33, 23, 30, 61, 62, 45, 59, 119, 116, 90, 156, 198, 373, 326),
    "yolov5-p6": (
        *(19, 27, 44, 40, 38, 94, 96, 68, 86, 152, 180, 137),
        *(140, 301, 303, 264, 238, 542, 436, 615, 739, 380, 925, 792),
    ),
    "yolov7": (12, 16, 19, 36, 40, 28, 36, 75, 76, 55, 72, 146, 142, 110, 192, 243, 459, 401),
}
"""Widths and heights of COCO's anchors in pixels of the model's input, three for each level, the finest level first.
YOLOv3 has those of YOLOv5, and YOLOv4 those of YOLOv7.
"""
_USUAL_ANCHORS = {2: "yolov3-tiny", 3: "yolov5", 4: "yolov5-p6"}


def sigmoid(values: Any) -> Any:
    """Return the logistic function of the values, float64. Large values do not overflow."""
    return (1 + np.tanh(np.asarray(values, np.float64) / 2)) / 2


def softmax(values: Any) -> Any:
    """Return the softmax over the last axis, float64."""
    values = np.asarray(values, np.float64)
    # Subtracting the maximum keeps the exponentials finite and does not change the softmax.
    weights = np.exp(values - values.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def lay_cells(size: Size, strides: Sequence[int], up: bool = False, anchors: int = 1) -> Tuple[Any, Any]:
    """Return the column and row of each cell, float64 [N, 2], and the stride of its level in pixels, [N, 1].

    Cells are listed row by row, level by level.

    Args:
        size: (width, height) of the model's input in pixels.
        up: whether to round the sizes of levels up.
        anchors: number of rows for each cell.
    """
    places, steps = [], []
    for stride in strides:
        width, height = (math.ceil(side / stride) if up else side // stride for side in size)
        rows, columns = np.mgrid[:height, :width]
        places.append(np.repeat(np.stack([columns, rows], axis=-1).reshape(-1, 2), anchors, axis=0))
        steps.append(np.full((columns.size * anchors, 1), stride))
    return np.concatenate(places).astype(np.float64), np.concatenate(steps).astype(np.float64)


def count_cells(size: Size, strides: Sequence[int], up: bool = False) -> int:
    """Return the number of cells of all levels."""
    sides = ([math.ceil(side / stride) if up else side // stride for side in size] for stride in strides)
    return sum(width * height for width, height in sides)


def find_strides(count: int, size: Size, up: bool = False) -> Optional[Tuple[int, ...]]:
    """Return the strides of the levels that have `count` cells together, or None."""
    fitting = (strides for strides in _LEVELS if count and count_cells(size, strides, up) == count)
    return next(fitting, None)


def read_levels(arrays: Mapping[str, Any], size: Size) -> Dict[str, Tuple[int, Any]]:
    """Return name → stride and content [channels, h, w] of levels [1, channels, h, w], or all [1, h, w, channels].

    Raises:
        ValueError: an array is not a level of an input of `size`.
    """
    # A level whose sides equal its channels fits both layouts; the others of the model decide.
    for axes in ((0, 1, 2), (2, 0, 1)):
        levels = {}
        for name, array in arrays.items():
            if array.ndim == 4 and len(array) == 1 and array.size:
                level = array[0].transpose(axes)
                stride = size[0] // level.shape[2]
                if stride in _STRIDES and (level.shape[2] * stride, level.shape[1] * stride) == tuple(size):
                    levels[name] = stride, np.asarray(level, np.float64)
        if levels and len(levels) == len(arrays):
            return levels
    raise ValueError(f"the outputs are not levels of an input of {size[0]}x{size[1]}")


def read_anchors(value: Any, levels: int) -> Any:
    """Return the anchors, float64 [levels, 3, 2].

    Args:
        value: name in `ANCHORS`, numbers in any nesting, or text of numbers with blanks between; None for the usual.
    """
    value = _USUAL_ANCHORS.get(levels) if value is None else value
    if isinstance(value, str):
        value = ANCHORS[value] if value in ANCHORS else [float(number) for number in value.split()]
    return np.asarray(value, np.float64).reshape(levels, 3, 2)


def read_anchor_levels(outputs: Mapping[str, Any], size: Size) -> List[Tuple[int, Any]]:
    """Return stride and content [3, columns, h, w] of levels with three anchors a cell, the finest level first.

    Args:
        outputs: arrays [1, 3 * columns, h, w] (or with their channels at the end) or [1, 3, h, w, columns].

    Raises:
        ValueError: the arrays are not such levels, of different strides and at least 6 columns.
    """
    flat = {}
    for name, array in outputs.items():
        if array.ndim == 5 and array.shape[1] == 3:
            array = array.transpose(0, 1, 4, 2, 3).reshape(len(array), -1, *array.shape[2:4])
        flat[name] = array
    levels = sorted(read_levels(flat, size).values(), key=lambda pair: pair[0])
    channels = {len(level) for _, level in levels}
    if len({stride for stride, _ in levels}) != len(levels) or len(channels) != 1 or not 2 <= len(levels) <= 4:
        raise ValueError("the levels do not belong together")
    if min(channels) % 3 or min(channels) < 18:
        raise ValueError(f"{min(channels)} channels are not 3 * (5 + classes)")
    return [(stride, level.reshape(3, -1, *level.shape[1:])) for stride, level in levels]


def list_anchor_rows(levels: Sequence[Tuple[int, Any]], anchors: Any, size: Size) -> Tuple[Any, Any, Any, Any]:
    """Return the rows of such levels: values [N, columns], cells [N, 2], strides [N, 1], anchors [N, 2]."""
    values, cells, steps, extents = [], [], [], []
    for (stride, level), boxes in zip(levels, read_anchors(anchors, len(levels))):
        values.append(level.transpose(0, 2, 3, 1).reshape(-1, level.shape[1]))
        places, step = lay_cells(size, (stride,))
        cells.append(np.tile(places, (3, 1)))
        steps.append(np.tile(step, (3, 1)))
        extents.append(np.repeat(boxes, len(places), axis=0))
    rows, places, strides, sizes = map(np.concatenate, (values, cells, steps, extents))
    return rows, places, strides, sizes


def find_anchor_levels(outputs: Mapping[str, Any], size: Size, classes: Optional[int]) -> Optional[List[Any]]:
    """Return the contents [3, columns, h, w] of outputs that are all levels with three anchors, or None."""
    try:
        levels = [level for _, level in read_anchor_levels(outputs, size)]
    except ValueError:
        return None
    return levels if classes in (None, levels[0].shape[1] - 5) else None


def expect_distances(logits: Any, bins: int) -> Any:
    """Return the expected distances [N, 4] of distributions, whose logits are [N, 4 * bins], in strides.

    Source: X. Li et al., "Generalized Focal Loss", 2020: distance = sum over i of i * softmax(logits)_i.
    """
    return softmax(np.asarray(logits).reshape(len(logits), 4, bins)) @ np.arange(bins, dtype=np.float64)


def add_distances(centres: Any, distances: Any) -> Any:
    """Return the corners [N, 4] at the distances [N, 4] (left, top, right, bottom) from the centres [N, 2]."""
    return np.concatenate([centres - distances[:, :2], centres + distances[:, 2:]], axis=1)


def exp(values: Any) -> Any:
    """Return the exponential. An infinite box is dropped later."""
    with np.errstate(over="ignore"):
        return np.exp(np.asarray(values, np.float64))
