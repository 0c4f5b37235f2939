"""Compare a model's answers with those of the float model, in the terms of the head's task.

| task | primary figure | over |
|---|---|---|
| detect, segment, pose, obb | matched | objects of both models at the head's threshold |
| semantic | mIoU | classes, the pixels of all samples together |
| text | characters | 1 - character error rate: edits over characters of the float model |
| text-detect | matched | regions of both models |
| voice | frames | frames on the same side of the threshold |

An object at the threshold flips by the least noise, and moves back if the threshold moves. So the counterpart of an
object above the threshold may score down to half the threshold. Objects that only the threshold hides are counted
apart ("below"): the threshold can give them back.

    matched = (float's objects that are found again + the model's objects that float has too) / (objects of both)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from edgeq_device.answers.answer import Answer
from edgeq_device.answers.head import Head
from edgeq_device.answers.match import match_objects
from numpy.typing import NDArray

FLOOR = 0.5
"""Lowest score of a counterpart, as a share of the threshold."""
_THRESHOLD = 0.5
"""Threshold of answers whose head sets none."""


@dataclass(frozen=True)
class AnswerTally:
    """Hold what one sample adds to the figures.

    Attributes:
        agreeing, total: the primary figure is the mean of sums of `agreeing` over sums of `total`, [K] each. Entries
            without a total do not count.
        sums: further figure → (its sum, the number of values); the figure is their ratio.
        scored: scores of the objects, whether float has each of them too, and the number of float's objects.
    """

    agreeing: NDArray[np.float64]
    total: NDArray[np.float64]
    sums: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    scored: tuple[NDArray[np.float64], NDArray[np.bool_], int] | None = None


Comparison = Callable[[Answer, Answer, float], AnswerTally]
"""Function from the float model's answer, another model's answer and the head's threshold to a tally."""


def compare_objects(reference: Answer, candidate: Answer, threshold: float) -> AnswerTally:
    """Compare objects. Both answers contain objects down to `FLOOR` times the threshold."""
    mine, its, overlaps = match_objects(reference, candidate)
    asked, given = reference.scores >= threshold, candidate.scores >= threshold
    found, confirmed = int(asked[mine].sum()), int(given[its].sum())
    both = asked[mine]
    bias = candidate.scores[its][both] - reference.scores[mine][both]
    total = int(asked.sum() + given.sum())
    sums = {
        "found": (float(found), float(asked.sum())),
        "extra": (float(given.sum() - confirmed), float(given.sum())),
        "below": (float((~given[its] & both).sum()), float(asked.sum())),
        "overlap": (float(overlaps[both].sum()), float(found)),
        "score_bias": (float(bias.sum()), float(found)),
    }
    right = np.zeros(len(candidate), np.bool_)
    right[its[both]] = True
    scored = candidate.scores, right, int(asked.sum())
    return AnswerTally(np.array([found + confirmed], float), np.array([total], float), sums, scored)


def compare_maps(reference: Answer, candidate: Answer, threshold: float) -> AnswerTally:
    """Compare maps of class numbers by the intersection over union of each class."""
    del threshold
    r, c = np.asarray(reference.map).ravel(), np.asarray(candidate.map).ravel()
    if r.shape != c.shape:
        raise ValueError(f"the maps have {r.size} and {c.size} pixels")
    # Numbers below zero mark pixels without a class.
    size = int(max(r.max(initial=0), c.max(initial=0), len(reference.labels) - 1)) + 1
    counts = np.bincount(np.clip(r, 0, None) * size + np.clip(c, 0, None), minlength=size * size).reshape(size, size)
    both = np.diag(counts).astype(np.float64)
    union = counts.sum(0) + counts.sum(1) - np.diag(counts)
    return AnswerTally(both, union.astype(np.float64), {"pixels": (float((r == c).sum()), float(r.size))})


def compare_texts(reference: Answer, candidate: Answer, threshold: float) -> AnswerTally:
    """Compare texts by their characters."""
    del threshold
    mine, its = reference.text or "", candidate.text or ""
    length = max(len(mine), 1)
    agreeing = max(0, length - count_edits(mine, its)) if mine else int(not its)
    return AnswerTally(np.array([float(agreeing)]), np.array([float(length)]), {"exact": (float(mine == its), 1.0)})


def compare_frames(reference: Answer, candidate: Answer, threshold: float) -> AnswerTally:
    """Compare the probabilities of frames by the side of the threshold."""
    r, c = np.asarray(reference.vector, np.float64), np.asarray(candidate.vector, np.float64)
    same = (r >= threshold) == (c >= threshold)
    return AnswerTally(np.array([float(same.sum())]), np.array([float(same.size)]))


def count_edits(reference: str, candidate: str) -> int:
    """Return the Levenshtein distance of two texts: the least number of inserted, removed and replaced characters.

    One row of the table at a time (R. Wagner, M. Fischer: The String-to-String Correction Problem, 1974). Insertions
    along a row are a running minimum, so that a row needs no loop.
    """
    letters = np.array([ord(letter) for letter in candidate], np.int64)
    places = np.arange(len(letters) + 1)
    row = places.copy()
    for number, letter in enumerate(reference, 1):
        replaced = row[:-1] + (letters != ord(letter))
        best = np.concatenate([[number], np.minimum(replaced, row[1:] + 1)])
        row = np.minimum.accumulate(best - places) + places
    return int(row[-1])


@dataclass(frozen=True)
class AnswerFigure:
    """Describe how the answers of one task are compared.

    Attributes:
        primary: name of the primary figure.
        compare: the comparison of two answers.
        noun: what is counted, for sentences.
    """

    primary: str
    compare: Comparison
    noun: str


_OBJECTS = AnswerFigure("matched", compare_objects, "objects")
FIGURES: Mapping[str, AnswerFigure] = {
    **dict.fromkeys(("detect", "segment", "pose", "obb"), _OBJECTS),
    "semantic": AnswerFigure("mIoU", compare_maps, "pixels"),
    "text": AnswerFigure("characters", compare_texts, "characters"),
    "text-detect": replace(_OBJECTS, noun="regions"),
    "voice": AnswerFigure("frames", compare_frames, "frames"),
}
"""Task of a family → the comparison that judges it. Tasks that are absent have no discrete answers: vectors and images
are judged by their noise. So are classes, because few samples say little about rare ones.
"""


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
        width = max((len(tally.total) for tally in self.tallies), default=0)
        agreeing, total = (
            halves @ np.array([np.pad(a, (0, width - len(a))) for a in arrays]).reshape(len(self.tallies), width)
            for arrays in ([t.agreeing for t in self.tallies], [t.total for t in self.tallies])
        )
        ratios = np.divide(agreeing, total, out=np.zeros_like(agreeing), where=total > 0)
        counted = (total > 0).sum(axis=1)
        result: NDArray[np.float64] = np.where(counted > 0, ratios.sum(axis=1) / np.maximum(counted, 1), 1.0)
        return result

    def sample_figures(self) -> NDArray[np.float64]:
        """Return the primary figure of each sample, [samples]."""
        return self.primary_over(np.eye(len(self.tallies), dtype=bool))
