"""Classification: top-1, and top-5 where there are more than five classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from edgeq.data.records import Sample
from edgeq.errors import DataError, UsageError
from edgeq.measure.latency import Outputs
from edgeq.measure.task import TaskKind, TaskOptions, integer_labels, pick_output
from edgeq.util.display import Displayed


@dataclass(frozen=True)
class Classification(Displayed):
    """Class scores [N, classes] (further axes of length 1 allowed), the label an integer per row.

    One score a row is a binary classifier with a sigmoid: class 1 above one half. A row with NaN is never right.

    Attributes:
        class_offset: scores in front of class 0 that are no class (MobileNet's background: 1).
        output: the output with the scores; None where the model has only one.
    """

    classes: ClassVar[bool] = True
    class_offset: int = 0
    output: str | None = None
    name: str = "classification"
    primary: str = "top1"
    higher_is_better: bool = True

    def __post_init__(self) -> None:
        if self.class_offset < 0:
            raise UsageError(f"class offset is {self.class_offset}", "It counts scores to skip: 0 or more")

    def start(self) -> ClassificationMeter:
        """A meter of top-1 and top-5."""
        return ClassificationMeter(self)


def classification(options: TaskOptions) -> Classification:
    """The task of the command line's options."""
    return Classification(class_offset=options.class_offset or 0, output=options.output)


_LEAST_BESIDE = 8
"""Rows with the best class beside the label from which on that is no chance."""


class ClassificationMeter:
    def __init__(self, task: Classification) -> None:
        self._task = task
        self._ranks: list[int] = []
        self._classes = 0
        # Rows whose best class is the one behind the label, or the one before it.
        self._beside = (0, 0)

    def update(self, outputs: Outputs, sample: Sample) -> None:
        """Count the rows whose label is the best, or among the five best, of the scores [rows, classes].

        Raises:
            DataError: scores of another shape, or a label without a score.
            UsageError: the class offset leaves no class.
        """
        labels = integer_labels(sample)
        scores = _scores(pick_output(outputs, self._task.output, sample), len(labels), sample)
        scores = scores[:, self._task.class_offset :]
        if not scores.shape[1]:
            raise UsageError(f"class offset {self._task.class_offset} leaves no class", "Give a smaller --class-offset")
        if scores.shape[1] == 1:
            if scores.dtype.kind != "f":
                raise DataError(f"{sample.name}: one integer score a row", "Where its middle lies is not known")
            scores = np.concatenate([1 - scores, scores], axis=1)
        self._classes = scores.shape[1]
        outside = labels[(labels < 0) | (labels >= self._classes)]
        if outside.size:
            raise DataError(
                f"{sample.name}: label {outside[0]} is not one of the model's {self._classes} classes",
                "Check the labels and --class-offset",
            )
        self._ranks += ranks(scores, labels).tolist()
        best = scores.argmax(axis=1)
        self._add_beside(int((best == labels + 1).sum()), int((best == labels - 1).sum()))

    def collected(self) -> tuple[list[int], int, tuple[int, int]]:
        """Ranks of the rows, how many classes there are, and how many rows have their best class beside the label."""
        return self._ranks, self._classes, self._beside

    def take(self, collected: tuple[list[int], int, tuple[int, int]]) -> None:
        """Add the rows of another meter."""
        ranks, self._classes, beside = collected
        self._ranks += ranks
        self._add_beside(*beside)

    def _add_beside(self, behind: int, before: int) -> None:
        self._beside = self._beside[0] + behind, self._beside[1] + before

    def notes(self) -> tuple[str, ...]:
        """Whether the labels seem to be counted from another number than the model's classes."""
        rows, right = len(self._ranks), sum(rank < 1 for rank in self._ranks)
        fixes = (
            ("plus", f"--class-offset {self._task.class_offset + 1} where the model has a class in front of theirs"),
            ("minus", "count the labels from 0, or give a smaller --class-offset"),
        )
        return tuple(
            f"the best class is the label {sign} 1 in {found} of {rows} rows and the label in {right}: {fix}"
            for found, (sign, fix) in zip(self._beside, fixes, strict=True)
            if self._classes > 2 and found >= _LEAST_BESIDE and found > 4 * right
        )

    def scores(self) -> NDArray[np.float64]:
        """For each row 1 where it is right, else 0."""
        return (np.array(self._ranks) < 1).astype(np.float64)

    def result(self) -> Mapping[str, float]:
        """ "top1" and, with more than five classes, "top5": shares of rows, from 0 to 1."""
        found = np.array(self._ranks)
        metrics = {"top1": float((found < 1).mean())}
        if self._classes > 5:
            metrics["top5"] = float((found < 5).mean())
        return metrics


def ranks(scores: NDArray[Any], labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many classes stand before the right one, [N], of scores [N, C] and labels [N].

    Of equal scores the lower index stands first, as with arg-max. A row with NaN ranks last: C.
    """
    own = scores[np.arange(len(labels)), labels][:, None]
    before = np.arange(scores.shape[1])[None] < labels[:, None]
    rank = ((scores > own) | ((scores == own) & before)).sum(axis=1)
    if scores.dtype.kind == "f":
        rank[np.isnan(scores).any(axis=1)] = scores.shape[1]
    found: NDArray[np.int64] = rank
    return found


def _scores(output: NDArray[Any], rows: int, sample: Sample) -> NDArray[Any]:
    batch = output if output.ndim > 1 else output[None]
    inner = batch.shape[1:]
    if len(batch) != rows or not batch.size or max(inner) != int(np.prod(inner)):
        raise DataError(
            f"{sample.name}: {rows} label(s), but scores of shape {list(output.shape)}",
            "Classification takes [rows, classes]; choose the output with --task-output, or another task",
        )
    return batch.reshape(rows, -1)


TASK = TaskKind(
    "classification",
    "top-1 and top-5 of class scores, or of one sigmoid score",
    classification,
    frozenset({"class_offset", "output"}),
)
