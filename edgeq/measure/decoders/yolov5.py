"""YOLOv5 and v7: one output [1, N, 5 + classes], decoded: centre x, centre y, width, height in pixels of the model's
input, then objectness and class scores after their sigmoid. Further outputs (the raw levels) are not of this shape.
"""

from __future__ import annotations

from edgeq.measure.boxes import Detections, best_class, centre_to_corners
from edgeq.measure.decoders import Decoder, only_head, wrong_head
from edgeq.measure.latency import Outputs

LAYOUT = "[1, N, 5 + classes]"


def decode(outputs: Outputs, size: tuple[int, int]) -> Detections:
    """Boxes of the decoded output; the score is objectness times class."""
    del size
    head = only_head(outputs, "yolov5", LAYOUT)
    if head.shape[1] < 6:
        raise wrong_head(outputs, "yolov5", LAYOUT)
    return best_class(centre_to_corners(head[:, :4]), head[:, 4:5] * head[:, 5:])


DECODER = Decoder("yolov5", LAYOUT, decode)
