"""Measure without labels how far a quantized model gives the answers of the float model: objects, text, classes, maps.

`AnswerMeter` takes the answers of both models for one input after the other. Decode both with `loosen(head)`, so that
the meter also sees the objects just below the threshold:

    meter, loose_head = AnswerMeter(head), loosen(head)
    meter.update(decode(float_outputs, loose_head, frame), decode(outputs, loose_head, frame), sample)
    print(meter.result().sentence)

The primary figures are shares from 0 to 1, or PSNR in dB. The tasks' figures:

    detect, segment, pose, obb, text-detect    matched: share of objects that both models give (see
                         `edgeq.measure.answer_sums.compare_objects`); iou, mask_iou, oks: means of the matched objects;
                         distance: mean distance of keypoints by the square root of the box's area; score_bias,
                         score_rms: mean and root mean square of the candidate's score minus the reference's
    classify, anomaly    same: share of inputs with the same best class; correlation: of anomaly maps, mean over inputs
    multi-label          same: share of the classes given by either model that both give
    text                 exact: share of equal texts; cer: edits of characters by the reference's characters
    semantic             miou: mean IoU over the classes of either model; pixels: share of pixels of the same class
    depth, matting, image    psnr: in dB, of the mean squared error over all inputs in units of the reference's range;
                         difference: mean absolute difference
    voice                same: share of windows on the same side of the threshold
    embedding            cosine: mean over inputs; lowest: the lowest
    regression           r2: coefficient of determination; difference: mean absolute difference
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from edgeq_device.answers.answer import Answer
from edgeq_device.answers.family import Family, load_family
from edgeq_device.answers.head import Head

from edgeq.data.sample import Sample
from edgeq.errors import UsageError
from edgeq.measure.agreement import Closeness
from edgeq.measure.answer_sums import ANSWER_TASKS, OBJECT_TASKS, Limits, Sums
from edgeq.measure.resample import SURE, draw_halves
from edgeq.measure.skill import score_interval
from edgeq.util.display import Displayed
from edgeq.util.records import Count, Finite, computed

# Halves without a figure are left out. With fewer halves, the interval would be a guess.
_FEWEST_HALVES = 8


@dataclass(frozen=True)
class Bound:
    """Hold from which value a figure is healthy, and below which it is poor. For an error rate, both are the other way
    round.
    """

    healthy: float
    poor: float

    def judge(self, value: float) -> Closeness:
        """Return the level of a figure."""
        sign = 1 if self.healthy > self.poor else -1
        if sign * value >= sign * self.healthy:
            return "healthy"
        return "poor" if sign * value < sign * self.poor else "noisy"


# Int8 is healthy if one answer of twenty changes: edgeq's choice, the share that the
# project's own bars ask for. A user cannot overlook it if one of five changes.
_SHARE = Bound(0.95, 0.80)
# The IoU of two boxes is 0.9 if their sides differ by a twentieth. 0.75 is COCO's strict limit of a right box. An OKS
# of 0.95 is the highest threshold of COCO's mean.
_OBJECT = {"matched": _SHARE, "iou": Bound(0.9, 0.75), "mask_iou": Bound(0.9, 0.75), "oks": Bound(0.95, 0.8)}
BOUNDS: Mapping[str, Mapping[str, Bound]] = {
    **dict.fromkeys(sorted(OBJECT_TASKS), _OBJECT),
    "classify": {"same": _SHARE},
    "anomaly": {"same": _SHARE, "correlation": _SHARE},
    "multi-label": {"same": _SHARE},
    # Long lines are seldom equal to the last character, so characters decide. A licence plate of seven characters with
    # a CER of 1 % is exact in 93 % of the cases.
    "text": {"cer": Bound(0.01, 0.05)},
    # Pixels at the edges of regions differ by rounding, and thin regions are mostly edge.
    "semantic": {"miou": Bound(0.9, 0.75)},
    # 30 dB are an error of 3 % of the range, 20 dB of 10 %.
    "depth": {"psnr": Bound(30.0, 20.0)},
    "matting": {"psnr": Bound(30.0, 20.0)},
    # 40 dB are an error of 1 % of white, 30 dB of 3 %, which shows as grain.
    "image": {"psnr": Bound(40.0, 30.0)},
    # Two windows of a hundred: a speech of three seconds may begin or end one or two windows elsewhere.
    "voice": {"same": Bound(0.98, 0.9)},
    # Thresholds of verification lie at cosines of 0.3 to 0.5; 0.99 moves a cosine by at most 0.14, 0.95 by 0.32.
    "embedding": {"cosine": Bound(0.99, 0.95)},
    # Noise of a hundredth and of a tenth of the values' power.
    "regression": {"r2": Bound(0.99, 0.9)},
}
"""Task → figure → bounds of its level. The worst of these figures decides."""
_ORDER: tuple[Closeness, ...] = ("poor", "noisy", "healthy")


@dataclass(frozen=True)
class SampleAgreement:
    """Hold how far the answers for one input agree.

    Attributes:
        name: name of the sample.
        score: the primary figure of this input alone; 1 if there is nothing to compare. For a regression, minus the
            mean absolute difference. A lower score means a larger difference.
        sentence: the input's figures for users.
    """

    name: str
    score: Finite
    sentence: str = ""


@dataclass(frozen=True)
class AnswerAgreement(Displayed):
    """Hold how far a quantized model gives the answers of the float model.

    Attributes:
        task: task of the head's family.
        primary: name of the primary figure.
        value: the primary figure, a share or dB; None if there is nothing to compare, such as no object in any input.
        low, high: its 95 % interval over other inputs; None if the inputs do not show it.
        figures: all figures by name; see the module.
        counts: what was counted, such as matched, missed, extra and borderline objects. "nonfinite" counts values that
            are not finite in the quantized model alone.
        samples: each input with its score, in the order of the inputs.
        unit: "dB" or "".
        sentence: the figures for users.
    """

    task: str
    primary: str
    value: Finite | None
    low: Finite | None = None
    high: Finite | None = None
    figures: Mapping[str, Finite] = field(default_factory=dict)
    counts: Mapping[str, Count] = field(default_factory=dict)
    samples: tuple[SampleAgreement, ...] = ()
    unit: str = ""
    sentence: str = ""

    def __brief__(self) -> Mapping[str, Any]:
        return {"task": self.task, self.primary: self.value, "level": self.level, "sentence": self.sentence}

    @computed
    def level(self) -> Closeness | None:
        """Return "healthy", "noisy" or "poor" by the worst of the figures in `BOUNDS`. Return None if there is nothing
        to judge.
        """
        if self.counts.get("nonfinite"):
            return "poor"
        levels = [bound.judge(self.figures[name]) for name, bound in BOUNDS[self.task].items() if name in self.figures]
        return min(levels, key=_ORDER.index, default=None)

    def most_different(self, limit: int = 8) -> tuple[SampleAgreement, ...]:
        """Return the inputs whose answers differ most, the worst first. Equal scores keep the order of the inputs."""
        return tuple(sorted(self.samples, key=lambda sample: sample.score)[:limit])


def loosen(head: Head, family: Family | None = None) -> Head:
    """Return the head that also gives the objects just below its threshold. For a task without objects, return `head`.

    The objects above the threshold stay the same, because suppression and limits prefer the better score.
    """
    family = family or load_family(head.family)
    limits = _read_limits(head, family)
    if family.task not in OBJECT_TASKS or not limits.margin:
        return head
    return replace(head, thresholds={**head.thresholds, "confidence": limits.confidence - limits.margin})


def _read_limits(head: Head, family: Family) -> Limits:
    thresholds = {**family.thresholds, **head.thresholds}
    return Limits(thresholds.get("confidence", 0.0), thresholds.get("keypoint", Limits.keypoint))


class AnswerMeter:
    """Compare the answers of two models, input by input.

    Args:
        head: the head with the thresholds that users get.
        family: the family of the head, if it is not one of the runner's own.

    Raises:
        UsageError: answers of the family's task cannot be compared.
    """

    def __init__(self, head: Head, family: Family | None = None) -> None:
        family = family or load_family(head.family)
        if family.task not in ANSWER_TASKS:
            raise UsageError(
                f"answers of the task {family.task!r} cannot be compared", f"Use {', '.join(sorted(ANSWER_TASKS))}"
            )
        self._name, self._task, self._limits = family.task, ANSWER_TASKS[family.task], _read_limits(head, family)
        self._samples: list[tuple[str, Sums]] = []

    def update(self, reference: Answer, candidate: Answer, sample: Sample) -> None:
        """Add the answers of both models for one input, decoded with `loosen(head)`.

        Raises:
            DataError: the answers' maps or vectors have different shapes.
        """
        self._samples.append((sample.name, self._task.compare(reference, candidate, self._limits)))

    def collected(self) -> list[tuple[str, Sums]]:
        """Return the name and the sums of each input."""
        return self._samples

    def take(self, collected: Sequence[tuple[str, Sums]]) -> None:
        """Add the inputs of another meter."""
        self._samples += collected

    def result(self) -> AnswerAgreement:
        """Return the figures over all inputs so far."""
        total: Counter[str] = Counter()
        for _, sums in self._samples:
            total.update(sums)
        figures = self._task.summarize(total)
        samples = tuple(SampleAgreement(name, self._score(sums), self._describe(sums)) for name, sums in self._samples)
        if self._task.primary == "cosine" and samples:
            figures["lowest"] = min(sample.score for sample in samples)
        low, high = self._find_interval(total)
        return AnswerAgreement(
            self._name,
            self._task.primary,
            figures.get(self._task.primary),
            low,
            high,
            figures,
            {name: int(total[name]) for name in _COUNTS if name in total},
            samples,
            self._task.unit,
            self._describe(total),
        )

    def _describe(self, sums: Mapping[str, float]) -> str:
        figures = self._task.summarize(sums)
        if not sums or (not figures and not sums.get("nonfinite")):
            return "the answers contain nothing to compare"
        strange = int(sums.get("nonfinite", 0))
        text = self._task.describe(sums, figures)
        return f"{text}; {strange} values are not finite" if strange else text

    def _score(self, sums: Sums) -> float:
        if self._name == "regression":
            return -self._task.summarize(sums).get("difference", 0.0)
        return self._task.summarize(sums).get(self._task.primary, 0.0 if sums.get("nonfinite") else 1.0)

    def _find_interval(self, total: Mapping[str, float]) -> tuple[float | None, float | None]:
        """Return the 95 % interval of the primary figure.

        Inputs are drawn again (`edgeq.measure.resample`), because objects of one image are not independent. If all
        inputs agree, drawing shows no spread. So a share is at least as uncertain as a share of independent events.
        """
        value = self._task.summarize(total).get(self._task.primary)
        if value is None:
            return None, None
        ends: list[float] = []
        if self._task.share:
            numerator, denominator = self._task.share
            ends += score_interval(total[numerator], int(total[denominator]))
        names = sorted(total)
        table = np.array([[sums.get(name, 0.0) for name in names] for _, sums in self._samples])
        halves = draw_halves(len(table)).astype(np.float64) @ table
        drawn = [self._task.summarize(dict(zip(names, row, strict=True))).get(self._task.primary) for row in halves]
        finite = [figure for figure in drawn if figure is not None and math.isfinite(figure)]
        if len(table) > 1 and len(finite) >= _FEWEST_HALVES:
            reach = SURE * float(np.std(finite, ddof=1))
            ends += [value - reach, value + reach]
        if not ends:
            return None, None
        low, high = min(ends), max(ends)
        return (low, high) if self._task.unit else (max(low, -1.0), min(high, 1.0))


_COUNTS = (
    *("matched", "missed", "extra", "borderline", "dimmed", "objects", "same", "answers", "labels", "exact", "texts"),
    *("edits", "characters", "pixels", "maps", "windows", "vectors", "values", "nonfinite"),
)
"""Sums that are counts, and that a record shows."""
