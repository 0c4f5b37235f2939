"""Prepare an image or array for the model with the steps that the bundle records. The arithmetic is the same as
edgeq's, in numpy.

The steps are those of `edgeq/data/steps`, and tests check that both give the same results. Pillow decodes and resizes
images. Only the steps on pixels need Pillow.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, Optional, Sequence, Tuple, Union

import numpy as np

from edgeq_device.errors import BundleError, DataError, RuntimeUnavailableError
from edgeq_device.prepare.frame import Frame
from edgeq_device.system.files import check_file

Array = Any
# Larger images are refused before they are decoded.
MOST_PIXELS = 1 << 26
# Pillow's other decoders are code that an untrusted file could attack.
_FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "GIF", "TIFF", "PPM")
# Pillow's own numbers.
_FILTERS = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3, "box": 4, "hamming": 5}
_ROUNDINGS: Dict[str, Callable[[float], int]] = {"floor": math.floor, "round": round, "ceil": math.ceil}
_ARITHMETIC = {"add": np.add, "subtract": np.subtract, "multiply": np.multiply, "divide": np.divide}
_DTYPES = ("float16", "float32", "float64")


class Prepare:
    """Preprocess inputs for one model.

    Args:
        record: `preprocessing` in the edgeq.json of a variant.
        shape: shape of the model's input; sizes that are not numbers are open.
    """

    def __init__(self, record: Mapping[str, Any], shape: Sequence[Any]) -> None:
        steps, source = record.get("steps"), record.get("source", {})
        if not isinstance(steps, list) or not isinstance(source, dict):
            raise BundleError(
                "the bundle's preprocessing is a function, which a bundle does not contain",
                "Give tensors by input name",
            )
        self._steps, self._shape = steps, list(shape)
        self._layout, self._channels = source.get("layout"), source.get("channels", "RGB")
        self.input = source.get("input")

    def __call__(self, item: Union[str, Path, Array]) -> Array:
        """Return the model's input for an image file, a Pillow image, or a raw array (uint8 [H, W, 3], RGB).

        Raises: see `prepare`.
        """
        return self.prepare(item)[0]

    def prepare(self, item: Union[str, Path, Array]) -> Tuple[Array, Optional[Frame]]:
        """Return the model's input, and the frame of the image; None if the item is not known to be an image.

        Raises:
            DataError: the item cannot be read or does not fit the steps.
            BundleError: this runner does not know a step.
            RuntimeUnavailableError: Pillow is needed and is not installed.
        """
        if isinstance(item, np.ndarray):
            # Without a recorded layout, an array is taken for an image.
            axes = self._layout or {2: "HW", 3: "HWC"}.get(item.ndim, "")
            state = _State(item, axes if len(axes) == item.ndim else "", self._channels)
        else:
            state = _State(read_image(item), "HWC", "RGB")
        for step in self._steps:
            state = self._apply(state, step)
        # The steps prepare one sample; the model also has a batch axis.
        if len(self._shape) == state.array.ndim + 1:
            state.array = state.array[None]
        return np.ascontiguousarray(state.array), state.frame

    def _apply(self, state: "_State", step: Any) -> "_State":
        name = step.get("op") if isinstance(step, dict) else None
        try:
            if name in _ARITHMETIC:
                return _apply_arithmetic(state, name, step["value"])
            if name in ("resize", "crop", "letterbox", "pad"):
                return self._apply_to_pixels(state, name, step)
            if name == "layout":
                return self._order_axes(state, step["axes"])
            if name in _OTHER:
                return _OTHER[name](state, step)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise DataError(
                f"step {name} does not fit an item of {state.array.dtype}{list(state.array.shape)} ({error})",
                "Give an image, or tensors by input name",
            ) from error
        raise BundleError(f"this runner does not know the preprocessing step {name!r}", "Give tensors by input name")

    def _apply_to_pixels(self, state: "_State", name: str, step: Mapping[str, Any]) -> "_State":
        model = self._find_size()
        size = model if step["size"] == "model" else (int(step["size"][0]), int(step["size"][1]))
        if size is None:
            if name in ("letterbox", "pad"):
                raise DataError(f"{name} needs the model's width and height, which are open", "Give tensors")
            return state
        size = model or size if name == "pad" else size
        if min(size) < 1 or size[0] * size[1] > MOST_PIXELS:
            raise BundleError(f"the preprocessing makes an image of {size[0]}x{size[1]} pixels", "Give tensors")
        pixels = state.to_pixels()
        rounding = _ROUNDINGS[step.get("rounding", "floor")]
        height, width = pixels.shape[:2]
        frame = state.frame or Frame.of(width, height)
        if name == "pad":
            missing = [max(0, side - have) for side, have in zip(size, (width, height))]
            value = np.asarray(step.get("value", 0), pixels.dtype)
            pixels = np.pad(pixels, ((0, missing[1]), (0, missing[0]), (0, 0)), constant_values=value)
            return state.replace_pixels(pixels, frame.placed(0, 0, (width + missing[0], height + missing[1])))
        if name == "crop":
            x_offset, y_offset = rounding((width - size[0]) / 2), rounding((height - size[1]) / 2)
            if x_offset < 0 or y_offset < 0:
                raise DataError(f"an image of {width}x{height} is smaller than the crop of {size[0]}x{size[1]}")
            cut = pixels[y_offset : y_offset + size[1], x_offset : x_offset + size[0]]
            return state.replace_pixels(cut, frame.placed(-x_offset, -y_offset, size))
        rule = "fit" if name == "letterbox" else step.get("rule", "exact")
        pixels = _resize(pixels, _plan_size(width, height, size, rule, rounding, model), step.get("filter", "bilinear"))
        height, width = pixels.shape[:2]
        frame = frame.resized(width, height)
        if name == "resize":
            return state.replace_pixels(pixels, frame)
        centred = step.get("position", "top-left") == "center"
        x_offset, y_offset = ((size[0] - width) // 2, (size[1] - height) // 2) if centred else (0, 0)
        canvas = np.empty((size[1], size[0], pixels.shape[2]), pixels.dtype)
        # 114 is the grey around the images that YOLO models are trained with.
        canvas[:] = step.get("value", [114])
        canvas[y_offset : y_offset + height, x_offset : x_offset + width] = pixels
        return state.replace_pixels(canvas, frame.placed(x_offset, y_offset, size))

    def _find_axes(self, have: str) -> str:
        """Return the axes of the model's input. A size of 1 or 3 may be the number of channels. Channels come last if
        the last size is 1 or 3 and the size in the channels-first position is not. Otherwise they come first.
        """
        shape = self._shape
        if len(shape) == 4:
            return "NHWC" if shape[3] in (1, 3) and shape[1] not in (1, 3) else "NCHW"
        if len(shape) == 3 and "C" in have:
            return "HWC" if shape[2] in (1, 3) and shape[0] not in (1, 3) else "CHW"
        if len(shape) == len(have) + 1:
            return "N" + have
        return have if len(shape) == len(have) else ""

    def _find_size(self) -> Optional[Tuple[int, int]]:
        """Return the width and height of the model's input, or None if they are open."""
        axes = self._find_axes("HWC")
        if "H" not in axes or len(axes) != len(self._shape):
            return None
        height, width = self._shape[axes.index("H")], self._shape[axes.index("W")]
        return (width, height) if isinstance(height, int) and isinstance(width, int) else None

    def _order_axes(self, state: "_State", axes: str) -> "_State":
        want = self._find_axes(state.axes.replace("N", "")) if axes == "model" else axes
        if axes == "model" and not (want and state.axes):
            return state
        if not state.axes or set(state.axes) - set(want):
            raise DataError(f"layout {want} does not fit the axes of shape {list(state.array.shape)}", "Give an image")
        array = state.array.transpose([state.axes.index(axis) for axis in want if axis in state.axes])
        missing = tuple(i for i, axis in enumerate(want) if axis not in state.axes)
        return _State(np.expand_dims(array, missing) if missing else array, want, state.channels, state.frame)


