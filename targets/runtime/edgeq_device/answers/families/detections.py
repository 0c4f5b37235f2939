"""YOLOv10, YOLO26 and all exports with suppression inside: objects that the graph has selected.

    rows [1, N, 6]: left, top, right, bottom, score, class

Rows that fill up have low scores or are zero. Source: Ultralytics, nn/modules/head.py (end to end) and
engine/exporter.py, class NMSModel.
"""

from edgeq_device.answers.selected import make_row_family

FAMILY = make_row_family("detections", "rows [1, N, 6]: corners, score, class", "xyxysc", 3, preprocess="yolo")
