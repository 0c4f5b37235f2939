"""YOLOv8 and its kin: one output [1, 4 + classes, N], decoded: centre x, centre y, width, height in pixels of the
model's input, then class scores after their sigmoid. There is no objectness. [1, N, 4 + classes] is taken too; the
longer axis is N.
"""

from __future__ import annotations

from edgeq.measure.boxes import Detections, best_class, centre_to_corners
from edgeq.measure.decoders import Decoder, only_head, wrong_head
from edgeq.measure.latency import Outputs

LAYOUT = "[1, 4 + classes, N]"


def decode(outputs: Outputs, size: tuple[int, int]) -> Detections:
    """Boxes of the decoded output; the score is that of the class."""
    del size
    head = only_head(outputs, "yolov8", LAYOUT)
    rows = head.T if head.shape[0] < head.shape[1] else head
    if rows.shape[1] < 5:
        raise wrong_head(outputs, "yolov8", LAYOUT)
    return best_class(centre_to_corners(rows[:, :4]), rows[:, 4:])


DECODER = Decoder("yolov8", LAYOUT, decode)
