"""Matting: how much of each pixel belongs to the foreground.

    alpha [1, 1, h, w], [1, h, w, 1] or [1, h, w]: from 0 (background) to 1

Other outputs, such as the foreground's colours and the recurrent states of RVM, are not read. Sources: MODNet, onnx;
Robust Video Matting, inference (output pha).
"""

from __future__ import annotations

from typing import Optional

import numpy as np

from edgeq_device.answers.answer import Answer
from edgeq_device.answers.checks import are_scores
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.head import Head
from edgeq_device.answers.raster import find_single_maps, read_single, to_stored
from edgeq_device.prepare.frame import Frame

_NAMES = ("pha", "alpha", "matte")


def decode(outputs: Outputs, head: Head, frame: Frame) -> Answer:
    """Return alpha for each pixel of the stored image, float64 [H, W]."""
    array = outputs[head.outputs["alpha"]]
    return Answer("matting", map=np.clip(to_stored(read_single(array), frame), 0, 1))


def fit(view: View) -> Optional[Fit]:
    """Accept the map named pha, alpha or matte, or the only map of one channel if the family is named."""
    maps = {name: array for name, array in find_single_maps(view.outputs).items() if are_scores(array)}
    names = [name for name in maps if name in _NAMES] or (list(maps) if view.named else [])
    return Fit({"alpha": names[0]}) if len(names) == 1 else None


FAMILY = Family("matting", "matting", "alpha [1, 1, h, w]", fit, decode=decode)
