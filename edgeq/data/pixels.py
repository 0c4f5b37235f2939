"""What the steps on pixels share. They take uint8 and give uint8, through Pillow.

Pillow's default filter has changed between versions, so the filter is always named.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from edgeq.data.state import Array, State, model_size
from edgeq.data.step import UnfitError, field_kind, integer, one_of
from edgeq.errors import DataError
from edgeq.signature import TensorSpec

FILTERS = {
    "nearest": Image.Resampling.NEAREST,
    "box": Image.Resampling.BOX,
    "bilinear": Image.Resampling.BILINEAR,
    "hamming": Image.Resampling.HAMMING,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
FEWER = "Give fewer pixels"
ROUNDINGS = ("floor", "round", "ceil")

Size = tuple[int, int] | str
"""(width, height), or "model" for the size that the model's input fixes."""


def _read_size(value: Any) -> Size:
    if value == "model":
        return "model"
    pair = (value, value) if isinstance(value, int) else value
    if (
        not isinstance(pair, list | tuple)
        or len(pair) != 2
        or not all(isinstance(n, int) and not isinstance(n, bool) and 1 <= n <= 65536 for n in pair)
    ):
        raise UnfitError(value, "Give pixels, as 256, [width, height], or 'model'")
    return int(pair[0]), int(pair[1])


def _size_part(text: str) -> Any:
    if match := re.fullmatch(r"(\d{1,9})x(\d{1,9})", text):
        return [int(match[1]), int(match[2])]
    value = integer(text)
    return value if isinstance(value, int) or text == "model" else None


SIZE = field_kind(_read_size, _size_part)
FILTER = one_of(*FILTERS)
ROUNDING = one_of(*ROUNDINGS)


def rounded(value: float, rule: str) -> int:
    """`value` in pixels: floor, ceil, or round half to even."""
    if rule == "round":
        return round(value)
    return math.floor(value) if rule == "floor" else math.ceil(value)


def target_size(size: Size, spec: TensorSpec | None) -> tuple[int, int] | None:
    """(width, height) in pixels; None where the model's size is wanted and the model does not fix one."""
    return model_size(spec) if isinstance(size, str) else size


def describe_size(size: Size, model: str = "the model's width and height") -> str:
    """ "WIDTH x HEIGHT", or `model`."""
    return model if isinstance(size, str) else f"{size[0]} x {size[1]}"


def image_size(state: State) -> tuple[int, int]:
    """(height, width) of an image in any axis order.

    Raises:
        DataError: the axes are not known to be those of an image.
    """
    if "H" not in state.axes or "W" not in state.axes or len(state.axes) != state.array.ndim:
        raise DataError(
            f"shape {list(state.array.shape)} is not known to be an image", "Declare source.layout = 'HWC' (or 'CHW')"
        )
    return int(state.array.shape[state.axes.index("H")]), int(state.array.shape[state.axes.index("W")])


def to_hwc(array: Array, axes: str) -> Array:
    """From `axes` (H, W, perhaps C, and others of size 1, as a batch axis) to HWC.

    Raises:
        DataError: another axis has another size.
    """
    others = tuple(i for i, axis in enumerate(axes) if axis not in "HWC")
    if any(array.shape[i] != 1 for i in others):
        raise DataError(f"shape {list(array.shape)}, axes {axes}, is not one image", "Put steps on pixels first")
    kept = "".join(axis for axis in axes if axis in "HWC")
    array = array.squeeze(others)
    if "C" not in kept:
        return array.transpose([kept.index(a) for a in "HW"])[:, :, None]
    return array.transpose([kept.index(a) for a in "HWC"])


def from_hwc(array: Array, axes: str) -> Array:
    """The inverse of `to_hwc`."""
    kept = "".join(axis for axis in axes if axis in "HWC")
    if "C" not in kept:
        array = array[:, :, 0].transpose(["HW".index(a) for a in kept])
    else:
        array = (array if array.ndim == 3 else array[:, :, None]).transpose(["HWC".index(a) for a in kept])
    return np.expand_dims(array, tuple(i for i, axis in enumerate(axes) if axis not in "HWC"))


def through_pillow(state: State, what: str, work: Callable[[Image.Image], Image.Image]) -> Array:
    """The item's array after `work` on it as a Pillow image; `what` names the step in messages.

    Raises:
        DataError: the item is not uint8 of 1 or 3 channels.
    """
    array = to_hwc(state.array, state.axes)
    if array.dtype != np.uint8 or array.shape[2] not in (1, 3):
        raise DataError(
            f"{what} takes uint8 images of 1 or 3 channels, not {array.dtype} {list(array.shape)} (rows first)",
            "Put the step before any arithmetic, or prepare the data at the model's size",
        )
    image = Image.fromarray(np.ascontiguousarray(array[:, :, 0] if array.shape[2] == 1 else array))
    result = np.asarray(work(image))
    return from_hwc(result if result.ndim == 3 else result[:, :, None], state.axes)
