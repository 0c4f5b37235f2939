"""Define the trials of a search, the interface that measures them, their comparison, and the sentences that describe
them.

The search itself measures nothing and only decides, so tests can run it with an evaluator that returns invented
figures.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from edgeq_device.engines.catalog import FLOAT as FLOAT_PRECISION
from edgeq_device.measure.claim import FEWEST_PAIRS, UNKNOWN, Claim

from edgeq.reporting.tuning_record import Assessment, Screening, Stage, StageTime, Status, StructureTiming
from edgeq.run.engines import DEFAULT
from edgeq.tuning.float_layers import LayerRanking
from edgeq.tuning.goal import DOUBTFUL, EQUAL, MET, MISSED, THOROUGH, BudgetClock, Goal, Pace
from edgeq.tuning.space import Candidate
from edgeq.util.display import SILENT, Progress
from edgeq.util.records import marked, written

FLOAT = "float32"
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


class Evaluator(Protocol):
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


BY_TIME = ("latency", "throughput")
"""The objectives whose costs are speeds."""
FLOAT_MACS = "MACs in float"
"""The objective if speed is counted. The share of MACs in float should be as small as possible."""
_LEAST_NOISE = 1e-20
BLOCKS_COST = 0.9
"""Cost of products with weights in blocks if speed is counted, relative to float. On a sentence encoder, the measured
cost was 0.8 to 1.3 over all input sizes.
"""
WIDE_COST = 0.5
"""Cost of 16 bits if speed is counted, relative to float."""


@dataclass(frozen=True)
class Trial:
    """Hold one candidate and everything that is known about it.

    Attributes:
        assessment: accuracy on this machine's kernels.
        simulated: accuracy in a simulator of the target; None without a simulator, or if it was not needed.
        stage: the stage that made the candidate.
        parent: the candidate that it was made from; "" if it comes from the search space.
        status: "chosen"; "qualified" (keeps the accuracy, but is not the best); "short" (measured, but loses too much);
            "eliminated" (dropped before it was measured on all samples).
        reason: why it was chosen, or why it was not.
        pareto: whether the candidate is on the Pareto front: no other candidate is at least as good in speed and
            accuracy, and better in one of them.
        memory_bytes: peak memory of its session, if the objective needs it.
    """

    candidate: Candidate
    stage: Stage = "space"
    parent: str = ""
    screening: Screening | None = None
    assessment: Assessment | None = None
    simulated: Assessment | None = None
    timing: StructureTiming | None = None
    memory_bytes: int | None = None
    status: Status = "eliminated"
    reason: str = ""
    pareto: bool = False

    @property
    def name(self) -> str:
        """Return the candidate's name, which is unique in a search."""
        return self.candidate.name

    @property
    def judged(self) -> Assessment | None:
        """Return the accuracy that decides: the simulator's if it was measured there, else this machine's."""
        return self.simulated or self.assessment

    @property
    def loss(self) -> float:
        """Return the loss that is compared with the allowed loss, as a fraction; infinity if the trial was not
        assessed.
        """
        return self.judged.bound if self.judged else float("inf")

    @property
    def accuracy_key(self) -> tuple[float, float, str]:
        """Return a key that sorts the more accurate first: by loss, then by how far the outputs are from float32's."""
        return self.loss, -(self.assessment.sqnr_db if self.assessment else 0.0), self.name

    @property
    def latency(self) -> float:
        """Return the median latency divided by float32's in the same race; infinity if the trial was not timed. If the
        machine becomes slower or faster between two races, this ratio changes little.
        """
        return self.timing.share if self.timing else float("inf")

    @property
    def verdict(self) -> str:
        """Return the verdict on the trial's speed; unknown if the trial was not timed."""
        return self.timing.verdict if self.timing else UNKNOWN

    @property
    def structure(self) -> str:
        """Return the hash of its structure; "" if it was not built."""
        return self.screening.structure if self.screening else ""

    @property
    def sqnr_db(self) -> float:
        """Return the SQNR of the screening in dB. For identical outputs it is 200, so that differences are finite."""
        return min(200.0, self.screening.sqnr_db) if self.screening else -200.0

    def replace(self, **changes: Any) -> Trial:
        """Return a copy with `changes`."""
        return dataclasses.replace(self, **changes)

    def __record__(self) -> dict[str, Any]:
        engine = self.candidate.engine
        return {
            **marked(self.candidate),
            "engine": engine.engine.name if engine else DEFAULT,
            "precision": engine.precision if engine else FLOAT_PRECISION,
            "stage": self.stage,
            "parent": self.parent,
            "status": self.status,
            "reason": self.reason,
            "pareto": self.pareto,
            "screening": self.screening,
            "accuracy": self.assessment,
            "timing": self.timing,
            "memory_bytes": self.memory_bytes,
        }


