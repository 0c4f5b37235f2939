"""Give the axes of arrays a meaning: those of an item between two steps, and those of a model's input."""

from __future__ import annotations

from dataclasses import dataclass

from edgeq_device.prepare.frame import Frame

from edgeq.data.images import Array
from edgeq.signature import TensorSpec


@dataclass(frozen=True)
class ItemState:
    """Hold one item between two preprocessing steps.

    Attributes:
        array: the values.
        axes: one letter per axis (N batch, C channel, H row, W column, others as the source declares), or "" if the
            axes have no declared meaning.
        channels: the order of the channels, "RGB" or "BGR", or "" for anything else.
        frame: the frame of an image, or None for other items.
    """

    array: Array
    axes: str
    channels: str = ""
    frame: Frame | None = None


def model_axes(spec: TensorSpec | None, axes: str) -> str:
    """Return the axes of a model input, derived from its shape. The channel axis is the one whose size is 1 or 3, or
    else the first.

    Args:
        spec: the input.
        axes: the item's axes without the batch axis. They settle the order if the shape alone is ambiguous.
    """
    if spec is None or spec.shape is None:
        return ""
    shape = spec.shape
    # An image model has its channels first or last, and only a size of 1 or 3 tells which. If both ends could be
    # channels, the order of ONNX exporters (channels first) decides.
    if len(shape) == 4:
        # Grey and colour images have these two sizes; no other size says that an axis holds channels.
        return "NHWC" if shape[3] in (1, 3) and shape[1] not in (1, 3) else "NCHW"
    if len(shape) == 3 and "C" in axes:
        return "HWC" if shape[2] in (1, 3) and shape[0] not in (1, 3) else "CHW"
    if len(shape) == len(axes) + 1:
        return "N" + axes
    return axes if len(shape) == len(axes) else ""


def assumed_axes(shape: tuple[int, ...], spec: TensorSpec | None) -> str:
    """Return the axes of a raw array that has no declared axes.

    If the shape matches the model's input (with or without its batch axis), these are the input's axes. Otherwise three
    axes are HWC and two axes are HW. For any other number of axes, the result is "".
    """
    guess = {2: "HW", 3: "HWC"}.get(len(shape), "")
    if spec is None or spec.shape is None:
        return guess
    input_axes = model_axes(spec, "HWC" if len(spec.shape) >= 3 else "")
    # The data may have been stored with the batch axis of the model or without it, so both forms are tried.
    for expected, axes in (
        (spec.shape, input_axes.replace("N", "")),
        (spec.shape[1:], input_axes[1:] if input_axes[:1] == "N" else ""),
    ):
        matches = len(expected) == len(shape) and all(
            not isinstance(want, int) or want == have for want, have in zip(expected, shape, strict=True)
        )
        # If all sizes of the model are symbols, every array would match, and the match would say nothing.
        if matches and any(isinstance(want, int) for want in expected):
            return axes
    return guess


def model_size(spec: TensorSpec | None) -> tuple[int, int] | None:
    """Return the (width, height) that a model's image input fixes, or None if the input fixes no size."""
    axes = model_axes(spec, "HWC")
    if spec is None or spec.shape is None or "H" not in axes or len(axes) != len(spec.shape):
        return None
    height, width = spec.shape[axes.index("H")], spec.shape[axes.index("W")]
    # A symbolic size accepts any image, so there is nothing to resize to.
    if isinstance(height, int) and isinstance(width, int):
        return width, height
    return None
