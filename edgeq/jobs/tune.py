"""Implement `edgeq tune`: find the best candidate for a model and its data, and write it as a bundle that contains the
record of the search.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgeq_device.measure.claim import UNKNOWN
from edgeq_device.system.places import scratch_folder

from edgeq.calibration.files import save_statistics
from edgeq.data.open_source import Data
from edgeq.distributed.workers import open_workers
from edgeq.errors import BoardError, GoalNotMetError
from edgeq.hardware.detect import Machine, detect_machine
from edgeq.hardware.target import Target, runs_natively
from edgeq.jobs.bundles import BundleContents, as_text, bundle_variants
from edgeq.jobs.candidates import check_samples, is_static, kernel_choices, promising_first, resolve_timed
from edgeq.measure.checks import keep_strongest
from edgeq.measure.find_head import HeadChoice
from edgeq.measure.task import Task
from edgeq.model.files import model_bytes
from edgeq.prove.builds import prove_built, simulated_proof, target_coverage, with_compiled
from edgeq.prove.job import Job
from edgeq.prove.prepare import collect_statistics, prepare
from edgeq.prove.proof import Proof
from edgeq.prove.request import Request
from edgeq.prove.target_checks import artifact_checks
from edgeq.prove.variants import ProvenVariant, variant_name, with_fallback
from edgeq.run.engines import EngineChoice, as_engines, find_only_engine
from edgeq.run.session import Engines
from edgeq.scheme import Scheme
from edgeq.tuning.budget import BudgetClock
from edgeq.tuning.clock import RemoteClock
from edgeq.tuning.engines import Field, find_field
from edgeq.tuning.goal import Goal, as_goal
from edgeq.tuning.journal import Journal, JournaledEvaluator
from edgeq.tuning.local import LocalEvaluator
from edgeq.tuning.memory import Memory, Space, memory_file, recall
from edgeq.tuning.record import add_elapsed, build_record
from edgeq.tuning.run_folder import (
    COLLECTED,
    JOURNAL,
    check_folder,
    claim_folder,
    clear,
    folder_of,
    remove_record,
    save_record,
)
from edgeq.tuning.run_settings import Run, settings_of
from edgeq.tuning.search import Searched, Searches
from edgeq.tuning.simulated_record import describe_form
from edgeq.tuning.space import (
    Candidate,
    sequence_candidates,
    thread_counts,
)
from edgeq.tuning.trials import FLOAT, Outcome
from edgeq.tuning.verdict import describe_shortfall, describe_verdict, is_goal_met
from edgeq.util.bundle_names import BUNDLE as SUFFIX
from edgeq.util.display import SILENT, Page, Progress
from edgeq.util.numbers import parse_drop
from edgeq.util.outputs import default_output
from edgeq.util.ownership import printable_path
from edgeq.util.paths import path_of
from edgeq.util.records import marked


def _write(
    plan: _TunePlan,
    run: Run,
    evaluator: LocalEvaluator,
    outcome: Outcome,
    record: Mapping[str, Any],
    contents: BundleContents,
) -> Proof:
    """Prove the winner and write the bundle. If the winner needs a plug-in engine, the bundle also contains a variant
    for machines without it. The record in the bundle counts the time up to the writing of the bundle.
    """
    assert outcome.winner is not None
    counts, candidate, simulated = evaluator.counts, outcome.winner.candidate, outcome.winner.simulated
    winner = _proven(run, evaluator, candidate, simulated.samples if simulated else None)
    default, preferred = winner, []
    if candidate.engine is not None:
        unquantized = Candidate(FLOAT, Scheme(mode="float"), threads=outcome.baseline_threads)
        fallback = outcome.trial(outcome.fallback).candidate if outcome.fallback else unquantized
        default, preferred = _proven(run, evaluator, fallback), [winner]
    name, target = as_text(run.job.source.name), f" -t {run.target.name}" if counts else ""
    notes = (describe_form(record),) if counts else ()
    record = add_elapsed(record, plan.deadline)
    bundle_variants(
        run.job,
        with_fallback(variant_name(run.target), default, preferred),
        plan.output,
        workdir=run.workdir,
        command=f"edgeq tune {shlex.quote(name)} ⟨data⟩ CALIBRATION{target} -o BUNDLE",
        contents=contents,
        tuning=None if counts else record,
        notes=(*run.job.prepared.notes, *notes, *winner.built.artifact.notes, *winner.proof.opening.notes),
        force=plan.request.force,
    )
    return winner.proof


def _proven(run: Run, evaluator: LocalEvaluator, candidate: Candidate, count: int | None = None) -> ProvenVariant:
    """Return the candidate's artifact with its proof. If a simulator proves it, `count` is the number of samples to
    use.
    """
    job, threads = run.job, candidate.threads
    built = with_compiled(job, evaluator.built(candidate))
    route = None if run.clock is None else run.clock.route
    coverage = target_coverage(job, built, route=route)
    reduced = evaluator.proof_job(count)
    proof = simulated_proof(
        job, built, prove_built(reduced, built, coverage, timed=False, threads=threads, count=count)
    )
    size, native = model_bytes(built.artifact.model), runs_natively(run.target, run.host)
    board_checks = () if run.clock is None else run.clock.checks()
    checks = keep_strongest((*artifact_checks(built, proof, run.host, None), *board_checks))
    return ProvenVariant(built, proof, native, size, candidate.scheme, threads, checks)


# Smallest and largest share of the budget to reserve for the steps after the search, and the seconds that these steps
# take besides the runs over the validation samples.
_RESERVED, _RESERVED_S = (0.05, 0.35), 5.0


@dataclass(frozen=True)
class Tuned(Page):
    """Report the result of `tune`.

    Attributes:
        bundle: path of the bundle.
        outcome: all candidates and their measurements.
        proof: proof of the winner, as in `edgeq package`.
        record: plain values with the keys that docs/tune.md lists. For a simulated target, the keys differ.
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
            "describe_verdict": next(iter(self.record.get("describe_verdict", ())), ""),
            "doubts": self.record.get("doubts", ()),
            "candidates": len(self.record.get("candidates", ())),
            **self.proof.__brief__(),
        }

    def __page__(self) -> dict[str, Any]:
        variants = {self.target.name: {**marked(self.proof), "title": self.target.title}}
        return {"name": self.bundle.name, "tuning": self.record, "variants": variants}

    def __record__(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"bundle": str(self.bundle), **self.record, "proof": self.proof}


