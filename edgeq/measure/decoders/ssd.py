"""SSD, boxes decoded in the graph: boxes [1, N, 4] as corners x1, y1, x2, y2 normalised to 0..1, and class scores
[1, N, 1 + classes] after softmax, where class 0 is the background and dropped. Which output is which shows in the last
axis; with three classes and background, in the names ("box" or "loc" against the other).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.measure.boxes import Detections, best_class
from edgeq.measure.decoders import Decoder, single_image, wrong_head
from edgeq.measure.latency import Outputs

LAYOUT = "boxes [1, N, 4] and scores [1, N, 1 + classes]"


def decode(outputs: Outputs, size: tuple[int, int]) -> Detections:
    """Boxes scaled to pixels of the input, with the best class but the background."""
    boxes, scores = _boxes_and_scores(outputs)
    corners = np.asarray(boxes, np.float64) * np.tile(size, 2)
    return best_class(corners, scores[:, 1:])


def _boxes_and_scores(outputs: Outputs) -> tuple[NDArray[Any], NDArray[Any]]:
    found = single_image(outputs)
    four = [name for name, array in found.items() if array.shape[1] == 4]
    if len(four) > 1:
        four = [name for name in four if "box" in name.lower() or "loc" in name.lower()]
    if len(found) != 2 or len(four) != 1:
        raise wrong_head(outputs, "ssd", LAYOUT)
    boxes = found.pop(four[0])
    (scores,) = found.values()
    if len(scores) != len(boxes) or scores.shape[1] < 2:
        raise wrong_head(outputs, "ssd", LAYOUT)
    return boxes, scores


DECODER = Decoder("ssd", LAYOUT, decode)