def _or_none(name: str) -> str | None:
    return name or None


@dataclass(frozen=True)
class Outcome:
    """Hold the result of a search.

    Attributes:
        trials: all candidates, in the order in which they were made.
        chosen: name of the winner; "" if nothing qualified.
        fallback: name of the candidate that runs if the winner's engine is missing; "" if there is none, or if float32
            runs in that case.
        baseline: float32's timing, with the number of threads with which it is fastest.
        baseline_threads: that number of threads.
        stages: the stages with their times.
        settled: whether the order of the finalists is settled, as in `Race`.
        out_of_time: whether the budget ended the search.
        histograms: {"edges_ms": [...], "counts": {name: [...]}} of the finalists and float32.
        earlier: speed relative to float32 that an earlier run on this machine claimed for these kernels of this model;
            None if there was no such run, or if this run claims a speed itself.
    """

    trials: tuple[Trial, ...] = field(metadata=written(name="candidates"))
    chosen: str = field(metadata=written(form=_or_none))
    baseline: StructureTiming | None
    baseline_threads: int = 0
    stages: tuple[StageTime, ...] = ()
    settled: bool = True
    out_of_time: bool = False
    histograms: Mapping[str, Any] = field(default_factory=dict)
    fallback: str = field(default="", metadata=written(form=_or_none))
    earlier: float | None = None

    def trial(self, name: str) -> Trial:
        """Return the trial with that name.

        Raises:
            StopIteration: there is no such trial.
        """
        return next(t for t in self.trials if t.name == name)

    @property
    def winner(self) -> Trial | None:
        """Return the chosen trial; None if nothing qualified."""
        return self.trial(self.chosen) if self.chosen else None


class Trials:
    """Hold the state of a search: its trials by name, and the evaluator that measures them. A trial without a reason is
    still in the run.

    Attributes:
        objective: the goal's objective, or `FLOAT_MACS` if speed is counted.
        equal: share by which costs must differ to count as different; 0 if speed is counted.
        deadline: the deadline of the current stage.
        float_threads: number of threads with which float32 is fastest.
        raced: the last race; None before the first.
        leader: the last line shown on the leading candidate.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        goal: Goal,
        deadline: BudgetClock,
        progress: Progress = SILENT,
        pace: Pace | None = None,
    ) -> None:
        self.evaluator, self.goal = evaluator, goal
        self.pace = pace or (THOROUGH if goal.thorough else Pace())
        self.deadline, self.progress = deadline, progress
        self.objective: str = FLOAT_MACS if evaluator.counts else goal.objective
        self.by_time = self.objective in BY_TIME
        self.equal = 0.0 if evaluator.counts else EQUAL
        self.float_threads = 0
        self.raced: Race | None = None
        self.leader = ""
        self._trials: dict[str, Trial] = {}
        self._timings: dict[tuple[str, int], StructureTiming] = {}

    def __iter__(self) -> Iterator[Trial]:
        return iter(tuple(self._trials.values()))

    def __getitem__(self, name: str) -> Trial:
        return self._trials[name]

    def __contains__(self, name: str) -> bool:
        return name in self._trials

    def add(self, candidate: Candidate, stage: Stage = "space", parent: str = "") -> None:
        """Add a candidate to the run. If there is one with the same name already, nothing changes."""
        self._trials.setdefault(candidate.name, Trial(candidate, stage, parent))

    def update(self, name: str, **changes: Any) -> Trial:
        """Replace fields of the trial called `name`, and return the new trial."""
        self._trials[name] = self._trials[name].replace(**changes)
        return self._trials[name]

    def eliminate(self, name: str, reason: str) -> None:
        """Drop a trial from the run."""
        self.update(name, status="eliminated", reason=reason)

    def screened(self, name: str, found: Screening) -> None:
        """Record a trial's screening. Also record its timing if speed is counted or its structure has been timed."""
        in_blocks = self[name].candidate.scheme.mode == "weight-only"
        timing = counted(found, in_blocks=in_blocks) if self.evaluator.counts else None
        self.timed(self.update(name, screening=found, timing=timing))

    def alive(self) -> list[Trial]:
        """List the trials that were built and are still in the run."""
        return [trial for trial in self if not trial.reason and trial.screening is not None]

    def time(self, trial: Trial, timing: StructureTiming) -> None:
        """Remember the timing of a structure, and record it in every trial of that structure with the same threads."""
        key = trial.structure, trial.candidate.threads
        self._timings[key] = timing
        for other in self:
            if other.screening and (other.structure, other.candidate.threads) == key:
                self.update(other.name, timing=timing)

    def timed(self, trial: Trial) -> Trial:
        """Return `trial` with its structure's timing, if that is known."""
        timing = self._timings.get((trial.structure, trial.candidate.threads)) if trial.timing is None else None
        return self.update(trial.name, timing=timing) if timing else trial

    def cost(self, trial: Trial) -> float:
        """Return the quantity that the objective minimizes: the size in bytes, or the latency or the MACs relative to
        float32. Return infinity while the value is unknown.
        """
        if self.objective == "size":
            return float(trial.screening.bytes) if trial.screening else float("inf")
        if self.objective == "memory":
            return float(trial.memory_bytes) if trial.memory_bytes is not None else float("inf")
        return trial.latency

    def cheaper(self, a: Trial, b: Trial) -> bool:
        """Return whether `a` costs less than `b`, by more than the share that counts as equal."""
        return self.cost(a) * (1 + self.equal) < self.cost(b)

    def meets(self, trial: Trial) -> bool:
        """Return whether a trial was measured on all samples and keeps the required accuracy."""
        return trial.judged is not None and trial.judged.complete and trial.loss <= self.goal.max_drop

    def qualified(self) -> list[Trial]:
        """List the trials that keep the accuracy, the cheapest first. At equal cost, the more accurate comes first."""
        return sorted((t for t in self.alive() if self.meets(t)), key=lambda t: (self.cost(t), t.accuracy_key))

    def promising(self) -> list[Trial]:
        """List the trials that are in the run, the most accurate first. At equal accuracy, the cheaper comes first."""
        return sorted(self.alive(), key=lambda t: (t.accuracy_key, self.cost(t)))

    def mark_pareto(self) -> None:
        """Set `pareto` to True in every trial that was measured on all samples, unless another trial is at least as
        good in latency and loss, and better in one of them.
        """
        measured = [t for t in self if t.assessment and t.assessment.complete and t.timing]
        least = float("inf")
        for trial in sorted(measured, key=lambda t: (t.latency, t.accuracy_key)):
            if trial.loss < least:
                least = trial.loss
                self.update(trial.name, pareto=True)