def tune(
    model: str | Path,
    data: Data | Any | None,
    output: str | Path | None = None,
    *,
    val: Data | Any | None = None,
    statistics: str | Path | None = None,
    target: str | Path = "auto",
    task: Task | str | None = None,
    head: HeadChoice | str | None = None,
    threshold: float | str | None = None,
    cut_head: bool = False,
    goal: Goal | str | None = None,
    max_drop: float | str | None = None,
    budget: str | float | None = None,
    engines: EngineChoice | str | Sequence[EngineChoice | str] = (),
    fix: Mapping[str, int] | None = None,
    clock: RemoteClock | None = None,
    resume: bool = False,
    with_float: bool = False,
    selftest: int = 2,
    force: bool = False,
    workers: int | str | None = None,
    memory: bool = True,
    progress: Progress = SILENT,
) -> Tuned:
    """Find the best int8 version of a model that stays within the accuracy limit, and write it as a bundle.

    Args:
        model: float32 ONNX model.
        data: calibration samples, or None if `statistics` is given.
        output: a folder, or a file that ends in ".edgeq". Default: MODEL.edgeq next to the model.
        val: samples to measure accuracy on, with labels if `task` is given. With None, `data` is used.
        statistics: folder written by `edgeq calibrate`, instead of a calibration pass.
        target: "auto", or a target or profile that this machine can run or simulate. If this machine runs it, latency
            is measured. If this machine simulates it, the objective is the share of multiply-accumulates in int8, and
            the objective in `goal` is ignored.
        head, threshold, cut_head: see `quantize`.
        task: the task that measures accuracy by labels, or its name if it needs no options. With None, agreement with
            float32 is measured.
        goal: objective, accuracy and time, or only an objective. Default: the lowest latency with a loss of at most
            0.01.
        max_drop: allowed loss of accuracy, which replaces that in `goal`: 0.005 or "0.5pt" is half a point.
        budget: time limit, which replaces that in `goal`: "90s" or 90 is a minute and a half.
        engines: names of the engines to compare, one or several. Default: onnxruntime's own kernels and every installed
            plug-in that computes correctly, each in the precisions that are fast here.
        fix: see `edgeq.quantize`.
        clock: another machine that does all timings and checks the outputs of every candidate. The target is then the
            target of that machine. This machine still builds the candidates and measures their accuracy.
        resume: continue from the journal of an interrupted run, which is next to `output`.
        with_float, selftest, force: see `edgeq.package`.
        workers: a number of processes that share the samples, or the address of a Dask scheduler. Timings are still
            taken on this machine.
        memory: begin with the candidates that won for similar models on this machine (docs/tune.md), and store the new
            winner. A thorough search does neither.

    Raises:
        GoalNotMetError: no candidate keeps the accuracy and is faster than float32. The candidate that comes closest is
            still written. But if the goal is strict or nothing could be built, nothing is written.
        OutputError: `output` exists; there is a journal but `resume` is not set; or `resume` is set but the journal is
            of another run.
        UsageError: an argument has the wrong type, or a task, engine or objective is unknown.
        EdgeqError: a stage failed.
    """
    request = Request.of(
        model,
        data,
        val=val,
        statistics=statistics,
        task=task,
        head=head,
        threshold=threshold,
        cut_head=cut_head,
        fix=fix,
        targets=target,
        force=force,
        workers=workers,
        progress=progress,
    )
    return run_tune(
        request,
        output,
        goal=as_goal(goal, max_drop=parse_drop(max_drop), budget=budget),
        engines=engines,
        clock=clock,
        contents=BundleContents(selftest, with_float),
        resume=resume,
        memory=memory,
    )


