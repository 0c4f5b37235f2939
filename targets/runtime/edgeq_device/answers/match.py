"""Match the objects of two answers for one image: those of a reference, and those of another model.

Two objects are the same if their classes are equal and they overlap by half or more: their boxes by intersection over
union (rotated boxes by the probabilistic one), their masks by intersection over union, and their keypoints by COCO's
similarity. Each object of the reference takes the best free object, in descending order of its score, as COCO assigns
detections.
"""

from __future__ import annotations

from typing import Any, Tuple

import numpy as np

from edgeq_device.answers.answer import Answer
from edgeq_device.answers.objects import compute_iou, compute_rotated_iou

LEAST_OVERLAP = 0.5
# COCO's standard deviations of annotators for its 17 keypoints, in shares of the object's size.
_COCO = (26, 25, 25, 35, 35, 79, 79, 72, 72, 62, 62, 107, 107, 87, 87, 89, 89)
# For keypoints of other sets, the mean of COCO's.
_SIGMA = 0.06


def match_objects(reference: Answer, candidate: Answer) -> Tuple[Any, Any, Any]:
    """Return the indices of the objects that belong together, int[m] of the reference and int[m] of the candidate, and
    their overlaps float64[m].
    """
    pairs = []
    free = np.ones(len(candidate), bool)
    for place in np.argsort(-reference.scores, kind="stable"):
        places = np.nonzero(free & (candidate.classes == reference.classes[place]))[0]
        if not len(places):
            continue
        overlaps = compute_overlaps(reference, int(place), candidate, places)
        best = int(overlaps.argmax())
        if overlaps[best] >= LEAST_OVERLAP:
            free[places[best]] = False
            pairs.append((int(place), int(places[best]), float(overlaps[best])))
    columns = list(zip(*pairs)) or [(), (), ()]
    return np.array(columns[0], np.int64), np.array(columns[1], np.int64), np.array(columns[2], np.float64)


def compute_overlaps(reference: Answer, place: int, candidate: Answer, places: Any) -> Any:
    """Return the overlap of one object of the reference with those of the candidate at `places`, from 0 to 1. It is the
    least of the overlaps of boxes and masks, or the similarity of keypoints.
    """
    box = reference.boxes[place]
    if reference.angles is not None and candidate.angles is not None:
        angle = float(reference.angles[place])
        return compute_rotated_iou(box, angle, candidate.boxes[places], candidate.angles[places])
    if reference.keypoints is not None and candidate.keypoints is not None:
        return np.array([compute_oks(reference.keypoints[place], candidate.keypoints[i], box) for i in places])
    overlaps = compute_iou(box, candidate.boxes[places])
    if reference.masks is not None and candidate.masks is not None:
        mask = reference.masks[place]
        for i, other in enumerate(candidate.masks[places]):
            if overlaps[i] >= LEAST_OVERLAP:  # a mask takes long, and the boxes already decide about most
                union = int((mask | other).sum())
                overlaps[i] = min(overlaps[i], int((mask & other).sum()) / union if union else 1.0)
    return overlaps


def compute_oks(reference: Any, candidate: Any, box: Any) -> float:
    """Return COCO's similarity of two sets of keypoints [K, 3], from 0 to 1, over the points that the reference sees
    (score of a half or more; all, if it sees none):

        mean exp(-d^2 / (2 area (2 sigma)^2))

    The area is that of the box, which COCO's evaluation takes where there is no mask.
    """
    sigmas = np.array(_COCO) / 1000 if len(reference) == len(_COCO) else np.full(len(reference), _SIGMA)
    seen = reference[:, 2] >= 0.5
    seen = seen if seen.any() else np.ones(len(reference), bool)
    area = max(float(np.prod(np.clip(box[2:] - box[:2], 0, None))), 1.0)
    squares = ((reference[:, :2] - candidate[:, :2]) ** 2).sum(axis=1)
    return float(np.exp(-squares / (2 * area * (2 * sigmas) ** 2))[seen].mean())