class _State:
    """Hold an item between two steps: its array, one letter for each axis, the order of its channels, and the frame of
    an image.
    """

    def __init__(self, array: Array, axes: str, channels: str, frame: Optional[Frame] = None) -> None:
        self.array, self.axes, self.channels, self.frame = array, axes, channels, frame
        if frame is None and set("HW") <= set(axes) and len(axes) == array.ndim:
            self.frame = Frame.of(array.shape[axes.index("W")], array.shape[axes.index("H")])

    def to_pixels(self) -> Array:
        """Return the array as [H, W, C]."""
        if not set("HW") <= set(self.axes):
            raise DataError(f"shape {list(self.array.shape)} is not known to be an image", "Give uint8 [H, W, 3]")
        array = self.array.squeeze(tuple(i for i, axis in enumerate(self.axes) if axis not in "HWC"))
        pixel_axes = "".join(axis for axis in self.axes if axis in "HWC")
        if "C" not in pixel_axes:
            return array.transpose([pixel_axes.index(axis) for axis in "HW"])[:, :, None]
        return array.transpose([pixel_axes.index(axis) for axis in "HWC"])

    def replace_pixels(self, pixels: Array, frame: Optional[Frame]) -> "_State":
        """Return an item with the same axes and other pixels, given as [H, W, C]."""
        pixel_axes = "".join(axis for axis in self.axes if axis in "HWC")
        # Pixels always have channels, the item need not.
        order = pixel_axes if "C" in pixel_axes else pixel_axes + "C"
        array = pixels.transpose(["HWC".index(axis) for axis in order])
        if "C" not in pixel_axes:
            array = array[..., 0]
        leading = tuple(i for i, axis in enumerate(self.axes) if axis not in "HWC")
        return _State(np.expand_dims(array, leading) if leading else array, self.axes, self.channels, frame)


