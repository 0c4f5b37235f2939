"""Define an evaluator with made-up figures, so that tests can check each decision of the search."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from edgeq_device.measure.claim import Claim

from edgeq.errors import EdgeqError, EngineError, ModelError
from edgeq.hardware.profile import Profile
from edgeq.measure.structure_timing import StructureTiming
from edgeq.scheme import Scheme
from edgeq.tuning.evaluator import Race, Runner
from edgeq.tuning.float_layers import LayerRanking, MacCosts, RankedLayer
from edgeq.tuning.measurements import Assessment, Screening
from edgeq.tuning.space import Candidate
from edgeq.tuning.trials import FLOAT


@dataclass(frozen=True)
class Fact:
    """State the facts about a candidate.

    `speed` is relative to float32. `loss` is measured on all samples, `early` on the first ones."""

    speed: float = 2.0
    loss: float = 0.0
    early: float | None = None
    sqnr_db: float = 30.0
    structure: str = ""
    content: str = ""
    share: float = 1.0
    bytes: int = 100
    error: str = ""
    width: float = 0.001
    doubt: float = 0.0
    wide: float = 0.0


@dataclass
class FakeEvaluator:
    """Evaluate candidates by `facts`, a Fact for each name or beginning of names; the longest key counts.

    Attributes:
        ranked: the layers in the order in which to keep them in float.
        timed: False for hardware without a clock here.
        thread_gain: factor on the median latency, by number of threads.
        tails: mean latency divided by the median, by number of threads.
        busy: reason why no speed can be claimed; "" if it can.
        reach: half the width of a claimed interval, as a fraction of the speed.
        simulated: losses in a simulator, with names as in `facts`; a negative loss is a crash.
        cut_short: names that are simulated on only a third of the samples.
    """

    facts: Mapping[str, Fact]
    total: int = 400
    methods: tuple[str, ...] = ()
    ranked: tuple[str, ...] = ()
    timed: bool = True
    costly: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()
    float_ms: float = 10.0
    thread_gain: Mapping[int, float] = field(default_factory=dict)
    tails: Mapping[int, float] = field(default_factory=dict)
    busy: str = ""
    reach: float = 0.01
    simulated: Mapping[str, float] = field(default_factory=dict)
    cut_short: tuple[str, ...] = ()
    raised: Literal["exclude", "wide"] = "exclude"
    clock: Clock | None = None
    log: list[str] = field(default_factory=list)

    @property
    def counts(self) -> bool:
        return not self.timed

    def fact(self, name: str) -> Fact:
        if name in self.facts:
            return self.facts[name]
        near = [key for key in self.facts if name.startswith(key)]
        return self.facts[max(near, key=len)] if near else Fact()

    def build(self, candidate: Candidate) -> Screening:
        self._note(f"build {candidate.name}", 1)
        fact = self.fact(candidate.name)
        if fact.error:
            raise ModelError(fact.error)
        return Screening(
            fact.bytes,
            fact.structure or f"{fact.speed}",
            fact.content or candidate.name,
            fact.share,
            fact.sqnr_db,
            wide_share=fact.wide,
        )

    def assess(self, candidates: Sequence[Candidate], samples: int) -> dict[str, Assessment]:
        found = {}
        for candidate in candidates:
            self._note(f"assess {candidate.name} {samples}", samples / 100)
            fact = self.fact(candidate.name)
            complete = samples >= self.total
            loss = fact.loss if complete or fact.early is None else fact.early
            width = fact.width * (self.total / samples) ** 0.5
            found[candidate.name] = Assessment(
                samples, complete, "labels", loss, loss - width, loss + width, loss, fact.doubt
            )
        return found

    def simulate(self, candidate: Candidate, max_drop: float, seconds: float) -> Assessment | None:
        near = [key for key in self.simulated if candidate.name.startswith(key)]
        if not near:
            return None
        self._note(f"simulate {candidate.name}", 5)
        loss = self.simulated[max(near, key=len)]
        if loss < 0:
            raise EngineError("the process of the engine ended: signal SIGSEGV")
        samples = 8 if candidate.name.startswith(self.cut_short) else 24
        return Assessment(samples, True, "labels", loss, loss - 0.01, loss + 0.01, loss)

    def time(self, runners: Mapping[str, Runner], baseline: str, **how: Any) -> Race:
        self._note(f"race {', '.join(runners)}", 2)
        p50 = {name: self._p50(candidate, threads) for name, (candidate, threads) in runners.items()}
        timings, ends = {}, (1 - self.reach, 1 + self.reach)
        for name, value in p50.items():
            estimate = p50[baseline] / value
            ratio = Claim(estimate, estimate * ends[0], estimate * ends[1], 0.97, 6, p50[baseline], value, self.busy)
            figures = {"p50_ms": value, "mean_ms": value * self.tails.get(runners[name][1], 1.0)}
            timings[name] = (
                StructureTiming(figures) if name == baseline else StructureTiming(figures, ratio, p50[baseline])
            )
        return Race(timings, True, {"edges_ms": [], "counts": {}})

    def slow_layers(self, candidate: Candidate, float_threads: int) -> tuple[str, ...]:
        return self.slow

    def memory(self, candidate: Candidate | None, threads: int) -> int:
        return 1000 if candidate is None else self.fact(candidate.name).bytes * 2

    def recovery_groups(self) -> tuple[tuple[str, ...], ...]:
        return (self.methods, *((name,) for name in self.costly))

    def rank(self, candidate: Candidate, *, headroom: float, seconds: float) -> LayerRanking:
        layers = tuple(RankedLayer(name, (name,), 1.0) for name in self.ranked)
        return LayerRanking(layers, MacCosts(dict.fromkeys(self.ranked, 1)), field=self.raised)

    def _p50(self, candidate: Candidate | None, threads: int) -> float:
        gain = self.thread_gain.get(threads, 1.0)
        return self.float_ms * gain / (self.fact(candidate.name).speed if candidate else 1.0)

    def _note(self, text: str, seconds: float) -> None:
        self.log.append(text)
        if self.clock is not None:
            self.clock.now += seconds


class BusyWith(FakeEvaluator):
    """Never claim the speed of `doubtful`, but estimate it to within `spread`, if that is not 0."""

    doubtful = ""
    spread = 0.0

    def time(self, runners: Mapping[str, Runner], baseline: str, **how: Any) -> Race:
        found = super().time(runners, baseline, **how)
        ratio = found.timings[self.doubtful].speedup if self.doubtful in found.timings else None
        if ratio is None:
            return found
        about = ratio.estimate or 0.0
        likely = (about, about * (1 - self.spread), about * (1 + self.spread)) if self.spread else None
        disagree = replace(ratio, reason="the runs disagree", likely=likely)
        unclear = replace(found.timings[self.doubtful], speedup=disagree)
        return replace(found, timings={**found.timings, self.doubtful: unclear})


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Interrupted:
    """Interrupt an evaluator after `after` pieces of work."""

    evaluator: FakeEvaluator
    after: int

    def __getattr__(self, name: str) -> object:
        if name in ("build", "assess", "time"):
            self.after -= 1
            if self.after < 0:
                raise KeyboardInterrupt
        return getattr(self.evaluator, name)


def profile(**search: object) -> Profile:
    """Return a profile for U8S8 per channel with this search table."""
    return Profile("test", "Test", "any", frozenset(), 1, "cpu", "1.20", Scheme(), search=search)


__all__ = ["FLOAT", "BusyWith", "Clock", "EdgeqError", "Fact", "FakeEvaluator", "Interrupted", "profile"]


class Notes:
    """Keep the notes of a search."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def stage(self, title: str, total: int | None = None) -> Any:
        raise AssertionError("nothing is drawn")

    def note(self, text: str) -> None:
        self.texts.append(text)


class Interrupting:
    """Press Ctrl-C when the accuracy is first measured."""

    @contextmanager
    def stage(self, title: str, total: int | None = None) -> Iterator[Any]:
        if title.startswith("accuracy on"):
            raise KeyboardInterrupt
        yield lambda steps: None

    def note(self, text: str) -> None:
        del text
