"""RT-DETR, D-FINE and DEIM as their authors export them: queries that the graph has selected.

    labels [1, Q] integers, boxes [1, Q, 4] left, top, right, bottom, scores [1, Q]

The second input `orig_target_sizes` [1, 2] is the width and height of the stored image, and boxes are in its pixels.
Without that input, boxes are in pixels of the model's input or shares of its size; the ONNX Model Zoo's SSD gives
these. Source: lyuwenyu/RT-DETR, rtdetrv2_pytorch/tools/export_onnx.py.
"""

from edgeq_device.answers.selected import make_list_family

TITLE = "labels [1, Q], boxes [1, Q, 4] and scores [1, Q]"
FAMILY = make_list_family("rtdetr-official", TITLE, batch=True, offset=0)
