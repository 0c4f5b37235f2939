"""Resize maps of values, and bring them from the model's input to the stored image."""

from __future__ import annotations

from typing import Any, Tuple

import numpy as np

from edgeq_device.prepare.frame import Frame


def sample_bilinear(values: Any, x: Any, y: Any) -> Any:
    """Return `values` [..., h, w] at the columns `x` [n] and rows `y` [m], as [..., m, n].

    Positions are in pixels whose centres are at whole numbers; outside the map, its edge continues.
    """
    height, width = values.shape[-2:]
    x, y = np.clip(x, 0, width - 1), np.clip(y, 0, height - 1)
    left, top = np.floor(x).astype(np.int64), np.floor(y).astype(np.int64)
    right, bottom = np.minimum(left + 1, width - 1), np.minimum(top + 1, height - 1)
    across, down = x - left, (y - top)[:, None]
    # First along rows, then along columns: two small interpolations instead of one with four corners.
    rows = values[..., left] * (1 - across) + values[..., right] * across
    return rows[..., top, :] * (1 - down) + rows[..., bottom, :] * down


def resize_bilinear(values: Any, size: Tuple[int, int]) -> Any:
    """Return `values` [..., h, w] resized to `size` (width, height). The corners of the images are aligned, not the
    centres of the pixels ("half pixel", align_corners=False).
    """
    height, width = values.shape[-2:]
    x = (np.arange(size[0]) + 0.5) * width / size[0] - 0.5
    y = (np.arange(size[1]) + 0.5) * height / size[1] - 0.5
    return sample_bilinear(values, x, y)


def map_to_original(values: Any, frame: Frame) -> Any:
    """Return `values` [..., h, w] of the model's input, at any resolution, resampled to the stored image: padding is
    cut off, and what a crop removed repeats the edge.
    """
    height, width = values.shape[-2:]
    x, y = _positions(frame)
    return sample_bilinear(values, x * width / frame.size[0] - 0.5, y * height / frame.size[1] - 0.5)


def masks_to_original(values: Any, boxes: Any, frame: Frame) -> Any:
    """Return masks bool [N, H, W] in the size of the stored image, where `values` [N, h, w] exceed 0 inside the boxes.

    Args:
        boxes: [N, 4] in pixels of the model's input. A mask ends at its box, and where a crop cut the image.
    """
    width, height = frame.original
    masks = np.zeros((len(values), height, width), bool)
    rows, columns = values.shape[-2:]
    x, y = _positions(frame)
    boxes = np.clip(boxes, 0, np.tile(frame.size, 2))
    for mask, value, (x1, y1, x2, y2) in zip(masks, values, boxes):
        # Only the pixels inside the box are computed.
        inside_x, inside_y = np.nonzero((x >= x1) & (x < x2))[0], np.nonzero((y >= y1) & (y < y2))[0]
        if not len(inside_x) or not len(inside_y):
            continue
        at_x = x[inside_x] * columns / frame.size[0] - 0.5
        at_y = y[inside_y] * rows / frame.size[1] - 0.5
        mask[inside_y[0] : inside_y[-1] + 1, inside_x[0] : inside_x[-1] + 1] = sample_bilinear(value, at_x, at_y) > 0
    return masks


def _positions(frame: Frame) -> Tuple[Any, Any]:
    """Return the centres of the stored image's columns and rows in pixels of the model's input."""
    width, height = frame.original
    x = (np.arange(width) + 0.5) * frame.scale[0] + frame.offset[0]
    y = (np.arange(height) + 0.5) * frame.scale[1] + frame.offset[1]
    return x, y
