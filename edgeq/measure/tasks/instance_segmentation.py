"""Measure masks: the mean average precision over categories and the overlaps .50:.05:.95."""

from __future__ import annotations

from edgeq.measure.answer_metric import AnswerMetric
from edgeq.measure.object_metric import compare_masks, make_metric
from edgeq.measure.task import TaskKind, TaskOptions

# So many detections of an image count.
_LIMIT = 100


def make_task(options: TaskOptions) -> AnswerMetric:
    """Return the task for the command line's options. The options must include annotations."""
    return make_metric("instance-segmentation", frozenset({"segment"}), compare_masks, _LIMIT, options)


TASK = TaskKind(
    "instance-segmentation",
    "COCO mean average precision of masks",
    make_task,
    frozenset({"annotations", "confidence", "iou"}),
)
