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
from edgeq.tune.explain import Outcome, needed, verdict
from edgeq.tune.goal import Goal
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
