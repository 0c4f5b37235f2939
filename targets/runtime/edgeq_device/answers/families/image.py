"""Image to image: super-resolution, denoising, colours, styles.

    image [1, C, h, w] or [1, h, w, C], C is 1 or 3

The parameter "range" says how values become pixels: "unit" for 0 to 1, "signed" for -1 to 1, "byte" for 0 to 255. The
parameter "channels" is "RGB" (default) or "BGR". The answer is an image uint8 [H, W, 3] at the model's resolution,
without the padding of the input. One channel (grey, or Y of YCbCr) gives a grey image: the outputs do not contain the
colours of the input.
"""

from __future__ import annotations

from typing import Any, Optional

import numpy as np

from edgeq_device.answers.answer import Answer
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.head import Head
from edgeq_device.answers.raster import cut_padding, find_layout, find_maps, order_axes
from edgeq_device.prepare.frame import Frame

# Range → what brings values to 0 to 255: x * factor + offset.
_RANGES = {"unit": (255.0, 0.0), "signed": (127.5, 127.5), "byte": (1.0, 0.0)}
# Filters overshoot at edges.
_OVERSHOOT = 0.5


def decode(outputs: Outputs, head: Head, frame: Frame) -> Answer:
    """Return the image uint8 [H, W, 3], red first."""
    values = np.asarray(order_axes(outputs[head.outputs["image"]], head.parameters.get("layout")), np.float64)
    if len(values) not in (1, 3):
        raise ValueError("the image has neither 1 nor 3 channels")
    factor, offset = _RANGES[head.parameters.get("range", "unit")]
    rows, columns = cut_padding(frame, values)
    pixels = np.rint(values[:, rows, columns] * factor + offset)
    if head.parameters.get("channels") == "BGR":
        pixels = pixels[::-1]
    # Values that are not numbers become black instead of a warning.
    pixels = np.clip(np.nan_to_num(pixels), 0, 255).astype(np.uint8).transpose(1, 2, 0)
    return Answer("image", map=np.ascontiguousarray(np.broadcast_to(pixels, (*pixels.shape[:2], 3))))


def fit(view: View) -> Optional[Fit]:
    """Accept the only output if it has more pixels than the input, in a whole ratio. If the family is named, accept
    any size.
    """
    maps = {name: array for name, array in find_maps(view.outputs, "fu").items() if array.ndim == 4}
    if len(view.outputs) != 1 or len(maps) != 1:
        return None
    ((name, array),) = maps.items()
    layout = find_layout(array, array.shape[3] if array.shape[1] not in (1, 3) else None)
    values = order_axes(array, layout.get("layout"))
    if len(values) not in (1, 3) or not (view.named or _is_enlarged(values, view)):
        return None
    return Fit({"image": name}, {"range": view.hints.get("range", _find_range(values)), **layout})


def _is_enlarged(values: Any, view: View) -> bool:
    height, width = values.shape[1:]
    if min(view.size) < 1 or width % view.size[0] or height % view.size[1]:
        return False
    return bool(width // view.size[0] == height // view.size[1] > 1)


def _find_range(values: Any) -> str:
    if values.dtype == np.uint8 or values.max() > 1 + 2 * _OVERSHOOT:
        return "byte"
    return "signed" if values.min() < -_OVERSHOOT else "unit"


FAMILY = Family("image", "image", "image [1, 1 or 3, h, w]", fit, decode=decode)
