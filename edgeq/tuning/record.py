"""Write the tuning record as plain values (keys: docs/tune.md), and list what its measurements depend on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeq.bundle.sbom import read_tool_versions
from edgeq.hardware.detect import Machine
from edgeq.hardware.target import Target
from edgeq.measure.task import Task
from edgeq.model.load import model_bytes, model_digest
from edgeq.prove.job import Job
from edgeq.remote.clock import BoardClock
from edgeq.reporting.tuning_record import SCHEMA
from edgeq.tuning.engines import Field
from edgeq.tuning.goal import BudgetClock, Goal
from edgeq.tuning.local import LocalEvaluator
from edgeq.tuning.search import Searched
from edgeq.tuning.trials import Outcome, Trial, in_simulator
from edgeq.tuning.verdict import doubts, met, needed, verdict
from edgeq.util.display import Progress
from edgeq.util.records import fingerprint, plain


@dataclass(frozen=True)
class Run:
    """Hold a run whose model is prepared.

    Attributes:
        here, machine: this machine, and the machine on which everything is timed.
        clock: times models on another machine; None if they are timed on this one.
        workdir: folder for intermediate files.
    """

    job: Job
    target: Target
    here: Machine
    machine: Machine
    task: Task | None
    goal: Goal
    clock: BoardClock | None
    workdir: Path
    progress: Progress


def settings_of(run: Run, engines: Field) -> dict[str, Any]:
    """Return the settings that every measurement of a run depends on."""
    job, goal = run.job, run.goal
    collected = job.statistics.data_digest if job.statistics else ""
    return {
        "model": job.prepared.digest,
        "calibration_data": job.calibration.digest() if job.calibration else collected,
        "validation_data": job.validation.digest(),
        "target": run.target.name,
        "profile": fingerprint(run.target.profile),
        "machine": fingerprint(run.machine),
        "task": _describe(run.task),
        # The allowed loss and the budget are left out: they decide what is measured, not the results.
        "objective": goal.objective,
        **({"thorough": True} if goal.thorough else {}),
        "version": read_tool_versions(),
        **({"set_of_engines": plain(engines)} if engines.plugins else {}),
    }


def _describe(task: Task | None) -> dict[str, str]:
    """Return a task's name and options. Options that are not plain values are left out."""
    if task is None:
        return {}
    names: list[str] = [f.name for f in dataclasses.fields(task)] if dataclasses.is_dataclass(task) else []
    values = {name: getattr(task, name) for name in names}
    options = {name: str(value) for name, value in values.items() if isinstance(value, str | int | float | None)}
    return {"kind": type(task).__qualname__, "primary": task.primary, **options}


def timed_record(record: Mapping[str, Any], deadline: BudgetClock) -> dict[str, Any]:
    """Return a record with the seconds of the run up to now. The search is only a part of them."""
    return {**record, "elapsed_s": round(deadline.elapsed_s, 3)}


def record_of(run: Run, evaluator: LocalEvaluator, searched: Searched, elapsed_s: float) -> dict[str, Any]:
    """Return the tuning record of a search as plain values: the goal, each trial with its reason, the Pareto front and
    the verdict. The record of a simulated search has other keys.
    """
    job, task, goal, machine, outcome = run.job, run.task, run.goal, run.machine, searched.outcome
    if evaluator.counts:
        return simulated_record(run.target, goal, outcome, elapsed_s)
    found = plain(outcome)
    baseline, threads = found.pop("baseline"), found.pop("baseline_threads")
    classes = any(t.assessment and t.assessment.disagreement is not None for t in outcome.trials)
    metric = task.primary if task else "agreement" if classes else "cosine"
    return {
        "schema": SCHEMA,
        "model": {"name": job.source.name, "sha256": model_digest(job.source), "bytes": model_bytes(job.source)},
        "data": {
            "calibration_samples": job.statistics.samples if job.statistics else 0,
            "validation_samples": len(job.validation),
            "held_out": job.held_out,
            "labelled": task is not None,
        },
        "target": run.target.name,
        "profile": run.target.profile.name,
        "machine": {
            "cpu_name": machine.cpu_name,
            "architecture": machine.architecture,
            "threads": machine.usable_threads,
        },
        "versions": {**read_tool_versions(), **searched.field.versions},
        "goal": plain(goal),
        "metric": {"name": metric, "higher_is_better": task.higher_is_better if task else True},
        "elapsed_s": round(elapsed_s, 3),
        "verdict": list(verdict(outcome, goal)),
        "goal_met": met(outcome, goal),
        "doubts": list(doubts(outcome, goal)),
        "needed": [] if met(outcome, goal) else list(needed(outcome, goal)),
        "float32": {
            "accuracy": evaluator.float_metrics(),
            "timing": baseline,
            "threads": threads,
            "bytes": model_bytes(job.prepared.path),
        },
        **found,
        **({} if run.clock is None else {"boards": plain(run.clock.record())}),
        **({"memory": searched.memory} if searched.memory else {}),
    }


