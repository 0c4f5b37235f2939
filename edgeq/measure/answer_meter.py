"""Compare a model's answers with those of the float model, in the terms of the head's task.

| task | primary figure | over |
|---|---|---|
| detect, segment, pose, obb | matched | objects of both models at the head's threshold, over COCO's overlaps |
| semantic | mIoU | classes, the pixels of all samples together |
| text | characters | 1 - character error rate: edits over characters of the float model |
| text-detect | matched | regions of both models |
| voice | frames | frames on the same side of the threshold |

An object at the threshold flips by the least noise, and moves back if the threshold moves. So the counterpart of an
object above the threshold may score down to half the threshold. Objects that only the threshold hides are counted
apart ("below"): the threshold can give them back.

    matched = (float's objects that are found again + the model's objects that float has too) / (objects of both),
              each counted by the share of COCO's overlaps (0.5 to 0.95) that it reaches
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from edgeq_device.answers.answer import Answer
from edgeq_device.answers.head import Head
from edgeq_device.answers.match import match_objects
from numpy.typing import NDArray

from edgeq.measure.answer_sums import COMMON, EITHER, compare_classes
from edgeq.measure.edit_distance import count_edits

FLOOR = 0.5
"""Lowest score of a counterpart, as a share of the threshold."""
_THRESHOLD = 0.5
"""Threshold of answers whose head sets none."""


@dataclass(frozen=True)
class AnswerTally:
    """Hold what one sample adds to the figures.

    Attributes:
        agreeing, total: part → number. The primary figure is the mean over the parts, such as classes, of the sum of
            `agreeing` by the sum of `total`. Parts without a total do not count.
        sums: further figure → (its sum, the number of values); the figure is their ratio.
        scored: scores of the objects, whether float has each of them too, and the number of float's objects.
    """

    agreeing: Mapping[str, float]
    total: Mapping[str, float]
    sums: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    scored: tuple[NDArray[np.float64], NDArray[np.bool_], int] | None = None


Comparison = Callable[[Answer, Answer, float], AnswerTally]
"""Function from the float model's answer, another model's answer and the head's threshold to a tally."""


COCO = tuple(round(0.5 + 0.05 * step, 2) for step in range(10))
"""The overlaps at which COCO counts objects as the same, for its mean average precision."""


def compare_objects(
    reference: Answer, candidate: Answer, threshold: float, overlaps: Sequence[float] = COCO
) -> AnswerTally:
    """Compare objects. Both answers contain objects down to `FLOOR` times the threshold.

    Args:
        overlaps: an object is given again to the extent of the share of these that its overlap reaches. With COCO's, a
            box that lies badly counts less, as in mean average precision.
    """
    mine, its, reached = match_objects(reference, candidate)
    credit = (reached[:, None] >= np.asarray(overlaps) - 1e-9).mean(axis=1)
    asked, given = reference.scores >= threshold, candidate.scores >= threshold
    found, confirmed = int(asked[mine].sum()), int(given[its].sum())
    both = asked[mine]
    bias = candidate.scores[its][both] - reference.scores[mine][both]
    total = int(asked.sum() + given.sum())
    sums = {
        "found": (float(found), float(asked.sum())),
        "extra": (float(given.sum() - confirmed), float(given.sum())),
        "below": (float((~given[its] & both).sum()), float(asked.sum())),
        "overlap": (float(reached[both].sum()), float(found)),
        "score_bias": (float(bias.sum()), float(found)),
    }
    right = np.zeros(len(candidate), np.bool_)
    right[its[both]] = True
    scored = candidate.scores, right, int(asked.sum())
    agreeing = float(credit[both].sum() + credit[given[its]].sum())
    return AnswerTally({"": agreeing}, {"": total}, sums, scored)


def compare_maps(reference: Answer, candidate: Answer, threshold: float) -> AnswerTally:
    """Compare maps of class numbers by the intersection over union of each class."""
    del threshold
    sums = compare_classes(reference, candidate)
    parts = [name.removeprefix(EITHER) for name in sums if name.startswith(EITHER)]
    common, either = ({part: sums[f"{prefix}{part}"] for part in parts} for prefix in (COMMON, EITHER))
    return AnswerTally(common, either, {"pixels": (sums["equal"], sums["pixels"])})


