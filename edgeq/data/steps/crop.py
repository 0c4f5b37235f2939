"""Cut the centre out of an image."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from edgeq.data.records import Geometry, State
from edgeq.data.step import ROUNDING, SIZE, Size, Step, describe_size, image_size, rounded, target_size
from edgeq.errors import DataError
from edgeq.signature import TensorSpec


@dataclass(frozen=True)
class Crop(Step):
    """Cut the centre; `rounding` turns half of an odd margin into pixels."""

    name: ClassVar[str] = "crop"
    help: ClassVar[str] = "SIZE[:floor|round|ceil]; the centre"
    size: Size = field(metadata=SIZE)
    rounding: str = field(default="floor", metadata=ROUNDING)

    def apply(self, state: State, spec: TensorSpec | None) -> State:
        """The centre of the image; unchanged where the model does not fix the size that is wanted.

        Raises:
            DataError: no image, or one smaller than the crop.
        """
        size = target_size(self.size, spec)
        if size is None:
            return state
        height, width = image_size(state)
        left, top = rounded((width - size[0]) / 2, self.rounding), rounded((height - size[1]) / 2, self.rounding)
        if left < 0 or top < 0:
            raise DataError(f"an image of {width}x{height} is smaller than the crop of {size[0]}x{size[1]}", "Resize")
        row, column = state.axes.index("H"), state.axes.index("W")
        cut = [slice(None)] * state.array.ndim
        cut[row], cut[column] = slice(top, top + size[1]), slice(left, left + size[0])
        geometry = state.geometry or Geometry((width, height))
        return replace(state, array=state.array[tuple(cut)], geometry=geometry.moved(-left, -top))

    def describe(self) -> str:
        """The size, and how an odd margin is divided."""
        target = describe_size(self.size, "the model's size")
        return f"the centre {target} is kept; left = {self.rounding}((w - W) / 2), top = {self.rounding}((h - H) / 2)"


STEP = Crop
