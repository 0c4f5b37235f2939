"""Mask R-CNN and related models of torchvision and MMDetection: objects that the graph has selected, with masks.

    torchvision: boxes [n, 4], labels [n] (integers from 1), scores [n], masks [n, 1, h, w]
    MMDetection: dets [1, n, 5] (left, top, right, bottom, score), labels [1, n] (integers from 0), masks [1, n, h, w]

Positions are in pixels of the model's input. Masks are probabilities: in the box's frame if h x w is smaller than the
input, else in the input's. n may be 0. MMDetection's rows that fill up have label -1. Sources: torchvision,
models/detection/roi_heads.py; open-mmlab/mmdeploy, codebase/mmdet/deploy/object_detection_model.py.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import numpy as np

from edgeq_device.answers.checks import are_scores
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.head import Head
from edgeq_device.answers.maps import masks_to_original, paste_masks
from edgeq_device.answers.objects import Objects
from edgeq_device.answers.rows import are_selected, find_numbers, list_objects

_THRESHOLD = 0.5


def candidates(outputs: Outputs, head: Head, size: Tuple[int, int]) -> Objects:
    """Return the objects. Their coefficients are the numbers of their masks."""
    del size
    boxes, scores, labels = _read_objects(outputs, head.outputs)
    places = np.arange(len(boxes), dtype=np.float64)[:, None]
    return list_objects(boxes, scores, labels, head.parameters, coefficients=places)


def _read_objects(outputs: Outputs, roles: Any) -> Tuple[Any, Any, Any]:
    """Return the boxes [n, 4], the scores [n] and the labels [n]."""
    boxes = np.asarray(outputs[roles["boxes"]], np.float64)
    boxes = boxes.reshape(-1, boxes.shape[-1])
    scores = outputs[roles["scores"]] if "scores" in roles else boxes[:, 4]
    labels = np.reshape(outputs[roles["labels"]], -1)
    if not len(boxes) == len(scores) == len(labels):
        raise ValueError("boxes, scores and labels are not of the same objects")
    return boxes[:, :4], np.asarray(scores, np.float64), labels


def masks(outputs: Outputs, head: Head, objects: Objects, frame: Any) -> Any:
    """Return the masks bool [N, H, W] of the objects in the size of the stored image."""
    array = outputs[head.outputs["masks"]]
    if array.ndim != 4:
        raise ValueError("the masks are not [n, 1, h, w] or [1, n, h, w]")
    maps = array[:, 0] if "scores" in head.outputs else array[0]
    selected = np.asarray(maps[np.asarray(objects.coefficients)[:, 0].astype(np.int64)], np.float64)
    if selected.shape[:0:-1] == tuple(frame.size):
        return masks_to_original(selected - _THRESHOLD, objects.boxes, frame)
    return paste_masks(selected, objects.boxes, frame, _THRESHOLD)


def fit(view: View) -> Optional[Fit]:
    """Accept boxes, labels, scores and a map of probabilities for each object."""
    ranks = {name: array.ndim for name, array in view.outputs.items()}
    floats = {name for name, array in view.outputs.items() if array.dtype.kind == "f"}
    maps = [name for name in ranks if ranks[name] == 4]
    rank, columns = (2, 4) if len(view.outputs) == 4 else (3, 5)
    boxes = [n for n, a in view.outputs.items() if ranks[n] == rank and n in floats and a.shape[-1] == columns]
    labels = [name for name in ranks if ranks[name] == rank - 1 and name not in floats]
    scores = [name for name in floats if ranks[name] == 1]
    if len(view.outputs) not in (3, 4) or [len(maps), len(boxes), len(labels), len(scores)] != [1, 1, 1, rank == 2]:
        return None
    roles = {"boxes": boxes[0], "labels": labels[0], "masks": maps[0], **({"scores": scores[0]} if scores else {})}
    array, number = view.outputs[maps[0]], view.outputs[boxes[0]].shape[-2]
    if array.shape[:2] != ((number, 1) if scores else (1, number)) or view.outputs[labels[0]].size != number:
        return None
    box, score, label = _read_objects(view.outputs, roles)
    # No object is a legal answer, and these shapes are those of no other family.
    if number and not view.forced and not (are_selected(box, score, label) and are_scores(array)):
        return None
    return Fit(roles, find_numbers(int(label.max(initial=0)), view.classes, 1 if scores else 0))


FAMILY = Family(
    "mask-rcnn",
    "segment",
    "boxes, labels, scores and masks [n, 1, h, w]",
    fit,
    candidates=candidates,
    masks=masks,
    thresholds={"confidence": 0.5, "limit": 100},
)
