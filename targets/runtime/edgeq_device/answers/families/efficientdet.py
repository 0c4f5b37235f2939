"""EfficientDet before its boxes are decoded: offsets from nine anchors a cell at strides of 8 to 128.

    boxes [1, N, 4] and scores [1, N, C], or for each stride boxes [1, h, w, 36] and scores [1, h, w, 9 * C]

Offsets are those of centre y, centre x, height and width:

    centre = anchor + offset * anchor size    size = anchor size * exp(offset)

Anchors have 3 scales (4 strides times 2^0, 2^(1/3), 2^(2/3)) of 3 ratios each. Scores are logits or after their
sigmoid. Sources: google/automl, efficientdet/tf2/anchors.py; zylo117/Yet-Another-EfficientDet-Pytorch.
"""

from __future__ import annotations

from typing import Any, Dict, Mapping, Optional, Tuple

import numpy as np

from edgeq_device.answers.checks import are_scores
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.grids import count_cells, exp, lay_cells, read_levels, sigmoid
from edgeq_device.answers.head import Head
from edgeq_device.answers.objects import Objects, pick_best_class, to_corners
from edgeq_device.answers.rows import are_corners, find_pair, is_named

_STRIDES = (8, 16, 32, 64, 128)
_SHAPES = [
    (scale * w, scale * h) for scale in (1, 2 ** (1 / 3), 2 ** (2 / 3)) for w, h in ((1, 1), (1.4, 0.7), (0.7, 1.4))
]
_SCALE = 4.0


def candidates(outputs: Outputs, head: Head, size: Tuple[int, int]) -> Objects:
    """Return the best class of each anchor."""
    offsets, scores = _read(outputs, size, head.outputs)
    cells, stride = lay_cells(size, _STRIDES, anchors=len(_SHAPES))
    if len(cells) != len(offsets):
        raise ValueError(f"there are {len(cells)} anchors for {len(offsets)} boxes")
    extents = np.tile(np.array(_SHAPES), (len(cells) // len(_SHAPES), 1)) * stride * _SCALE
    centres = (cells + 0.5) * stride + offsets[:, [1, 0]] * extents
    boxes = np.concatenate([centres, extents * exp(offsets[:, [3, 2]])], axis=1)
    return pick_best_class(to_corners(boxes), sigmoid(scores) if head.parameters["scores"] == "logits" else scores)


def _read(outputs: Outputs, size: Tuple[int, int], roles: Mapping[str, str]) -> Tuple[Any, Any]:
    """Return the offsets [N, 4] and the scores [N, C]."""
    if "boxes" in roles:
        return tuple(np.asarray(outputs[roles[role]][0], np.float64) for role in ("boxes", "scores"))  # type: ignore
    parts: Dict[Tuple[str, int], Any] = {}
    named = {role: outputs[name] for role, name in roles.items()}
    for role, (stride, level) in read_levels(named, size).items():
        parts[role[:5], stride] = level.transpose(1, 2, 0).reshape(level.shape[1] * level.shape[2] * len(_SHAPES), -1)
    # The levels are sorted by stride, whatever their order in the model.
    joined = [np.concatenate([parts[kind, stride] for stride in _STRIDES]) for kind in ("boxes", "score")]
    return joined[0], joined[1]


def _find_levels(view: View) -> Optional[Dict[str, str]]:
    """Return the roles of five levels of boxes and five of scores. With four classes, the names decide."""
    try:
        levels = {n: (stride, len(level)) for n, (stride, level) in read_levels(view.outputs, view.size).items()}
    except ValueError:
        return None
    boxes = [name for name, (_, channels) in levels.items() if channels == 4 * len(_SHAPES)]
    if len(boxes) > len(_STRIDES):
        boxes = [name for name in boxes if is_named(name, "box", "regress")]
    scores = [name for name in levels if name not in boxes]
    strides = [sorted(levels[name][0] for name in names) for names in (boxes, scores)]
    channels = {levels[name][1] for name in scores}
    if strides != [list(_STRIDES)] * 2 or len(channels) != 1 or channels.pop() % len(_SHAPES):
        return None
    named = [
        (f"{kind}{number}", name)
        for kind, names in (("boxes", boxes), ("score", scores))
        for number, name in enumerate(names)
    ]
    return dict(named)


def fit(view: View) -> Optional[Fit]:
    """Accept as many offsets and scores as there are anchors."""
    if min(view.size) < _STRIDES[-1]:
        return None
    pair, roles = find_pair({n: a for n, a in view.outputs.items() if not is_named(n, "anchor")}), None
    if pair is not None and view.outputs[pair[0]].shape[1] == len(_SHAPES) * count_cells(view.size, _STRIDES):
        roles = {"boxes": pair[0], "scores": pair[1]}
    elif len(view.outputs) == 2 * len(_STRIDES):
        roles = _find_levels(view)
    if roles is None:
        return None
    offsets, scores = _read(view.outputs, view.size, roles)
    if view.classes not in (None, scores.shape[1]) or (not view.forced and are_corners(offsets)):
        return None
    return Fit(roles, {"scores": "probabilities" if are_scores(scores) else "logits"})


FAMILY = Family(
    "efficientdet",
    "detect",
    "offsets [1, anchors, 4] and scores [1, anchors, classes], or five levels of each",
    fit,
    candidates=candidates,
    thresholds={"confidence": 0.25, "iou": 0.5, "limit": 100},
)
