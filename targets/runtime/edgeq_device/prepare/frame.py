"""Map points between an image as stored and the model's input, exactly as the image was resized, padded and cropped."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Tuple

import numpy as np


@dataclass(frozen=True)
class Frame:
    """Hold the geometry of one prepared image.

    For a point, x_input = x_original * scale[0] + offset[0] and y_input = y_original * scale[1] + offset[1].

    Attributes:
        original: (width, height) of the image as stored, in pixels.
        size: (width, height) of the prepared image, in pixels.
        scale: (horizontal, vertical). It is the ratio of whole pixels, after the new size was rounded. With the ratio
            before rounding, points would be up to half a pixel off.
        offset: (horizontal, vertical) in pixels of the prepared image: positive where padding was added, negative where
            a crop cut pixels off.
    """

    original: Tuple[int, int]
    size: Tuple[int, int]
    scale: Tuple[float, float] = (1.0, 1.0)
    offset: Tuple[float, float] = (0.0, 0.0)

    @classmethod
    def of(cls, width: int, height: int) -> Frame:
        """Return the frame of an image that is not prepared yet."""
        return cls((width, height), (width, height))

    def resized(self, width: int, height: int) -> Frame:
        """Return the frame after the prepared image was resized to `width` x `height`."""
        x, y = width / self.size[0], height / self.size[1]
        return replace(
            self,
            size=(width, height),
            scale=(self.scale[0] * x, self.scale[1] * y),
            offset=(self.offset[0] * x, self.offset[1] * y),
        )

    def placed(self, x: int, y: int, size: Tuple[int, int]) -> Frame:
        """Return the frame after the prepared image was placed at (x, y) of an image of `size`. Negative places crop
        it.
        """
        return replace(self, size=size, offset=(self.offset[0] + x, self.offset[1] + y))

    def to_original(self, points: Any) -> Any:
        """Map points from the model's input to the stored image. `points` is [..., 2 n]: x and y in turns, in pixels.
        Boxes (x1, y1, x2, y2) are two points. Points are not clipped to the image.
        """
        return ((_to_pairs(points) - np.asarray(self.offset)) / np.asarray(self.scale)).reshape(np.shape(points))

    def to_input(self, points: Any) -> Any:
        """Map points from the stored image to the model's input: the inverse of `to_original`."""
        return (_to_pairs(points) * np.asarray(self.scale) + np.asarray(self.offset)).reshape(np.shape(points))


def _to_pairs(points: Any) -> Any:
    array = np.asarray(points, np.float64)
    # -1 instead of the number of points would fail for an empty array.
    return array.reshape(*array.shape[:-1], array.shape[-1] // 2, 2)
