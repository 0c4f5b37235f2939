"""YOLO models with masks: boxes, class scores and coefficients in rows, prototypes in a second output.

    rows [1, 4 + C + M, N]: centre x, centre y, width, height, class scores after their sigmoid, M coefficients
    rows [1, N, 6 + M]: left, top, right, bottom, score, class, M coefficients; the graph has selected the objects
    prototypes [1, M, h, w] or [1, h, w, M]

A mask is the sum of the prototypes weighted by the coefficients. It is resized bilinearly to the model's input before
it is compared with 0 (a sigmoid of 0.5) and cut to its box. Source: Ultralytics, utils/ops.py, process_mask;
engine/exporter.py, class NMSModel.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import numpy as np

from edgeq_device.answers.checks import are_scores, single_rows, state_unit, to_pixels
from edgeq_device.answers.families.yolov8 import read_rows
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.head import Head
from edgeq_device.answers.maps import masks_to_original
from edgeq_device.answers.objects import Objects, pick_best_class, to_corners
from edgeq_device.answers.rows import are_selected, drop_batch, list_objects


def candidates(outputs: Outputs, head: Head, size: Tuple[int, int]) -> Objects:
    """Return the best class of each row, with the row's coefficients."""
    name, selected = head.outputs["rows"], head.parameters.get("selected")
    rows = drop_batch(outputs[name], 2) if selected else read_rows(outputs, name)
    count = _read_prototypes(outputs, head).shape[0]
    if rows.shape[1] < 5 + count:
        raise ValueError(f"a row has fewer than {5 + count} columns")
    boxes = to_pixels(rows[:, :4], head.parameters.get("unit", "pixel"), size)
    if selected:
        return list_objects(boxes, rows[:, 4], rows[:, 5], head.parameters, coefficients=rows[:, -count:])
    return pick_best_class(to_corners(boxes), rows[:, 4:-count], coefficients=rows[:, -count:])


def masks(outputs: Outputs, head: Head, objects: Objects, frame: Any) -> Any:
    """Return the masks bool [N, H, W] of the objects in the size of the stored image."""
    prototypes = _read_prototypes(outputs, head)
    values = np.tensordot(np.asarray(objects.coefficients), prototypes, axes=1)
    return masks_to_original(values, objects.boxes, frame)


def _read_prototypes(outputs: Outputs, head: Head) -> Any:
    array = np.asarray(outputs[head.outputs["prototypes"]], np.float64)
    if array.ndim != 4 or len(array) != 1:
        raise ValueError("the prototypes are not [1, M, h, w]")
    return array[0].transpose(2, 0, 1) if head.parameters.get("layout") == "NHWC" else array[0]


def fit(view: View) -> Optional[Fit]:
    """Accept rows of 4 + C + M or 6 + M columns, and prototypes of M channels."""
    rows = single_rows(view.outputs)
    prototypes = [(n, a) for n, a in view.outputs.items() if a.ndim == 4 and len(a) == 1 and a.dtype.kind == "f"]
    if rows is None or len(prototypes) != 1 or len(view.outputs) != 2:
        return None
    (name, array), (prototype_name, prototype) = rows, prototypes[0]
    # A grid has equal sides for square inputs, so the other axis is the channels.
    last = prototype.shape[3] < min(prototype.shape[1:3])
    count = prototype.shape[3] if last else prototype.shape[1]
    layout = {"layout": "NHWC"} if last else {}
    roles = {"rows": name, "prototypes": prototype_name}
    if array.shape[1] == 6 + count and are_selected(array[:, :4], array[:, 4], array[:, 5]):
        return Fit(roles, {**state_unit(array[:, :4]), **layout, "selected": True})
    array = array if len(array) < array.shape[1] else array.T
    if not 5 + count <= len(array) < array.shape[1] or view.classes not in (None, len(array) - 4 - count):
        return None
    if not view.forced and (not are_scores(array[4:-count]) or array[2:4].min() < 0):
        return None
    return Fit(roles, {**state_unit(array[:4].T), **layout})


FAMILY = Family(
    "yolo-seg",
    "segment",
    "rows [1, 4 + classes + M, N] or [1, N, 6 + M], and prototypes [1, M, h, w]",
    fit,
    candidates=candidates,
    masks=masks,
    thresholds={"confidence": 0.25, "iou": 0.7, "limit": 300},
    preprocess="yolo",
)
