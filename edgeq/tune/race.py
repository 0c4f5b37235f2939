"""What a measured race says: milliseconds, claims against the baseline, and which candidates are tied."""

from __future__ import annotations

from edgeq_device.claim import Ranking, claim
from edgeq_device.latency import Distribution, histogram, shared_edges

from edgeq.report.tuning_record import Timing
from edgeq.tune.evaluator import Race
from edgeq.tune.trials import TIE
from edgeq.util.records import plain

LIKELY = 0.05
"""A larger difference of medians counts although the race leaves it in doubt: a little accuracy is not worth it."""


def race_of(ranking: Ranking, baseline: str, *, batch: int) -> Race:
    """The race whose latencies are `ranking`.

    Args:
        batch: samples in a query.
    """
    whole = ranking.distributions
    measured = {name: distribution.undisturbed() for name, distribution in whole.items()}
    timings = {}
    for name, distribution in measured.items():
        figures = plain(distribution)
        figures["samples_per_s"] *= batch
        beside = (claim(whole[baseline], whole[name]), measured[baseline].p50)
        timings[name] = Timing(figures) if name == baseline else Timing(figures, *beside)
    edges = shared_edges(list(measured.values()))
    counts = {name: histogram(distribution, edges) for name, distribution in measured.items()}
    order = [name for name in ranking.order if name != baseline]
    tied = tuple(name for name in order if not slower(whole[name], whole[order[0]]))
    return Race(timings, ranking.settled, {"edges_ms": edges.tolist(), "counts": counts}, tied)


def slower(one: Distribution, other: Distribution) -> bool:
    """Whether `one` takes longer than `other`: beyond doubt by more than the share `TIE`, or in the median by more than
    `LIKELY`. An interval of few sessions has 1 in it where one session was odd."""
    found = claim(one, other).interval
    beyond_doubt = found is not None and found[1] > 1 + TIE
    return beyond_doubt or one.undisturbed().p50 > (1 + LIKELY) * other.undisturbed().p50
