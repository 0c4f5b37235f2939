"""Write the tuning record as plain values (keys: docs/tune.md), and list what its measurements depend on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeq.bundle.plan import tool_versions
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
from edgeq.tuning.trials import Outcome, Trial, describe_simulated_loss
from edgeq.tuning.verdict import describe_doubts, describe_needs, describe_verdict, is_goal_met
from edgeq.util.display import Progress
from edgeq.util.records import fingerprint, plain


@dataclass(frozen=True)
class Run:
    """Hold a run whose model is prepared.

    Attributes:
        host, machine: this machine, and the machine on which everything is timed.
        clock: times models on another machine; None if they are timed on this one.
        workdir: folder for intermediate files.
    """

    job: Job
    target: Target
    host: Machine
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
        "task": _describe_task(run.task),
        # The allowed loss and the budget are left out: they decide what is measured, not the results.
        "objective": goal.objective,
        **({"thorough": True} if goal.thorough else {}),
        "version": tool_versions(),
        **({"set_of_engines": plain(engines)} if engines.plugins else {}),
    }


def _describe_task(task: Task | None) -> dict[str, str]:
    """Return a task's name and options. Options that are not plain values are left out."""
    if task is None:
        return {}
    names: list[str] = [f.name for f in dataclasses.fields(task)] if dataclasses.is_dataclass(task) else []
    values = {name: getattr(task, name) for name in names}
    options = {name: str(value) for name, value in values.items() if isinstance(value, str | int | float | None)}
    return {"kind": type(task).__qualname__, "primary": task.primary, **options}


def add_elapsed(record: Mapping[str, Any], deadline: BudgetClock) -> dict[str, Any]:
    """Return a record with the seconds of the run up to now. The search is only a part of them."""
    return {**record, "elapsed_s": round(deadline.elapsed_s, 3)}


def build_record(run: Run, evaluator: LocalEvaluator, searched: Searched, elapsed_s: float) -> dict[str, Any]:
    """Return the tuning record of a search as plain values: the goal, each trial with its reason, the Pareto front and
    the verdict. The record of a simulated search has other keys.
    """
    job, task, goal, machine, outcome = run.job, run.task, run.goal, run.machine, searched.outcome
    if evaluator.counts:
        return build_simulated_record(run.target, goal, outcome, elapsed_s)
    fields = plain(outcome)
    baseline, threads = fields.pop("baseline"), fields.pop("baseline_threads")
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
        "versions": {**tool_versions(), **searched.field.versions},
        "goal": plain(goal),
        "metric": {"name": metric, "higher_is_better": task.higher_is_better if task else True},
        "elapsed_s": round(elapsed_s, 3),
        "verdict": list(describe_verdict(outcome, goal)),
        "goal_met": is_goal_met(outcome, goal),
        "doubts": list(describe_doubts(outcome, goal)),
        "needed": [] if is_goal_met(outcome, goal) else list(describe_needs(outcome, goal)),
        "float32": {
            "accuracy": evaluator.float_metrics(),
            "timing": baseline,
            "threads": threads,
            "bytes": model_bytes(job.prepared.path),
        },
        **fields,
        **({} if run.clock is None else {"boards": plain(run.clock.record())}),
        **({"memory": searched.memory} if searched.memory else {}),
    }


def build_simulated_record(target: Target, goal: Goal, outcome: Outcome, elapsed_s: float) -> dict[str, Any]:
    """Return the record of a simulated search as plain JSON values, with the keys that docs/tune.md lists."""
    profile_exclusions, winner = target.profile.scheme.exclude, outcome.winner
    return {
        "target": target.name,
        "simulated": True,
        "goal": plain(goal),
        "goal_met": is_goal_met(outcome, goal),
        "chosen": _form_record(winner, profile_exclusions) if winner else None,
        "trials": [_form_record(trial, profile_exclusions) for trial in outcome.trials],
        "elapsed_s": round(elapsed_s, 3),
    }


def describe_shortfall(target: Target, goal: Goal, outcome: Outcome) -> str:
    """Return why nothing was chosen, in one line."""
    assessed = [trial for trial in outcome.trials if trial.final_assessment]
    if assessed:
        best = min(assessed, key=lambda t: (t.simulated is None, t.loss))
        on = f" ({describe_simulated_loss(best.simulated)})" if best.simulated else ""
        return (
            f"goal missed: no form for {target.name} loses at most {goal.max_drop:g} in simulation: the best, "
            f"{best.loss:.4f}{on}"
        )
    reasons = [trial.reason for trial in outcome.trials] or ["its profile has no scheme that fits the data"]
    return f"no form for {target.name} could be built: {reasons[0]}"


def describe_form(record: Mapping[str, Any]) -> str:
    """Return a line that describes the form chosen in a record, for the notes of a bundle."""
    form = record["chosen"]
    parts = [f"calibration by {form['method']}", f"{len(form['kept_in_float'])} layers kept in float"]
    if form["wide"]:
        parts.append(f"{form['wide_share']:.1%} of the activations on 16 bits")
    if form["simulator"]:
        parts.append(form["simulator"]["text"])
    return f"tuned in simulation: {', '.join(parts)}"


def summarize(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the form chosen in a record as texts by title; empty if nothing was chosen."""
    form = record["chosen"]
    if form is None:
        return {}
    facts = {
        "chosen": f"calibration by {form['method']}, {form['int8_mac_share']:.1%} of the MACs in int8",
        "kept in float": ", ".join(form["kept_in_float"]) or "nothing",
        "loss": f"{form['loss']:.4f}",
    }
    if form["recoveries"]:
        facts["recoveries"] = ", ".join(form["recoveries"])
    if form["wide"]:
        facts["on 16 bits"] = f"{form['wide_share']:.1%} of the activations: {', '.join(form['wide'])}"
    if form["simulator"]:
        facts["loss"] += f" on this machine's kernels; it {form['simulator']['text']}"
    return {
        **facts,
        "latency": "not measured: this is a simulation. Time it on the device with `edgeq_run.py bench`",
    }


def _form_record(trial: Trial, profile_exclusions: tuple[str, ...]) -> dict[str, Any]:
    scheme, screening, assessment = trial.candidate.scheme, trial.screening, trial.assessment
    options = [f"{value:g}" for value in scheme.method_options.values()]
    return {
        "method": " ".join([scheme.method, *options]),
        "recoveries": list(trial.candidate.recoveries),
        "kept_in_float": [name for name in scheme.exclude if name not in profile_exclusions],
        "wide": list(scheme.wide),
        "wide_share": screening.wide_share if screening else 0.0,
        "int8_mac_share": screening.int8_mac_share if screening else 0.0,
        "loss": assessment.drop if assessment and assessment.complete else None,
        "simulator": {"text": describe_simulated_loss(trial.simulated), **plain(trial.simulated)}
        if trial.simulated
        else None,
        "noise": 10 ** (-screening.sqnr_db / 10) if screening else None,
    }
