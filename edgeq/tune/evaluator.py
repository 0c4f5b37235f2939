"""What the search measures with: build a candidate, assess its accuracy, time it. The search itself only decides, so
that it can be tested with an evaluator whose figures are made up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from edgeq.report.tuning_record import Assessment, Screening, Timing
from edgeq.tune.float_layers import Ranking
from edgeq.tune.space import Candidate

FLOAT = "float32"
Runner = tuple[Candidate | None, int]
"""A candidate, or None for float32, and the threads that it runs with."""


@dataclass(frozen=True)
class Race:
    """Latencies of runners that were measured together.

    Attributes:
        timings: by the names that the runners were given, with their ratio to `baseline`.
        settled: whether the order of the first places is settled, as `Ranking.settled` has it.
        histograms: {"edges_ms": [...], "counts": {name: [...]}}.
    """

    timings: Mapping[str, Timing]
    settled: bool
    histograms: Mapping[str, Any] = field(default_factory=dict)


class Evaluator(Protocol):
    """All that takes time. Each method is a function of its arguments, the model and the data."""

    @property
    def total(self) -> int:
        """Number of validation samples."""

    @property
    def counts(self) -> bool:
        """Whether its clock counts multiply-accumulates: the target's kernels do not run here. Each candidate's speed
        is known when it is built then, and `time` is not called."""

    def build(self, candidate: Candidate) -> Screening:
        """Build a candidate and look at it: does it load, what runs in int8, how far are its outputs.

        Raises:
            EdgeqError: it cannot be built or does not load.
        """

    def assess(self, candidates: Sequence[Candidate], samples: int) -> dict[str, Assessment]:
        """Measure the accuracy of several candidates on the first `samples` validation samples, by name."""

    def simulate(self, candidate: Candidate, max_drop: float, seconds: float) -> Assessment | None:
        """Measure the accuracy in a simulator of the target, too slow for `assess`, which has measured all samples
        without it. None where there is no such simulator.

        Args:
            max_drop: loss that is allowed: no more samples are run than it takes to know.
            seconds: when there is no time for more samples; may be infinite.
        """

    def time(self, runners: Mapping[str, Runner], baseline: str, *, tie: float, seconds: float, rough: bool) -> Race:
        """Measure latencies side by side until it is settled which is the fastest, or that what leads takes at most
        the share `tie` longer than any other, or `seconds` are over. What is settled to be slower is not run further.

        Args:
            rough: whether the race decides only what is looked at next.
        """

    def slow_layers(self, candidate: Candidate, float_threads: int) -> tuple[str, ...]:
        """Return the layers of `candidate` that take longer than float32's, by the runtime's profile, worst first."""

    def memory(self, candidate: Candidate | None, threads: int) -> int:
        """Return the peak memory of a session, bytes."""

    def recovery_groups(self) -> tuple[tuple[str, ...], ...]:
        """Return names of accuracy recoveries, in groups that are tried together, cheapest first."""

    def rank(self, candidate: Candidate, *, headroom: float, seconds: float) -> Ranking:
        """Rank the layers of `candidate` in the order in which to keep them in float; empty where there is no choice.

        Args:
            headroom: largest cost that is of interest, as a share of the cost of all layers in float.
            seconds: after which measuring is cut short; may be infinite.
        """
