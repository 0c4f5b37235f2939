"""Hold the trials of a search: each candidate with everything that is known about it, and why it won or was dropped."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from edgeq_device.engines.catalog import FLOAT as FLOAT_PRECISION
from edgeq_device.measure.claim import FEWEST_PAIRS, UNKNOWN, Claim

from edgeq.measure.structure_timing import StructureTiming
from edgeq.run.engines import DEFAULT
from edgeq.tuning.budget import BudgetClock
from edgeq.tuning.evaluator import CandidateEvaluator, Race
from edgeq.tuning.goal import Goal
from edgeq.tuning.measurements import Assessment, Screening, Stage, StageTime, Status
from edgeq.tuning.pace import EQUAL, THOROUGH, Pace
from edgeq.tuning.space import Candidate
from edgeq.util.display import SILENT, Progress
from edgeq.util.records import marked, write_as

FLOAT = "float32"
BY_TIME = ("latency", "throughput")
"""The objectives whose costs are speeds."""
FLOAT_MACS = "MACs in float"
"""The objective if speed is counted. The share of MACs in float should be as small as possible."""
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
    def final_assessment(self) -> Assessment | None:
        """Return the accuracy that decides: the simulator's if it was measured there, else this machine's."""
        return self.simulated or self.assessment

    @property
    def loss(self) -> float:
        """Return the loss that is compared with the allowed loss, as a fraction; infinity if the trial was not
        assessed.
        """
        return self.final_assessment.bound if self.final_assessment else float("inf")

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


def _name_or_none(name: str) -> str | None:
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

    trials: tuple[Trial, ...] = field(metadata=write_as(name="candidates"))
    chosen: str = field(metadata=write_as(form=_name_or_none))
    baseline: StructureTiming | None
    baseline_threads: int = 0
    stages: tuple[StageTime, ...] = ()
    settled: bool = True
    out_of_time: bool = False
    histograms: Mapping[str, Any] = field(default_factory=dict)
    fallback: str = field(default="", metadata=write_as(form=_name_or_none))
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
        evaluator: CandidateEvaluator,
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
        # A candidate may be proposed by several stages. The first one stays as its origin.
        self._trials.setdefault(candidate.name, Trial(candidate, stage, parent))

    def update(self, name: str, **changes: Any) -> Trial:
        """Replace fields of the trial called `name`, and return the new trial."""
        self._trials[name] = self._trials[name].replace(**changes)
        return self._trials[name]

    def eliminate(self, name: str, reason: str) -> None:
        """Drop a trial from the run."""
        self.update(name, status="eliminated", reason=reason)

    def record_screening(self, name: str, screening: Screening) -> None:
        """Record a trial's screening. Also record its timing if speed is counted or its structure has been timed."""
        in_blocks = self[name].candidate.scheme.mode == "weight-only"
        # A counted speed is known as soon as the file is built. A measured one may be known from the same structure.
        timing = count_timing(screening, in_blocks=in_blocks) if self.evaluator.counts else None
        self.with_timing(self.update(name, screening=screening, timing=timing))

    def alive(self) -> list[Trial]:
        """List the trials that were built and are still in the run."""
        return [trial for trial in self if not trial.reason and trial.screening is not None]

    def record_timing(self, trial: Trial, timing: StructureTiming) -> None:
        """Remember the timing of a structure, and record it in every trial of that structure with the same threads."""
        # Speed depends on the graph and the threads, not on the values of weights and scales.
        key = trial.structure, trial.candidate.threads
        self._timings[key] = timing
        for sibling in self:
            if sibling.screening and (sibling.structure, sibling.candidate.threads) == key:
                self.update(sibling.name, timing=timing)

    def with_timing(self, trial: Trial) -> Trial:
        """Return `trial` with its structure's timing, if that is known."""
        # A timing of the trial itself is newer than that of its structure, so it stays.
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

    def is_cheaper(self, a: Trial, b: Trial) -> bool:
        """Return whether `a` costs less than `b`, by more than the share that counts as equal."""
        # Of two candidates within the margin, neither is cheaper.
        return self.cost(a) * (1 + self.equal) < self.cost(b)

    def meets(self, trial: Trial) -> bool:
        """Return whether a trial was measured on all samples and keeps the required accuracy."""
        return trial.final_assessment is not None and trial.final_assessment.complete and trial.loss <= self.goal.limit

    def qualified(self) -> list[Trial]:
        """List the trials that keep the accuracy, the cheapest first. At equal cost, the more accurate comes first."""
        return sorted((t for t in self.alive() if self.meets(t)), key=lambda t: (self.cost(t), t.accuracy_key))

    def promising(self) -> list[Trial]:
        """List the trials that are in the run, the most accurate first. At equal accuracy, the cheaper comes first."""
        return sorted(self.alive(), key=lambda t: (t.accuracy_key, self.cost(t)))

    def mark_pareto(self) -> None:
        """Set `pareto` to True in every trial that was measured on all samples and not eliminated, unless another trial
        is at least as good in latency and loss, and better in one of them.
        """
        # A loss on part of the samples would put a merely lucky candidate on the front.
        measured = [t for t in self if t.status != "eliminated" and t.assessment and t.assessment.complete and t.timing]
        lowest_loss = float("inf")
        for trial in sorted(measured, key=lambda t: (t.latency, t.accuracy_key)):
            if trial.loss < lowest_loss:
                lowest_loss = trial.loss
                self.update(trial.name, pareto=True)


def count_timing(screening: Screening, *, in_blocks: bool = False) -> StructureTiming:
    """Return a speed that is counted, not timed.

    The cost is the share of multiply-accumulates in float, plus the cost of 16 bits and of weights in blocks. The speed
    has no uncertainty. It is relative to the largest cost: all multiply-accumulates in float and all tensors in 16
    bits. Ranges that are measured at run time count as free, although they took 4 to 7 % of the time in measurements.
    """
    cost = 1 - screening.int8_mac_share + WIDE_COST * screening.wide_share
    cost += BLOCKS_COST * screening.int8_mac_share if in_blocks else 0.0
    # All of the work in int8 would cost nothing, so the cost has a lower limit.
    times_float = (1 + WIDE_COST) / max(cost, 1e-6)
    # A counted speed has an interval of no width, so that every rule for claims applies to it.
    exact = Claim(times_float, times_float, times_float, confidence=1.0, pairs=FEWEST_PAIRS)
    return StructureTiming({"p50_ms": cost}, exact, 1.0)


def group_by_structure(trials: Iterable[Trial]) -> list[list[Trial]]:
    """Group trials by their structure, and keep their order."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(trial.structure, []).append(trial)
    return list(groups.values())
