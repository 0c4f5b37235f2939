"""Read keypoints, and name them where a family defines them."""

from __future__ import annotations

from typing import Any, Tuple

import numpy as np

from edgeq_device.answers.checks import to_pixels
from edgeq_device.answers.objects import Objects

COCO_POINTS = (
    *("nose", "left_eye", "right_eye", "left_ear", "right_ear", "left_shoulder", "right_shoulder", "left_elbow"),
    *("right_elbow", "left_wrist", "right_wrist", "left_hip", "right_hip", "left_knee", "right_knee", "left_ankle"),
    "right_ankle",
)
"""The keypoints of COCO's people. Left is the person's left."""
FACE_POINTS = ("right_eye", "left_eye", "nose", "right_mouth", "left_mouth")
"""The five points of a face: eyes, tip of the nose, corners of the mouth. Left is the person's left."""

# Real heads put keypoints within their box, up to a box of the upper body whose feet are outside.
_SHARE_NEAR, _STRONGEST = 0.8, 20


def read_points(values: Any, count: int, unit: Any, size: Tuple[int, int]) -> Any:
    """Return columns [N, K * v] as keypoints float64 [N, K, 3] in pixels of the model's input of `size`.

    Args:
        count: K.
        unit: "pixel" or "share", the unit of x and y.

    Without a third value, keypoints have the score 1.
    """
    points = np.asarray(values, np.float64).reshape(len(values), count, np.shape(values)[1] // max(count, 1))
    if points.shape[2] not in (2, 3):
        raise ValueError(f"{np.shape(values)[1]} columns are not {count} keypoints of 2 or 3 values")
    visible = points[..., 2:] if points.shape[2] == 3 else np.ones((*points.shape[:2], 1))
    return np.concatenate([to_pixels(points[..., :2], unit, size), visible], axis=-1)


def lie_near(boxes: Any, scores: Any, points: Any) -> bool:
    """Return whether the keypoints [N, K, 2 or 3] of the strongest boxes [N, 4] lie near their box: at most its width
    or height outside. Other columns that are taken for keypoints do not.
    """
    strongest = np.argsort(-np.asarray(scores), kind="stable")[:_STRONGEST]
    boxes, points = np.asarray(boxes, np.float64)[strongest, None], np.asarray(points, np.float64)[strongest]
    reach = boxes[..., 2:] - boxes[..., :2]
    near = (points[..., :2] >= boxes[..., :2] - reach) & (points[..., :2] <= boxes[..., 2:] + reach)
    return bool(near.size and near.all(axis=-1).mean() >= _SHARE_NEAR)


def enclose_person(points: Any, box: Any) -> Objects:
    """Return one person of class 0 with keypoints [K, 3] and a box [4], which scores the keypoints' mean score."""
    box, points = np.asarray(box, np.float64)[None], np.asarray(points, np.float64)[None]
    return Objects(box, points[..., 2].mean(axis=1), np.zeros(1, np.int64), keypoints=points)


def are_peaks(values: Any) -> bool:
    """Return whether rows [K, n] are heatmaps of one keypoint each: small, and high at one place only."""
    values = np.asarray(values, np.float64)
    if not values.size or not np.isfinite(values).all() or np.abs(values.sum(axis=0) - 1).max() < 1e-2:
        return False
    highest = values.max(axis=1)
    # A Gaussian covers few cells of its map. Logits and scores of areas are high, or low, at many places.
    wide = (values > highest[:, None] / 2).mean(axis=1)
    return bool(highest.max() > 0.05 and highest.min() >= 0 and np.median(wide) < 0.1)
