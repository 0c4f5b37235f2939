"""PaddleDetection with suppression inside: objects in pixels of the stored image.

    rows [n, 6]: class, score, left, top, right, bottom; the number of rows [1], integers

Rows that fill up have class -1. The input `scale_factor` [1, 2] is the ratio of the model's input to the stored image
(height, width), and `im_shape` the size of the input. Source: PaddleDetection, deploy/third_engine/onnx/infer.py.
"""

from edgeq_device.answers.selected import make_row_family

TITLE = "rows [n, 6]: class, score, corners; and a count"
FAMILY = make_row_family("paddle-detection", TITLE, "csxyxy", 2, confidence=0.5)
