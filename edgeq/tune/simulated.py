"""What tuning in simulation found, as plain values and as text. There is no latency in it: the share of
multiply-accumulates in int8 is what was made as large as the accuracy asked for allows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeq.hardware.target import Target
from edgeq.records import plain
from edgeq.tune.goal import Goal
from edgeq.tune.record import Outcome, Trial


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
    losses = [trial.assessment.bound for trial in outcome.trials if trial.assessment is not None]
    if losses:
        return f"no form for {target.name} loses at most {goal.max_drop:g} in simulation: the best, {min(losses):.4f}"
    reasons = [trial.reason for trial in outcome.trials] or ["its profile has no scheme that fits the data"]
    return f"no form for {target.name} could be built: {reasons[0]}"


def bundle_note(record: Mapping[str, Any]) -> str:
    """What the notes of a bundle say of the chosen form of a record."""
    chosen = record["chosen"]
    kept = len(chosen["kept_in_float"])
    return f"tuned in simulation: calibration by {chosen['method']}, {kept} layers kept in float"


def summary(record: Mapping[str, Any]) -> dict[str, str]:
    """The chosen form of a record, as text by title; empty where nothing was chosen."""
    chosen = record["chosen"]
    if chosen is None:
        return {}
    return {
        "chosen": f"calibration by {chosen['method']}, {chosen['int8_mac_share']:.1%} of the MACs in int8",
        "kept in float": ", ".join(chosen["kept_in_float"]) or "nothing",
        "loss": f"{chosen['loss']:.4f}",
        "latency": "not measured: this is a simulation. Time it on the device with `edgeq_run.py bench`",
    }


def _form(trial: Trial, own: tuple[str, ...]) -> dict[str, Any]:
    scheme, screening, assessment = trial.candidate.scheme, trial.screening, trial.assessment
    options = [f"{value:g}" for value in scheme.method_options.values()]
    return {
        "method": " ".join([scheme.method, *options]),
        "kept_in_float": [name for name in scheme.exclude if name not in own],
        "int8_mac_share": screening.int8_mac_share if screening else 0.0,
        "loss": assessment.drop if assessment and assessment.complete else None,
        "noise": 10 ** (-screening.sqnr_db / 10) if screening else None,
    }