def simulated_record(target: Target, goal: Goal, outcome: Outcome, elapsed_s: float) -> dict[str, Any]:
    """Return the record of a simulated search as plain JSON values, with the keys that docs/tune.md lists."""
    own, winner = target.profile.scheme.exclude, outcome.winner
    return {
        "target": target.name,
        "simulated": True,
        "goal": plain(goal),
        "goal_met": met(outcome, goal),
        "chosen": _form(winner, own) if winner else None,
        "trials": [_form(trial, own) for trial in outcome.trials],
        "elapsed_s": round(elapsed_s, 3),
    }


def shortfall(target: Target, goal: Goal, outcome: Outcome) -> str:
    """Return why nothing was chosen, in one line."""
    judged = [trial for trial in outcome.trials if trial.judged]
    if judged:
        best = min(judged, key=lambda t: (t.simulated is None, t.loss))
        on = f" ({in_simulator(best.simulated)})" if best.simulated else ""
        return (
            f"goal missed: no form for {target.name} loses at most {goal.max_drop:g} in simulation: the best, "
            f"{best.loss:.4f}{on}"
        )
    reasons = [trial.reason for trial in outcome.trials] or ["its profile has no scheme that fits the data"]
    return f"no form for {target.name} could be built: {reasons[0]}"


def bundle_note(record: Mapping[str, Any]) -> str:
    """Return a line that describes the form chosen in a record, for the notes of a bundle."""
    chosen = record["chosen"]
    found = [f"calibration by {chosen['method']}", f"{len(chosen['kept_in_float'])} layers kept in float"]
    if chosen["wide"]:
        found.append(f"{chosen['wide_share']:.1%} of the activations on 16 bits")
    if chosen["simulator"]:
        found.append(chosen["simulator"]["text"])
    return f"tuned in simulation: {', '.join(found)}"


def summary(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the form chosen in a record as texts by title; empty if nothing was chosen."""
    chosen = record["chosen"]
    if chosen is None:
        return {}
    found = {
        "chosen": f"calibration by {chosen['method']}, {chosen['int8_mac_share']:.1%} of the MACs in int8",
        "kept in float": ", ".join(chosen["kept_in_float"]) or "nothing",
        "loss": f"{chosen['loss']:.4f}",
    }
    if chosen["recoveries"]:
        found["recoveries"] = ", ".join(chosen["recoveries"])
    if chosen["wide"]:
        found["on 16 bits"] = f"{chosen['wide_share']:.1%} of the activations: {', '.join(chosen['wide'])}"
    if chosen["simulator"]:
        found["loss"] += f" on this machine's kernels; it {chosen['simulator']['text']}"
    return {
        **found,
        "latency": "not measured: this is a simulation. Time it on the device with `edgeq_run.py bench`",
    }


def _form(trial: Trial, own: tuple[str, ...]) -> dict[str, Any]:
    scheme, screening, assessment = trial.candidate.scheme, trial.screening, trial.assessment
    options = [f"{value:g}" for value in scheme.method_options.values()]
    return {
        "method": " ".join([scheme.method, *options]),
        "recoveries": list(trial.candidate.recoveries),
        "kept_in_float": [name for name in scheme.exclude if name not in own],
        "wide": list(scheme.wide),
        "wide_share": screening.wide_share if screening else 0.0,
        "int8_mac_share": screening.int8_mac_share if screening else 0.0,
        "loss": assessment.drop if assessment and assessment.complete else None,
        "simulator": {"text": in_simulator(trial.simulated), **plain(trial.simulated)} if trial.simulated else None,
        "noise": 10 ** (-screening.sqnr_db / 10) if screening else None,
    }
