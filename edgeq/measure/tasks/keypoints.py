"""Measure keypoints: the mean average precision over categories and the overlaps .50:.05:.95."""

from __future__ import annotations

from edgeq.measure.answer_metric import AnswerMetric
from edgeq.measure.object_metric import compare_points, make_metric
from edgeq.measure.task import TaskKind, TaskOptions

# So many detections of an image count.
_LIMIT = 20


def make_task(options: TaskOptions) -> AnswerMetric:
    """Return the task for the command line's options. The options must include annotations."""
    return make_metric("keypoints", frozenset({"pose"}), compare_points, _LIMIT, options)


TASK = TaskKind(
    "keypoints",
    "COCO mean average precision of keypoints (OKS)",
    make_task,
    frozenset({"annotations", "confidence", "iou"}),
)
