"""Measure top-1 of class scores. With more than five classes, also measure top-5."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from edgeq.data.sample import Sample
from edgeq.errors import DataError, UsageError
from edgeq.measure.inference import Outputs
from edgeq.measure.skill import Skill, score_interval
from edgeq.measure.task import TaskKind
from edgeq.measure.task_inputs import pick_output, read_integer_labels
from edgeq.util.display import Displayed
from edgeq.util.numbers import share


@dataclass(frozen=True)
class Classification(Displayed):
    """Compare class scores [N, classes] (further axes of length 1 are allowed) with an integer label for each row.

    A model with one score for each row is a binary classifier with a sigmoid: a score above one half means class 1. A
    row with NaN always counts as wrong.

    Attributes:
        class_offset: number of scores before class 0 that do not belong to a class (MobileNet's background: 1). With
            None, labelled samples decide (`settled`); until then the offset is 0.
        output: the output with the scores; None if the model has only one.
    """

    classes: ClassVar[bool] = True
    class_offset: int | None = None
    output: str | None = None
    name: str = "classification"
    primary: str = "top1"
    higher_is_better: bool = True

    def __post_init__(self) -> None:
        if self.class_offset is not None and self.class_offset < 0:
            raise UsageError(f"class offset is {self.class_offset}", "It counts scores to skip: 0 or more")

    @property
    def offset(self) -> int:
        """Return the number of scores to skip."""
        return self.class_offset or 0

    def settled(self, pairs: Iterable[tuple[Sample, Outputs]]) -> tuple[Classification, str]:
        """Return the task with the class offset that labelled rows show, and a text about the choice ("" for none).

        The offset is 1 if the model has more scores than the labels need, and if the model is correct far more often
        with this offset. Otherwise it is 0.
        """
        if self.class_offset is not None:
            return self, ""
        rows, right = 0, [0, 0]
        for sample, outputs in pairs:
            labels = read_integer_labels(sample)
            scores = _read_class_scores(pick_output(outputs, self.output, sample), len(labels), sample)
            # Without a spare score, there is no class before the labels'.
            if scores.shape[1] < max(3, int(labels.max(initial=0)) + 2):
                return replace(self, class_offset=0), ""
            rows += len(labels)
            for offset in (0, 1):
                right[offset] += int((scores[:, offset:].argmax(axis=1) == labels).sum())
        # Neighbouring classes are often alike, so shifted labels are right now and then.
        if right[1] < _LEAST_BESIDE or right[1] <= 4 * right[0]:
            return replace(self, class_offset=0), ""
        choice = f"class offset 1, with which {right[1]} of {rows} samples are right, and {right[0]} without"
        return replace(self, class_offset=1), f"{choice}; ⟨class_offset⟩ sets another"

    def start(self) -> ClassificationMeter:
        """Return a meter for top-1 and top-5."""
        return ClassificationMeter(self)


def infer_task(sample: Sample, outputs: Outputs) -> Classification | None:
    """Return the task that a sample's label and a model's outputs for the sample suggest. Return None if no task can be
    inferred.

    The task is classification if the labels are class numbers, and if the only float output has one row of class scores
    for each label, with a score for each class number.
    """
    floats = [array for array in outputs.values() if array.dtype.kind == "f"]
    label = np.asarray(sample.label).reshape(-1) if sample.label is not None else np.zeros(0)
    if len(floats) != 1 or label.dtype.kind not in "iu" or not len(label):
        return None
    shape = floats[0].shape
    if len(shape) < 2 or shape[0] != len(label) or shape[1] < 2 or any(size != 1 for size in shape[2:]):
        return None
    # A label without a score belongs to another task, or to another model.
    return Classification() if label.min() >= 0 and label.max() < shape[1] else None


_LEAST_BESIDE = 8
"""If labels shifted by one make at least this many rows correct, edgeq does not attribute this to chance."""
_LEAST_JUDGED = 10
"""Smallest number of rows for which the share of correct answers is compared with that of guesses."""


class ClassificationMeter:
    """Measure top-1 and top-5 of class scores. See `edgeq.measure.task.Meter`."""

    def __init__(self, task: Classification) -> None:
        self._task = task
        self._ranks: list[int] = []
        self._classes = 0
        self._labels: list[int] = []
        self._best: list[int] = []

    def update(self, outputs: Outputs, sample: Sample) -> None:
        """Record the rank of the label for each row of the scores [rows, classes].

        Raises:
            DataError: the scores have another shape, or a label has no score.
            UsageError: the class offset leaves no class.
        """
        labels = read_integer_labels(sample)
        scores = _read_class_scores(pick_output(outputs, self._task.output, sample), len(labels), sample)
        scores = scores[:, self._task.offset :]
        if not scores.shape[1]:
            raise UsageError(f"class offset {self._task.offset} leaves no class", "Give a smaller ⟨class_offset⟩")
        if scores.shape[1] == 1:
            # An integer score is a logit or a share in an unknown scale.
            if scores.dtype.kind != "f":
                raise DataError(
                    f"{sample.name}: one integer score for each row",
                    "Export a float score: integers do not show where one half is",
                )
            # The score and its complement make two classes, whose arg-max changes at one half.
            scores = np.concatenate([1 - scores, scores], axis=1)
        self._classes = scores.shape[1]
        outside = labels[(labels < 0) | (labels >= self._classes)]
        if outside.size:
            raise DataError(
                f"{sample.name}: label {outside[0]} is not one of the model's {self._classes} classes",
                "Check the labels and ⟨class_offset⟩; ⟨classes⟩ FILE gives names their numbers",
            )
        self._ranks += rank_labels(scores, labels).tolist()
        self._labels += labels.tolist()
        self._best += scores.argmax(axis=1).tolist()

    def collected(self) -> tuple[list[int], int, list[int], list[int]]:
        """Return the ranks of the rows' labels, the number of classes, the labels, and the best class of each row."""
        return self._ranks, self._classes, self._labels, self._best

    def take(self, collected: tuple[list[int], int, list[int], list[int]]) -> None:
        """Add the rows of another meter."""
        ranks, self._classes, labels, best = collected
        self._ranks += ranks
        self._labels += labels
        self._best += best

    def notes(self) -> tuple[str, ...]:
        """Return a warning if the labels seem to start at another number than the model's classes.

        Otherwise, return a warning if the model's answers are not better than a guess.
        """
        labels, best = np.array(self._labels, np.int64), np.array(self._best, np.int64)
        rows, right = len(labels), int((np.array(self._ranks) < 1).sum())
        fixes = (
            ("plus", 1, f"⟨class_offset⟩ {self._task.offset + 1} if the model has a class before theirs"),
            ("minus", -1, "count the labels from 0, or give a smaller ⟨class_offset⟩"),
        )
        warnings = tuple(
            f"the best class is the label {sign} 1 in {hits} of {rows} rows and the label in {right}: {fix}"
            for sign, shift, fix in fixes
            if (hits := int((best == labels + shift).sum())) >= _LEAST_BESIDE and hits > 4 * right
        )
        # With two classes, a shifted label is simply the other class.
        if warnings and self._classes > 2:
            return warnings
        skill = self.skill()
        return () if skill is None or skill.better else (skill.doubt,)

    def skill(self) -> Skill | None:
        """Return how top-1 compares with that of guesses. Return None if there are too few rows."""
        rows, right = len(self._labels), int((np.array(self._ranks) < 1).sum())
        if rows < _LEAST_JUDGED:
            return None
        guessed = estimate_chance(np.array(self._labels, np.int64), np.array(self._best, np.int64), self._classes)
        fix = (
            f"The labels have {len(set(self._labels))} classes, the scores {self._classes}; `⟨classes⟩ FILE` "
            "names them (one name per line in the order of the scores), `⟨class_offset⟩` skips some"
        )
        figure = f"top-1 is {share(right / rows)} on {rows} rows"
        return Skill(figure, guessed, *score_interval(right, rows), share(guessed), fix)

    def scores(self) -> NDArray[np.float64]:
        """Return 1 for each row that is correct, else 0."""
        return (np.array(self._ranks) < 1).astype(np.float64)

    def result(self) -> Mapping[str, float]:
        """Return "top1" and, with more than five classes, "top5": shares of rows, from 0 to 1."""
        label_ranks = np.array(self._ranks)
        metrics = {"top1": float((label_ranks < 1).mean())}
        if self._classes > 5:
            metrics["top5"] = float((label_ranks < 5).mean())
        return metrics


def estimate_chance(labels: NDArray[np.int64], best: NDArray[np.int64], classes: int) -> float:
    """Return the share of correct answers that a model would reach by chance.

    Such a model gives each answer as often as the measured model does, but ignores the sample. The share is the
    agreement by chance in Cohen's kappa. If all labels are the same class, the share is 1 / `classes`.
    """
    values, counts = np.unique(labels, return_counts=True)
    # A model that always answers the only class of the labels would have a chance of 1.
    if len(values) < 2:
        return 1 / max(2, classes)
    answered = np.array([(best == value).mean() for value in values])
    return float((counts / len(labels)) @ answered)


def rank_labels(scores: NDArray[Any], labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count, for each row, the classes that rank before the correct one, [N]. `scores` is [N, C] and `labels` is [N].

    Of equal scores, the lower index ranks first, as with arg-max. The label of a row with NaN ranks last: C.
    """
    label_scores = scores[np.arange(len(labels)), labels][:, None]
    precedes = np.arange(scores.shape[1])[None] < labels[:, None]
    rank = ((scores > label_scores) | ((scores == label_scores) & precedes)).sum(axis=1)
    if scores.dtype.kind == "f":
        # Comparisons with NaN are false, so the label would otherwise rank first.
        rank[np.isnan(scores).any(axis=1)] = scores.shape[1]
    label_ranks: NDArray[np.int64] = rank
    return label_ranks


def _read_class_scores(output: NDArray[Any], rows: int, sample: Sample) -> NDArray[Any]:
    batch = output if output.ndim > 1 else output[None]
    inner = batch.shape[1:]
    if len(batch) != rows or not batch.size or max(inner) != int(np.prod(inner)):
        raise DataError(
            f"{sample.name}: {rows} label(s), but scores of shape {list(output.shape)}",
            "Classification takes [rows, classes]; choose the output with ⟨task_output⟩, or another task",
        )
    return batch.reshape(rows, -1)


TASK = TaskKind(
    "classification",
    "top-1 and top-5 of class scores, or of one sigmoid score",
    lambda options: Classification(class_offset=options.class_offset, output=options.output),
    frozenset({"class_offset", "output"}),
)
