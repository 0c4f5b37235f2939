"""Measure recall and precision at the threshold that users run with, and find the threshold that gives float's recall.

Quantization lowers scores more than it moves boxes, so a quantized model finds less at the float model's threshold. A
lower threshold finds it again, at the price of more false ones.

A threshold that is chosen and judged on the same events flatters itself. With at least 200 positives, it is chosen on
every second sample and judged on the others; with fewer, both use all of them, and `held_out` says so. An event is one
detection, one window or one row; it counts above the threshold, as in heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeq.errors import DataError
from edgeq.measure.average_precision import Matches
from edgeq.util.display import Displayed
from edgeq.util.records import Count, Share

# Half of fewer positives would leave a standard error of recall above 5 points.
_ENOUGH = 200


@dataclass(frozen=True)
class ScoredEvents:
    """Hold the events of one sample.

    Attributes:
        scores: score of each event, [N].
        right: whether each event is right, [N]: a detection that took an object, or a row with the label 1.
        positives: number of objects or positive rows, including those without an event.
    """

    scores: NDArray[np.float64]
    right: NDArray[np.bool_]
    positives: int


def list_events(image: Mapping[int, Matches]) -> ScoredEvents:
    """Return the detections of one image as events. A detection is right if it took an object by an overlap of 0.5."""
    # Detections of crowds count neither as right nor as wrong.
    usable = [~match.ignored[0] for match in image.values()]
    scores = [match.scores[mask] for match, mask in zip(image.values(), usable, strict=True)]
    right = [match.right[0][mask] for match, mask in zip(image.values(), usable, strict=True)]
    return ScoredEvents(
        np.concatenate([np.zeros(0), *scores]),
        np.concatenate([np.zeros(0, bool), *right]),
        sum(match.objects for match in image.values()),
    )


@dataclass(frozen=True)
class OperatingFigures:
    """Hold recall and precision at one threshold. The precision is 1 if nothing scores above it."""

    threshold: float
    recall: Share
    precision: Share


@dataclass(frozen=True)
class OperatingPoint(Displayed):
    """Hold the figures of both models at one threshold, and of the quantized model at the one with float's recall.

    Attributes:
        reference, candidate: both models at the head's threshold, on the samples that judge.
        restored: the quantized model at the threshold that gives float's recall; None if no threshold does.
        positives: number of objects or positive rows that judge.
        held_out: whether the threshold was chosen on other samples.
    """

    reference: OperatingFigures
    candidate: OperatingFigures
    restored: OperatingFigures | None
    positives: Count
    held_out: bool

    @property
    def sentence(self) -> str:
        """Return the figures for users."""
        r, c, restored = self.reference, self.candidate, self.restored
        text = (
            f"at {r.threshold:.3g}, float has recall {r.recall:.3f} and precision {r.precision:.3f}, the quantized "
            f"model {c.recall:.3f} and {c.precision:.3f}"
        )
        if restored is None:
            return f"{text}; no threshold gives float's recall"
        origin = "chosen on other samples" if self.held_out else "chosen on the same samples, because they are few"
        return (
            f"{text}; {restored.threshold:.3g} gives {restored.recall:.3f} and {restored.precision:.3f} ({origin}, "
            f"{self.positives} positives)"
        )


def find_operating_point(
    reference: Sequence[ScoredEvents], candidate: Sequence[ScoredEvents], threshold: float
) -> OperatingPoint:
    """Return the operating point of two models over the same samples, at the head's threshold.

    Raises:
        DataError: the samples have no positive.
    """
    positives = sum(events.positives for events in reference)
    if not positives:
        raise DataError("the samples have no object or positive row", "Raise ⟨count⟩")
    halves = [slice(0, None, 2), slice(1, None, 2)]
    split = positives >= _ENOUGH and all(sum(e.positives for e in reference[half]) for half in halves)
    choosing, judging = halves if split else [slice(None), slice(None)]
    target = measure_at(reference[choosing], threshold).recall
    restored = find_threshold(candidate[choosing], target)
    return OperatingPoint(
        measure_at(reference[judging], threshold),
        measure_at(candidate[judging], threshold),
        measure_at(candidate[judging], restored) if restored is not None else None,
        sum(events.positives for events in reference[judging]),
        split,
    )


def measure_at(samples: Sequence[ScoredEvents], threshold: float) -> OperatingFigures:
    """Return recall and precision over samples at one threshold. There is at least one positive."""
    above = [events.right[events.scores > threshold] for events in samples]
    right, total = sum(int(flags.sum()) for flags in above), sum(map(len, above))
    positives = sum(events.positives for events in samples)
    return OperatingFigures(threshold, right / positives, right / total if total else 1.0)


def find_threshold(samples: Sequence[ScoredEvents], recall: float) -> float | None:
    """Return the highest threshold at which the recall is at least `recall`, or None if there is none.

    The threshold lies in the middle between the score that must be above it and the next lower one.
    """
    scores = np.concatenate([events.scores for events in samples])
    right = np.concatenate([events.right for events in samples])
    required = math.ceil(recall * sum(events.positives for events in samples) - 1e-9)
    ranked = np.sort(scores[right])[::-1]
    if required > len(ranked):
        return None
    if required <= 0:
        return 1.0
    least = float(ranked[required - 1])
    lower = scores[scores < least]
    return (least + float(lower.max())) / 2 if len(lower) else least / 2
