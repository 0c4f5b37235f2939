"""What tuning in simulation found, as plain values and as text. There is no latency in it: the share of
multiply-accumulates in int8 is what was made as large as the accuracy asked for allows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeq.hardware.target import Target
from edgeq.tune.explain import Outcome, Trial, in_simulator
from edgeq.tune.goal import Goal
from edgeq.tune.trials import loss_of
from edgeq.util.records import plain


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
        best = min(judged, key=loss_of)
        on = f" ({in_simulator(best.simulated)})" if best.simulated else ""
        return (
            f"goal missed: no form for {target.name} loses at most {goal.max_drop:g} in simulation: the best, "
            f"{loss_of(best):.4f}{on}"
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
