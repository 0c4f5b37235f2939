"""YOLOv3 of the ONNX Model Zoo: boxes, scores, and the indices that a NonMaxSuppression in the graph selects.

    boxes [1, N, 4]: top, left, bottom, right
    scores [1, C, N]
    indices [K, 3] or [1, K, 3], integers: batch, class, box

The model has a second input for the size of the image (`image_shape`), and gives boxes in pixels of that image.
Source: onnx/models, yolov3.
"""

from __future__ import annotations

from typing import Optional, Tuple

import numpy as np

from edgeq_device.answers.checks import are_scores
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.head import Head
from edgeq_device.answers.objects import Objects
from edgeq_device.answers.rows import find_pair, find_size_inputs


def candidates(outputs: Outputs, head: Head, size: Tuple[int, int]) -> Objects:
    """Return the boxes at the indices."""
    del size
    boxes, scores = outputs[head.outputs["boxes"]][0], outputs[head.outputs["scores"]][0]
    image, classes, places = outputs[head.outputs["indices"]].reshape(-1, 3).astype(np.int64).T
    limits = (1, len(scores), len(boxes))
    # A negative index would silently count from the end.
    if any(((part < 0) | (part >= limit)).any() for part, limit in zip((image, classes, places), limits)):
        raise ValueError("the indices are not those of its own boxes and classes")
    corners = np.asarray(boxes[places][:, [1, 0, 3, 2]], np.float64)
    return Objects(corners, np.asarray(scores[classes, places], np.float64), classes)


def fit(view: View) -> Optional[Fit]:
    """Accept boxes, scores with the classes first, and integers [K, 3]."""
    indices = [n for n, array in view.outputs.items() if array.dtype.kind == "i" and array.shape[-1:] == (3,)]
    pair = find_pair(view.outputs, transposed=True)
    if len(indices) != 1 or pair is None or len(view.outputs) != 3:
        return None
    scores = view.outputs[pair[1]]
    if view.classes not in (None, scores.shape[1]) or not (view.forced or are_scores(scores)):
        return None
    return Fit({"boxes": pair[0], "scores": pair[1], "indices": indices[0]}, find_size_inputs(view.inputs))


FAMILY = Family(
    "yolov3-nms",
    "detect",
    "boxes [1, N, 4], scores [1, classes, N] and integers [K, 3]",
    fit,
    candidates=candidates,
    thresholds={"confidence": 0.25, "limit": 300},
)
