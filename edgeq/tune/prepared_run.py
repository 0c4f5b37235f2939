"""The steps of `edgeq tune` behind the preparation of the model: search, record, proof, bundle."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgeq.hardware.machine import Machine
from edgeq.hardware.target import Target, runs_natively
from edgeq.measure.checks import strongest
from edgeq.measure.task import Task
from edgeq.model.load import model_bytes
from edgeq.pipeline.builds import prove_built
from edgeq.pipeline.compiled import with_compiled
from edgeq.pipeline.job import Job
from edgeq.pipeline.proof import Proof
from edgeq.pipeline.target_checks import artifact_checks
from edgeq.pipeline.target_coverage import target_coverage
from edgeq.pipeline.variant_bundle import as_text, bundle_variants
from edgeq.pipeline.variants import PackagedVariant, variant_name, with_fallback
from edgeq.progress import Progress
from edgeq.records import plain
from edgeq.remote.clock import BoardClock
from edgeq.scheme import Scheme
from edgeq.tune.candidate import Candidate
from edgeq.tune.document import make_record
from edgeq.tune.engines import Field
from edgeq.tune.evaluator import FLOAT
from edgeq.tune.goal import Deadline, Goal
from edgeq.tune.journal import Journal, JournaledEvaluator
from edgeq.tune.local import LocalEvaluator
from edgeq.tune.memory import Memory, Space
from edgeq.tune.plan import kernel_choices, promising_first
from edgeq.tune.record import Outcome, Trial
from edgeq.tune.searches import Searched, Searches
from edgeq.tune.sequence import sequence_candidates
from edgeq.tune.simulated import bundle_note, simulated_record
from edgeq.tune.space import thread_counts
from edgeq.workers.engine import Engines


@dataclass(frozen=True)
class PreparedRun:
    """A run whose model is prepared: search, record, bundle.

    Attributes:
        here, machine: this machine, and the one where everything is timed.
        clock: times on another machine; None here.
        workdir: for what is made on the way.
    """

    job: Job
    target: Target
    here: Machine
    machine: Machine
    task: Task | None
    goal: Goal
    evaluator: LocalEvaluator
    clock: BoardClock | None
    workdir: Path
    progress: Progress

    def space(self, static: bool, field: Field) -> Space:
        """Where the search begins; `static`: whether ranges are derived before the build."""
        kernels = kernel_choices(self.job.prepared, self.target, static=static)
        candidates = promising_first(kernels, sequence_candidates(self.job, self.target))
        return Space(candidates, self.target.profile, field)

    def search(
        self, space: Space, known: Memory, journal: Journal, opener: Engines, budget_s: float | None
    ) -> Searched:
        """The best of `space`. What is in the journal is not measured again."""
        evaluator = JournaledEvaluator(self.evaluator, journal)
        threads = thread_counts(self.machine.usable_threads)
        return Searches(evaluator, self.goal, threads, opener.ended, self.progress).best(space, known, budget_s)

    def record(self, searched: Searched, deadline: Deadline) -> dict[str, Any]:
        """The tuning record, plain values; that of a simulation has other keys."""
        outcome = searched.outcome
        if not self.evaluator.timed:
            return simulated_record(self.target, self.goal, outcome, deadline.elapsed_s)
        float32 = self.evaluator.float_metrics()
        about = (self.job, self.target, self.machine, self.task, self.goal)
        found = make_record(*about, outcome, searched.field, deadline.elapsed_s, float32)
        found |= {} if self.clock is None else {"boards": plain(self.clock.record())}
        return found | ({"memory": searched.memory} if searched.memory else {})

    def write(
        self,
        outcome: Outcome,
        chosen: Trial,
        record: Mapping[str, Any],
        output: Path,
        *,
        selftest: int,
        with_float: bool,
        force: bool,
    ) -> Proof:
        """Prove the chosen candidate and write the bundle, with what stands in for it where its engine is missing."""
        timed = self.evaluator.timed
        winner = self._proven(chosen.candidate, chosen.simulated.samples if chosen.simulated else None)
        stand_in, preferred = winner, []
        if chosen.candidate.engine is not None:
            unquantized = Candidate(FLOAT, Scheme(mode="float"), threads=outcome.baseline_threads)
            stand_in = self._proven(outcome.trial(outcome.fallback).candidate if outcome.fallback else unquantized)
            preferred = [winner]
        name = as_text(self.job.source.name)
        named = "" if timed else f" -t {self.target.name}"
        notes = () if timed else (bundle_note(record),)
        bundle_variants(
            self.job,
            with_fallback(variant_name(self.target), stand_in, preferred),
            output,
            workdir=self.workdir,
            selftest=selftest,
            with_float=with_float,
            command=f"edgeq tune {shlex.quote(name)} --data CALIBRATION{named} -o BUNDLE",
            tuning=record if timed else None,
            notes=(*self.job.prepared.notes, *notes, *winner.built.artifact.notes, *winner.proof.opening.notes),
            force=force,
            progress=self.progress,
        )
        return winner.proof

    def _proven(self, candidate: Candidate, count: int | None = None) -> PackagedVariant:
        """The candidate's artifact with its proof, on the first `count` samples where a simulator proves it."""
        built, threads = self.evaluator.built(candidate), candidate.threads
        built = with_compiled(self.job, built, self.workdir / "compiled", progress=self.progress)
        route = None if self.clock is None else self.clock.route
        coverage = target_coverage(self.job, built, self.here, route=route, progress=self.progress)
        judged = self.job
        if count is not None:
            judged = replace(judged, validation=self.evaluator.simulated_samples(count))
        proof = prove_built(
            judged, built, coverage, task=self.task, timed=False, threads=threads, count=count, progress=self.progress
        )
        size, native = model_bytes(built.artifact.model), runs_natively(self.target, self.here)
        there = () if self.clock is None else self.clock.checks()
        checks = strongest((*artifact_checks(built, proof, self.here, None), *there))
        return PackagedVariant(built, proof, native, size, threads, checks)
