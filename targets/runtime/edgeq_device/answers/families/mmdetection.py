"""MMDetection exported by MMDeploy: objects that the graph has selected, in pixels of the model's input.

    dets [1, n, 5]: left, top, right, bottom, score; labels [1, n], integers (and masks, which are left out)

Rows that fill up have label -1. Source: open-mmlab/mmdeploy, codebase/mmdet/deploy/object_detection_model.py.
"""

from edgeq_device.answers.selected import make_row_family

TITLE = "rows [1, n, 5]: corners, score; and labels [1, n]"
FAMILY = make_row_family("mmdetection", TITLE, "xyxys", 3, confidence=0.3)
