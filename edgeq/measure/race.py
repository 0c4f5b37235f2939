"""The race in which a proof times models: in turns, for as long as a claim about their speed needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from edgeq_device.distribution import Distribution
from edgeq_device.latency import Runner, WarmUp, measure_interleaved
from edgeq_device.scenarios import query_runner

_TIMED_SECONDS = 0.5
# In several sessions, which differ more than the runs of one: a claim rests on a pair of sessions each.
_TIMED_SECONDS_IN_SEVERAL = 0.25
# On a busy machine for longer, until enough runs were not disturbed.
_PATIENCE_SECONDS = 8.0
# A model of seconds is timed this often, not for minutes: the fewest pairs that a 95 % interval of their median needs.
_TIMED_RUNS = 6
_WARM_UP = WarmUp(window=3, min_s=0.1, max_s=2.0)


def runners(sessions: Mapping[str, Sequence[Any]], feeds: Sequence[Mapping[str, Any]]) -> dict[str, list[Runner]]:
    """What `race` takes, of models in some sessions each.

    Args:
        feeds: what one query runs, all of them.
    """
    return {name: [query_runner(s, feeds, samples_per_query=len(feeds)) for s in own] for name, own in sessions.items()}


def race(models: Mapping[str, Sequence[Runner]], on_round: Callable[[], None]) -> Mapping[str, Distribution]:
    """Latencies of models, measured in turns.

    Args:
        models: name → a runner for each of its sessions.
        on_round: called between rounds.
    """
    several = all(len(own) > 1 for own in models.values())
    return measure_interleaved(
        models,
        min_duration_s=_TIMED_SECONDS_IN_SEVERAL if several else _TIMED_SECONDS,
        min_runs=_TIMED_RUNS,
        patience_s=_PATIENCE_SECONDS,
        warmup=_WARM_UP,
        on_progress=lambda share: on_round(),
    )
