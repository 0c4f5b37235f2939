"""Record what a search measures of a candidate: the checks of its build, and its accuracy with the uncertainty.

The tuning record contains these values as they are. `edgeq.reporting.tuning_record` reads the few that it draws.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from edgeq.util.records import Count, NullIsInfinite, Share, computed

SCHEMA = "edgeq.tuning/1"
_NINE_OF_TEN = 1.2816  # one-sided 90 % quantile of the normal distribution
_AS_MANY = _NINE_OF_TEN * math.sqrt(2)  # factor for the difference between two equally uncertain sets of samples
_SURE = 1.96  # two-sided 95 % quantile of the normal distribution
Stage = Literal["space", "recovery", "exclusion", "threads"]
Status = Literal["chosen", "qualified", "short", "eliminated"]
Basis = Literal["labels", "answers", "agreement", "noise"]


@dataclass(frozen=True)
class Screening:
    """Record the results of the cheap checks of a candidate that was built.

    Attributes:
        bytes: the size on disk, external data included.
        structure: a hash of the graph without the values of scales and weights. Candidates with the same structure have
            the same speed.
        content: a hash of the file. Candidates with the same content are the same model.
        int8_mac_share: the share of the multiply-accumulates in int8, after the runtime's optimisation.
        wide_share: the share of the activations' elements that are in 16 bits.
        sqnr_db: the SQNR of the worst output against float32 on a few samples; infinity if all outputs are identical.
        build_s: the time of the build in seconds.
    """

    bytes: Count
    structure: str
    content: str
    int8_mac_share: Share
    sqnr_db: NullIsInfinite
    build_s: float = 0.0
    wide_share: Share = 0.0


@dataclass(frozen=True)
class Assessment:
    """Hold the accuracy of a candidate against float32 on the first `samples` of the validation samples.

    Attributes:
        samples: the number of samples. Each row of a gathered batch counts as a sample.
        complete: True if these are all the validation samples.
        basis: "labels" if there are labels. Without labels, it is "answers" if the model is judged by the float
            model's answers; else "noise" in a repair, and "agreement" otherwise.
        drop: with labels or answers, the loss in the task's primary metric. For the other values of `basis`, see
            docs/tune.md.
        low, high: the 95 % confidence interval of `drop`.
        expected: the best estimate of the loss on other samples; equal to `drop` if no better estimate is known.
        doubt: the standard error of `expected`. It is 0 if it is not known or not needed: if there are hardly any
            samples, if outputs are compared by their cosine, or if only the loss on these samples matters.
        metrics: the task's metrics by name; empty without labels.
        disagreement: the share of rows whose top-1 differs from that of float32. The loss of top-1 cannot be larger
            than this share. It is None if the outputs are not class scores.
        sqnr_db, cosine: the figures of the worst output.
    """

    samples: Count
    complete: bool
    basis: Basis
    drop: float
    low: float
    high: float
    expected: float
    doubt: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    disagreement: float | None = None
    sqnr_db: NullIsInfinite = math.inf
    cosine: float = 1.0

    @computed
    def bound(self) -> float:
        """Return the loss that is compared with the allowed loss. With a probability above 90 %, the model's loss over
        many other samples is not larger than this bound. The bound is never less than the loss on these samples.
        """
        return max(self.drop, self.expected + _AS_MANY * self.doubt)

    @computed
    def prediction_bound(self) -> float:
        """Return the limit of the one-sided 90 % prediction interval for the loss on the same number of other samples.
        The interval includes the random variation of those samples.

        The limit is equal to `bound` if only labels are known, or if the uncertainty is unknown. It is larger than
        `bound` if `expected` is more certain than the loss on that many samples can be.
        """
        if not self.doubt:
            return self.bound
        error = (self.high - self.low) / (2 * _SURE)
        return max(self.bound, self.expected + _NINE_OF_TEN * math.hypot(self.doubt, error))

    def least_bound(self, share: float) -> float:
        """Return a value that `bound` on all samples will not fall below, with a certainty of 97.5 %. `share` is the
        share of all samples that this assessment uses.

        Let e be the standard error of the mean over a share s of the samples. The mean over all samples differs from
        that mean by e times sqrt(1 - s). The doubt on all samples is the doubt on the share times sqrt(s).
        """
        moves = math.sqrt(1 - share)
        lowest = self.drop - (self.drop - self.low) * moves if self.high - self.low < 1 else self.low
        shrunk = _AS_MANY * math.sqrt(share) - _SURE * moves
        return max(lowest, self.expected + shrunk * self.doubt) if self.doubt else lowest


@dataclass(frozen=True)
class StageTime:
    """Record the time that one stage took."""

    name: str
    seconds: float
    entered: Count
    left: Count
