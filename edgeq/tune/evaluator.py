"""What the search asks of the world: build a candidate, measure its accuracy, measure latencies. The search itself only
decides, so it is tested with an evaluator that makes its figures up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from edgeq.tune.candidate import Candidate
from edgeq.tune.record import Assessment, Screening, Timing

FLOAT = "float32"
Runner = tuple[Candidate | None, int]
"""A candidate, or None for float32, and the threads that it runs with."""


@dataclass(frozen=True)
class Race:
    """Latencies of runners that were measured together.

    Attributes:
        timings: by the names that the runners were given, with their ratio to `baseline`.
        order: names, fastest first.
        settled: whether the order of the first places is statistically settled.
        histograms: {"edges_ms": [...], "counts": {name: [...]}}.
    """

    timings: Mapping[str, Timing]
    order: tuple[str, ...]
    settled: bool
    histograms: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "timings": {name: timing.to_dict() for name, timing in self.timings.items()},
            "order": list(self.order),
            "settled": self.settled,
            "histograms": dict(self.histograms),
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Race:
        timings = {name: Timing.from_dict(timing) for name, timing in plain["timings"].items()}
        return cls(timings, tuple(plain["order"]), plain["settled"], plain["histograms"])


@dataclass(frozen=True)
class Exclusion:
    """What a search for layers to keep in float is asked for.

    Attributes:
        loss: builds and measures a candidate.
        max_drop: what it may lose at most.
        headroom: how far it may go from the first candidate's latency towards float32's, 1 being all the way; what goes
            further need not be measured.
        expired: whether to stop looking.
    """

    loss: Callable[[Candidate], float]
    max_drop: float
    headroom: float
    expired: Callable[[], bool]


class Evaluator(Protocol):
    """Everything that takes time. Each method is a function of its arguments, the model and the data."""

    @property
    def total(self) -> int:
        """Validation samples that there are."""

    def screen(self, candidate: Candidate) -> Screening:
        """Build a candidate and look at it: does it load, what runs in int8, how far are its outputs.

        Raises:
            EdgeqError: it cannot be built or does not load.
        """

    def assess(self, candidates: Sequence[Candidate], samples: int) -> dict[str, Assessment]:
        """Accuracy of several candidates on the first `samples` validation samples, by name."""

    def race(
        self,
        runners: Mapping[str, Runner],
        baseline: str,
        *,
        top: int | None,
        tie: float,
        seconds: float,
    ) -> Race:
        """Measure latencies side by side until the order of the first `top` (None: all) is settled, where differences
        below `tie` do not count, or `seconds` are over."""

    def slow_layers(self, candidate: Candidate, float_threads: int) -> tuple[str, ...]:
        """Layers of `candidate` that take longer than float32's, by the runtime's profile, worst first."""

    def memory(self, candidate: Candidate | None, threads: int) -> int:
        """Peak memory of a session, bytes."""

    def recoveries(self) -> tuple[tuple[str, ...], ...]:
        """Names of accuracy recoveries, in groups that are tried together, cheapest first."""

    def exclude(self, candidate: Candidate, wanted: Exclusion) -> None:
        """Ask for the loss of candidates with ever more layers kept in float, until one loses little enough."""