def run_tune(
    request: Request,
    output: str | Path | None = None,
    *,
    goal: Goal | None = None,
    engines: EngineChoice | str | Sequence[EngineChoice | str] = (),
    clock: RemoteClock | None = None,
    contents: BundleContents | None = None,
    resume: bool = False,
    memory: bool = True,
) -> Tuned:
    """Find the best candidate for the request's only target, and write it as a bundle.

    1. Plan: find the engines to compare, and refuse what cannot succeed.
    2. Prepare the model, and open its samples.
    3. Calibrate: one float32 pass gives the ranges of all candidates.
    4. Open the journal, which keeps every measurement.
    5. Search: build, measure and repair candidates until the budget is spent.
    6. Prove the winner, and write its bundle.
    7. Judge the outcome: raise an error if the goal is missed, or else clear the journal.

    Args and errors: see `tune`.
    """
    # 1. Everything that can be refused is refused here, because the search takes minutes to hours.
    plan = _plan(request, output, goal or Goal(), engines, clock)
    with (
        scratch_folder("edgeq-tune-") as folder,
        Engines(keep=True) as opener,
        open_workers(request.workers) as workers,
        ExitStack() as claims,
    ):
        # 2. All timings run on `plan.machine`, but everything is built on this one.
        static = is_static(request, plan.target)
        job = prepare(request, Path(folder), static=static, workers=workers, machine=plan.this_machine)
        # 3. A run that goes on uses the statistics of the run that it continues.
        job = collect_statistics(job, _earlier_statistics(plan, resume=resume))
        goal = plan.goal.settled(job.task)
        plan = replace(plan, goal=goal)
        run = Run(
            job,
            plan.target,
            plan.this_machine,
            plan.machine,
            job.task,
            goal,
            clock,
            Path(folder),
            request.progress,
        )
        # 4. From here on, a second run for the same output is refused.
        claims.enter_context(claim_folder(plan.journal_folder))
        journal = _open_journal(plan, run, resume=resume)
        # 5. An interrupt loses at most the measurement that is under way.
        evaluator = _evaluator(plan, run, opener)
        evidence = _evidence(plan, run, memory=memory)
        search = _search(plan, run, evaluator, journal, evidence, opener)
        outcome, record = search.outcome, build_record(run, evaluator, search, plan.deadline.elapsed_s)
        if outcome.winner is None:
            save_record(plan.journal_folder, record)
            hint = f"-v lists all candidates; {_kept_note(plan.journal_folder)}"
            raise GoalNotMetError(_missed(run, outcome, timed=plan.timed), hint, record)
        # 6. If the goal is missed, the candidate that comes closest is still worth a bundle.
        proof = _write(plan, run, evaluator, outcome, record, contents or BundleContents())
        # 7. The record counts the time that the bundle took.
        record = add_elapsed(record, plan.deadline)
        _judge(plan, run, outcome, record)
        evidence.remember(request.model.name, job.prepared.digest, outcome, request.progress)
    return Tuned(plan.output, plan.target, outcome, plan.goal, proof, record)