def read_image(item: Any) -> Array:
    """Decode an image file, or convert a Pillow image, to uint8 [H, W, 3] in the order RGB. EXIF rotation is not
    applied.

    Raises:
        DataError: the item is not a readable image, or has too many pixels.
        RuntimeUnavailableError: Pillow is not installed.
    """
    pillow = _import_pillow()
    try:
        if not isinstance(item, pillow.Image):
            check_file(Path(item))
        image = item if isinstance(item, pillow.Image) else pillow.open(Path(item), formats=_FORMATS)
        with image:
            # The header states the size, so a decompression bomb is not decoded.
            if image.width * image.height > MOST_PIXELS:
                raise DataError(f"{item} is an image of {image.width}x{image.height} pixels", "Give fewer pixels")
            return np.asarray(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError, TypeError, pillow.DecompressionBombError) as error:
        raise DataError(f"{item} cannot be read as an image ({error})", "Give a .jpg or .png, or tensors") from error


def _import_pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise RuntimeUnavailableError(
            f"images need Pillow, which cannot be imported ({error})", "Install it: python -m pip install pillow"
        ) from error
    return Image


def _plan_size(
    width: int,
    height: int,
    size: Tuple[int, int],
    rule: str,
    rounding: Callable[[float], int],
    model: Optional[Tuple[int, int]],
) -> Tuple[int, int]:
    """Return the new width and height of an image. `model` is the size that the model fixes."""
    if rule == "height":
        line = model[1] if model else size[1]
        return min(rounding(line * width / height), model[0] if model else MOST_PIXELS), line
    if rule == "limit":
        scale = min(1.0, size[0] / max(width, height))
        return model or (
            max(32, 32 * rounding(int(width * scale) / 32)),
            max(32, 32 * rounding(int(height * scale) / 32)),
        )
    if rule == "exact":
        return size
    if rule == "fit":
        scale = min(size[0] / width, size[1] / height)
        return rounding(width * scale), rounding(height * scale)
    short_or_long = min(width, height) if rule == "short" else max(width, height)
    return rounding(size[0] * width / short_or_long), rounding(size[0] * height / short_or_long)