def compare_texts(reference: Answer, candidate: Answer, threshold: float) -> AnswerTally:
    """Compare texts by their characters."""
    del threshold
    mine, its = reference.text or "", candidate.text or ""
    length = max(len(mine), 1)
    agreeing = max(0, length - count_edits(mine, its)) if mine else int(not its)
    return AnswerTally({"": agreeing}, {"": length}, {"exact": (float(mine == its), 1.0)})


def compare_frames(reference: Answer, candidate: Answer, threshold: float) -> AnswerTally:
    """Compare the probabilities of frames by the side of the threshold."""
    r, c = np.asarray(reference.vector, np.float64), np.asarray(candidate.vector, np.float64)
    same = (r >= threshold) == (c >= threshold)
    return AnswerTally({"": float(same.sum())}, {"": float(same.size)})


@dataclass(frozen=True)
class AnswerFigure:
    """Describe how the answers of one task are compared.

    Attributes:
        primary: name of the primary figure.
        compare: the comparison of two answers.
        noun: what is counted, for sentences.
        healthy: share of the float model's answers from which users hardly see a difference.
    """

    primary: str
    compare: Comparison
    noun: str
    healthy: float = 0.95


# A tenth less costs a detector some points of mAP.
_OBJECTS = AnswerFigure("matched", compare_objects, "objects", 0.9)
FIGURES: Mapping[str, AnswerFigure] = {
    **dict.fromkeys(("detect", "segment", "pose", "obb"), _OBJECTS),
    # Thin regions are mostly edge, where classes change by rounding.
    "semantic": AnswerFigure("mIoU", compare_maps, "pixels", 0.97),
    # Of plates of seven characters, one in fourteen is read wrong if one character in a hundred is.
    "text": AnswerFigure("characters", compare_texts, "characters", 0.99),
    # Lines are thin, so their overlap is small where one edge moves by a pixel. ICDAR counts from 0.5 on.
    "text-detect": AnswerFigure("matched", partial(compare_objects, overlaps=COCO[:1]), "regions", 0.9),
    "voice": AnswerFigure("frames", compare_frames, "frames", 0.99),
}
"""Task of a family → the comparison that judges it. Tasks that are absent have no discrete answers: vectors and images
are judged by their noise. So are classes, because few samples say little about rare ones.
"""


HEALTHY: Mapping[str, float] = {figure.primary: figure.healthy for figure in FIGURES.values()}
"""Primary figure → share of the float model's answers from which users hardly see a difference."""


def find_threshold(head: Head) -> float:
    """Return the score from which an answer counts."""
    return head.thresholds.get("confidence", _THRESHOLD)


def lower_threshold(head: Head) -> Head:
    """Return the head that also gives the answers that the threshold hides, down to `FLOOR` times the threshold."""
    if "confidence" not in head.thresholds:
        return head
    return replace(head, thresholds={**head.thresholds, "confidence": FLOOR * head.thresholds["confidence"]})


@dataclass
class AnswerTallies:
    """Hold the tallies of all samples so far."""

    tallies: list[AnswerTally] = field(default_factory=list)

    def figures(self, primary: str) -> dict[str, float]:
        """Return the primary figure, and the further ones."""
        figures = {primary: float(self.primary_over(np.ones((1, len(self.tallies)), bool))[0])}
        for name in dict.fromkeys(name for tally in self.tallies for name in tally.sums):
            entries = [tally.sums.get(name, (0.0, 0.0)) for tally in self.tallies]
            value, count = (sum(column) for column in zip(*entries, strict=True))
            figures[name] = value / count if count else 0.0
        return figures

    def primary_over(self, halves: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the primary figure over each half. `halves` is [H, samples]. Without answers, all agree."""
        parts = list(dict.fromkeys(part for tally in self.tallies for part in tally.total))
        shape = len(self.tallies), len(parts)
        agreeing, total = (
            halves @ np.array([[counts.get(part, 0.0) for part in parts] for counts in column], float).reshape(shape)
            for column in ([t.agreeing for t in self.tallies], [t.total for t in self.tallies])
        )
        ratios = np.divide(agreeing, total, out=np.zeros(agreeing.shape), where=total > 0)
        counted = (total > 0).sum(axis=1)
        result: NDArray[np.float64] = np.where(counted > 0, ratios.sum(axis=1) / np.maximum(counted, 1), 1.0)
        return result

    def sample_figures(self) -> NDArray[np.float64]:
        """Return the primary figure of each sample, [samples]."""
        return self.primary_over(np.eye(len(self.tallies), dtype=bool))
