"""The steps on pixels: resize, crop, letterbox, channel order. They take uint8 and give uint8, through Pillow.

Pillow's default filter has changed between versions, so the filter is always named.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from PIL import Image

from edgeq.data.state import Array, Geometry, State, model_size
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
RULES = ("exact", "short", "long", "fit")
ROUNDINGS = ("floor", "round", "ceil")
POSITIONS = ("top-left", "center")
ORDERS = ("RGB", "BGR", "L")

Size = tuple[int, int] | str
"""(width, height), or "model" for the size that the model's input fixes."""


def rounded(value: float, rule: str) -> int:
    """floor, ceil, or round half to even."""
    if rule == "round":
        return round(value)
    return math.floor(value) if rule == "floor" else math.ceil(value)


@dataclass(frozen=True)
class Resize:
    """Resize by a rule; `rounding` turns the computed side into pixels."""

    op: ClassVar[str] = "resize"
    size: Size
    rule: str = "exact"
    filter: str = "bilinear"
    rounding: str = "floor"

    def apply(self, state: State, spec: TensorSpec | None) -> State:
        size = _target(self.size, spec)
        if size is None:
            return state
        height, width = _image_size(state)
        x, y, new = self.plan(width, height, size)
        if new == (width, height):
            return state
        if min(new) < 1:
            raise DataError(f"an image of {width}x{height} would shrink to {new[0]}x{new[1]}", "Leave it out")
        array = _pillow(state, "resize", lambda image: image.resize(new, FILTERS[self.filter]))
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
        target = "the model's width and height" if isinstance(self.size, str) else f"{self.size[0]} x {self.size[1]}"
        side = self.size if isinstance(self.size, str) else self.size[0]
        how = {
            "exact": f"resized to {target} (width x height), aspect not kept",
            "fit": f"r = min(W/w, H/h) for {target}; resized to {self.rounding}(w*r) x {self.rounding}(h*r)",
            "short": f"the shorter side becomes {side}, the other {self.rounding}({side} * longer / shorter)",
            "long": f"the longer side becomes {side}, the other {self.rounding}({side} * shorter / longer)",
        }[self.rule]
        return f"{how}; Pillow filter {self.filter}; nothing where the size is that already or not fixed"


@dataclass(frozen=True)
class Crop:
    """Cut the centre; `rounding` turns half of an odd margin into pixels."""

    op: ClassVar[str] = "crop"
    size: Size
    rounding: str = "floor"

    def apply(self, state: State, spec: TensorSpec | None) -> State:
        size = _target(self.size, spec)
        if size is None:
            return state
        height, width = _image_size(state)
        left, top = rounded((width - size[0]) / 2, self.rounding), rounded((height - size[1]) / 2, self.rounding)
        if left < 0 or top < 0:
            raise DataError(f"an image of {width}x{height} is smaller than the crop of {size[0]}x{size[1]}", "Resize")
        row, column = state.axes.index("H"), state.axes.index("W")
        cut = [slice(None)] * state.array.ndim
        cut[row], cut[column] = slice(top, top + size[1]), slice(left, left + size[0])
        geometry = state.geometry or Geometry((width, height))
        return replace(state, array=state.array[tuple(cut)], geometry=geometry.moved(-left, -top))

    def describe(self) -> str:
        target = "the model's size" if isinstance(self.size, str) else f"{self.size[0]} x {self.size[1]}"
        return f"the centre {target} is kept; left = {self.rounding}((w - W) / 2), top = {self.rounding}((h - H) / 2)"


