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

from edgeq.backends.base import backend_named
from edgeq.calibration.files import save_statistics
from edgeq.data.open_source import Data, check_there
from edgeq.distributed.workers import open_workers
from edgeq.errors import BoardError, GoalNotMetError, HardwareError
from edgeq.hardware.detect import Machine, detect_machine
from edgeq.hardware.target import Target, resolve, runs_natively
from edgeq.jobs.bundles import as_text, bundle_variants
from edgeq.measure.coverage import strongest
from edgeq.measure.task import Task
from edgeq.model.clean import BUNDLE as SUFFIX
from edgeq.model.load import model_bytes, path_of
from edgeq.model.prepare import PreparedModel, prepare_model
from edgeq.model.products import node_macs
from edgeq.prove.builds import prove_built, simulated_proof, target_coverage, with_compiled
from edgeq.prove.job import Job, Request, collect_statistics
from edgeq.prove.proof import Proof
from edgeq.prove.target_checks import artifact_checks
from edgeq.prove.variants import ProvenVariant, variant_name, with_fallback
from edgeq.remote.clock import BoardClock
from edgeq.run.engines import DEFAULT, EngineChoice, as_engines, only_engine
from edgeq.run.session import Engines
from edgeq.scheme import Scheme
from edgeq.tuning.engines import Field, find_field, with_entrants
from edgeq.tuning.goal import BudgetClock, Goal, as_goal
from edgeq.tuning.journal import (
    COLLECTED,
    JOURNAL,
    Journal,
    JournaledEvaluator,
    check_folder,
    claimed,
    clear,
    folder_of,
    forget_record,
    keep_record,
)
from edgeq.tuning.local import LocalEvaluator
from edgeq.tuning.memory import Memory, Space, memory_file, recall
from edgeq.tuning.record import Run, bundle_note, record_of, settings_of, shortfall, timed_record
from edgeq.tuning.recover.methods import recovery_groups
from edgeq.tuning.search import Searches
from edgeq.tuning.space import (
    WORTH_A_TRY,
    Candidate,
    kernel_candidates,
    method_candidates,
    sequence_candidates,
    thread_counts,
)
from edgeq.tuning.trials import FLOAT, Outcome, Trial
from edgeq.tuning.verdict import met, verdict
from edgeq.util.display import SILENT, Page, Progress
from edgeq.util.numbers import parse_drop
from edgeq.util.outputs import next_to, shown
from edgeq.util.records import marked


@dataclass(frozen=True)
class CandidateList:
    """Describe the candidates of a run, for `--dry-run`.

    Attributes:
        candidates: kernel choices, in the order in which they are built.
        methods: names of the candidates that combine the first kernel choice with other calibration methods.
        recoveries: names of accuracy recoveries, in the order in which they are tried.
        threads: numbers of threads to compare; 0 means all cores. It is empty if the target is simulated, because
            nothing is timed.
        engines: the engines that run the candidates.
    """

    target: Target
    goal: Goal
    candidates: tuple[Candidate, ...]
    methods: tuple[str, ...]
    recoveries: tuple[str, ...]
    threads: tuple[int, ...]
    engines: Field

    def __record__(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "target": self.target.name,
            "profile": self.target.profile.name,
            "goal": self.goal,
            "candidates": self.candidates,
            "methods": self.methods,
            "recoveries": self.recoveries,
            "threads": self.threads,
            "engines": [*([DEFAULT] if self.engines.own else []), *self.engines.plugins],
        }


def plan(
    model: Path,
    data: Data | None,
    *,
    val: Data | None = None,
    target: str | Path = "auto",
    goal: Goal | None = None,
    statistics: Path | None = None,
    engines: Sequence[EngineChoice] = (),
    progress: Progress = SILENT,
) -> CandidateList:
    """Return the candidates with which `tune` would begin, without building any of them. The samples must exist, but
    are not read.

    Raises:
        DataError: there is no file at the path of the samples.
        HardwareError: the target is unknown, or cannot run or be simulated here.
    """
    _check_samples(data, val)
    machine = detect_machine()
    chosen, timed = resolve_timed(target, machine)
    goal, raced = goal or Goal(), find_field(chosen, machine, engines, timed=timed, progress=progress)
    with scratch_folder("edgeq-tune-") as folder:
        prepared = prepare_model(model, Path(folder), progress=progress)
        first = kernel_choices(prepared, chosen, static=is_static(chosen, data, statistics))
    methods = method_candidates(first[0], chosen.profile) if first else ()
    editable = timed or backend_named(chosen.backend).recoverable
    return CandidateList(
        target=chosen,
        goal=goal,
        candidates=with_entrants(first, raced, unquantized=goal.objective != "size"),
        methods=tuple(c.name for c in methods),
        recoveries=tuple(name for group in recovery_groups() for name in group) if editable else (),
        threads=thread_counts(machine.usable_threads) if timed else (),
        engines=raced,
    )


