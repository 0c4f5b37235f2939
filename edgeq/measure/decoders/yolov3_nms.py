"""YOLOv3 of the ONNX model zoo, which suppresses boxes itself: boxes, scores, and which of them to keep.

    boxes [1, N, 4]: top, left, bottom, right
    scores [1, classes, N]
    indices [K, 3] or [1, K, 3]: batch, class, box

The model takes the image's size as a second input and gives boxes of that size. Here it is to be that of the model's
own input, so that boxes are in its pixels (`edgeq.compat.readers.YoloV3DataReader` sees to that).
"""

from __future__ import annotations

import numpy as np

from edgeq.measure.boxes import Detections
from edgeq.measure.decoders import Decoder, wrong_head
from edgeq.measure.latency import Outputs

LAYOUT = "boxes [1, N, 4], scores [1, classes, N] and integers [K, 3]"


def decode(outputs: Outputs, size: tuple[int, int]) -> Detections:
    """The boxes that the model kept."""
    del size
    integers = [array for array in outputs.values() if array.dtype.kind == "i" and array.shape[-1:] == (3,)]
    floats = [array[0] for array in outputs.values() if array.dtype.kind == "f" and array.ndim == 3 and len(array) == 1]
    boxes = next((array for array in floats if array.shape[1] == 4), None)
    scores = next((array for array in floats if array is not boxes), None)
    if len(integers) != 1 or boxes is None or scores is None or scores.shape[1] != len(boxes):
        raise wrong_head(outputs, "yolov3-nms", LAYOUT)
    image, classes, places = integers[0].reshape(-1, 3).astype(np.int64).T
    limits = (1, len(scores), len(boxes))
    if any(((part < 0) | (part >= limit)).any() for part, limit in zip((image, classes, places), limits, strict=True)):
        raise wrong_head(outputs, "yolov3-nms", "indices of its own boxes and classes")
    corners = np.asarray(boxes[places][:, [1, 0, 3, 2]], np.float64)
    return Detections(corners, np.asarray(scores[classes, places], np.float64), classes)


DECODER = Decoder("yolov3-nms", LAYOUT, decode)