def _resize(pixels: Array, size: Tuple[int, int], name: str) -> Array:
    if size == (pixels.shape[1], pixels.shape[0]):
        return pixels
    if min(size) < 1 or size[0] * size[1] > MOST_PIXELS:
        raise DataError(f"an image of {pixels.shape[1]}x{pixels.shape[0]} would become {size[0]}x{size[1]}")
    if pixels.dtype != np.uint8 or pixels.shape[2] not in (1, 3):
        raise DataError(f"resize takes uint8 of 1 or 3 channels, not {pixels.dtype}{list(pixels.shape)}")
    # Pillow has no third axis for a single channel.
    single = pixels.shape[2] == 1
    image = _import_pillow().fromarray(np.ascontiguousarray(pixels[:, :, 0] if single else pixels))
    array = np.asarray(image.resize(size, _FILTERS[name]))
    return array[:, :, None] if single else array


def _to_float(array: Array) -> Array:
    return array if array.dtype.kind == "f" else array.astype(np.float32)


def _apply_arithmetic(state: _State, name: str, value: Any) -> _State:
    array = _to_float(state.array)
    constant = np.asarray(value, array.dtype)
    if constant.ndim:
        shape = [1] * array.ndim
        shape[state.axes.index("C") if "C" in state.axes else array.ndim - 1] = constant.size
        constant = constant.reshape(shape)
    # Divisions by zero give infinities, without a warning on the user's terminal.
    with np.errstate(all="ignore"):
        return _State(
            np.asarray(_ARITHMETIC[name](array, constant), array.dtype), state.axes, state.channels, state.frame
        )


def _center(state: _State, step: Mapping[str, Any]) -> _State:
    array = _to_float(state.array)
    # In float64, because a float32 sum over an image loses digits.
    mean = np.asarray(array.mean(dtype=np.float64)).astype(array.dtype)
    return _State(np.asarray(array - mean, array.dtype), state.axes, state.channels, state.frame)


def _cast(state: _State, step: Mapping[str, Any]) -> _State:
    if step["dtype"] not in _DTYPES:
        raise ValueError(f"dtype {step['dtype']!r}")
    return _State(state.array.astype(step["dtype"]), state.axes, state.channels, state.frame)


def _order_channels(state: _State, step: Mapping[str, Any]) -> _State:
    order = step["order"]
    if order == "L":
        if "C" not in state.axes:
            return state
        pixels = state.to_pixels()
        # The weights of the grey are in the order RGB.
        pixels = pixels[:, :, ::-1] if state.channels == "BGR" else pixels
        grey = pixels if pixels.shape[2] == 1 else _to_grey(pixels)
        return state.replace_pixels(grey, state.frame)
    if state.channels == order:
        return state
    return _State(np.flip(state.array, state.axes.index("C")), state.axes, order, state.frame)


def _to_grey(pixels: Array) -> Array:
    """Return the grey values that Pillow computes."""
    red, green, blue = (pixels[:, :, i].astype(np.uint32) for i in range(3))
    # The weights of ITU-R 601 in 16-bit fixed point.
    return ((19595 * red + 38470 * green + 7471 * blue + 32768) >> 16).astype(np.uint8)[:, :, None]


def _expand(state: _State, step: Mapping[str, Any]) -> _State:
    return _State(np.expand_dims(state.array, int(step["axis"])), "", state.channels, state.frame)


def _reshape(state: _State, step: Mapping[str, Any]) -> _State:
    return _State(state.array.reshape([int(size) for size in step["shape"]]), "", state.channels, state.frame)


_OTHER: Dict[str, Callable[[_State, Mapping[str, Any]], _State]] = {
    "center": _center,
    "channels": _order_channels,
    "dtype": _cast,
    "expand": _expand,
    "reshape": _reshape,
}
