"""CenterNet: a heatmap of centres for each class, sizes, and offsets of the centres.

    heat [1, C, h, w]: scores or logits; sizes [1, 2, h, w] and offsets [1, 2, h, w]: x, y in cells

An object is a cell whose score is the largest of its 3 x 3 neighbourhood, so nothing overlaps. Source:
xingyizhou/CenterNet, src/lib/models/decode.py, ctdet_decode.
"""

from __future__ import annotations

from typing import Optional, Tuple

import numpy as np

from edgeq_device.answers.checks import are_scores
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.grids import read_levels, sigmoid
from edgeq_device.answers.head import Head
from edgeq_device.answers.objects import Objects, to_corners
from edgeq_device.answers.rows import is_named

_LIMIT = 1000


def candidates(outputs: Outputs, head: Head, size: Tuple[int, int]) -> Objects:
    """Return the best peaks of the heatmap."""
    levels = read_levels({role: outputs[name] for role, name in head.outputs.items()}, size)
    (stride, heat), (_, sizes), (_, offsets) = (levels[role] for role in ("heat", "sizes", "offsets"))
    heat = sigmoid(heat) if head.parameters["scores"] == "logits" else heat
    padded = np.pad(heat, ((0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
    height, width = heat.shape[1:]
    shifted = [padded[:, y : y + height, x : x + width] for y in range(3) for x in range(3)]
    scores = np.where(heat >= np.max(shifted, axis=0), heat, 0).reshape(-1)
    best = np.argsort(-scores, kind="stable")[:_LIMIT]
    classes, rows, columns = np.unravel_index(best, heat.shape)
    centres = np.stack([columns, rows], axis=1) + offsets[:, rows, columns].T
    boxes = to_corners(np.concatenate([centres, sizes[:, rows, columns].T], axis=1) * stride)
    return Objects(boxes, scores[best], classes.astype(np.int64))


def fit(view: View) -> Optional[Fit]:
    """Accept a map of scores and two maps of pairs. The smaller pairs are the offsets, if no name says it."""
    try:
        levels = read_levels(view.outputs, view.size)
    except ValueError:
        return None
    pairs = [name for name, (_, level) in levels.items() if len(level) == 2]
    if len(pairs) > 2:
        pairs = [name for name in pairs if is_named(name, "wh", "size", "reg", "off")]
    heats = [name for name in levels if name not in pairs]
    if len(levels) != 3 or len(pairs) != 2 or len({stride for stride, _ in levels.values()}) != 1:
        return None
    heat = levels[heats[0]][1]
    if view.classes not in (None, len(heat)):
        return None
    pairs.sort(key=lambda name: (is_named(name, "reg", "off"), -np.abs(levels[name][1]).max()))
    probabilities = are_scores(heat)
    if not view.forced and np.median(heat) >= (0.5 if probabilities else 0.0):
        return None
    roles = {"heat": heats[0], "sizes": pairs[0], "offsets": pairs[1]}
    return Fit(roles, {"scores": "probabilities" if probabilities else "logits"})


FAMILY = Family(
    "centernet",
    "detect",
    "heat [1, classes, h, w], sizes [1, 2, h, w] and offsets [1, 2, h, w]",
    fit,
    candidates=candidates,
    thresholds={"confidence": 0.3, "limit": 100},
)
