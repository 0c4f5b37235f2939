"""What travels through the steps of a preprocessing: one item, the meaning of its axes, where its pixels came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.signature import TensorSpec

Array = NDArray[Any]


@dataclass(frozen=True)
class Picture:
    """A decoded image. `pixels`: uint8 [H, W, 3], red first."""

    pixels: Array


@dataclass(frozen=True)
class Geometry:
    """How the pixels of the original image map to those of the model's input.

    For a point, x_input = x_original * scale[0] + offset[0], and the same for y with index 1.

    Attributes:
        original: (width, height) of the image as stored.
        scale: (horizontal, vertical), as the resize rule computes it in float64 (before sizes are rounded to pixels).
        offset: (horizontal, vertical) in input pixels: positive where padding was added, negative where a crop cut.
    """

    original: tuple[int, int]
    scale: tuple[float, float] = (1.0, 1.0)
    offset: tuple[float, float] = (0.0, 0.0)

    def scaled(self, x: float, y: float) -> Geometry:
        """The geometry after the image was scaled by `x` and `y`."""
        return Geometry(
            self.original,
            (self.scale[0] * x, self.scale[1] * y),
            (self.offset[0] * x, self.offset[1] * y),
        )

    def moved(self, x: float, y: float) -> Geometry:
        """The geometry after the image was moved by `x` and `y` pixels of the input."""
        return Geometry(self.original, self.scale, (self.offset[0] + x, self.offset[1] + y))

    def context(self) -> dict[str, Any]:
        """The keys that a sample's context carries."""
        return {"original_size": self.original, "scale": self.scale, "offset": self.offset}


def to_original(boxes: Array, context: Mapping[str, Any]) -> Array:
    """Map boxes from input pixels back to pixels of the original image.

    Args:
        boxes: [..., 4] as x1, y1, x2, y2 (floating).
        context: a sample's context with "scale" and "offset" (see `Geometry`).
    """
    scale = np.asarray(context["scale"] * 2, boxes.dtype)
    offset = np.asarray(context["offset"] * 2, boxes.dtype)
    return np.asarray((boxes - offset) / scale)


@dataclass(frozen=True)
class State:
    """One item on its way to the model.

    Attributes:
        array: the values.
        axes: one letter an axis (N batch, C channel, H row, W column, others as the source declares), or "" where the
            axes have no declared meaning.
        channels: the order of the channels, "RGB" or "BGR", or "" for anything else.
        geometry: for images.
    """

    array: Array
    axes: str
    channels: str = ""
    geometry: Geometry | None = None


def model_axes(spec: TensorSpec | None, axes: str) -> str:
    """The axes of a model input, read from its shape: channels are where the size is 1 or 3, else first.

    Args:
        spec: the input.
        axes: the item's axes, without the batch; they decide where the shape alone says nothing.
    """
    if spec is None or spec.shape is None:
        return ""
    shape = spec.shape
    if len(shape) == 4:
        return "NHWC" if shape[3] in (1, 3) and shape[1] not in (1, 3) else "NCHW"
    if len(shape) == 3 and "C" in axes:
        return "HWC" if shape[2] in (1, 3) and shape[0] not in (1, 3) else "CHW"
    if len(shape) == len(axes) + 1:
        return "N" + axes
    return axes if len(shape) == len(axes) else ""


def assumed_axes(shape: tuple[int, ...], spec: TensorSpec | None) -> str:
    """The axes of a raw array without declared ones: those of the model where the shape is the model's own (with or
    without its batch axis); else HWC for three axes, HW for two, and no meaning for any other number."""
    guess = {2: "HW", 3: "HWC"}.get(len(shape), "")
    if spec is None or spec.shape is None:
        return guess
    own = model_axes(spec, "HWC" if len(spec.shape) >= 3 else "")
    for wanted, axes in ((spec.shape, own.replace("N", "")), (spec.shape[1:], own[1:] if own[:1] == "N" else "")):
        same = len(wanted) == len(shape) and all(
            not isinstance(want, int) or want == have for want, have in zip(wanted, shape, strict=True)
        )
        if same and any(isinstance(want, int) for want in wanted):
            return axes
    return guess


def model_size(spec: TensorSpec | None) -> tuple[int, int] | None:
    """(width, height) that a model's image input fixes, or None."""
    axes = model_axes(spec, "HWC")
    if spec is None or spec.shape is None or "H" not in axes or len(axes) != len(spec.shape):
        return None
    height, width = spec.shape[axes.index("H")], spec.shape[axes.index("W")]
    if isinstance(height, int) and isinstance(width, int):
        return width, height
    return None
