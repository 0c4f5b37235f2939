"""Resize an image by a rule."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

from edgeq.data.records import Geometry, State, check_size
from edgeq.data.step import (
    FEWER,
    FILTER,
    FILTERS,
    ROUNDING,
    SIZE,
    Size,
    Step,
    describe_size,
    image_size,
    one_of,
    rounded,
    target_size,
    through_pillow,
)
from edgeq.errors import DataError
from edgeq.signature import TensorSpec

RULES = ("exact", "short", "long", "fit")


@dataclass(frozen=True)
class Resize(Step):
    """Resize by a rule; `rounding` turns the computed side into pixels."""

    name: ClassVar[str] = "resize"
    help: ClassVar[str] = "SIZE[:exact|short|long|fit][:FILTER][:floor|round|ceil]; SIZE 256, 320x240 or model"
    size: Size = field(metadata=SIZE)
    rule: str = field(default="exact", metadata=one_of(*RULES))
    filter: str = field(default="bilinear", metadata=FILTER)
    rounding: str = field(default="floor", metadata=ROUNDING)

    def __post_init__(self) -> None:
        if self.rule in ("short", "long") and isinstance(self.size, str):
            raise DataError(f"resize by the {self.rule} side needs a number of pixels", "Give size = 256 or the like")

    def apply(self, state: State, spec: TensorSpec | None) -> State:
        """The image in its new size; unchanged where it has that size, or where the model does not fix the wanted one.

        Raises:
            DataError: no uint8 image of 1 or 3 channels, or a size below one pixel.
        """
        size = target_size(self.size, spec)
        if size is None:
            return state
        height, width = image_size(state)
        x, y, new = self.plan(width, height, size)
        if new == (width, height):
            return state
        if min(new) < 1:
            raise DataError(f"an image of {width}x{height} would shrink to {new[0]}x{new[1]}", "Leave it out")
        check_size(math.prod(new) * state.array.size // max(1, width * height), f"resized to {new[0]}x{new[1]}", FEWER)
        array = through_pillow(state, "resize", lambda image: image.resize(new, FILTERS[self.filter]))
        geometry = state.geometry or Geometry((width, height))
        return replace(state, array=array, geometry=geometry.scaled(x, y))

    def plan(self, width: int, height: int, size: tuple[int, int]) -> tuple[float, float, tuple[int, int]]:
        """The scales and the new (width, height) of an image of `width` x `height`."""
        if self.rule == "exact":
            return size[0] / width, size[1] / height, size
        if self.rule == "fit":
            scale = min(size[0] / width, size[1] / height)
            return scale, scale, (rounded(width * scale, self.rounding), rounded(height * scale, self.rounding))
        known = min(width, height) if self.rule == "short" else max(width, height)
        scale = size[0] / known
        # Integer product first, one division: the known side comes out exact.
        sides = tuple(rounded(size[0] * side / known, self.rounding) for side in (width, height))
        return scale, scale, (sides[0], sides[1])

    def describe(self) -> str:
        """How the new size is computed, and the filter."""
        target = describe_size(self.size)
        side = self.size if isinstance(self.size, str) else self.size[0]
        how = {
            "exact": f"resized to {target} (width x height), aspect not kept",
            "fit": f"r = min(W/w, H/h) for {target}; resized to {self.rounding}(w*r) x {self.rounding}(h*r)",
            "short": f"the shorter side becomes {side}, the other {self.rounding}({side} * longer / shorter)",
            "long": f"the longer side becomes {side}, the other {self.rounding}({side} * shorter / longer)",
        }[self.rule]
        return f"{how}; Pillow filter {self.filter}; nothing where the size is that already or not fixed"


STEP = Resize
