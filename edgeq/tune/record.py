"""The tuning record as plain values (keys: docs/tune.md), and what its measurements depend on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from edgeq.bundle.plan import tool_versions
from edgeq.hardware.detect import Machine
from edgeq.hardware.target import Target
from edgeq.jobs.job import Job
from edgeq.measure.task import Task
from edgeq.model.load import model_bytes, model_digest
from edgeq.report.tuning_record import SCHEMA
from edgeq.tune.engines import Field
from edgeq.tune.goal import Goal
from edgeq.tune.trials import Outcome, Trial, in_simulator, needed, verdict
from edgeq.util.records import fingerprint, plain


def settings_of(
    job: Job, target: Target, machine: Machine, task: Task | None, goal: Goal, engines: Field
) -> dict[str, Any]:
    """What every measurement of a run depends on."""
    return {
        "model": job.prepared.digest,
        "calibration_data": job.calibration.digest() if job.calibration else _statistics_digest(job),
        "validation_data": job.validation.digest(),
        "target": target.name,
        "profile": fingerprint(target.profile),
        "machine": fingerprint(machine),
        "task": _describe(task),
        # Not the accuracy asked for, nor the time: they decide what is measured, not what comes out.
        "objective": goal.objective,
        **({"thorough": True} if goal.thorough else {}),
        "version": tool_versions(),
        **({"set_of_engines": plain(engines)} if engines.plugins else {}),
    }


def _statistics_digest(job: Job) -> str:
    return job.statistics.data_digest if job.statistics else ""


def _describe(task: Task | None) -> dict[str, str]:
    """A task's name and options, as far as they are plain."""
    if task is None:
        return {}
    plain: dict[str, str] = {}
    names: list[str] = [f.name for f in dataclasses.fields(task)] if dataclasses.is_dataclass(task) else []
    for name in names:
        value = getattr(task, name)
        if isinstance(value, str | int | float | bool | None):
            plain[name] = str(value)
    return {"kind": type(task).__qualname__, "primary": task.primary, **plain}


def make_record(
    job: Job,
    target: Target,
    machine: Machine,
    task: Task | None,
    goal: Goal,
    outcome: Outcome,
    engines: Field,
    elapsed_s: float,
    float32: Mapping[str, float],
) -> dict[str, Any]:
    """The tuning record of a search: the goal, each trial with its reason, the Pareto front, the verdict."""
    found = plain(outcome)
    baseline, threads = found.pop("baseline"), found.pop("baseline_threads")
    classes = any(t.assessment and t.assessment.disagreement is not None for t in outcome.trials)
    metric = task.primary if task else "agreement" if classes else "cosine"
    return {
        "schema": SCHEMA,
        "model": {
            "name": job.source.name,
            "sha256": model_digest(job.source),
            "bytes": model_bytes(job.source),
        },
        "data": {
            "calibration_samples": job.statistics.samples if job.statistics else 0,
            "validation_samples": len(job.validation),
            "held_out": job.held_out,
            "labelled": task is not None,
        },
        "target": target.name,
        "profile": target.profile.name,
        "machine": {"cpu": machine.cpu_name, "architecture": machine.architecture, "threads": machine.usable_threads},
        "versions": {**tool_versions(), **engines.versions},
        "goal": plain(goal),
        "metric": {"name": metric, "higher_is_better": task.higher_is_better if task else True},
        "elapsed_s": round(elapsed_s, 3),
        "verdict": list(verdict(outcome, goal)),
        "needed": [] if outcome.winner else list(needed(outcome, goal)),
        "float32": {
            "accuracy": dict(float32),
            "timing": baseline,
            "threads": threads,
            "bytes": model_bytes(job.prepared.path),
        },
        **found,
    }


def simulated_record(target: Target, goal: Goal, outcome: Outcome, elapsed_s: float) -> dict[str, Any]:
    """The outcome as plain JSON values; keys as docs/tune.md lists them."""
    own = target.profile.scheme.exclude
    winner = outcome.winner
    return {
        "target": target.name,
        "simulated": True,
        "goal": plain(goal),
        "chosen": _form(winner, own) if winner else None,
        "trials": [_form(trial, own) for trial in outcome.trials],
        "elapsed_s": round(elapsed_s, 3),
    }


def shortfall(target: Target, goal: Goal, outcome: Outcome) -> str:
    """Why nothing was chosen, in one line."""
    judged = [trial for trial in outcome.trials if trial.simulated] or [
        trial for trial in outcome.trials if trial.judged
    ]
    if judged:
        best = min(judged, key=lambda t: t.loss)
        on = f" ({in_simulator(best.simulated)})" if best.simulated else ""
        return (
            f"goal missed: no form for {target.name} loses at most {goal.max_drop:g} in simulation: the best, "
            f"{best.loss:.4f}{on}"
        )
    reasons = [trial.reason for trial in outcome.trials] or ["its profile has no scheme that fits the data"]
    return f"no form for {target.name} could be built: {reasons[0]}"


def bundle_note(record: Mapping[str, Any]) -> str:
    """What the notes of a bundle say of the chosen form of a record."""
    chosen = record["chosen"]
    found = [f"calibration by {chosen['method']}", f"{len(chosen['kept_in_float'])} layers kept in float"]
    if chosen["wide"]:
        found.append(f"{chosen['wide_share']:.1%} of the activations on 16 bits")
    if chosen["simulator"]:
        found.append(chosen["simulator"]["text"])
    return f"tuned in simulation: {', '.join(found)}"


def summary(record: Mapping[str, Any]) -> dict[str, str]:
    """The chosen form of a record, as text by title; empty where nothing was chosen."""
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
