"""Measure semantic segmentation: the mean IoU over classes, and the share of right pixels.

Pixels with the label 255 do not count. The IoU of a class is taken over all images. Classes that neither the labels nor
the answers contain do not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from edgeq_device.answers.answer import Answer

from edgeq.data.label_maps import read_numbers_map
from edgeq.data.sample import Sample
from edgeq.errors import DataError
from edgeq.measure.answer_metric import AnswerMetric, add_up, describe_shape, read_label
from edgeq.measure.answer_sums import Sums, compare_classes, summarize_classes
from edgeq.measure.task import TaskKind

IGNORED = 255


def read(answer: Answer, sample: Sample) -> Sums:
    """Count the pixels of each class. The label is a map [H, W] of class numbers, or the path of one."""
    label = read_label(sample)
    truth = read_numbers_map(label) if isinstance(label, Path) else np.asarray(label)
    if answer.map is None or np.shape(answer.map) != truth.shape or truth.dtype.kind not in "biu":
        raise DataError(
            f"{sample.name}: the label is {truth.dtype} {list(truth.shape)}, the answer {describe_shape(answer.map)}",
            "Give class numbers in the size of the image",
        )
    usable = truth != IGNORED
    return compare_classes(
        Answer("semantic", map=truth[usable].astype(np.int64)), Answer("semantic", map=answer.map[usable])
    )


def summarize(values: Sequence[Sums]) -> Mapping[str, float]:
    """Return "miou" and "accuracy"."""
    figures = summarize_classes(add_up(values))
    if not figures:
        raise DataError("all pixels have the label 255", "Give labels with class numbers")
    return {"miou": figures["miou"], "accuracy": figures["pixels"]}


TASK = TaskKind(
    "semantic-segmentation",
    "mean IoU over classes, and pixel accuracy",
    lambda options: AnswerMetric("semantic-segmentation", "miou", read, summarize, frozenset({"semantic"})),
    frozenset(),
)
