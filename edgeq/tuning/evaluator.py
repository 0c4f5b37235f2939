"""Define what a search asks of whoever measures: an `CandidateEvaluator` builds, times and assesses candidates.

The search itself measures nothing and only decides, so tests can run it with an evaluator that returns invented
figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from edgeq.measure.structure_timing import StructureTiming
from edgeq.tuning.float_layers import LayerRanking
from edgeq.tuning.measurements import Assessment, Screening
from edgeq.tuning.space import Candidate

# The float model runs with a number of threads as well, so that both are compared at their best.
Runner = tuple[Candidate | None, int]
"""A candidate, or None for float32, and the threads that it runs with."""


@dataclass(frozen=True)
class Race:
    """Hold latencies of runners that were measured together.

    Attributes:
        timings: timings by the names of the runners, with their ratio to `baseline`.
        settled: whether the order of the first places is settled, as in `Ranking.settled`.
        histograms: {"edges_ms": [...], "counts": {name: [...]}}.
    """

    timings: Mapping[str, StructureTiming]
    settled: bool
    histograms: Mapping[str, Any] = field(default_factory=dict)


class CandidateEvaluator(Protocol):
    """Do everything in a search that takes time. Results depend only on the arguments, the model and the data."""

    @property
    def total(self) -> int:
        """Return the number of validation samples."""

    @property
    def counts(self) -> bool:
        """Return whether speed is counted in multiply-accumulates, because the target's kernels do not run here. If so,
        each candidate's speed is known when it is built, and `time` is not called.
        """

    def build(self, candidate: Candidate) -> Screening:
        """Build a candidate and screen it. The screening shows whether it loads, what runs in int8, and how far its
        outputs are from float32's.

        Raises:
            EdgeqError: the candidate cannot be built or does not load.
        """

    def assess(self, candidates: Sequence[Candidate], samples: int) -> dict[str, Assessment]:
        """Measure the accuracy of several candidates on the first `samples` validation samples. Return the assessments
        by name.
        """

    def simulate(self, candidate: Candidate, max_drop: float, seconds: float) -> Assessment | None:
        """Measure the accuracy in a simulator of the target that is too slow for `assess`. Call `assess` on all samples
        first. Return None if there is no such simulator.

        Args:
            max_drop: the allowed loss. Measuring stops when it is clear whether the candidate loses more.
            seconds: time after which no more samples are run; may be infinite.
        """

    def time(self, runners: Mapping[str, Runner], baseline: str, *, tie: float, seconds: float, rough: bool) -> Race:
        """Measure latencies side by side until one of three things happens:

        - The fastest runner is known.
        - No runner is faster than the leader by more than the share `tie`.
        - `seconds` have passed.

        A runner that is certainly slower stops early.

        Args:
            rough: whether the race only decides what to examine next.
        """

    def slow_layers(self, candidate: Candidate, float_threads: int) -> tuple[str, ...]:
        """Return the layers that, according to the profile, take longer in `candidate` than in float32. The worst come
        first.
        """

    def memory(self, candidate: Candidate | None, threads: int) -> int:
        """Return the peak memory of a session in bytes."""

    def recovery_groups(self) -> tuple[tuple[str, ...], ...]:
        """Return names of accuracy recoveries, in groups that are tried together, the cheapest first."""

    def rank(self, candidate: Candidate, *, headroom: float, seconds: float) -> LayerRanking:
        """Rank the layers of `candidate` in the order in which to keep them in float; empty if there is no choice.

        Args:
            headroom: largest cost of interest, as a share of the cost of all layers in float.
            seconds: time after which measuring stops; may be infinite.
        """
