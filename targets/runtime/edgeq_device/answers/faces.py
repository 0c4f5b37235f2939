"""Read the outputs of face detectors: levels of a grid with scores, boxes and five points in outputs of their own."""

from __future__ import annotations

from typing import Any, Dict, Mapping, Optional, Tuple

import numpy as np

from edgeq_device.answers.checks import are_scores
from edgeq_device.answers.head import Head

_STRIDES = (8, 16, 32, 64, 128)


def group_levels(
    outputs: Mapping[str, Any], size: Tuple[int, int], columns: Tuple[int, ...], anchors: int
) -> Optional[Dict[str, str]]:
    """Return role → output name, or None if the outputs are not levels with one output of each number of columns.

    Outputs are told apart by their shapes, because names may be numbers. The role of an output is its number of columns
    and the level's stride: "4_8" are the boxes at stride 8. Of two outputs of one shape, the second is "1b_8".

    Args:
        size: (width, height) of the model's input in pixels.
        columns: number of columns of each output of a level, such as (1, 4, 10).
        anchors: number of rows for each cell.
    """
    roles: Dict[str, str] = {}
    strides = {(size[0] // stride) * (size[1] // stride) * anchors: stride for stride in reversed(_STRIDES)}
    for name, array in outputs.items():
        if array.dtype.kind != "f" or array.ndim not in (2, 3) or (array.ndim == 3 and len(array) != 1):
            return None
        stride, width = strides.get(array.shape[-2], 0), array.shape[-1]
        if not array.size or not stride or not np.isfinite(array).all() or (width == 1 and not are_scores(array)):
            return None
        role = f"{width}_{stride}"
        roles[role if role not in roles else f"{width}b_{stride}"] = name
    levels = [stride for stride in _STRIDES if f"1_{stride}" in roles]
    expected = {
        f"{width}{'b' if width in columns[:place] else ''}_{stride}"
        for stride in levels
        for place, width in enumerate(columns)
    }
    return roles if len(levels) > 1 and len(outputs) == len(expected) and set(roles) == expected else None


def read_levels(outputs: Mapping[str, Any], head: Head, size: Tuple[int, int], anchors: int) -> Dict[str, Any]:
    """Return columns → values [N, columns] of all levels, finest first, for the roles of `group_levels`. "cells" are
    the column and row of each value's cell [N, 2], and "strides" [N, 1] those of its level.

    Raises:
        ValueError: an output does not cover the grid.
    """
    parts: Dict[str, Any] = {}
    for stride in _STRIDES:
        count = (size[0] // stride) * (size[1] // stride) * anchors
        roles = {role: name for role, name in head.outputs.items() if role.endswith(f"_{stride}")}
        for role, name in roles.items():
            width = int(role.partition("_")[0].rstrip("b"))
            values = np.asarray(outputs[name], np.float64)
            if values.size != count * width or not count:
                raise ValueError(f"output {name} does not have {count} rows of {width}")
            parts.setdefault(role.partition("_")[0], []).append(values.reshape(count, width))
        if roles:
            y, x = np.divmod(np.arange(count) // anchors, size[0] // stride)
            parts.setdefault("cells", []).append(np.stack([x, y], axis=1))
            parts.setdefault("strides", []).append(np.full((count, 1), stride))
    return {role: np.concatenate(values).astype(np.float64) for role, values in parts.items()}


def with_scores(points: Any, scores: Any) -> Any:
    """Return points [N, 10] as keypoints [N, 5, 3]. Such heads give no score for a point, so it has its face's."""
    return np.concatenate([points.reshape(-1, 5, 2), np.broadcast_to(scores[:, None, None], (len(points), 5, 1))], -1)