@dataclass(frozen=True)
class _TunePlan:
    """Hold what is decided before any work.

    Attributes:
        this_machine, machine: this machine, and the machine on which everything is timed.
        timed: whether candidates are timed. If the target is simulated, they are compared by other figures.
        field: the engines that run the candidates.
        journal_folder: the folder next to the output that keeps the journal.
    """

    request: Request
    goal: Goal
    output: Path
    this_machine: Machine
    machine: Machine
    target: Target
    timed: bool
    field: Field
    journal_folder: Path
    deadline: BudgetClock


def _plan(
    request: Request,
    output: str | Path | None,
    goal: Goal,
    engines: EngineChoice | str | Sequence[EngineChoice | str],
    clock: RemoteClock | None,
) -> _TunePlan:
    """Return the plan for a request.

    Raises:
        UsageError: an argument has the wrong type, or an engine is unknown.
        OutputError: the output is refused.
        DataError: there is no file at the path of the samples.
        HardwareError: the target is unknown, or cannot run or be simulated here.
    """
    place = path_of(default_output(request.model, SUFFIX) if output is None else output, "output")
    choices, progress = as_engines(engines), request.progress
    deadline = BudgetClock(goal.budget_s)
    request.check_output(place)
    check_folder(place, request.paths())
    check_samples(request)
    this_machine = detect_machine()
    machine = this_machine if clock is None else clock.machine
    target, timed = resolve_timed(request, machine)
    request.schemes([target])
    field = find_field(target, machine, choices, timed=timed, progress=progress)
    if clock is not None:
        field = field.limit_to(clock.engines, choices, progress)
    return _TunePlan(request, goal, place, this_machine, machine, target, timed, field, folder_of(place), deadline)


def _earlier_statistics(plan: _TunePlan, *, resume: bool) -> Path | None:
    """Return the folder of statistics to use instead of a pass, or None."""
    collected = plan.journal_folder / COLLECTED
    if plan.request.statistics is None and resume and collected.exists():
        return collected
    return plan.request.statistics


def _open_journal(plan: _TunePlan, run: Run, *, resume: bool) -> Journal:
    """Open the journal of a run, and store the run's statistics next to it.

    Raises:
        OutputError: there is a journal but `resume` is not set, or the journal is of another run.
    """
    remove_record(plan.journal_folder)
    journal = Journal(
        plan.journal_folder / JOURNAL, settings_of(run, plan.field), resume=resume, force=plan.request.force
    )
    if journal.count:
        run.progress.note(f"continuing from {journal.path}: {journal.count} measurements are known")
    if run.job.statistics is not None and plan.request.statistics is None:
        save_statistics(run.job.statistics, plan.journal_folder / COLLECTED, force=True)
    return journal


