"""Hold decoded images, and map the pixels of a stored image to the pixels of the model's input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Picture:
    """Hold a decoded image. `pixels` is uint8 [H, W, 3], red first."""

    pixels: Array


@dataclass(frozen=True)
class ImageGeometry:
    """Map the pixels of the original image to the pixels of the model's input.

    For a point, x_input = x_original * scale[0] + offset[0] and y_input = y_original * scale[1] + offset[1].

    Attributes:
        original: (width, height) of the image as stored.
        scale: (horizontal, vertical), as the resize rule computes it in float64 (before sizes are rounded to pixels).
        offset: (horizontal, vertical) in input pixels: positive if padding was added, negative if a crop cut pixels
            off.
    """

    original: tuple[int, int]
    scale: tuple[float, float] = (1.0, 1.0)
    offset: tuple[float, float] = (0.0, 0.0)

    def scaled(self, x: float, y: float) -> ImageGeometry:
        """Return the geometry after the image was scaled by `x` and `y`."""
        return ImageGeometry(
            self.original,
            (self.scale[0] * x, self.scale[1] * y),
            (self.offset[0] * x, self.offset[1] * y),
        )

    def moved(self, x: float, y: float) -> ImageGeometry:
        """Return the geometry after the image was moved by `x` and `y` pixels of the input."""
        # A move happens in input pixels, after all scaling, so it must not be scaled itself.
        return ImageGeometry(self.original, self.scale, (self.offset[0] + x, self.offset[1] + y))

    def context(self) -> dict[str, Any]:
        """Return the keys and values that the geometry adds to a sample's context."""
        return {"original_size": self.original, "scale": self.scale, "offset": self.offset}


def to_original(boxes: Array, context: Mapping[str, Any]) -> Array:
    """Map boxes from input pixels back to pixels of the original image.

    Args:
        boxes: [..., 4] as x1, y1, x2, y2, in floating point.
        context: a sample's context with "scale" and "offset" (see `ImageGeometry`).
    """
    # The pair (x, y) is needed twice, once for each corner of a box.
    scale = np.asarray(context["scale"] * 2, boxes.dtype)
    offset = np.asarray(context["offset"] * 2, boxes.dtype)
    return np.asarray((boxes - offset) / scale)
