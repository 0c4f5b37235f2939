"""Write the tuning record as plain values. docs/reference/tune.md lists its keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeq.bundle.sbom import read_tool_versions
from edgeq.model.digests import model_digest
from edgeq.model.files import model_bytes
from edgeq.tuning.budget import BudgetClock
from edgeq.tuning.local import LocalEvaluator
from edgeq.tuning.measurements import SCHEMA
from edgeq.tuning.run_settings import Run
from edgeq.tuning.search import Searched
from edgeq.tuning.simulated_record import build_simulated_record
from edgeq.tuning.verdict import (
    describe_doubts,
    describe_needs,
    describe_verdict,
    find_runners_up,
    is_goal_met,
)
from edgeq.util.records import plain


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
    # The fields of an outcome are keys of the record, except the two that belong to float32's part.
    fields = plain(outcome)
    baseline, threads = fields.pop("baseline"), fields.pop("baseline_threads")
    classes = any(t.assessment and t.assessment.disagreement is not None for t in outcome.trials)
    # Without labels, class scores are compared by their top-1, and all other outputs by their cosine.
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
        # Plug-ins are packages of their own, so their versions decide speeds as much as onnxruntime's.
        "versions": {**read_tool_versions(), **searched.field.versions},
        "goal": plain(goal),
        "metric": {"name": metric, "higher_is_better": task.higher_is_better if task else True},
        "elapsed_s": round(elapsed_s, 3),
        "verdict": list(describe_verdict(outcome, goal)),
        "goal_met": is_goal_met(outcome, goal),
        "doubts": list(describe_doubts(outcome, goal)),
        "runners_up": {engine: trial.name for engine, trial in find_runners_up(outcome).items()},
        "needed": [] if is_goal_met(outcome, goal) else list(describe_needs(outcome, goal)),
        "float32": {
            "accuracy": evaluator.float_metrics(),
            "timing": baseline,
            "threads": threads,
            "bytes": model_bytes(job.source),
        },
        **fields,
        **({} if run.clock is None else {"boards": plain(run.clock.record())}),
        **({"memory": searched.memory} if searched.memory else {}),
    }