@dataclass(frozen=True)
class Letterbox:
    """Resize to fit, keep the aspect, and fill the rest with one value (or one a channel, in the current order)."""

    op: ClassVar[str] = "letterbox"
    size: Size
    position: str = "top-left"
    value: tuple[int, ...] = (114,)
    filter: str = "bilinear"
    rounding: str = "floor"

    def apply(self, state: State, spec: TensorSpec | None) -> State:
        size = _target(self.size, spec)
        if size is None:
            raise DataError("letterbox = 'model' needs a model input of fixed height and width", "Give a size")
        resized = Resize(size, "fit", self.filter, self.rounding).apply(state, spec)
        height, width = _image_size(resized)
        left, top = (0, 0) if self.position == "top-left" else ((size[0] - width) // 2, (size[1] - height) // 2)
        array = _move(resized.array, resized.axes)
        if len(self.value) not in (1, array.shape[2]):
            raise DataError(f"{len(self.value)} pad values for {array.shape[2]} channels", "Give one, or one a channel")
        canvas = np.empty((size[1], size[0], array.shape[2]), array.dtype)
        canvas[:] = self.value
        canvas[top : top + height, left : left + width] = array
        geometry = resized.geometry or Geometry((width, height))
        return replace(resized, array=_move_back(canvas, resized.axes), geometry=geometry.moved(left, top))

    def describe(self) -> str:
        target = "the model's width and height" if isinstance(self.size, str) else f"{self.size[0]} x {self.size[1]}"
        pad = self.value[0] if len(self.value) == 1 else list(self.value)
        place = "at the top left" if self.position == "top-left" else "in the centre, left = (W - w') // 2, top alike"
        return (
            f"r = min(W/w, H/h) for {target}; resized to {self.rounding}(w*r) x {self.rounding}(h*r) with Pillow "
            f"filter {self.filter}, put {place} of W x H pixels of {pad}"
        )


@dataclass(frozen=True)
class Channels:
    """The order of the colour channels from here on; "L" turns colour to grey as Pillow does."""

    op: ClassVar[str] = "channels"
    order: str

    def apply(self, state: State, spec: TensorSpec | None) -> State:
        if self.order == "L":
            if "C" not in state.axes:
                return state
            rgb = state if state.channels != "BGR" else Channels("RGB").apply(state, spec)
            array = _pillow(rgb, "channels = L", lambda image: image.convert("L"))
            return State(array, state.axes, "", state.geometry)
        if state.channels == self.order:
            return state
        if state.channels not in ("RGB", "BGR") or "C" not in state.axes:
            raise DataError(f"channels = {self.order} needs an image with red, green and blue", "Leave the step out")
        axis = state.axes.index("C")
        return replace(state, array=np.flip(state.array, axis), channels=self.order)

    def describe(self) -> str:
        return {
            "RGB": "channels in order red, green, blue",
            "BGR": "channels in order blue, green, red",
            "L": "grey = (19595*R + 38470*G + 7471*B + 32768) >> 16, one channel",
        }[self.order]


def _target(size: Size, spec: TensorSpec | None) -> tuple[int, int] | None:
    return model_size(spec) if isinstance(size, str) else size


def _image_size(state: State) -> tuple[int, int]:
    if "H" not in state.axes or "W" not in state.axes or len(state.axes) != state.array.ndim:
        raise DataError(
            f"shape {list(state.array.shape)} is not known to be an image", "Declare source.layout = 'HWC' (or 'CHW')"
        )
    return int(state.array.shape[state.axes.index("H")]), int(state.array.shape[state.axes.index("W")])


def _move(array: Array, axes: str) -> Array:
    """From `axes` (H, W and perhaps C) to HWC."""
    if "C" not in axes:
        return array.transpose([axes.index(a) for a in "HW"])[:, :, None]
    return array.transpose([axes.index(a) for a in "HWC"])


def _move_back(array: Array, axes: str) -> Array:
    if "C" not in axes:
        return array[:, :, 0].transpose(["HW".index(a) for a in axes])
    if array.ndim == 2:
        array = array[:, :, None]
    return array.transpose(["HWC".index(a) for a in axes])


def _pillow(state: State, what: str, work: Callable[[Image.Image], Image.Image]) -> Array:
    array = _move(state.array, state.axes)
    if array.dtype != np.uint8 or array.shape[2] not in (1, 3):
        raise DataError(
            f"{what} takes uint8 images of 1 or 3 channels, not {array.dtype} {list(array.shape)} (rows first)",
            "Put the step before any arithmetic, or prepare the data at the model's size",
        )
    image = Image.fromarray(np.ascontiguousarray(array[:, :, 0] if array.shape[2] == 1 else array))
    result = np.asarray(work(image))
    return _move_back(result if result.ndim == 3 else result[:, :, None], state.axes)
