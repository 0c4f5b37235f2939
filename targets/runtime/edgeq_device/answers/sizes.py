"""Fill the inputs by which a model learns the size of the stored image."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgeq_device.prepare.frame import Frame


def fill(kind: str, frame: Frame) -> Any:
    """Return the values of an input for the image's size, float64 [1, 2]. `kind` is one of
    `edgeq_device.answers.rows.SIZE_INPUTS`.

    Raises:
        ValueError: the kind is unknown.
    """
    subject, _, order = kind.partition(" ")
    pairs = {"stored": frame.original, "input": frame.size, "scale": frame.scale}
    if subject not in pairs or order not in ("width, height", "height, width"):
        raise ValueError(f"this runner does not know the size {kind[:40]!r}")
    pair = np.array([pairs[subject]], np.float64)
    return pair if order == "width, height" else pair[:, ::-1]
