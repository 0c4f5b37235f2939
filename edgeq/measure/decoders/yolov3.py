"""YOLOv3 as Darknet has it: raw levels [1, 3 * (5 + classes), H, W], one a stride of 8, 16 and 32, in any order.

Channels are anchor by anchor x, y, w, h, objectness, classes, all before their sigmoid (Redmon and Farhadi, "YOLOv3: An
Incremental Improvement", 2018):

    centre = (cell + sigmoid(xy)) * stride    size = anchor * exp(wh)    score = sigmoid(objectness) * sigmoid(class)

Anchors are those of COCO.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.measure.boxes import Detections, best_class, centre_to_corners
from edgeq.measure.decoders import Decoder, wrong_head
from edgeq.measure.latency import Outputs

LAYOUT = "[1, 3 * (5 + classes), H, W] for strides of 8, 16 and 32"
ANCHORS = {
    8: ((10, 13), (16, 30), (33, 23)),
    16: ((30, 61), (62, 45), (59, 119)),
    32: ((116, 90), (156, 198), (373, 326)),
}
"""Width and height in pixels of the model's input, by stride."""


def decode(outputs: Outputs, size: tuple[int, int]) -> Detections:
    """Boxes of the three raw levels, anchors of COCO."""
    boxes, scores = [], []
    for array in outputs.values():
        stride = size[0] // array.shape[3] if array.ndim == 4 and array.shape[3] else 0
        channels = array.shape[1] if array.ndim == 4 else 0
        fits = stride in ANCHORS and array.shape[0] == 1 and array.shape[2] * stride == size[1]
        if not fits or channels % 3 or channels // 3 < 6:
            raise wrong_head(outputs, "yolov3", LAYOUT)
        head = _level(np.asarray(array[0], np.float64), stride)
        boxes.append(head[:, :4])
        scores.append(head[:, 4:5] * head[:, 5:])
    if not boxes or len({part.shape[1] for part in scores}) != 1:
        raise wrong_head(outputs, "yolov3", LAYOUT)
    return best_class(centre_to_corners(np.concatenate(boxes)), np.concatenate(scores))


def _level(level: NDArray[np.float64], stride: int) -> NDArray[np.float64]:
    """One level [3 * (5 + classes), H, W] as rows of centre, size in pixels, objectness and classes."""
    anchors = np.array(ANCHORS[stride], np.float64)
    height, width = level.shape[1:]
    values: NDArray[Any] = level.reshape(3, -1, height, width).transpose(0, 2, 3, 1).copy()
    rows, columns = np.mgrid[:height, :width]
    with np.errstate(over="ignore"):  # an infinite box is dropped later; an infinite exponent is a probability of 0
        values[..., 2:4] = anchors[:, None, None] * np.exp(values[..., 2:4])
        for place in (slice(0, 2), slice(4, None)):
            values[..., place] = 1 / (1 + np.exp(-values[..., place]))
    values[..., :2] = (values[..., :2] + np.stack([columns, rows], axis=-1)) * stride
    return values.reshape(-1, values.shape[-1])


DECODER = Decoder("yolov3", LAYOUT, decode)
