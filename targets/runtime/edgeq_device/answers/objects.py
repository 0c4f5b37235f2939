"""Represent the objects that a head proposes, before and after overlapping ones are suppressed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, List, Optional

import numpy as np

Array = Any


@dataclass(frozen=True)
class Objects:
    """Hold the objects of one image. Positions are in pixels of the model's input.

    Attributes:
        boxes: float64 [N, 4] as x1, y1, x2, y2.
        scores: float64 [N].
        classes: int64 [N].
        angles: float64 [N], clockwise in radians around the box's centre; None if boxes are upright.
        keypoints: float64 [N, K, 3] as x, y and score; None without keypoints.
        coefficients: float64 [N, M], what the family needs for masks; None without masks.
    """

    boxes: Array
    scores: Array
    classes: Array
    angles: Optional[Array] = None
    keypoints: Optional[Array] = None
    coefficients: Optional[Array] = None

    def __len__(self) -> int:
        return len(self.scores)

    def take(self, selection: Array) -> Objects:
        """Return the objects at some indices, or those for which a mask [N] is true."""
        optional = {
            name: None if (array := getattr(self, name)) is None else array[selection]
            for name in ("angles", "keypoints", "coefficients")
        }
        return Objects(self.boxes[selection], self.scores[selection], self.classes[selection], **optional)

    def scaled(self, x: float, y: float) -> Objects:
        """Return the objects with all positions multiplied, such as from shares of the input's size to pixels."""
        factor = np.array([x, y], np.float64)
        keypoints = self.keypoints
        if keypoints is not None:
            keypoints = np.concatenate([keypoints[..., :2] * factor, keypoints[..., 2:]], axis=-1)
        return replace(self, boxes=self.boxes * np.tile(factor, 2), keypoints=keypoints)


def pick_best_class(boxes: Array, scores: Array, **optional: Array) -> Objects:
    """Return each box [N, 4] with its highest-scoring class of `scores` [N, C]."""
    if not scores.shape[1]:
        raise ValueError("the scores have no class")
    classes = scores.argmax(axis=1)
    best = np.asarray(scores[np.arange(len(scores)), classes], np.float64)
    return Objects(np.asarray(boxes, np.float64), best, classes.astype(np.int64), **optional)


def to_corners(boxes: Array) -> Array:
    """Convert boxes [N, 4] from (centre x, centre y, width, height) to corners."""
    centre, half = np.asarray(boxes[:, :2], np.float64), np.asarray(boxes[:, 2:4], np.float64) / 2
    return np.concatenate([centre - half, centre + half], axis=1)


def compute_iou(box: Array, boxes: Array) -> Array:
    """Return the intersection over union of one box [4] with each of the boxes [N, 4]. Return 0 if the union has no
    area. A box whose corners are swapped has no area.
    """
    left, top, right, bottom = boxes.T
    common = _area(
        np.maximum(box[0], left), np.maximum(box[1], top), np.minimum(box[2], right), np.minimum(box[3], bottom)
    )
    union = _area(*box) + _area(left, top, right, bottom) - common
    return np.divide(common, union, out=np.zeros_like(common), where=union > 0)


def _area(left: Array, top: Array, right: Array, bottom: Array) -> Array:
    return np.maximum(right - left, 0) * np.maximum(bottom - top, 0)


def compute_rotated_iou(box: Array, angle: float, boxes: Array, angles: Array) -> Array:
    """Return the probabilistic IoU of one rotated box [4] with each of the rotated boxes [N, 4].

    A box is a Gaussian whose covariance is that of the uniform distribution over the box. The result is 1 minus the
    Hellinger distance of two Gaussians (J. Murrugarra-Llerena et al., "Gaussian Bounding Boxes and Probabilistic
    Intersection-over-Union for Object Detection", 2021). YOLO's rotated heads are suppressed with it.
    """
    (x1, a1, b1, c1), (x2, a2, b2, c2) = _to_gaussian(box[None], np.array([angle])), _to_gaussian(boxes, angles)
    a, b, c = a1 + a2, b1 + b2, c1 + c2
    dx, dy = (x1 - x2).T
    tiny = 1e-7
    determinant = a * b - c**2
    distance = (a * dy**2 + b * dx**2 - 2 * c * dx * dy) / (determinant + tiny) / 4
    own = np.clip(a1 * b1 - c1**2, 0, None) * np.clip(a2 * b2 - c2**2, 0, None)
    distance = distance + np.log(determinant / (4 * np.sqrt(own) + tiny) + tiny) / 2
    return 1 - np.sqrt(1 - np.exp(-np.clip(distance, tiny, 100)) + tiny)


def _to_gaussian(boxes: Array, angles: Array) -> Any:
    """Return the centres [N, 2] and the covariances (xx, yy, xy) of rotated boxes."""
    centres = (boxes[:, :2] + boxes[:, 2:]) / 2
    # The variance of a uniform distribution of width w is w^2 / 12.
    along, across = ((boxes[:, 2:] - boxes[:, :2]) ** 2 / 12).T
    cos, sin = np.cos(angles), np.sin(angles)
    return centres, along * cos**2 + across * sin**2, along * sin**2 + across * cos**2, (along - across) * cos * sin


def suppress(objects: Objects, confidence: float, iou: Optional[float], limit: int, rotated: bool = False) -> Objects:
    """Return the best objects, in descending order of score, at most `limit`.

    The returned objects are finite and score above `confidence`. They are processed in this order, and an object is
    dropped if it overlaps a better one of its class by more than `iou`. Of equal scores, the earlier one comes first.

    Args:
        iou: None suppresses nothing.
        rotated: compare rotated boxes by their probabilistic IoU.
    """
    # Few objects score so high, so only their boxes are looked at.
    strong = objects.take(objects.scores > confidence)
    strong = strong.take(np.isfinite(strong.boxes).all(axis=1))
    strong = strong.take(np.argsort(-strong.scores, kind="stable"))
    if iou is None:
        return strong.take(np.arange(min(limit, len(strong))))
    pending = np.arange(len(strong))
    selected: List[int] = []
    boxes, classes, angles = strong.boxes, strong.classes, strong.angles
    # Each round removes what the best pending box suppresses, so a suppressed box suppresses nothing itself.
    while pending.size and len(selected) < limit:
        best, remaining = pending[0], pending[1:]
        selected.append(int(best))
        if rotated and angles is not None:
            overlap = compute_rotated_iou(boxes[best], float(angles[best]), boxes[remaining], angles[remaining])
        else:
            overlap = compute_iou(boxes[best], boxes[remaining])
        pending = remaining[(classes[remaining] != classes[best]) | (overlap <= iou)]
    return strong.take(np.array(selected, np.int64))
