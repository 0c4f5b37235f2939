"""Find what a detector finds at its threshold, in float and in int8, and the threshold that gives float's recall back.

Mean average precision hides what users feel: they run at one threshold, and int8 lowers scores more than it moves
boxes. At a threshold of 0.25, a model may find a tenth fewer objects although its average precision is almost float's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.util.display import Displayed
from edgeq.util.records import Count, Share, computed

# With fewer objects, a half says too little about the other half.
_ENOUGH = 200
# Smaller differences of a recall or a threshold are not worth a sentence.
_HALF_POINT = 0.005


@dataclass(frozen=True)
class ScoredObjects:
    """Hold what one model gives for some samples.

    Attributes:
        scores: the score of each object that the model gives, float64 [n].
        right: whether each of these objects is a true one, bool [n].
        samples: the number of the sample of each object, int64 [n], from 0.
        objects: the number of true objects in each sample, int64 [samples].
    """

    scores: NDArray[np.float64]
    right: NDArray[np.bool_]
    samples: NDArray[np.int64]
    objects: NDArray[np.int64]

    @classmethod
    def join(cls, parts: Sequence[tuple[Any, Any, int]]) -> ScoredObjects:
        """Return the objects of all samples, each given as scores, right and the number of true objects."""
        counts = [len(scores) for scores, _, _ in parts]
        return cls(
            np.concatenate([np.asarray(scores, np.float64) for scores, _, _ in parts] or [np.zeros(0)]),
            np.concatenate([np.asarray(right, np.bool_) for _, right, _ in parts] or [np.zeros(0, np.bool_)]),
            np.repeat(np.arange(len(parts)), counts),
            np.array([objects for _, _, objects in parts], np.int64),
        )

    def part(self, chosen: NDArray[np.bool_]) -> ScoredObjects:
        """Return the objects of some samples, for which `chosen` [samples] is true."""
        inside = chosen[self.samples]
        return ScoredObjects(
            self.scores[inside], self.right[inside], self.samples[inside], np.where(chosen, self.objects, 0)
        )

    def recall(self, threshold: float) -> float:
        """Return the share of true objects that are given at a threshold; 0 if there are none."""
        return int((self.right & (self.scores >= threshold)).sum()) / max(1, int(self.objects.sum()))

    def precision(self, threshold: float) -> float:
        """Return the share of given objects that are true; 1 if none is given."""
        given = self.scores >= threshold
        return int((self.right & given).sum()) / int(given.sum()) if given.any() else 1.0


@dataclass(frozen=True)
class OperatingPoint(Displayed):
    """Hold recall and precision at a threshold, and the threshold that gives float's recall back.

    Attributes:
        threshold: the score from which an object counts.
        objects: number of true objects.
        float_recall, float_precision: figures of the float model at the threshold.
        recall, precision: figures of the model at the threshold.
        lowered: the model's threshold with the float model's recall, or without labels, with as many objects as the
            float model gives; None if no threshold reaches it.
        lowered_recall, lowered_precision: figures at `lowered`.
        halved: whether `lowered` was chosen on half of the samples, and its figures are those of the other half.
        labelled: whether the true objects are those of labels. Otherwise, they are the float model's own.
    """

    threshold: Share
    objects: Count
    float_recall: Share
    float_precision: Share
    recall: Share
    precision: Share
    lowered: Share | None
    lowered_recall: Share | None
    lowered_precision: Share | None
    halved: bool
    labelled: bool = True

    @computed
    def sentence(self) -> str:
        """Return a sentence for users; "" if the model finds as much as the float model."""
        # A threshold helps only if it is lower.
        if self.recall >= self.float_recall - _HALF_POINT or (self.lowered or 0.0) > self.threshold - _HALF_POINT:
            return ""
        lost = (
            f"at the threshold of {self.threshold:g}, int8 finds {self.recall:.1%} of the objects"
            f"{'' if self.labelled else ' of float32'} (float32 {self.float_recall:.1%})"
        )
        if self.lowered is None or self.lowered_recall is None or self.lowered_precision is None:
            return f"{lost}; no threshold gives them back"
        chosen = "chosen on one half of the samples, told on the other" if self.halved else "chosen on these samples"
        return (
            f"{lost}; {self.lowered:.3g} gives {self.lowered_recall:.1%}, with a precision of "
            f"{self.lowered_precision:.1%} (float32 {self.float_precision:.1%}; {chosen}): ⟨threshold⟩ float-recall "
            "records it"
        )


def find_operating_point(
    reference: ScoredObjects, candidate: ScoredObjects, threshold: float, *, labelled: bool = True
) -> OperatingPoint:
    """Return the operating point of a model against the float model, over the same samples.

    With `_ENOUGH` objects or more, the lowered threshold is chosen on the samples with even numbers, and its figures
    are those of the odd ones. Otherwise all samples serve for both.
    """
    even = np.arange(len(candidate.objects)) % 2 == 0
    halved = int(candidate.objects.sum()) >= _ENOUGH
    chosen, told = (even, ~even) if halved else (np.ones_like(even), np.ones_like(even))
    if labelled:
        goal = reference.part(chosen).recall(threshold)
        lowered = _find_threshold(candidate.part(chosen), goal, threshold)
    else:
        count = int(candidate.part(chosen).objects.sum())
        scores = np.sort(candidate.part(chosen).scores)[::-1]
        lowered = min(threshold, float(scores[count - 1])) if 0 < count <= len(scores) else None
    rest = candidate.part(told)
    return OperatingPoint(
        threshold=threshold,
        objects=int(candidate.objects.sum()),
        float_recall=reference.recall(threshold),
        float_precision=reference.precision(threshold),
        recall=candidate.recall(threshold),
        precision=candidate.precision(threshold),
        lowered=lowered,
        lowered_recall=rest.recall(lowered) if lowered is not None else None,
        lowered_precision=rest.precision(lowered) if lowered is not None else None,
        halved=halved,
        labelled=labelled,
    )


def _find_threshold(objects: ScoredObjects, goal: float, threshold: float) -> float | None:
    """Return the highest threshold, at most `threshold`, whose recall is at least `goal`; None if there is none."""
    if objects.recall(threshold) >= goal:
        return threshold
    hits = np.sort(objects.scores[objects.right])[::-1]
    # The recall after the n-th true object is n over the number of objects. Rounding must not ask for one more.
    needed = int(np.ceil(goal * max(1, int(objects.objects.sum())) - 1e-9))
    return float(hits[needed - 1]) if 0 < needed <= len(hits) else None
