"""RetinaFace: faces with five points, relative to prior boxes.

    locations [1, N, 4], confidences [1, N, 2] (background, face) after a softmax or as logits, landmarks [1, N, 10]

Two square priors stand in the middle of each cell: of 16 and 32 pixels at stride 8, 64 and 128 at 16, 256 and 512 at
32. With p for a prior and d for an output: centre = p + 0.1 d p_size, size = p_size exp(0.2 d), point = p + 0.1 d
p_size, in pixels of the model's input. Source: biubug6/Pytorch_Retinaface, layers/functions/prior_box.py.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import numpy as np

from edgeq_device.answers.faces import with_scores
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.head import Head
from edgeq_device.answers.objects import Objects, to_corners
from edgeq_device.answers.points import FACE_POINTS

_SIZES = {8: (16, 32), 16: (64, 128), 32: (256, 512)}
_ROLES = {4: "locations", 2: "confidences", 10: "landmarks"}
_ROUNDING = 1e-2


def make_priors(size: Tuple[int, int]) -> Any:
    """Return the priors float64 [N, 3] of an input of `size` (width, height): centre x, centre y and side in pixels."""
    parts = []
    for stride, sides in _SIZES.items():
        # The levels of the pyramid are rounded up.
        y, x = np.mgrid[: -(-size[1] // stride), : -(-size[0] // stride)]
        centres = np.repeat((np.stack([x, y], axis=-1).reshape(-1, 2) + 0.5) * stride, len(sides), axis=0)
        parts.append(np.column_stack([centres, np.tile(sides, x.size)]))
    return np.concatenate(parts)


def candidates(outputs: Outputs, head: Head, size: Tuple[int, int]) -> Objects:
    """Return the face of each prior."""
    priors = make_priors(size)
    values = {role: np.asarray(outputs[head.outputs[role]], np.float64) for role in _ROLES.values()}
    locations, confidences, landmarks = (values[role].reshape(len(priors), columns) for columns, role in _ROLES.items())
    centres, sides = priors[:, :2], priors[:, 2:]
    boxes = np.concatenate([centres + 0.1 * locations[:, :2] * sides, sides * np.exp(0.2 * locations[:, 2:])], axis=1)
    scores = confidences[:, 1]
    if head.parameters.get("scores") == "logits":
        scores = (1 + np.tanh((scores - confidences[:, 0]) / 2)) / 2
    points = np.tile(centres, 5) + 0.1 * landmarks * sides
    return Objects(to_corners(boxes), scores, np.zeros(len(scores), np.int64), keypoints=with_scores(points, scores))


def fit(view: View) -> Optional[Fit]:
    """Accept outputs of 4, 2 and 10 columns with as many rows as the input's size has priors."""
    roles = {_ROLES.get(array.shape[-1] if array.ndim else 0, ""): name for name, array in view.outputs.items()}
    if len(view.outputs) != 3 or set(roles) != set(_ROLES.values()) or not all(view.size):
        return None
    shape = (len(make_priors(view.size)),)
    for name in roles.values():
        array = view.outputs[name]
        if array.shape[:-1] not in (shape, (1, *shape)) or array.dtype.kind != "f" or not np.isfinite(array).all():
            return None
    confidences = np.asarray(view.outputs[roles["confidences"]], np.float64)
    softmax = (np.abs(confidences.sum(axis=-1) - 1) < _ROUNDING).all() and confidences.min() >= 0
    return Fit(roles, {} if softmax else {"scores": "logits"})


FAMILY = Family(
    "retinaface",
    "pose",
    "locations [1, N, 4], confidences [1, N, 2] and landmarks [1, N, 10]",
    fit,
    candidates=candidates,
    thresholds={"confidence": 0.6, "iou": 0.4, "limit": 300},
    keypoint_names=FACE_POINTS,
    preprocess="retinaface",
)
