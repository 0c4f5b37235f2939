"""Read the outputs of heads that list boxes: one row each, or boxes, scores and classes in outputs of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Dict, Mapping, Optional, Tuple

import numpy as np

from edgeq_device.answers.checks import are_scores
from edgeq_device.answers.objects import Objects

# COCO numbers its 80 classes 1 to 90.
_COCO_GAPS = (12, 26, 29, 30, 45, 66, 68, 69, 71, 83)
_COCO_CLASSES, _COCO_NUMBERS = 80, 90
_QUERIES = 1000
_MOST_CLASSES = 2**31

SIZE_INPUTS: Mapping[str, str] = {
    "orig_target_sizes": "stored width, height",
    "orig_size": "stored width, height",
    "image_shape": "stored height, width",
    "im_shape": "input height, width",
    "scale_factor": "scale height, width",
}
"""Name of an input for the image's size → what the model expects there: `edgeq_device.answers.sizes.fill` computes it.
Sources: lyuwenyu/RT-DETR, the ONNX Model Zoo's YOLOv3, PaddleDetection.
"""


def find_size_inputs(inputs: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the parameters of a head whose model gets the image's size and gives boxes in pixels of the image as
    stored, or {}.
    """
    sizes = {name: SIZE_INPUTS[name] for name in inputs if name in SIZE_INPUTS}
    return {"inputs": sizes, "frame": "image"} if sizes else {}


def drop_batch(array: Any, rank: int) -> Any:
    """Return an output [1, ...] or [...] as float64 array of `rank` axes.

    Raises:
        ValueError: the output has another number of axes, or holds several images.
    """
    if array.ndim == rank + 1 and len(array) == 1:
        array = array[0]
    if array.ndim != rank:
        raise ValueError(f"{list(array.shape)} are not {rank} axes of one image")
    return np.asarray(array, np.float64)


def find_pair(outputs: Mapping[str, Any], transposed: bool = False) -> Optional[Tuple[str, str]]:
    """Return the names of the boxes [1, N, 4] and the scores [1, N, C] (or [1, C, N] if `transposed`). Other outputs
    have other shapes. With four classes, the names decide. None if there is no such pair.
    """
    axis = 2 if transposed else 1
    arrays = {n: a for n, a in outputs.items() if a.ndim == 3 and len(a) == 1 and a.dtype.kind == "f" and a.size}
    pairs = [
        (box, score)
        for box, boxes in arrays.items()
        for score, scores in arrays.items()
        if box != score and boxes.shape[2] == 4 and scores.shape[axis] == boxes.shape[1]
    ]
    if len(pairs) > 1:
        pairs = [(box, score) for box, score in pairs if is_named(box, "box", "loc", "regress", "dets")]
        pairs = [(box, score) for box, score in pairs if not is_named(score, "box", "loc", "regress", "dets", "anchor")]
    if len(pairs) > 1:
        pairs = [(box, score) for box, score in pairs if is_named(score, "score", "conf", "class", "logit", "label")]
    return pairs[0] if len(pairs) == 1 else None


def is_named(name: str, *parts: str) -> bool:
    """Return whether the name of an output contains one of the parts."""
    return any(part in name.lower() for part in parts)


def are_corners(boxes: Any) -> bool:
    """Return whether boxes [N, 4] can be corners. The corners of a thin box may swap by rounding."""
    boxes = np.asarray(boxes, np.float64)
    # One pixel, in pixels or in shares of a usual size.
    rounding = 1.0 if np.abs(boxes).max(initial=0.0) > 2 else 0.01
    return bool(np.isfinite(boxes).all() and (boxes[:, 2:4] >= boxes[:, :2] - rounding).all())


def are_centred_shares(boxes: Any) -> bool:
    """Return whether boxes [N, 4] can be centre and size in shares of the input's size, as DETR's queries are.

    The sizes of corners would all be larger than the centres.
    """
    boxes = np.asarray(boxes, np.float64)
    inside = bool(boxes.size and boxes.min() >= -0.05 and boxes.max() <= 1.05)
    return inside and not (boxes[:, 2:4] >= boxes[:, :2]).all() and len(boxes) <= _QUERIES


def are_numbers(values: Any) -> bool:
    """Return whether all values are whole numbers from 0, or -1 for rows that fill up."""
    values = np.asarray(values, np.float64)
    return bool(values.size and values.min() >= -1 and (values == np.round(values)).all())


def are_selected(boxes: Any, scores: Any, classes: Any) -> bool:
    """Return whether boxes [N, 4], scores [N] and classes [N] can be objects that the graph has selected."""
    return are_corners(boxes) and are_scores(np.asarray(scores)) and are_numbers(classes)


def list_objects(boxes: Any, scores: Any, classes: Any, parameters: Mapping[str, Any], **optional: Any) -> Objects:
    """Return selected objects, without the rows that fill up (their class is negative).

    Args:
        parameters: those of the head. "offset" is the number of the first class, and "numbers" is "coco" where classes
            are numbered as COCO does it, with gaps.
    """
    numbers = np.asarray(classes, np.float64).reshape(-1)
    # Larger numbers, infinity and NaN differ between processors when they become integers.
    classes = np.where(np.abs(numbers) < _MOST_CLASSES, numbers, -1).astype(np.int64)
    objects = Objects(np.asarray(boxes, np.float64), np.asarray(scores, np.float64).reshape(-1), classes, **optional)
    classes = classes - int(parameters.get("offset", 0))
    if parameters.get("numbers") == "coco":
        present = np.setdiff1d(np.arange(1, _COCO_NUMBERS + 1), _COCO_GAPS)
        places = np.full(_COCO_NUMBERS + 2, -1, np.int64)
        places[present] = np.arange(_COCO_CLASSES)
        classes = places[np.clip(classes + 1, 0, _COCO_NUMBERS + 1)]
    return replace(objects, classes=classes).take(classes >= 0)


def find_numbers(largest: int, classes: Optional[int], offset: int) -> Dict[str, Any]:
    """Return the parameters "offset" and "numbers" of classes that begin at `offset`.

    COCO's numbers exceed its 80 classes. Models that number COCO's classes from 1 keep its gaps.

    Args:
        largest: the largest number that the model gives.
    """
    coco = classes == _COCO_CLASSES and (offset == 1 or largest >= _COCO_CLASSES)
    return {**({"numbers": "coco"} if coco else {}), **({"offset": offset} if offset else {})}


def pick_best_pairs(boxes: Any, scores: Any, parameters: Mapping[str, Any], limit: int = 300) -> Objects:
    """Return the best pairs of query and class, of boxes [Q, 4] and scores [Q, C]. A query may have several classes.
    The objects' coefficients [N, 1] are the numbers of their queries.
    """
    order = np.argsort(-scores, axis=None, kind="stable")[:limit]
    queries, classes = np.divmod(order, scores.shape[1])
    values = scores.reshape(-1)[order]
    return list_objects(boxes[queries], values, classes, parameters, coefficients=queries[:, None].astype(np.float64))
