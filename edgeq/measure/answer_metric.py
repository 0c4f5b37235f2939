"""Define tasks that measure a model's answers against labels. The model's head decodes its outputs to answers."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from edgeq_device.answers.answer import Answer
from edgeq_device.answers.decode import decode
from edgeq_device.answers.family import load_family
from edgeq_device.answers.head import Head
from numpy.typing import NDArray

from edgeq.data.images import find_frame
from edgeq.data.sample import Sample
from edgeq.errors import DataError, UsageError
from edgeq.measure.inference import Outputs
from edgeq.measure.task import Task
from edgeq.util.display import Displayed

T = TypeVar("T", bound=Task)


@dataclass(frozen=True)
class AnswerMetric(Displayed):
    """Measure answers against labels. A task in `edgeq.measure.tasks` is such a value with two functions.

    Attributes:
        name: name of the task on the command line.
        primary: name of the primary metric.
        read: function from the answer for a sample, and the sample with its label, to what the metrics need of them.
        summarize: function from these values of several samples to metrics. It raises DataError if the primary metric
            is undefined for them.
        answers: tasks of the heads whose answers the metric can read.
        head: the model's head. Without it, nothing can be measured (`with_head`).
        thresholds: thresholds of the head that the metric replaces.
        finish: a function like `summarize` that is called once, over all samples. None stands for `summarize`.
    """

    name: str
    primary: str
    read: Callable[[Answer, Sample], Any]
    summarize: Callable[[Sequence[Any]], Mapping[str, float]]
    answers: frozenset[str]
    higher_is_better: bool = True
    head: Head | None = None
    thresholds: Mapping[str, float] = field(default_factory=dict)
    finish: Callable[[Sequence[Any]], Mapping[str, float]] | None = None

    def start(self) -> AnswerMetricMeter:
        """Return a meter.

        Raises:
            UsageError: the model's head is not known, or gives answers of another kind.
        """
        if self.head is None:
            raise UsageError(f"the task {self.name} needs the model's head", "Name it with ⟨head⟩")
        return AnswerMetricMeter(self, self.head)


def with_head(task: T, head: Head | None) -> T:
    """Return the task with the model's head, if it reads answers and has no head yet. Return other tasks unchanged."""
    if not isinstance(task, AnswerMetric) or task.head is not None or head is None:
        return task
    return dataclasses.replace(task, head=head)


class AnswerMetricMeter:
    """Measure the answers of one model. See `edgeq.measure.task.Meter`."""

    def __init__(self, task: AnswerMetric, head: Head) -> None:
        family = load_family(head.family)
        if family.task not in task.answers:
            raise UsageError(
                f"the task {task.name} does not read the answers of the head {head.family} ({family.task})",
                "Choose another ⟨task⟩ or ⟨head⟩",
            )
        self._task, self._family = task, family
        self._head = dataclasses.replace(head, thresholds={**head.thresholds, **task.thresholds})
        self._values: list[Any] = []

    def update(self, outputs: Outputs, sample: Sample) -> None:
        """Add the outputs for one sample.

        Raises:
            DataError: the outputs do not fit the head, or the label does not fit the task.
        """
        answer = decode(outputs, self._head, find_frame(sample.context), self._family)
        self._values.append(self._task.read(answer, sample))

    def collected(self) -> list[Any]:
        """Return what the metrics need of each sample."""
        return self._values

    def take(self, collected: Sequence[Any]) -> None:
        """Add the samples of another meter."""
        self._values += collected

    def result(self) -> Mapping[str, float]:
        """Return the metrics over all samples so far."""
        return (self._task.finish or self._task.summarize)(self._values)

    def resampled(self, halves: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the primary metric over each half. `halves` is [H, samples]."""
        return np.array([self._value([self._values[i] for i in np.flatnonzero(half)]) for half in halves])

    def _value(self, values: Sequence[Any]) -> float:
        try:
            return self._task.summarize(values)[self._task.primary] if values else math.nan
        except DataError:
            return math.nan


def add_up(values: Iterable[Mapping[str, float]]) -> Counter[str]:
    """Return the sums of several samples."""
    total: Counter[str] = Counter()
    for sums in values:
        total.update(sums)
    return total


def read_label(sample: Sample) -> Any:
    """Return the sample's label.

    Raises:
        DataError: the sample has none.
    """
    if sample.label is None:
        raise DataError(f"{sample.name} has no label", "Give ⟨labels⟩, or compare with a ⟨reference⟩ model instead")
    return sample.label


def read_numbers(sample: Sample) -> NDArray[np.float64]:
    """Return a label of numbers, [N]. Text may list them, separated by spaces, commas or semicolons.

    Raises:
        DataError: the label contains something else, or a number that is not finite.
    """
    label = read_label(sample)
    if isinstance(label, str):
        label = label.replace(",", " ").replace(";", " ").split()
    try:
        numbers = np.asarray(label, np.float64).reshape(-1)
    except (ValueError, TypeError):
        numbers = np.array([math.nan])
    if not np.isfinite(numbers).all():
        raise DataError(f"{sample.name}: label {sample.label!r} does not consist of numbers", "Correct the label")
    return numbers


def describe_shape(array: Any) -> str:
    """Return the shape of an answer's array, or "none", for messages."""
    return "none" if array is None else str(list(np.shape(array)))
