"""Change the channels, size and margins of images. The steps accept and return uint8, and use Pillow.

Pillow's default filter has changed between versions, so these steps always name the filter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from edgeq_device.prepare.frame import Frame
from PIL import Image

from edgeq.data.axes import ItemState, model_size
from edgeq.data.images import Array
from edgeq.data.limits import check_size
from edgeq.data.step import Step, UnfitError, field_kind, one_of, parse_integer, parse_list
from edgeq.errors import DataError
from edgeq.signature import TensorSpec

# The names are edgeq's own, so that a recording does not depend on Pillow's numbers.
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
        # A side of more than 65536 pixels is most likely a typing error.
        or not all(isinstance(n, int) and not isinstance(n, bool) and 1 <= n <= 65536 for n in pair)
    ):
        raise UnfitError(value, "Give pixels, as 256, [width, height], or 'model'")
    return int(pair[0]), int(pair[1])


def _parse_size(text: str) -> Any:
    if match := re.fullmatch(r"(\d{1,9})x(\d{1,9})", text):
        return [int(match[1]), int(match[2])]
    value = parse_integer(text)
    return value if isinstance(value, int) or text == "model" else None


SIZE = field_kind(_read_size, _parse_size)
FILTER = one_of(*FILTERS)
ROUNDING = one_of(*ROUNDINGS)


def round_by(value: float, rule: str) -> int:
    """Round `value` to whole pixels by the rule floor, ceil or round (half to even)."""
    if rule == "round":
        # Half to even, as Python and PyTorch round.
        return round(value)
    return math.floor(value) if rule == "floor" else math.ceil(value)


def choose_size(size: Size, spec: TensorSpec | None) -> tuple[int, int] | None:
    """Return (width, height) in pixels, or None if `size` is "model" and the model does not fix a size."""
    return model_size(spec) if isinstance(size, str) else size


def describe_size(size: Size, model: str = "the model's width and height") -> str:
    """Return "WIDTH x HEIGHT", or `model`."""
    return model if isinstance(size, str) else f"{size[0]} x {size[1]}"


def measure_image(state: ItemState) -> tuple[int, int]:
    """Return (height, width) of an image in any axis order.

    Raises:
        DataError: the axes are not known to be those of an image.
    """
    if "H" not in state.axes or "W" not in state.axes or len(state.axes) != state.array.ndim:
        raise DataError(
            f"shape {list(state.array.shape)} is not known to be an image", "Declare source.layout = 'HWC' (or 'CHW')"
        )
    return int(state.array.shape[state.axes.index("H")]), int(state.array.shape[state.axes.index("W")])


def to_hwc(array: Array, axes: str) -> Array:
    """Return `array` as HWC. `axes` are H, W, optionally C, and other axes of size 1, such as a batch axis.

    Raises:
        DataError: another axis has a size other than 1.
    """
    extra_axes = tuple(i for i, axis in enumerate(axes) if axis not in "HWC")
    # Pillow works on one image, so another axis may be there only in name.
    if any(array.shape[i] != 1 for i in extra_axes):
        raise DataError(f"shape {list(array.shape)}, axes {axes}, is not one image", "Put steps on pixels first")
    image_axes = "".join(axis for axis in axes if axis in "HWC")
    array = array.squeeze(extra_axes)
    if "C" not in image_axes:
        return array.transpose([image_axes.index(a) for a in "HW"])[:, :, None]
    return array.transpose([image_axes.index(a) for a in "HWC"])


def from_hwc(array: Array, axes: str) -> Array:
    """Return an HWC array in the order of `axes`: the inverse of `to_hwc`."""
    image_axes = "".join(axis for axis in axes if axis in "HWC")
    if "C" not in image_axes:
        array = array[:, :, 0].transpose(["HW".index(a) for a in image_axes])
    else:
        array = (array if array.ndim == 3 else array[:, :, None]).transpose(["HWC".index(a) for a in image_axes])
    return np.expand_dims(array, tuple(i for i, axis in enumerate(axes) if axis not in "HWC"))


def apply_pillow(state: ItemState, step_name: str, work: Callable[[Image.Image], Image.Image]) -> Array:
    """Convert the item to a Pillow image, apply `work` to it, and return the resulting array. `step_name` names the
    step in messages.

    Raises:
        DataError: the item is not uint8 with 1 or 3 channels.
    """
    array = to_hwc(state.array, state.axes)
    if array.dtype != np.uint8 or array.shape[2] not in (1, 3):
        raise DataError(
            f"{step_name} takes uint8 images of 1 or 3 channels, not {array.dtype} {list(array.shape)} (rows first)",
            "Put the step before any arithmetic, or prepare the data at the model's size",
        )
    # Pillow needs consecutive bytes, and a single channel without its axis.
    image = Image.fromarray(np.ascontiguousarray(array[:, :, 0] if array.shape[2] == 1 else array))
    result = np.asarray(work(image))
    return from_hwc(result if result.ndim == 3 else result[:, :, None], state.axes)


@dataclass(frozen=True)
class Channels(Step):
    """Set the order of the colour channels for the steps that follow. "L" turns colour into grey as Pillow does."""

    name = "channels"
    help = "RGB, BGR, or L for grey"
    order: str = field(metadata=one_of("RGB", "BGR", "L"))

    def apply(self, state: ItemState, spec: TensorSpec | None) -> ItemState:
        """Return the channels in the chosen order. An image that already has this order is returned unchanged.

        Raises:
            DataError: the item is not an image of three channels.
        """
        if self.order == "L":
            # An image without a channel axis is already grey.
            if "C" not in state.axes:
                return state
            # Pillow weighs the channels as red, green, blue, so another order would weigh them wrongly.
            rgb = state if state.channels != "BGR" else Channels("RGB").apply(state, spec)
            array = apply_pillow(rgb, "channels = L", lambda image: image.convert("L"))
            return ItemState(array, state.axes, "", state.frame)
        if state.channels == self.order:
            return state
        if state.channels not in ("RGB", "BGR") or "C" not in state.axes:
            raise DataError(f"channels = {self.order} needs an image with red, green and blue", "Leave the step out")
        axis = state.axes.index("C")
        return replace(state, array=np.flip(state.array, axis), channels=self.order)

    def describe(self) -> str:
        """Describe the order of the channels, or the integer arithmetic that turns colours into grey."""
        return {
            "RGB": "channels in order red, green, blue",
            "BGR": "channels in order blue, green, red",
            "L": "grey = (19595*R + 38470*G + 7471*B + 32768) >> 16, one channel",
        }[self.order]


RULES = ("exact", "short", "long", "fit", "height", "limit")
_STRIDE = 32
"""Sides by the rule "limit" are multiples of this number of pixels, the stride of most backbones."""


@dataclass(frozen=True)
class Resize(Step):
    """Resize by a rule. `rounding` rounds the computed side to whole pixels."""

    name = "resize"
    help = "SIZE[:exact|short|long|fit|height|limit][:FILTER][:floor|round|ceil]; SIZE 256, 320x240 or model"
    size: Size = field(metadata=SIZE)
    rule: str = field(default="exact", metadata=one_of(*RULES))
    filter: str = field(default="bilinear", metadata=FILTER)
    rounding: str = field(default="floor", metadata=ROUNDING)

    def __post_init__(self) -> None:
        if self.rule not in ("exact", "fit") and isinstance(self.size, str):
            raise DataError(f"resize by the {self.rule} side needs a number of pixels", "Give size = 256 or the like")

    def apply(self, state: ItemState, spec: TensorSpec | None) -> ItemState:
        """Return the image in its new size. The image is unchanged if it already has that size, or if the size is
        "model" and the model does not fix a size.

        Raises:
            DataError: the item is not a uint8 image of 1 or 3 channels, or the size is below one pixel.
        """
        size = choose_size(self.size, spec)
        if size is None:
            return state
        height, width = measure_image(state)
        new = self.plan(width, height, size, model_size(spec))
        # Resampling at the same size could still blur, depending on the filter.
        if new == (width, height):
            return state
        if min(new) < 1:
            raise DataError(f"an image of {width}x{height} would shrink to {new[0]}x{new[1]}", "Leave it out")
        # A wide image of one row, resized by its short side, grows without limit.
        check_size(math.prod(new) * state.array.size // max(1, width * height), f"resized to {new[0]}x{new[1]}", FEWER)
        array = apply_pillow(state, "resize", lambda image: image.resize(new, FILTERS[self.filter]))
        # An array that was not decoded from an image starts its own frame here.
        frame = state.frame or Frame.of(width, height)
        return replace(state, array=array, frame=frame.resized(*new))

    def plan(
        self, width: int, height: int, size: tuple[int, int], model: tuple[int, int] | None = None
    ) -> tuple[int, int]:
        """Return the new (width, height) for an image of `width` x `height`. `model` is the size that the model fixes,
        which the rules "height" and "limit" prefer.
        """
        if self.rule == "exact":
            return size
        if self.rule == "height":
            line = model[1] if model is not None else size[1]
            new_width = round_by(line * width / height, self.rounding)
            return new_width if model is None else min(new_width, model[0]), line
        if self.rule == "limit":
            if model is not None:
                return model
            scale = min(1.0, size[0] / max(width, height))
            sides = (_STRIDE * round_by(int(side * scale) / _STRIDE, self.rounding) for side in (width, height))
            new_width, new_height = (max(_STRIDE, side) for side in sides)
            return new_width, new_height
        if self.rule == "fit":
            scale = min(size[0] / width, size[1] / height)
            return round_by(width * scale, self.rounding), round_by(height * scale, self.rounding)
        fixed_side = min(width, height) if self.rule == "short" else max(width, height)
        # The integer product is computed before the only division, so that the known side is exact.
        new_width, new_height = (round_by(size[0] * side / fixed_side, self.rounding) for side in (width, height))
        return new_width, new_height

    def describe(self) -> str:
        """Describe the filter and how the new size is computed."""
        target = describe_size(self.size)
        side = self.size if isinstance(self.size, str) else self.size[0]
        rule = {
            "exact": f"resized to {target} (width x height), aspect not kept",
            "fit": f"r = min(W/w, H/h) for {target}; resized to {self.rounding}(w*r) x {self.rounding}(h*r)",
            "short": f"the shorter side becomes {side}, the other {self.rounding}({side} * longer / shorter)",
            "long": f"the longer side becomes {side}, the other {self.rounding}({side} * shorter / longer)",
            "height": f"the height becomes {side}, or the model's if fixed, and the width "
            f"{self.rounding}(height * w / h), at most the model's if fixed",
            "limit": f"r = min(1, {side} / longer side); each side becomes {_STRIDE} * "
            f"{self.rounding}(int(side * r) / {_STRIDE}), at least {_STRIDE}, or the model's size if fixed",
        }[self.rule]
        return f"{rule}; Pillow filter {self.filter}; no change if the image has that size or the size is not fixed"


POSITIONS = ("top-left", "center")


def _read_pad(value: Any) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else value
    if not isinstance(values, list | tuple) or not all(isinstance(v, int) and 0 <= v <= 255 for v in values):
        raise UnfitError(value, "Give 0..255, or one value per channel")
    return tuple(values)


def _parse_pad(text: str) -> Any:
    if not re.fullmatch(r"\d+|\[.*\]", text):
        return None
    values = parse_list([text])
    return parse_integer(values) if isinstance(values, str) else [parse_integer(item) for item in values]


@dataclass(frozen=True)
class Letterbox(Step):
    """Resize to fit, keep the aspect ratio, and fill the rest with one value or with one value per channel."""

    name = "letterbox"
    help = "SIZE[:top-left|center][:PAD][:FILTER][:ROUNDING]; PAD 0..255 or [r,g,b], default 114"
    size: Size = field(metadata=SIZE)
    position: str = field(default="top-left", metadata=one_of(*POSITIONS))
    value: tuple[int, ...] = field(default=(114,), metadata=field_kind(_read_pad, _parse_pad))
    filter: str = field(default="bilinear", metadata=FILTER)
    rounding: str = field(default="floor", metadata=ROUNDING)

    def apply(self, state: ItemState, spec: TensorSpec | None) -> ItemState:
        """Return a uint8 image of exactly the given size, with the resized image inside.

        Raises:
            DataError: the item is not an image, the pad values do not fit its channels, or the model does not fix the
                size.
        """
        size = choose_size(self.size, spec)
        # Unlike a resize, padding cannot do without a size.
        if size is None:
            raise DataError("letterbox = 'model' needs a model input of fixed height and width", "Give a size")
        resized = Resize(size, "fit", self.filter, self.rounding).apply(state, spec)
        height, width = measure_image(resized)
        x, y = (0, 0) if self.position == "top-left" else ((size[0] - width) // 2, (size[1] - height) // 2)
        array = to_hwc(resized.array, resized.axes)
        if len(self.value) not in (1, array.shape[2]):
            raise DataError(
                f"{len(self.value)} pad values for {array.shape[2]} channels", "Give one, or one per channel"
            )
        check_size(size[0] * size[1] * array.shape[2], f"padded to {size[0]}x{size[1]}", FEWER)
        # Every pixel is written below, either as padding or as image, so zeros are not needed.
        canvas = np.empty((size[1], size[0], array.shape[2]), array.dtype)
        canvas[:] = self.value
        canvas[y : y + height, x : x + width] = array
        frame = resized.frame or Frame.of(width, height)
        return replace(resized, array=from_hwc(canvas, resized.axes), frame=frame.placed(x, y, size))

    def describe(self) -> str:
        """Describe the scale, the rounding, the filter, the position and the pad value."""
        target = describe_size(self.size)
        pad = self.value[0] if len(self.value) == 1 else list(self.value)
        place = (
            "at the top left"
            if self.position == "top-left"
            else "in the centre, left = (W - w') // 2, top = (H - h') // 2"
        )
        return (
            f"r = min(W/w, H/h) for {target}; resized to {self.rounding}(w*r) x {self.rounding}(h*r) with Pillow "
            f"filter {self.filter}, placed {place} of W x H pixels of value {pad}"
        )


@dataclass(frozen=True)
class Crop(Step):
    """Cut out the centre. `rounding` rounds half of an odd margin to whole pixels."""

    name = "crop"
    help = "SIZE[:floor|round|ceil]; the centre"
    size: Size = field(metadata=SIZE)
    rounding: str = field(default="floor", metadata=ROUNDING)

    def apply(self, state: ItemState, spec: TensorSpec | None) -> ItemState:
        """Return the centre of the image. The image is unchanged if the size is "model" and the model does not fix a
        size.

        Raises:
            DataError: the item is not an image, or is smaller than the crop.
        """
        size = choose_size(self.size, spec)
        if size is None:
            return state
        height, width = measure_image(state)
        x, y = round_by((width - size[0]) / 2, self.rounding), round_by((height - size[1]) / 2, self.rounding)
        # Padding here would put values into the sample that no user asked for.
        if x < 0 or y < 0:
            raise DataError(f"an image of {width}x{height} is smaller than the crop of {size[0]}x{size[1]}", "Resize")
        row, column = state.axes.index("H"), state.axes.index("W")
        cut = [slice(None)] * state.array.ndim
        cut[row], cut[column] = slice(y, y + size[1]), slice(x, x + size[0])
        frame = state.frame or Frame.of(width, height)
        return replace(state, array=state.array[tuple(cut)], frame=frame.placed(-x, -y, size))

    def describe(self) -> str:
        """Describe the size, and how an odd margin is divided."""
        target = describe_size(self.size, "the model's size")
        return f"the centre {target} is kept; left = {self.rounding}((w - W) / 2), top = {self.rounding}((h - H) / 2)"