def _evaluator(plan: _TunePlan, run: Run, opener: Engines) -> LocalEvaluator:
    return LocalEvaluator(
        run.job,
        plan.target,
        run.workdir / "tune",
        counts=not plan.timed,
        batched=plan.goal.objective == "throughput",
        engines=opener,
        clock=run.clock,
        progress=run.progress,
    )


def _evidence(plan: _TunePlan, run: Run, *, memory: bool) -> Memory:
    """Return what earlier runs on this machine found, or an empty memory if the run must not depend on them."""
    if not memory or not plan.timed or plan.goal.thorough:
        return Memory()
    settings = settings_of(run, plan.field)
    return recall(memory_file(), run.job.prepared.model, settings, plan.goal.limit, run.progress)


def _search(
    plan: _TunePlan, run: Run, evaluator: LocalEvaluator, journal: Journal, evidence: Memory, opener: Engines
) -> Searched:
    """Search the candidates of the target, and return the result."""
    kernels = kernel_choices(run.job.prepared, plan.target, static=run.job.static)
    candidates = promising_first(kernels, sequence_candidates(run.job, plan.target))
    space = Space(candidates, plan.target.profile, plan.field)
    # An engine that is the target's only one, such as a simulator, may use a single thread.
    only = find_only_engine(plan.target.backend)
    threads = thread_counts(plan.machine.usable_threads if only is None or only.threaded else 1)
    variants = 2 if plan.field.plugins else 1
    budget_s = plan.goal.budget_s
    left_s = budget_s and plan.deadline.remaining_s() - _reserved_s(run.job, plan.deadline, budget_s, variants)
    try:
        return Searches(JournaledEvaluator(evaluator, journal), plan.goal, threads, opener.ended, run.progress).best(
            space, evidence, left_s
        )
    except (KeyboardInterrupt, BoardError):
        run.progress.note(f"{journal.count} measurements are kept in {journal.path}: ⟨resume=True⟩ continues from them")
        raise


def _judge(plan: _TunePlan, run: Run, outcome: Outcome, record: Mapping[str, Any]) -> None:
    """Clear the journal if the goal is met for certain. Otherwise keep it, so that another run can continue.

    Raises:
        GoalNotMetError: the goal is not met.
    """
    if not is_goal_met(outcome, plan.goal):
        save_record(plan.journal_folder, record)
        hint = f"{printable_path(plan.output)} contains the nearest; {_kept_note(plan.journal_folder)}"
        problem = _missed(run, outcome, timed=plan.timed)
        raise GoalNotMetError(problem, hint, {"bundle": str(plan.output), **record})
    assert outcome.winner is not None
    if outcome.winner.verdict == UNKNOWN:
        save_record(plan.journal_folder, record)
        run.progress.note(f"the measurements are kept in {printable_path(plan.journal_folder)}")
    else:
        clear(plan.journal_folder, run.progress)


def _missed(run: Run, outcome: Outcome, *, timed: bool) -> str:
    """Return one line that states why the goal was not met. The record has the other sentences of the verdict."""
    if not timed:
        return describe_shortfall(run.target, run.goal, outcome)
    # Without a winner, the second sentence names what comes closest.
    return "; ".join(describe_verdict(outcome, run.goal)[: 1 if outcome.winner is not None else 2])


def _kept_note(folder: Path) -> str:
    return (
        f"the measurements are kept in {printable_path(folder)} for ⟨resume=True⟩ ⟨force=True⟩ with another ⟨max_drop⟩"
    )


def _reserved_s(job: Job, deadline: BudgetClock, budget_s: float, variants: int) -> float:
    """Return the seconds of the budget to reserve for the proof and the bundle. In these two steps, float32 and each
    variant run over the validation samples. Together, each sample takes about as long as in the calibration's float
    pass, which has just run.
    """
    samples = job.statistics.samples if job.statistics is not None else 0
    likely = variants * deadline.elapsed_s * len(job.validation) / samples if samples else 0.0
    smallest_share, largest_share = _RESERVED
    return min(max(_RESERVED_S + likely, smallest_share * budget_s), largest_share * budget_s, deadline.remaining_s())
