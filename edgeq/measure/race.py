"""Time several models in turns, for less than a second each, so that a pause of the machine hits all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeq_device.measure.claim import is_claim_settled, make_claim
from edgeq_device.measure.latency import Distribution, Runner, WarmUp, measure_interleaved
from edgeq_device.measure.load import CompetingLoad
from edgeq_device.measure.scenarios import make_runner

from edgeq.run.session import Engines, SessionSettings

_TIMED_SECONDS = 0.5
# The same duration for models that have several sessions. Less time is enough, because claims about such models compare
# pairs of sessions, and sessions differ more than the runs of one session do.
_TIMED_SECONDS_IN_SEVERAL = 0.25
# On a busy machine, timing continues for up to this many seconds until enough runs were undisturbed.
_PATIENCE_SECONDS = 2.0
# Minimum number of runs. It is the smallest number of pairs that gives a 95 % interval for their median. With a larger
# minimum, timing a model that takes seconds would take minutes.
_TIMED_RUNS = 6
# On a busy machine no latency is steady, so a longer warm-up would not help.
_WARM_UP = WarmUp(window=3, min_s=0.1, max_s=0.5)

CROWDED = 0.25
"""Share of the machine's time that others use, above which no claim can be expected. It is higher than the share that
rules out a claim, because it is read over a few tenths of a second.
"""


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
    """Time models in turns, and return their latencies. End as soon as the speed of each model against the first one is
    settled.

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
        is_settled=is_claim_settled,
    )


@dataclass(frozen=True)
class RacedFile:
    """Describe a model to time.

    Attributes:
        session: an open session of the model.
        count: number of sessions in which it is timed, each in a process of its own.
    """

    path: Path
    settings: SessionSettings
    session: Any
    count: int


def race_files(
    engines: Engines,
    files: Mapping[str, RacedFile],
    feed: Mapping[str, Any],
    load: CompetingLoad,
    on_round: Callable[[], None],
) -> Mapping[str, Distribution]:
    """Time model files in turns, and return their latencies.

    Next to other work, time only the open sessions: the processes of the others would take seconds to start, and still
    nothing could be claimed.

    Args:
        engines: opens the other sessions.
        feed: inputs of one query.
        load: what other processes have used since a moment ago.
    """
    if load.measure_busy() > CROWDED:
        latency = race(make_runners({name: [file.session] for name, file in files.items()}, [feed]), on_round)
        baseline, *rivals = latency.values()
        # A claim that does not cover the differences between processes would be too bold. The machine is calm by now.
        if all(make_claim(baseline, rival).interval is None for rival in rivals):
            return latency
    sessions = {name: engines.open_apart(file.path, file.settings, file.count) for name, file in files.items()}
    return race(make_runners(sessions, [feed]), on_round)
