"""Hold a run whose model is prepared, and list the settings that its measurements depend on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeq.bundle.sbom import read_tool_versions
from edgeq.hardware.detect import Machine
from edgeq.hardware.target import Target
from edgeq.measure.task import Task
from edgeq.prove.job import Job
from edgeq.tuning.clock import RemoteClock
from edgeq.tuning.engines import Field
from edgeq.tuning.goal import Goal
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
    clock: RemoteClock | None
    workdir: Path
    progress: Progress


def settings_of(run: Run, engines: Field) -> dict[str, Any]:
    """Return the settings that every measurement of a run depends on."""
    job, goal = run.job, run.goal
    # Statistics from an earlier calibration stand for the samples that they were collected from.
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
        "version": read_tool_versions(),
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