def _check_samples(*data: Data | None) -> None:
    """Refuse samples that do not exist, before hours of work."""
    for given in data:
        if given is not None and isinstance(given.source, str | Path):
            check_there(given.source)


def resolve_timed(target: str | Path, machine: Machine) -> tuple[Target, bool]:
    """Return the target and whether it can be timed, which means that its kernels run on this machine.

    Raises:
        HardwareError: the target is unknown, or cannot run or be simulated here.
    """
    chosen = resolve(target, machine)
    lacks = chosen.profile.missing(machine)
    if lacks and not backend_named(chosen.backend).simulated:
        raise HardwareError(
            f"{chosen.name} does not run here: this machine lacks {', '.join(lacks)}, and tuning measures latencies",
            "Run edgeq tune on the device, or `edgeq package` for it here",
        )
    return chosen, not lacks


def is_static(target: Target, data: Data | None, statistics: Path | None) -> bool:
    """Return whether ranges are derived before the build. This is so if there are data from which to derive them, or if
    the target supports no other kind of build.
    """
    return data is not None or statistics is not None or not target.profile.scheme.dynamic_weight_types


def kernel_choices(prepared: PreparedModel, target: Target, *, static: bool) -> tuple[Candidate, ...]:
    """Return the target's kernel choices for a model. The profile's own choice is first.

    Args:
        static: whether ranges are derived before the build.
    """
    macs = node_macs(prepared.model)
    types = target.profile.scheme.dynamic_weight_types
    dynamic = sum(macs.get(node.name or "", 0) for node in prepared.model.graph if node.op_type in types)
    worthwhile = dynamic > WORTH_A_TRY * sum(macs.values())
    return kernel_candidates(target.profile, static=static, dynamic=worthwhile or not static)


