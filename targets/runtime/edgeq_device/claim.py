"""What can be claimed of the speed of one model against another's: the one place that decides it.

Everything that prints or records a speed ratio (`edgeq` on a workstation, the runner in a bundle) has it from here, so
that estimate, interval, verdict and milliseconds always come from the same runs.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Dict, Mapping, Optional, Tuple

from edgeq_device.latency import Distribution
from edgeq_device.ranking import Ratio, ratio

FASTER, SLOWER, UNSETTLED, UNKNOWN = "faster", "slower", "unsettled", "unknown"
CONFIDENCE = 0.95
FEWEST_PAIRS = 6
"""An order-statistic interval that covers the median with 95 % needs six values: 1 - 2 / 2**6 is 97 %."""
WIDEST = 1.6
"""Upper over lower end of an interval; a wider one means that the runs do not agree on anything worth a claim."""
BUSY = 0.1
"""Share of the machine's time used or wanted by others, or taken by a virtual machine's host, from which on it counts
as busy."""
BUSY_ALLOWANCE = 1.15
"""By how much the interval is widened, either way, on a busy machine, even where no run was kept from its core: who
works on the other hyperthread, in the shared cache and on the same clock slows float and integer kernels unequally.
Measured on resnet20, a keyword spotter and MobileNet, with one thread and a loop on the other core: up to 10 %."""


@dataclass(frozen=True)
class Claim:
    """How many times faster a model is than a baseline, as far as that can be claimed.

    Attributes:
        estimate: the median of the pairs' ratios (baseline's latency / the model's), one that was observed; None where
            nothing can be claimed.
        low, high: ends of its confidence interval; None with `estimate`.
        confidence: what the interval covers, 0 to 1.
        pairs: how many ratios it rests on.
        baseline_ms, ms: median latencies of the pair that `estimate` is the ratio of; None where there was no pair.
        reason: why nothing can be claimed; "" where something can.
    """

    estimate: Optional[float] = None
    low: Optional[float] = None
    high: Optional[float] = None
    confidence: float = 0.0
    pairs: int = 0
    baseline_ms: Optional[float] = None
    ms: Optional[float] = None
    reason: str = ""

    @property
    def interval(self) -> Optional[Tuple[float, float, float]]:
        """(estimate, low, high); None where nothing can be claimed, whatever the fields of a record claim."""
        if self.reason or self.estimate is None or self.low is None or self.high is None:
            return None
        enough = self.pairs >= FEWEST_PAIRS and self.confidence >= CONFIDENCE
        ordered = 0 < self.low <= self.estimate <= self.high < math.inf
        return (self.estimate, self.low, self.high) if enough and ordered else None

    @property
    def verdict(self) -> str:
        """`FASTER` or `SLOWER` where the whole interval says so, `UNSETTLED` where it includes 1, else `UNKNOWN`."""
        found = self.interval
        if found is None:
            return UNKNOWN
        return FASTER if found[1] > 1 else SLOWER if found[2] < 1 else UNSETTLED

    def sentence(self, model: str, baseline: str) -> str:
        """The claim for people."""
        found = self.interval
        if found is None:
            why = self.reason or f"{self.pairs} pair{'' if self.pairs == 1 else 's'} of runs are too few to be sure"
            return f"{model} against {baseline}: the speed is not measurable here: {why}"
        if self.verdict == UNSETTLED:
            return f"{model} against {baseline}: no difference in speed is settled ({self.figures()})"
        if self.verdict == SLOWER:
            return f"{model} is SLOWER than {baseline}: {found[0]:.2f} times its speed ({self.figures()})"
        return f"{model} runs at {found[0]:.2f} times {baseline}'s speed ({self.figures()})"

    def figures(self) -> str:
        """Interval and milliseconds, such as "1.90 to 2.30; 12.9 → 6.2 ms"; "" where nothing can be claimed."""
        found = self.interval
        if found is None:
            return ""
        spent = ""
        if self.baseline_ms is not None and self.ms is not None:
            spent = f"; {self.baseline_ms:.3g} → {self.ms:.3g} ms"
        return f"{found[1]:.2f} to {found[2]:.2f}{spent}"

    def to_dict(self) -> Dict[str, Any]:
        """All figures and the verdict, under their own names."""
        return {**asdict(self), "verdict": self.verdict}

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> "Claim":
        """The claim that `to_dict` gave."""
        return cls(**{key: record[key] for key in cls.__dataclass_fields__ if key in record})


def claim(baseline: Distribution, model: Distribution) -> Claim:
    """What can be claimed of `model` against `baseline`, which were measured together.

    Only runs that nothing disturbed count, and only rounds (or sessions, see `ranking.ratio`) in which both have such
    runs. No claim is made where those are too few for an interval, or where they contradict each other.
    """
    found = ratio(baseline, model, confidence=CONFIDENCE, by_session=True)
    rests_on = found.confidence, found.pairs, found.a_ms, found.b_ms
    busy = max(baseline.busy, model.busy)
    slack = BUSY_ALLOWANCE if busy > BUSY else 1.0
    low, high = found.low / slack, found.high * slack
    reason = _reason(found, low, high, baseline, model, busy)
    return Claim(None, None, None, *rests_on, reason) if reason else Claim(found.estimate, low, high, *rests_on)


def _reason(found: Ratio, low: float, high: float, baseline: Distribution, model: Distribution, busy: float) -> str:
    """Why nothing can be claimed; "" where something can."""
    disturbed = max(baseline.disturbed_share, model.disturbed_share)
    stolen = max(baseline.stolen, model.stolen)
    taken = {"other processes used or wanted": busy - stolen, "the virtual machine's host took": stolen}
    seen = [f"{who} {share:.0%} of it" for who, share in taken.items() if busy > BUSY and share > BUSY / 2]
    seen += [f"{disturbed:.0%} of the runs were kept waiting for a core"] if disturbed > BUSY else []
    cause = f"the machine was busy ({' and '.join(seen)})" if seen else ""
    if found.pairs < FEWEST_PAIRS or found.confidence < CONFIDENCE:
        few = f"{found.pairs} pair{'' if found.pairs == 1 else 's'} of undisturbed runs, at least {FEWEST_PAIRS} needed"
        return f"{cause}; {few}" if cause else f"{few}: measure longer"
    if not high <= low * WIDEST:
        return f"{cause or 'the runs disagree'}; the ratio lay anywhere from {low:.2f} to {high:.2f}"
    return ""
