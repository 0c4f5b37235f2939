"""Anomaly detection, such as anomalib's models: how unusual an image is, and where.

    score [1] or [1, 1], label [1], map [1, 1, h, w] or [1, h, w], mask [1, 1, h, w] or [1, h, w] (each may be absent)

Models of anomalib 2 scale scores so that 0.5 is the limit, in the graph. Without a score, the largest value of the map
is the score. Without a mask, it is the map above the threshold "pixel". Thresholds of older models come from their
metadata. Class 1 is an anomaly; the anomalous pixels are one object. Source: anomalib, data/dataclasses.
"""

from __future__ import annotations

from typing import Any, Dict, Optional

import numpy as np

from edgeq_device.answers.answer import Answer
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.head import Head
from edgeq_device.answers.raster import find_frame, find_single_maps, pick_nearest, read_single, to_stored
from edgeq_device.prepare.frame import Frame

_ROLES = {"score": "pred_score", "label": "pred_label", "map": "anomaly_map", "mask": "pred_mask"}


def decode(outputs: Outputs, head: Head, frame: Frame) -> Answer:
    """Return the score as `confidence`, the class, the map in the size of the stored image, and the anomalous pixels as
    a mask.
    """
    arrays = {role: outputs[name] for role, name in head.outputs.items()}
    if not {"score", "map"} & set(arrays):
        raise ValueError("there is neither a score nor a map")
    values: Any = read_single(arrays["map"]) if "map" in arrays else None
    score = float(arrays["score"].reshape(-1)[0] if "score" in arrays else values.max())
    limit = head.thresholds.get("confidence", 0.5)
    # A label in the graph was decided by the limit in the graph, so another limit does without it.
    by_graph = "label" in arrays and limit == FAMILY.thresholds["confidence"]
    unusual = bool(arrays["label"].reshape(-1)[0]) if by_graph else score > limit
    top = {1: score, 0: 1 - score} if 0 <= score <= 1 else {int(unusual): score}
    order = (1, 0) if unusual else (0, 1)
    answer: Dict[str, Any] = {"top": {n: top[n] for n in order if n in top}, "confidence": score}
    mask = None
    if values is not None:
        answer["map"] = to_stored(values, frame)
        mask = answer["map"] > head.thresholds.get("pixel", limit)
    if "mask" in arrays:
        grid = read_single(arrays["mask"])
        mask = pick_nearest(grid, find_frame(frame, grid)) > 0
    if mask is not None and mask.any():
        y, x = np.nonzero(mask)
        box = [x.min(), y.min(), x.max() + 1, y.max() + 1]
        answer.update(boxes=np.array([box], np.float64), scores=np.array([score]), classes=np.ones(1, np.int64))
        answer["masks"] = mask[None]
    return Answer("anomaly", **answer)


def fit(view: View) -> Optional[Fit]:
    """Accept outputs with anomalib's names, or a single map if the family is named."""
    roles = {role: name for role, name in _ROLES.items() if name in view.outputs}
    if not {"score", "map"} & set(roles) and view.named and len(view.outputs) == 1:
        roles = dict(zip(("map",), find_single_maps(view.outputs)))
    return Fit(roles) if {"score", "map"} & set(roles) else None


FAMILY = Family(
    "anomaly",
    "anomaly",
    "pred_score, pred_label, anomaly_map, pred_mask",
    fit,
    decode=decode,
    thresholds={"confidence": 0.5},
)
