"""RF-DETR with masks: the queries of `rf_detr`, and the logits of a mask for each query.

    dets [1, Q, 4], labels [1, Q, C + 1], masks [1, Q, h, w]

The output of the masks has a number as its name in files of old versions. Source: roboflow/rf-detr.
"""

from __future__ import annotations

from typing import Any, Optional

import numpy as np

from edgeq_device.answers.families.rf_detr import candidates, find_queries
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.head import Head
from edgeq_device.answers.maps import masks_to_original
from edgeq_device.answers.objects import Objects


def masks(outputs: Outputs, head: Head, objects: Objects, frame: Any) -> Any:
    """Return the masks bool [N, H, W] of the objects in the size of the stored image."""
    queries = np.asarray(objects.coefficients)[:, 0].astype(np.int64)
    values = np.asarray(outputs[head.outputs["masks"]][0][queries], np.float64)
    return masks_to_original(values, objects.boxes, frame)


def fit(view: View) -> Optional[Fit]:
    """Accept dets, labels, and a map for each query."""
    maps = [name for name, array in view.outputs.items() if array.ndim == 4 and len(array) == 1]
    parameters = find_queries(view) if len(view.outputs) == 3 and len(maps) == 1 else None
    if parameters is None or view.outputs[maps[0]].shape[1] != view.outputs["dets"].shape[1]:
        return None
    return Fit({"dets": "dets", "labels": "labels", "masks": maps[0]}, parameters)


FAMILY = Family(
    "rf-detr-seg",
    "segment",
    "dets [1, Q, 4], labels [1, Q, classes + 1] and masks [1, Q, h, w]",
    fit,
    candidates=candidates,
    masks=masks,
    thresholds={"confidence": 0.5, "limit": 300},
)
