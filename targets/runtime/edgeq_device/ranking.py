"""Which runner is faster, by how much, and how sure that is."""

from __future__ import annotations

import math
import random
import time
from dataclasses import asdict, dataclass
from typing import Dict, List, Mapping, Optional, Tuple

import numpy as np

from edgeq_device.distribution import Distribution
from edgeq_device.latency import Bursts, Clock, Recorder, Runner, WarmUp, quiet_collector, warm_up


@dataclass(frozen=True)
class Ratio:
    """A paired latency ratio with its confidence interval.

    Attributes:
        estimate: median over the rounds of (latency of a / latency of b): how many times faster b is.
        low, high: ends of the interval.
        confidence: what the interval really covers; below what was asked where the rounds are too few for that.
        pairs: number of rounds.
    """

    estimate: float
    low: float
    high: float
    confidence: float
    pairs: int

    def to_dict(self) -> Dict[str, float]:
        """The five figures under their own names."""
        return asdict(self)


def ratio(a: Distribution, b: Distribution, *, confidence: float = 0.95) -> Ratio:
    """How many times faster `b` is than `a`, from the rounds in which both were measured.

    Each round gives one ratio, of the medians of the two bursts that lie next to each other in time, so drift of the
    clock or of the load cancels. The interval is the order-statistic interval of their median, which assumes nothing
    about the distribution: with n ratios in ascending order, (x[k], x[n-1-k]) covers the median with probability
    1 - 2 P(Binomial(n, 1/2) <= k), and k is the largest for which that is at least `confidence`.

    Where one runner has more rounds than the other (it was measured for longer), the rounds beyond are left out.
    """
    pairs = min(len(a.rounds), len(b.rounds))
    quotients = a.round_medians()[:pairs] / np.maximum(b.round_medians()[:pairs], 1e-12)
    quotients = np.sort(quotients)
    k, covered = _interval_rank(pairs, confidence)
    return Ratio(float(np.median(quotients)), float(quotients[k]), float(quotients[-1 - k]), covered, pairs)


def _interval_rank(n: int, confidence: float) -> Tuple[int, float]:
    """The largest k for which dropping k values at either end of n still covers the median, and the coverage."""
    tail = 0.0
    best = (0, max(0.0, 1 - 2 * 0.5**n))
    for k in range((n + 1) // 2):
        log_share = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) - n * math.log(2)
        tail += math.exp(log_share)
        if 1 - 2 * tail < confidence:
            break
        best = (k, 1 - 2 * tail)
    return best


@dataclass(frozen=True, eq=False)
class Ranking:
    """Runners from the fastest to the slowest.

    Attributes:
        order: names, fastest first. Runners dropped early (see `top`) stand behind those that were not.
        settled: whether the order of the first `top` places, or that it does not matter, is statistically settled.
        ties: neighbours in `order` that are equally fast within the tolerance.
        rounds: rounds of interleaving that it took.
        distributions: what was measured, by name.
    """

    order: Tuple[str, ...]
    settled: bool
    ties: Tuple[Tuple[str, str], ...]
    rounds: int
    distributions: Mapping[str, Distribution]


def rank_until_settled(
    runners: Mapping[str, Runner],
    *,
    confidence: float = 0.95,
    tie: float = 0.01,
    top: Optional[int] = None,
    min_rounds: int = 6,
    max_rounds: int = 400,
    max_duration_s: float = 60.0,
    warmup: Optional[WarmUp] = None,
    bursts: Optional[Bursts] = None,
    seed: int = 0,
    clock: Clock = time.perf_counter,
) -> Ranking:
    """Measure in interleaved rounds until the order of the runners is statistically settled.

    Two neighbours are settled when the confidence interval of their ratio lies above 1, or wholly within 1 ± `tie`:
    equally fast, whichever comes first. Looking again and again, and at many pairs, would find differences that are
    not there; so the error allowance 1 - `confidence` is divided by the number of pairs, and look number i gets the
    share 1 / (i (i + 1)) of it, which sums to 1. Looks grow further apart, by a quarter of the rounds so far.

    Args:
        top: how many of the fastest are of interest (None: all). A runner that is settled to be slower than all of
            them is dropped from further rounds.
        max_rounds, max_duration_s: give up after these; `settled` is then False.
        warmup: how to warm up first; None where the caller has done it.
    """
    if not runners:
        raise ValueError("nothing to rank: no runners")
    start = clock()
    if warmup is not None:
        for run in runners.values():
            warm_up(run, warmup, clock=clock)
    recorders = {name: Recorder(run, bursts or Bursts(0.05, 0.01), clock) for name, run in runners.items()}
    active = list(recorders)
    places = len(runners) if top is None else max(1, min(top, len(runners)))
    allowance = (1 - confidence) / max(1, math.comb(len(runners), 2))
    random_order = random.Random(seed)
    rounds, looks, next_look = 0, 0, min_rounds
    while True:
        turn = list(active)
        random_order.shuffle(turn)
        with quiet_collector():
            for name in turn:
                recorders[name].turn()
        rounds += 1
        out_of_time = rounds >= max_rounds or clock() - start >= max_duration_s
        if rounds < next_look and not out_of_time:
            continue
        looks += 1
        next_look = rounds + max(1, rounds // 4)
        measured = {name: recorders[name].distribution() for name in recorders}
        sure = 1 - allowance / (looks * (looks + 1))
        ranking = _look(measured, active, places, rounds, sure, tie)
        if ranking.settled or out_of_time:
            return ranking
        last = ranking.order[places - 1]
        active = [
            name
            for name in active
            if name in ranking.order[:places] or not _slower(measured[name], measured[last], sure)
        ]


def _look(
    measured: Mapping[str, Distribution], active: List[str], places: int, rounds: int, sure: float, tie: float
) -> Ranking:
    speed = {name: float(np.median(d.round_medians())) for name, d in measured.items()}
    order = sorted(measured, key=lambda name: (name not in active, speed[name]))
    contest = order[: len(active)]
    neighbours = [(contest[i], contest[i + 1]) for i in range(places - 1)]
    neighbours += [(contest[places - 1], name) for name in contest[places:]]
    settled = True
    ties = []
    for first, second in neighbours:
        between = ratio(measured[second], measured[first], confidence=sure)
        if between.confidence < sure:
            settled = False
        elif between.low >= 1 / (1 + tie) and between.high <= 1 + tie:
            ties.append((first, second))
        elif between.low <= 1:
            settled = False
    return Ranking(tuple(order), settled, tuple(ties), rounds, measured)


def _slower(a: Distribution, b: Distribution, sure: float) -> bool:
    """Whether `a` is settled to be slower than `b`."""
    between = ratio(a, b, confidence=sure)
    return between.confidence >= sure and between.low > 1
