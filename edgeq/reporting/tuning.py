"""State the facts of a tuning run, and the settings of each of its candidates."""

from __future__ import annotations

from edgeq.reporting.figures import Pairs, pairs
from edgeq.reporting.tuning_record import TrialRecord, TuningRecord
from edgeq.util.numbers import difference, metric_name

# Defaults of a scheme, which are left out of each candidate's settings.
_USUAL = {"mode": "static", "weight_symmetric": "yes", "activation_symmetric": "no", "reduce_range": "no"}


def trial_settings(trial: TrialRecord) -> Pairs:
    """Return the settings with which a candidate was made, without defaults."""
    # More fields than a scheme has. An untrusted record may have any number.
    scheme = [(key, value) for key, value in pairs(trial.scheme, 30) if _USUAL.get(key) != value]
    settings = {
        "engine": trial.engine,
        "precision": trial.precision,
        "recoveries": trial.recoveries,
        "threads": trial.threads or "",
        "builder": trial.builder,
        "parent": trial.parent,
    }
    return (*scheme, *pairs(settings, 10))


def tuning_facts(tuning: TuningRecord) -> Pairs:
    """Return facts about a run: the objective, allowed loss, budget, seconds and number of candidates."""
    goal, drop, name = tuning.goal, tuning.goal.max_drop, tuning.metric.name
    loss = difference(name, drop).lstrip("+") + f" of {metric_name(name)}" if drop is not None else ""
    facts = [
        ("objective", goal.objective),
        ("allowed loss", loss),
        ("budget", _seconds(goal.budget_s)),
        ("took", _seconds(tuning.elapsed_s)),
        ("candidates", str(len(tuning.candidates))),
        ("order of the finalists", {True: "settled", False: "not settled", None: ""}[tuning.settled]),
        ("ended", "by the budget" if tuning.out_of_time else ""),
    ]
    return tuple((key, value) for key, value in facts if value)


def _seconds(value: float | None) -> str:
    # Nobody measured or set a time of more than thirty years.
    if value is None or value >= 1e9:
        return ""
    minutes, seconds = divmod(round(value), 60)
    return f"{minutes} min {seconds:02d} s" if minutes else f"{value:.1f} s" if value < 10 else f"{seconds} s"
