"""`edgeq tune`: from a model and data to a bundle with the best candidate, and the record of how it was found."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgeq.calibrate.files import save_statistics
from edgeq.data.open_source import Data
from edgeq.distributed.workers import open_workers
from edgeq.errors import BoardError, GoalNotMetError
from edgeq.hardware.detect import Machine, detect_machine
from edgeq.hardware.target import Target, runs_natively
from edgeq.jobs.builds import prove_built, target_coverage, with_compiled
from edgeq.jobs.job import Job, collect_statistics
from edgeq.jobs.package import as_text, bundle_variants
from edgeq.jobs.proof import Proof
from edgeq.jobs.request import Request
from edgeq.jobs.target_checks import artifact_checks
from edgeq.jobs.variants import Variant, variant_name, with_fallback
from edgeq.measure.coverage import strongest
from edgeq.measure.task import Task
from edgeq.model.load import model_bytes, path_of
from edgeq.remote.clock import BoardClock
from edgeq.run.engines import EngineChoice, as_engines
from edgeq.run.session import Engines
from edgeq.scheme import Scheme
from edgeq.tune.document import make_record, settings_of
from edgeq.tune.engines import Field, find_field
from edgeq.tune.evaluator import FLOAT
from edgeq.tune.explain import Outcome, Trial, verdict
from edgeq.tune.goal import Deadline, Goal, as_goal
from edgeq.tune.journal import COLLECTED, JOURNAL, Journal, JournaledEvaluator, check_folder, claimed, clear, folder_of
from edgeq.tune.local import LocalEvaluator
from edgeq.tune.memory import Memory, Space, memory_file, recall
from edgeq.tune.plan import is_static, kernel_choices, promising_first, resolve_timed
from edgeq.tune.search import Searched, Searches
from edgeq.tune.simulated import bundle_note, shortfall, simulated_record
from edgeq.tune.space import Candidate, sequence_candidates, thread_counts
from edgeq.util.display import SILENT, Page, Progress
from edgeq.util.records import plain


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
        )
        return winner.proof

    def _proven(self, candidate: Candidate, count: int | None = None) -> Variant:
        """The candidate's artifact with its proof, on the first `count` samples where a simulator proves it."""
        built, threads = self.evaluator.built(candidate), candidate.threads
        built = with_compiled(self.job, built)
        route = None if self.clock is None else self.clock.route
        coverage = target_coverage(self.job, built, route=route)
        judged = self.job
        if count is not None:
            judged = replace(judged, validation=self.evaluator.simulated_samples(count))
        proof = prove_built(judged, built, coverage, timed=False, threads=threads, count=count)
        size, native = model_bytes(built.artifact.model), runs_natively(self.target, self.here)
        there = () if self.clock is None else self.clock.checks()
        checks = strongest((*artifact_checks(built, proof, self.here, None), *there))
        return Variant(built, proof, native, size, candidate.scheme, threads, checks)


# Least and most of a budget that is kept for what follows the search.
_RESERVED = (0.05, 0.25)


@dataclass(frozen=True)
class Tuned(Page):
    """What `tune` did.

    Attributes:
        bundle: where it lies.
        outcome: all candidates and what was measured of them.
        proof: of the winner, as `edgeq package` has it.
        record: plain values, keys as docs/tune.md lists them; others for a target that was simulated.
    """

    bundle: Path
    target: Target
    outcome: Outcome
    goal: Goal
    proof: Proof
    record: Mapping[str, Any]

    def __brief__(self) -> dict[str, Any]:
        return {
            "bundle": self.bundle,
            "target": self.target.name,
            "chosen": self.record.get("chosen"),
            "verdict": next(iter(self.record.get("verdict", ())), ""),
            "candidates": len(self.record.get("candidates", ())),
            **self.proof.__brief__(),
        }

    def __page__(self) -> dict[str, Any]:
        variants = {self.target.name: {**plain(self.proof), "title": self.target.title}}
        return {"name": self.bundle.name, "tuning": self.record, "variants": variants}

    def __record__(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"bundle": str(self.bundle), **self.record, "proof": self.proof}