def promising_first(kernels: Sequence[Candidate], extra: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Return all candidates, in an order that spends a short budget on the most promising ones.

    `extra` contains the candidates for sequence models, or nothing for other models. If it is not empty, dynamic
    candidates come first, because ranges measured at run time suit the matrix products of sequence models better than
    fixed ranges. Those in `extra` come second.
    """
    if not extra:
        return tuple(kernels)
    dynamic = [c for c in kernels if c.scheme.mode == "dynamic"]
    return (*dynamic, *extra, *(c for c in kernels if c not in dynamic))


def _write(
    run: Run,
    evaluator: LocalEvaluator,
    outcome: Outcome,
    chosen: Trial,
    record: Mapping[str, Any],
    output: Path,
    deadline: BudgetClock,
    **how: Any,
) -> Proof:
    """Prove the chosen candidate and write the bundle. If the candidate needs a plug-in engine, the bundle also
    contains a variant for machines without it.

    Args:
        deadline: the deadline of the run. The record in the bundle counts the time up to the writing of the bundle.
        how: additional arguments of `bundle_variants`.
    """
    counts = evaluator.counts
    winner = _proven(run, evaluator, chosen.candidate, chosen.simulated.samples if chosen.simulated else None)
    stand_in, preferred = winner, []
    if chosen.candidate.engine is not None:
        unquantized = Candidate(FLOAT, Scheme(mode="float"), threads=outcome.baseline_threads)
        stand_in = _proven(
            run, evaluator, outcome.trial(outcome.fallback).candidate if outcome.fallback else unquantized
        )
        preferred = [winner]
    name, named = as_text(run.job.source.name), f" -t {run.target.name}" if counts else ""
    notes = (bundle_note(record),) if counts else ()
    record = timed_record(record, deadline)
    bundle_variants(
        run.job,
        with_fallback(variant_name(run.target), stand_in, preferred),
        output,
        workdir=run.workdir,
        command=f"edgeq tune {shlex.quote(name)} --data CALIBRATION{named} -o BUNDLE",
        tuning=None if counts else record,
        notes=(*run.job.prepared.notes, *notes, *winner.built.artifact.notes, *winner.proof.opening.notes),
        **how,
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
    judged = replace(job, validation=evaluator.proof_samples(count))
    proof = simulated_proof(job, built, prove_built(judged, built, coverage, timed=False, threads=threads, count=count))
    size, native = model_bytes(built.artifact.model), runs_natively(run.target, run.here)
    there = () if run.clock is None else run.clock.checks()
    checks = strongest((*artifact_checks(built, proof, run.here, None), *there))
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
            "verdict": next(iter(self.record.get("verdict", ())), ""),
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
    goal: Goal | str | None = None,
    max_drop: float | str | None = None,
    budget: str | float | None = None,
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
    request = Request.of(model, data, val, statistics, task)
    output = path_of(next_to(request.model, SUFFIX) if output is None else output, "output")
    model, data, statistics, task = request.model, request.data, request.statistics, request.task
    goal, engines = as_goal(goal, max_drop=parse_drop(max_drop), budget=budget), as_engines(engines)
    deadline = BudgetClock(goal.budget_s)
    request.check_output(output, force=force)
    check_folder(output, request.paths())
    _check_samples(request.data, request.validation)
    here = detect_machine()
    machine = here if clock is None else clock.machine
    chosen, timed = resolve_timed(target, machine)
    request.schemes([chosen])
    kept = folder_of(output)
    field = find_field(chosen, machine, engines, timed=timed, progress=progress)
    if clock is not None:
        field = field.also_on(clock.engines, engines, progress)
    with (
        scratch_folder("edgeq-tune-") as folder,
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
        task = job.task
        run = Run(job, chosen, here, machine, task, goal, clock, workdir, progress)
        settings = settings_of(run, field)
        held.enter_context(claimed(kept))
        forget_record(kept)
        journal = Journal(kept / JOURNAL, settings, resume=resume, force=force)
        if journal.known:
            progress.note(f"continuing from {journal.path}: {journal.known} measurements are known")
        if job.statistics is not None and statistics is None:
            save_statistics(job.statistics, collected, force=True)
        evaluator = LocalEvaluator(
            job,
            chosen,
            workdir / "tune",
            task=task,
            counts=not timed,
            batched=goal.objective == "throughput",
            engines=opener,
            clock=clock,
            progress=progress,
        )
        known = Memory()
        if memory and timed and not goal.thorough:
            known = recall(memory_file(), job.prepared.model, settings, goal.max_drop, progress)
        kernels = kernel_choices(job.prepared, chosen, static=static)
        space = Space(promising_first(kernels, sequence_candidates(job, chosen)), chosen.profile, field)
        only = only_engine(chosen.backend)
        threads = thread_counts(machine.usable_threads if only is None or only.threaded else 1)
        journaled = JournaledEvaluator(evaluator, journal)
        variants = 2 if field.plugins else 1
        left_s = goal.budget_s and deadline.left_s() - _reserved_s(job, deadline, goal.budget_s, variants)
        try:
            searched = Searches(journaled, goal, threads, opener.ended, progress).best(space, known, left_s)
        except (KeyboardInterrupt, BoardError):
            progress.note(f"{journal.known} measurements are kept in {journal.path}: --resume continues from them")
            raise
        outcome, record = searched.outcome, record_of(run, evaluator, searched, deadline.elapsed_s)
        if outcome.winner is None:
            keep_record(kept, record)
            raise GoalNotMetError(_missed(run, outcome, timed=timed), f"-v lists all candidates; {_kept(kept)}", record)
        how = {"selftest": selftest, "with_float": with_float, "force": force}
        proof = _write(run, evaluator, outcome, outcome.winner, record, output, deadline, **how)
        record = timed_record(record, deadline)
        if not met(outcome, goal):
            keep_record(kept, record)
            hint = f"{shown(output)} contains the nearest; {_kept(kept)}"
            raise GoalNotMetError(_missed(run, outcome, timed=timed), hint, {"bundle": str(output), **record})
        if outcome.winner.verdict == UNKNOWN:
            keep_record(kept, record)
            progress.note(f"the measurements are kept in {shown(kept)}")
        else:
            clear(kept, progress)
        known.remember(model.name, job.prepared.digest, outcome, progress)
    return Tuned(output, chosen, outcome, goal, proof, record)


def _missed(run: Run, outcome: Outcome, *, timed: bool) -> str:
    """Return one line that states why the goal was not met."""
    return "; ".join(verdict(outcome, run.goal)) if timed else shortfall(run.target, run.goal, outcome)


def _kept(folder: Path) -> str:
    return f"the measurements are kept in {shown(folder)} for --resume --force with another --max-drop"


def _reserved_s(job: Job, deadline: BudgetClock, budget_s: float, variants: int) -> float:
    """Return the seconds of the budget to reserve for the proof and the bundle. In these two steps, float32 and each
    variant run over the validation samples. Together, each sample takes about as long as in the calibration's float
    pass, which has just run.
    """
    samples = job.statistics.samples if job.statistics is not None else 0
    likely = variants * deadline.elapsed_s * len(job.validation) / samples if samples else 0.0
    least, most = _RESERVED
    return min(max(_RESERVED_S + likely, least * budget_s), most * budget_s, deadline.left_s())
