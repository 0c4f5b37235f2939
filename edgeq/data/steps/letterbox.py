"""Resize to fit, and pad to the size."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from edgeq.data.records import Geometry, State, check_size
from edgeq.data.step import (
    FEWER,
    FILTER,
    ROUNDING,
    SIZE,
    Size,
    Step,
    UnfitError,
    describe_size,
    field_kind,
    from_hwc,
    image_size,
    integer,
    listed,
    one_of,
    target_size,
    to_hwc,
)
from edgeq.data.steps.resize import Resize
from edgeq.errors import DataError
from edgeq.signature import TensorSpec

POSITIONS = ("top-left", "center")


def _read_pad(value: Any) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else value
    if not isinstance(values, list | tuple) or not all(isinstance(v, int) and 0 <= v <= 255 for v in values):
        raise UnfitError(value, "Give 0..255, or one a channel")
    return tuple(values)


def _pad_part(text: str) -> Any:
    if not re.fullmatch(r"\d+|\[.*\]", text):
        return None
    values = listed([text])
    return integer(values) if isinstance(values, str) else [integer(item) for item in values]


@dataclass(frozen=True)
class Letterbox(Step):
    """Resize to fit, keep the aspect, and fill the rest with one value (or one a channel, in the current order)."""

    name: ClassVar[str] = "letterbox"
    help: ClassVar[str] = "SIZE[:top-left|center][:PAD][:FILTER][:ROUNDING]; PAD 0..255 or [r,g,b], default 114"
    size: Size = field(metadata=SIZE)
    position: str = field(default="top-left", metadata=one_of(*POSITIONS))
    value: tuple[int, ...] = field(default=(114,), metadata=field_kind(_read_pad, _pad_part))
    filter: str = field(default="bilinear", metadata=FILTER)
    rounding: str = field(default="floor", metadata=ROUNDING)

    def apply(self, state: State, spec: TensorSpec | None) -> State:
        """uint8 of exactly the size, the image inside it.

        Raises:
            DataError: no image, pad values that do not fit its channels, or no fixed model size where that is wanted.
        """
        size = target_size(self.size, spec)
        if size is None:
            raise DataError("letterbox = 'model' needs a model input of fixed height and width", "Give a size")
        resized = Resize(size, "fit", self.filter, self.rounding).apply(state, spec)
        height, width = image_size(resized)
        left, top = (0, 0) if self.position == "top-left" else ((size[0] - width) // 2, (size[1] - height) // 2)
        array = to_hwc(resized.array, resized.axes)
        if len(self.value) not in (1, array.shape[2]):
            raise DataError(f"{len(self.value)} pad values for {array.shape[2]} channels", "Give one, or one a channel")
        check_size(size[0] * size[1] * array.shape[2], f"padded to {size[0]}x{size[1]}", FEWER)
        canvas = np.empty((size[1], size[0], array.shape[2]), array.dtype)
        canvas[:] = self.value
        canvas[top : top + height, left : left + width] = array
        geometry = resized.geometry or Geometry((width, height))
        return replace(resized, array=from_hwc(canvas, resized.axes), geometry=geometry.moved(left, top))

    def describe(self) -> str:
        """Scale, rounding, filter, position and pad value."""
        target = describe_size(self.size)
        pad = self.value[0] if len(self.value) == 1 else list(self.value)
        place = "at the top left" if self.position == "top-left" else "in the centre, left = (W - w') // 2, top alike"
        return (
            f"r = min(W/w, H/h) for {target}; resized to {self.rounding}(w*r) x {self.rounding}(h*r) with Pillow "
            f"filter {self.filter}, put {place} of W x H pixels of {pad}"
        )


STEP = Letterbox
