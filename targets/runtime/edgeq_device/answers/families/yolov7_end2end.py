"""YOLOv7 exported with --end2end: objects that the graph has selected.

    rows [k, 7]: batch, left, top, right, bottom, class, score

The class comes before the score. Source: WongKinYiu/yolov7, models/experimental.py, class ONNX_ORT.
"""

from edgeq_device.answers.selected import make_row_family

TITLE = "rows [k, 7]: batch, corners, class, score"
FAMILY = make_row_family("yolov7-end2end", TITLE, "bxyxycs", 2, preprocess="yolo")