def counted(found: Screening, *, in_blocks: bool = False) -> StructureTiming:
    """Return a speed that is counted, not timed.

    The cost is the share of multiply-accumulates in float, plus the cost of 16 bits and of weights in blocks. The speed
    has no uncertainty. It is relative to the largest cost: all multiply-accumulates in float and all tensors in 16
    bits. Ranges that are measured at run time count as free, although they took 4 to 7 % of the time in measurements.
    """
    cost = 1 - found.int8_mac_share + WIDE_COST * found.wide_share
    cost += BLOCKS_COST * found.int8_mac_share if in_blocks else 0.0
    times_float = (1 + WIDE_COST) / max(cost, 1e-6)
    exact = Claim(times_float, times_float, times_float, confidence=1.0, pairs=FEWEST_PAIRS)
    return StructureTiming({"p50_ms": cost}, exact, 1.0)


def accuracy_of(trial: Trial, goal: Goal) -> int:
    """Return `MET` if the goal allows the bound of the loss, `DOUBTFUL` if it allows only the loss on the samples, else
    `MISSED`.
    """
    found = trial.judged
    if found is None or not found.complete or found.drop > goal.max_drop:
        return MISSED
    return MET if found.bound <= goal.max_drop else DOUBTFUL


def speed_of(trial: Trial, goal: Goal) -> int:
    """Return `MET` if a trial is certainly faster than float32, `DOUBTFUL` if its whole spread says so but is only an
    estimate, else `MISSED`. If speed is not the objective, equal speed is enough.

    An interval or a spread that merely reaches beyond float32's speed counts for nothing, however uncertain it is:
    otherwise the least certain figure would win over the settled ones. An estimate counts for nothing either if another
    engine runs the trial than float32: next to other work, engines wait for cores in different ways, and one busy loop
    made a form seem 1.6 times as fast that is half as fast.
    """
    least = 1.0 if goal.objective in BY_TIME else 1 / (1 + EQUAL)
    claim = trial.timing.speedup if trial.timing else None
    known = claim and (claim.interval or claim.estimated)
    if not claim or not known or known[1] <= least:
        return MISSED
    if claim.interval is None and trial.candidate.engine is not None:
        return MISSED
    return MET if claim.interval is not None else DOUBTFUL


