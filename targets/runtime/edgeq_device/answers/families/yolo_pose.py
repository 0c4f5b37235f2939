"""YOLO models with keypoints: boxes, class scores and keypoints in rows, decoded in the graph.

    rows [1, 4 + C + v K, N]: centre x, centre y, width, height, class scores after their sigmoid, then for each of K
    keypoints x, y and (if v is 3) its visibility after its sigmoid

Boxes and keypoints are in pixels of the model's input; .tflite files give shares of its size. [1, N, columns] is also
read. Source: Ultralytics, nn/modules/head.py, class Pose.
"""

from __future__ import annotations

from typing import Optional, Tuple

from edgeq_device.answers.checks import are_scores, find_unit, single_rows, to_pixels
from edgeq_device.answers.families.yolov8 import read_rows
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.head import Head
from edgeq_device.answers.objects import Objects, pick_best_class, to_corners
from edgeq_device.answers.points import COCO_POINTS, lie_near, read_points


def candidates(outputs: Outputs, head: Head, size: Tuple[int, int]) -> Objects:
    """Return the best class of each row, with the row's keypoints."""
    rows, unit = read_rows(outputs, head.outputs["rows"]), head.parameters.get("unit", "pixel")
    count = int(head.parameters["keypoints"])
    end = rows.shape[1] - count * int(head.parameters.get("values", 3))
    if end < 5 or count < 1:
        raise ValueError(f"{rows.shape[1]} columns are not a box, scores and {count} keypoints")
    points = read_points(rows[:, end:], count, unit, size)
    return pick_best_class(to_corners(to_pixels(rows[:, :4], unit, size)), rows[:, 4:end], keypoints=points)


def fit(view: View) -> Optional[Fit]:
    """Accept one output whose last columns are keypoints near their boxes. Without a stated number of classes or
    keypoints, there is one class.
    """
    only = single_rows(view.outputs)
    if only is None or len(view.outputs) != 1:
        return None
    rows = read_rows(view.outputs, only[0])
    count, values = view.keypoints or (0, 3)
    classes = view.classes or (rows.shape[1] - 4 - count * values if count else 1)
    end = 4 + classes
    count = count or (rows.shape[1] - end) // 3
    if min(count, classes) < 1 or values not in (2, 3) or rows.shape[1] != end + count * values:
        return None
    points = rows[:, end:].reshape(len(rows), count, values)
    if not view.forced:
        visible = values == 2 or are_scores(points[..., 2])
        if len(rows) <= rows.shape[1] or not visible or not are_scores(rows[:, 4:end]) or rows[:, 2:4].min() < 0:
            return None
        if not lie_near(to_corners(rows[:, :4]), rows[:, 4:end].max(axis=1), points):
            return None
    unit = {"unit": "share"} if find_unit(rows[:, :4]) == "share" else {}
    return Fit({"rows": only[0]}, {"keypoints": count, **({"values": 2} if values == 2 else {}), **unit})


FAMILY = Family(
    "yolo-pose",
    "pose",
    "rows [1, 4 + classes + 3 K, N]",
    fit,
    candidates=candidates,
    thresholds={"confidence": 0.25, "iou": 0.7, "limit": 300},
    keypoint_names=COCO_POINTS,
    preprocess="yolo",
)
