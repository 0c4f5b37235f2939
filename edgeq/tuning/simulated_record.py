"""Write the record of a search for a simulated target, and describe the form that it chose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeq.hardware.target import Target
from edgeq.tuning.goal import Goal
from edgeq.tuning.sentences import describe_simulated_loss
from edgeq.tuning.trials import Outcome, Trial
from edgeq.tuning.verdict import is_goal_met
from edgeq.util.records import plain


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
        # Say so, because without this line a reader may take the share in int8 for a speed.
        "latency": "not measured: this is a simulation. Time it on the device with `edgeq_run.py bench`",
    }


def _form_record(trial: Trial, profile_exclusions: tuple[str, ...]) -> dict[str, Any]:
    scheme, screening, assessment = trial.candidate.scheme, trial.screening, trial.assessment
    options = [f"{value:g}" for value in scheme.method_options.values()]
    return {
        "method": " ".join([scheme.method, *options]),
        "recoveries": list(trial.candidate.recoveries),
        # The profile's own exclusions are no result of the search.
        "kept_in_float": [name for name in scheme.exclude if name not in profile_exclusions],
        "wide": list(scheme.wide),
        "wide_share": screening.wide_share if screening else 0.0,
        "int8_mac_share": screening.int8_mac_share if screening else 0.0,
        # A loss on part of the samples cannot be compared with the others.
        "loss": assessment.drop if assessment and assessment.complete else None,
        "simulator": {"text": describe_simulated_loss(trial.simulated), **plain(trial.simulated)}
        if trial.simulated
        else None,
        "noise": 10 ** (-screening.sqnr_db / 10) if screening else None,
    }
