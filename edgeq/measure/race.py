"""Time several models in turns, for less than a second each, so that a pause of the machine hits all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from edgeq_device.measure.latency import Distribution, Runner, WarmUp, measure_interleaved
from edgeq_device.measure.scenarios import make_runner

_TIMED_SECONDS = 0.5
# The same duration for models that have several sessions. Less time is enough, because claims about such models compare
# pairs of sessions, and sessions differ more than the runs of one session do.
_TIMED_SECONDS_IN_SEVERAL = 0.25
# On a busy machine, timing continues for up to this many seconds until enough runs were undisturbed.
_PATIENCE_SECONDS = 8.0
# Minimum number of runs. It is the smallest number of pairs that gives a 95 % interval for their median. With a larger
# minimum, timing a model that takes seconds would take minutes.
_TIMED_RUNS = 6
# On a busy machine no latency is steady, so a longer warm-up would not help.
_WARM_UP = WarmUp(window=3, min_s=0.1, max_s=0.5)


def make_runners(sessions: Mapping[str, Sequence[Any]], feeds: Sequence[Mapping[str, Any]]) -> dict[str, list[Runner]]:
    """Return the runners for `race`. Each model has one or several sessions.

    Args:
        feeds: inputs of one query; a query runs all of them.
    """
    return {
        name: [make_runner(s, feeds, samples_per_query=len(feeds)) for s in model_sessions]
        for name, model_sessions in sessions.items()
    }


def race(models: Mapping[str, Sequence[Runner]], on_round: Callable[[], None]) -> Mapping[str, Distribution]:
    """Time models in turns, and return their latencies.

    Args:
        models: name → a runner for each session of the model.
        on_round: function to call between rounds.
    """
    several = all(len(model_runners) > 1 for model_runners in models.values())
    return measure_interleaved(
        models,
        min_duration_s=_TIMED_SECONDS_IN_SEVERAL if several else _TIMED_SECONDS,
        min_runs=_TIMED_RUNS,
        patience_s=_PATIENCE_SECONDS,
        warmup=_WARM_UP,
        on_progress=lambda share: on_round(),
    )