def by_structure(trials: Iterable[Trial]) -> list[list[Trial]]:
    """Group trials by their structure, and keep their order."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(trial.structure, []).append(trial)
    return list(groups.values())


def outrun(trial: Trial, other: Trial, by: float) -> bool:
    """Return whether `trial` certainly takes longer than `other` by at least the share `by`. Return False if one of the
    speeds cannot be claimed.
    """
    known = trial.timing is not None and other.timing is not None and not unmeasured(trial, other)
    return known and other.latency * (1 + by) < trial.latency


def points(loss: float) -> str:
    """Write a loss as a fraction in points: 0.0123 is "1.23 points"."""
    return f"{100 * loss:.2f} points"


def loses(found: Assessment) -> str:
    """Write the loss on the samples, and how large it may be over many other samples. If the loss is noise, write the
    SQNR.
    """
    if found.basis == "noise":
        return f"has {decibels(found.drop)} SQNR"
    text, bound = f"loses {points(found.drop)}", points(found.bound)
    return text if bound == points(found.drop) else f"{text}, up to {bound} over many other samples"


def allowed(found: Assessment, max_drop: float) -> str:
    """Write the allowed loss, in the unit of the loss in `found`."""
    if found.basis == "noise":
        return f"{decibels(max_drop)} are wanted"
    return f"{points(max_drop)} are allowed"


def decibels(noise: float) -> str:
    """Write noise power over signal power as SQNR."""
    return f"{0 - 10 * math.log10(max(noise, _LEAST_NOISE)):.1f} dB"


def in_simulator(found: Assessment) -> str:
    """Write the loss in a simulator of the target, with its interval and the number of samples."""
    return f"loses {points(found.drop)} in the simulator{interval(found)}, {found.samples} samples"


def times(timing: StructureTiming | None, of: str = "") -> str:
    """Write the speed relative to float32 with its interval, or an estimate that is marked as an estimate; "" if there
    is no ratio.
    """
    found = timing.speedup if timing is not None else None
    if found is None:
        return ""
    whose = f"{of}'s" if of else "its"
    if found.interval is not None:
        return f"{found.interval[0]:.2f} times {whose} speed ({found.figures()})"
    about = found.estimated
    return f"about {about[0]:.2f} times {whose} speed ({found.figures()})" if about else "a speed that is not known"


def against_float(timing: StructureTiming | None) -> str:
    """Write how certainly a trial is faster or slower than float32, with its speed."""
    claim = timing.speedup if timing is not None else None
    known = claim and (claim.interval or claim.estimated)
    if not claim or not known:
        return f"its speed is not known: {(claim and claim.reason) or 'too few pairs of runs'}"
    which = "slower than float32" if known[2] < 1 else "faster than float32" if known[1] > 1 else ""
    if claim.interval is None:
        which = f"{which} only by an estimate" if which else "it may be slower than float32"
    return f"{which or 'no difference in speed from float32 is settled'}: {times(timing)}"


def unmeasured(*trials: Trial) -> str:
    """Write why the speeds of `trials` cannot be compared: the reason of the first trial whose speed cannot be claimed.
    Return "" if the speeds of all timed trials can be claimed.
    """
    claims = (t.timing.speedup for t in trials if t.timing is not None and t.verdict == UNKNOWN)
    return next(((claim and claim.reason) or "too few pairs of runs" for claim in claims), "")


def behind(trial: Trial, faster: Trial) -> str:
    """Write how much longer `trial` takes than `faster`, or why that is unknown."""
    if unmeasured(trial, faster):
        return f"not distinguishable in speed from {faster.name}: it runs at {times(trial.timing, of='float32')}"
    return f"{trial.latency / faster.latency:.2f} times the latency of {faster.name}"


def hopeless(found: Assessment, max_drop: float) -> str:
    """Write why a candidate was not measured on all samples."""
    seen = f"{loses(found)} after {found.samples} samples"
    if found.basis == "noise":
        return f"{seen}; {allowed(found, max_drop)}"
    return f"{seen}; 97.5 % sure that it loses more than {points(max_drop)} on all samples"


def less_accurate(trial: Trial, better: Trial) -> str:
    """Write why `better` is preferred to `trial`, which is equally fast."""
    mine, other = (points(t.assessment.bound) if t.assessment else "nothing known" for t in (trial, better))
    if mine != other:
        return f"and loses up to {mine}, not {other}"
    a, b = (t.assessment.sqnr_db if t.assessment else 0.0 for t in (trial, better))
    return f"as accurate, and its outputs are further from float32's (SQNR {a:.1f} dB, not {b:.1f})"


def interval(found: Assessment) -> str:
    """Write the interval of a loss. If it covers the whole scale, nothing is known; return ""."""
    return "" if found.high - found.low >= 1 else f" ({points(found.low)} to {points(found.high)})"
