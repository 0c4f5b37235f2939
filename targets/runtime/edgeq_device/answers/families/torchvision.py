"""Detectors of torchvision: objects that the graph has selected, in pixels of the model's input.

    boxes [n, 4]: left, top, right, bottom; labels [n], integers from 1; scores [n] (and masks, which are left out)

n may be 0. COCO's models have labels 1 to 90 with gaps. Source: torchvision, models/detection/generalized_rcnn.py.
"""

from edgeq_device.answers.selected import make_list_family

FAMILY = make_list_family("torchvision", "boxes [n, 4], labels [n] and scores [n]", batch=False, offset=1)
