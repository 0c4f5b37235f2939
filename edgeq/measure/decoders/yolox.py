"""YOLOX: one output [1, N, 5 + classes], undecoded: x, y as offsets in grid cells, w, h as logarithms, then objectness
and class scores, both after their sigmoid.

    centre = (xy + cell) * stride    size = exp(wh) * stride    score = objectness * class

Cells run row by row, the levels from the finest stride on: 8, 16, 32, and 64 in the larger variants.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgeq.measure.boxes import Detections, best_class, centre_to_corners
from edgeq.measure.decoders import Decoder, only_head, wrong_head
from edgeq.measure.latency import Outputs

STRIDES = ((8, 16, 32), (8, 16, 32, 64))


def decode(outputs: Outputs, size: tuple[int, int]) -> Detections:
    """Boxes of the raw output, decoded by grid cell and stride."""
    layout = f"[1, N, 5 + classes] with N = {' or '.join(str(cells(size, s)) for s in STRIDES)}"
    head = only_head(outputs, "yolox", layout)
    strides = next((s for s in STRIDES if cells(size, s) == len(head)), None)
    if strides is None or head.shape[1] < 6:
        raise wrong_head(outputs, "yolox", layout)
    grid, stride = anchors(size, strides)
    head = head.astype(np.float64)
    centre = (head[:, :2] + grid) * stride
    with np.errstate(over="ignore"):  # an infinite box is dropped later
        extent = np.exp(head[:, 2:4]) * stride
    return best_class(centre_to_corners(np.concatenate([centre, extent], axis=1)), head[:, 4:5] * head[:, 5:])


def cells(size: tuple[int, int], strides: tuple[int, ...]) -> int:
    """How many grid cells an input of `size` (width, height) has over all levels."""
    return sum((size[0] // s) * (size[1] // s) for s in strides)


def anchors(size: tuple[int, int], strides: tuple[int, ...]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Column and row of each cell, [N, 2], and its stride in pixels, [N, 1]."""
    places, steps = [], []
    for stride in strides:
        rows, columns = np.mgrid[: size[1] // stride, : size[0] // stride]
        places.append(np.stack([columns, rows], axis=-1).reshape(-1, 2))
        steps.append(np.full((columns.size, 1), stride))
    return np.concatenate(places).astype(np.float64), np.concatenate(steps).astype(np.float64)


DECODER = Decoder("yolox", "[1, N, 5 + classes] with box centres and sizes relative to the grid", decode)
