"""Read outputs that are maps, in either order of the axes, and bring class maps to the stored image."""

from __future__ import annotations

from typing import Any, Dict, Mapping, Tuple

import numpy as np

from edgeq_device.answers.grids import sigmoid
from edgeq_device.answers.maps import map_to_original
from edgeq_device.prepare.frame import Frame

_SMALLEST_SIDE = 4


def find_maps(outputs: Mapping[str, Any], kinds: str = "f") -> Dict[str, Any]:
    """Return the outputs [1, C, h, w], [1, h, w, C] or [1, h, w] by name, whose dtypes have one of the numpy `kinds`
    and whose sides have at least 4 pixels. Outputs without elements are left out.
    """
    return {
        name: array
        for name, array in outputs.items()
        if array.ndim in (3, 4)
        and len(array) == 1
        and array.dtype.kind in kinds
        # A map of no channels has two large sides, too.
        and array.size
        and sorted(array.shape[1:])[-2] >= _SMALLEST_SIDE
    }


def find_single_maps(outputs: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the float outputs [1, h, w], [1, 1, h, w] and [1, h, w, 1] by name."""
    return {
        name: array
        for name, array in find_maps(outputs).items()
        if array.ndim == 3 or array.shape[1] == 1 or array.shape[3] == 1
    }


def read_single(array: Any) -> Any:
    """Return a map of one channel, in one of the shapes of `find_single_maps`, as [h, w]."""
    shape = np.shape(array)
    sides = shape[1:] if len(shape) == 3 else shape[2:] if len(shape) == 4 and shape[1] == 1 else shape[1:3]
    if len(shape) not in (3, 4) or sides[0] * sides[1] != np.size(array):
        raise ValueError("a map has several channels")
    return np.reshape(array, sides)


def order_axes(array: Any, layout: Any = "NCHW") -> Any:
    """Return a map [1, C, h, w], [1, h, w, C] or [1, h, w] as [C, h, w]."""
    if array.ndim not in (3, 4) or len(array) != 1:
        raise ValueError("a map is not [1, C, h, w]")
    if array.ndim == 3:
        return array
    return array[0].transpose(2, 0, 1) if layout == "NHWC" else array[0]


def find_layout(array: Any, channels: Any = None) -> Dict[str, str]:
    """Return {"layout": "NHWC"} if the last axis holds the channels, else {}. Without their number, the last axis
    holds them if it is the smallest.
    """
    if array.ndim != 4:
        return {}
    first, *_, end = array.shape[1:]
    last = end == channels if channels in (first, end) and first != end else end < min(array.shape[1:3])
    return {"layout": "NHWC"} if last else {}


def find_frame(frame: Frame, values: Any) -> Frame:
    """Return the frame, or that of an unprepared image of the size of `values` [..., h, w] if the input is no image."""
    return frame if min(frame.size) > 0 else Frame.of(values.shape[-1], values.shape[-2])


def to_stored(values: Any, frame: Frame) -> Any:
    """Return values [h, w] at any resolution of the model's input, as float64 in the size of the stored image."""
    return map_to_original(np.asarray(values, np.float64), find_frame(frame, values))


def pick_class(logits: Any, frame: Frame) -> Any:
    """Return the class with the highest of the `logits` [C, h, w] for each pixel of the stored image, int64 [H, W].

    The logits are resampled bilinearly before classes are compared, because class numbers have no mean. Of equal
    logits, the smaller class number wins.
    """
    frame = find_frame(frame, logits)
    width, height = frame.original
    best = np.full((height, width), -np.inf)
    classes = np.zeros((height, width), np.int64)
    # One class at a time, because 150 maps of a large photograph do not fit into memory.
    for number in _find_rivals(logits):
        values = map_to_original(np.asarray(logits[number], np.float64), frame)
        better = values > best
        best[better] = values[better]
        classes[better] = number
    return classes


def _find_rivals(logits: Any) -> Any:
    """Return the classes that can win at some place between the pixels.

    A bilinear value lies between the values of the four pixels around it. So a class loses in a cell if its largest
    corner is below another class's smallest corner.
    """
    padded = np.pad(logits, ((0, 0), (0, 1), (0, 1)), mode="edge")
    corners = padded[:, :-1, :-1], padded[:, :-1, 1:], padded[:, 1:, :-1], padded[:, 1:, 1:]
    highest, lowest = corners[0], corners[0]
    for corner in corners[1:]:
        highest, lowest = np.maximum(highest, corner), np.minimum(lowest, corner)
    return np.nonzero((highest >= lowest.max(axis=0)).any(axis=(1, 2)))[0]


def pick_nearest(values: Any, frame: Frame) -> Any:
    """Return `values` [h, w], such as class numbers, in the size of the stored image: each pixel has the value at its
    centre.
    """
    frame = find_frame(frame, values)
    places = []
    for axis, count in enumerate(values.shape[::-1]):
        centres = (np.arange(frame.original[axis]) + 0.5) * frame.scale[axis] + frame.offset[axis]
        places.append(np.clip(np.floor(centres * count / frame.size[axis]), 0, count - 1).astype(np.int64))
    return values[places[1][:, None], places[0]]


def score_scale(values: Any) -> str:
    """Return "probabilities" if all values are from 0 to 1, else "logits"."""
    return "probabilities" if values.min() >= -1e-3 and values.max() <= 1 + 1e-3 else "logits"


def to_probabilities(values: Any, scale: Any) -> Any:
    """Return values whose scale is "logits" after a sigmoid, others as they are, in float64."""
    return sigmoid(values) if scale == "logits" else np.asarray(values, np.float64)


def cut_padding(frame: Frame, values: Any) -> Tuple[slice, slice]:
    """Return the rows and columns of `values` [..., h, w] that show the stored image, without padding."""
    frame = find_frame(frame, values)
    cuts = []
    for axis, count in enumerate((values.shape[-1], values.shape[-2])):
        share = count / frame.size[axis]
        begin = max(0, round(frame.offset[axis] * share))
        end = round((frame.offset[axis] + frame.original[axis] * frame.scale[axis]) * share)
        cuts.append(slice(begin, min(count, end)))
    return cuts[1], cuts[0]
