"""Hold decoded images, and pass the frame of an image through a sample's context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgeq_device.prepare.frame import Frame
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Picture:
    """Hold a decoded image. `pixels` is uint8 [H, W, 3], red first."""

    pixels: Array


def to_context(frame: Frame) -> dict[str, Any]:
    """Return the keys and values that an image's frame adds to a sample's context."""
    return {
        "original_size": frame.original,
        "input_size": frame.size,
        "scale": frame.scale,
        "offset": frame.offset,
    }


def find_frame(context: Mapping[str, Any]) -> Frame | None:
    """Return the frame in a sample's context, or None if the sample is not one image that edgeq prepared."""
    # A user's own samples may have one of these keys.
    if any(key not in context for key in ("original_size", "input_size", "scale", "offset")):
        return None
    return Frame(
        tuple(context["original_size"]), tuple(context["input_size"]), tuple(context["scale"]), tuple(context["offset"])
    )
