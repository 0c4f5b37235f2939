"""Measure regression: the coefficient of determination (R²) and the mean absolute error (MAE)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from edgeq_device.answers.answer import Answer

from edgeq.data.sample import Sample
from edgeq.errors import DataError
from edgeq.measure.answer_metric import AnswerMetric, add_up, read_numbers
from edgeq.measure.answer_sums import Sums, compare_numbers, summarize_numbers
from edgeq.measure.task import TaskKind


def read(answer: Answer, sample: Sample) -> Sums:
    """Return the sums of one sample. The label is a number for each value of the answer."""
    numbers = read_numbers(sample)
    size = np.size(answer.vector) if answer.vector is not None else 0
    if size != numbers.size:
        raise DataError(f"{sample.name}: {numbers.size} numbers for {size} values", "Give a number for each value")
    sums = compare_numbers(Answer("regression", vector=numbers), answer)
    if sums["nonfinite"]:
        raise DataError(f"{sample.name}: the model's values are not finite", "Check the model and its preprocessing")
    return sums


def summarize(values: Sequence[Sums]) -> Mapping[str, float]:
    """Return "r2" and "mae"."""
    figures = summarize_numbers(add_up(values))
    if "r2" not in figures:
        raise DataError("all samples have the same label", "R² needs different labels; raise ⟨count⟩")
    return {"r2": figures["r2"], "mae": figures["difference"]}


TASK = TaskKind(
    "regression",
    "R² and mean absolute error",
    lambda options: AnswerMetric("regression", "r2", read, summarize, frozenset({"regression"})),
    frozenset(),
)