def tune(
    model: str | Path,
    data: Data | Any | None,
    output: str | Path,
    *,
    validation: Data | Any | None = None,
    statistics: str | Path | None = None,
    target: str | Path = "auto",
    task: Task | str | None = None,
    goal: Goal | str | None = None,
    engines: EngineChoice | str | Sequence[EngineChoice | str] = (),
    fix: Mapping[str, int] | None = None,
    clock: BoardClock | None = None,
    resume: bool = False,
    with_float: bool = False,
    selftest: int = 2,
    force: bool = False,
    workers: int | str | None = None,
    memory: bool = True,
    progress: Progress = SILENT,
) -> Tuned:
    """Find the best int8 model for a target that keeps its accuracy, and write it as a bundle.

    Args:
        model: float32 ONNX model.
        data: calibration samples; None with `statistics`.
        output: a directory, or a file that ends in ".edgeq".
        validation: samples that accuracy is measured on, labelled where `task` is given; None takes `data`.
        statistics: folder written by `edgeq calibrate`, instead of a calibration pass.
        target: "auto", or a target or profile that runs on this machine, where latency is measured; or one that is
            simulated on it, where the share of multiply-accumulates in int8 takes the place of the goal's objective.
        task: what to measure by labels, a task or the name of one that needs no options; None measures agreement with
            float32.
        goal: objective, accuracy and time, or an objective alone; default: the lowest latency at 0.01 accuracy.
        engines: those that are raced, by name, one or several; default: onnxruntime's own kernels and every plug-in
            that is installed and right, each in the precisions that are fast here.
        fix: as `edgeq.quantize`.
        clock: another machine, where all is timed and every candidate's answers are checked; the target then is that
            machine's. What is built, and its accuracy, is found here.
        resume: go on from the journal of an interrupted run, which lies beside `output`.
        with_float, selftest, force: as `edgeq.package`.
        workers: a number of processes to share the samples among, or the address of a Dask scheduler; what is timed is
            timed here.
        memory: begin with what won on similar models on this machine (docs/tune.md), and remember what wins now; a
            thorough search does neither.

    Raises:
        GoalNotMetError: nothing keeps the accuracy and is faster than float32; nothing is written then.
        OutputError: `output` is taken; or a journal is there without `resume`, or with it belongs to something else.
        UsageError: an argument of another type, or an unknown task, engine or objective.
        EdgeqError: as the stages have it.
    """
    request, output = Request.of(model, data, validation, statistics, task), path_of(output, "output")
    model, data, statistics, task = request.model, request.data, request.statistics, request.task
    goal, engines = as_goal(goal), as_engines(engines)
    deadline = Deadline(goal.budget_s)
    request.check_output(output, force=force)
    check_folder(output, request.paths())
    here = detect_machine()
    machine = here if clock is None else clock.machine
    chosen, timed = resolve_timed(target, machine)
    request.schemes([chosen])
    kept = folder_of(output)
    field = find_field(chosen, machine, engines, timed=timed, progress=progress)
    if clock is not None:
        field = field.also_on(clock.engines, engines, progress)
    with (
        tempfile.TemporaryDirectory(prefix="edgeq-tune-") as folder,
        Engines(keep=True) as opener,
        open_workers(workers) as pool,
        ExitStack() as held,
    ):
        workdir = Path(folder)
        collected = kept / COLLECTED
        reuse = collected if statistics is None and resume and collected.exists() else statistics
        static = is_static(chosen, data, statistics)
        job = request.prepare(workdir, static=static, fix=fix, workers=pool, machine=here, progress=progress)
        job = collect_statistics(job, reuse)
        settings = settings_of(job, chosen, machine, task, goal, field)
        held.enter_context(claimed(kept))
        journal = Journal(kept / JOURNAL, settings, resume=resume, force=force)
        if journal.known:
            progress.note(f"going on from {journal.path}: {journal.known} measurements are known")
        if job.statistics is not None and statistics is None:
            save_statistics(job.statistics, collected, force=True)
        evaluator = LocalEvaluator(
            job,
            chosen,
            workdir / "tune",
            task=task,
            timed=timed,
            batched=goal.objective == "throughput",
            engines=opener,
            clock=clock,
            progress=progress,
        )
        run = PreparedRun(job, chosen, here, machine, task, goal, evaluator, clock, workdir, progress)
        known = Memory()
        if memory and timed and not goal.thorough:
            known = recall(memory_file(), job.prepared.model, settings, goal.max_drop, progress)
        left_s = goal.budget_s and deadline.left_s() - _reserved_s(job, deadline, goal.budget_s)
        try:
            searched = run.search(run.space(static, field), known, journal, opener, left_s)
        except (KeyboardInterrupt, BoardError):
            progress.note(f"{journal.known} measurements are kept in {journal.path}: --resume goes on from there")
            raise
        outcome, record = searched.outcome, run.record(searched, deadline)
        if outcome.winner is None:
            problem = "; ".join(verdict(outcome, goal)) if timed else shortfall(chosen, goal, outcome)
            hint = f"-v lists all candidates; what was measured is kept in {kept} for --resume with another --max-drop"
            raise GoalNotMetError(problem, hint, record)
        proof = run.write(
            outcome, outcome.winner, record, output, selftest=selftest, with_float=with_float, force=force
        )
        clear(kept, progress)
        known.remember(model.name, job.prepared.digest, outcome, progress)
    return Tuned(output, chosen, outcome, goal, proof, record)


def _reserved_s(job: Job, deadline: Deadline, budget_s: float) -> float:
    """Seconds of the budget for the proof and the bundle: float32 and the winner run over the validation samples, at
    about what the float pass, just now, took for each sample of the calibration."""
    samples = job.statistics.samples if job.statistics is not None else 0
    likely = deadline.elapsed_s * len(job.validation) / samples if samples else 0.0
    least, most = _RESERVED
    return min(max(likely, least * budget_s), most * budget_s, deadline.left_s())
