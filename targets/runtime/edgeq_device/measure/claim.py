"""Decide which runner is faster, by how much and how certainly, and what may be claimed about its speed.

Everything that prints or records a speed ratio (`edgeq` on a workstation, the runner in a bundle) gets it from this
module. So the estimate, interval, verdict and milliseconds always come from the same runs.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import asdict, dataclass
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

import numpy as np

from edgeq_device.measure.latency import (
    BUSY,
    Bursts,
    Clock,
    Distribution,
    Recorder,
    Runners,
    WarmUp,
    is_out_of_reach,
    quiet_collector,
    warm_up_all,
)
from edgeq_device.measure.watch import MachineWatch

FEWEST_SESSIONS = 3
"""Minimum number of sessions for an interval over sessions. With fewer sessions, the interval is over rounds."""

# The two constants apply if there are too few rounds for the requested certainty. A runner then counts as slower if it
# is slower by the factor `_FAR` in every round, and if there are enough rounds that the range of their ratios covers
# the median with probability `_FEWEST`.
_FAR, _FEWEST = 1.2, 0.95


@dataclass(frozen=True)
class Ratio:
    """Hold a paired latency ratio with its confidence interval.

    Attributes:
        estimate: latency of a / latency of b, that is, how many times faster b is. It is the median over the pairs or,
            if the pairs are sessions, the round next to their geometric mean. So it is one of the observed ratios,
            never an average of two.
        low, high: ends of the interval. If the pairs are sessions, the estimate of another, equally long measurement in
            new sessions lies in this interval.
        confidence: actual coverage of the interval, 0 to 1. It is lower than requested if there are too few rounds.
        pairs: number of pairs, each of which gives one ratio.
        a_ms, b_ms: median latencies in milliseconds of the pair that gave `estimate`; None if there is no pair.
    """

    estimate: float
    low: float
    high: float
    confidence: float
    pairs: int
    a_ms: Optional[float] = None
    b_ms: Optional[float] = None


def compute_ratio(a: Distribution, b: Distribution, *, confidence: float = 0.95, by_session: bool = False) -> Ratio:
    """Return how many times faster `b` is than `a`, from the rounds in which both ran undisturbed.

    Each round gives the ratio of the median latencies of two bursts. The bursts are adjacent in time, so drift of the
    clock or of the load cancels out. The interval is the order-statistic interval of the median of the ratios, which
    assumes nothing about the distribution: with n ratios in ascending order, (x[k], x[n-1-k]) covers the median with
    probability 1 - 2 P(Binomial(n, 1/2) <= k). k is the largest value for which that probability is at least
    `confidence`.

    If `by_session` is set and both ran in at least `FEWEST_SESSIONS` sessions, each session instead gives one ratio:
    the median of its rounds' ratios. All rounds of a session share the session's place in memory and its process, so
    more rounds do not predict the next session better. The interval is then that of `_predict_next`.

    If one runner was measured for longer and has more rounds than the other, the surplus rounds are left out.
    """
    rounds = min(len(a.rounds), len(b.rounds))
    times = np.stack([a.compute_round_medians()[:rounds], b.compute_round_medians()[:rounds]])
    measured = ~np.isnan(times).any(axis=0)
    # Round i ran in session i modulo their number.
    times, session = times[:, measured], np.flatnonzero(measured) % a.sessions
    # A coarse clock may measure 0.
    quotients = np.divide(*np.maximum(times, 1e-12))
    if quotients.size == 0:
        return Ratio(float("nan"), 0.0, float("inf"), 0.0, 0)
    if by_session and a.sessions == b.sessions >= FEWEST_SESSIONS:
        medians = np.array([np.median(np.log(quotients[session == number])) for number in np.unique(session)])
        pairs = len(medians)
        # The estimate is the ratio of two latencies that were observed together, so take the round next to the mean.
        centre = int(np.abs(np.log(quotients) - medians.mean()).argmin())
        if pairs >= FEWEST_SESSIONS:
            low, high = _predict_next(medians, confidence)
        else:
            # Too few sessions had an undisturbed round, so the next one is unknown.
            low, high, confidence = float(quotients.min()), float(quotients.max()), 0.0
    else:
        pairs, ordered = len(quotients), np.sort(quotients)
        centre = int(np.argsort(quotients, kind="stable")[pairs // 2])
        k, confidence = _find_interval_rank(pairs, confidence)
        low, high = float(ordered[k]), float(ordered[-1 - k])
    estimate = float(quotients[centre])
    latencies = float(times[0][centre]), float(times[1][centre])
    # The estimate is a round that was observed, which may lie outside an interval of means.
    return Ratio(estimate, min(low, estimate), max(high, estimate), confidence, pairs, *latencies)


def _predict_next(logs: np.ndarray, confidence: float) -> Tuple[float, float]:
    """Return the interval in which the mean ratio of as many new sessions lies with probability `confidence`.

    The logarithm of a session's ratio is the sum of the models' true ratio, a deviation of the session, and the noise
    of its rounds. With n sessions of m rounds each, the variance s^2 of the n observed values therefore estimates
    (variance between sessions) + (variance within a session) / m, as in a one-way analysis of variance with random
    effects. This measurement's mean and the next one's each have the variance s^2 / n. Their difference divided by
    s sqrt(2 / n) has Student's t distribution with n - 1 degrees of freedom.

    Args:
        logs: float64[n], n >= 2: logarithm of each session's ratio.
    """
    count = len(logs)
    reach = find_student_t(confidence, count - 1) * float(logs.std(ddof=1)) * math.sqrt(2 / count)
    return math.exp(logs.mean() - reach), math.exp(logs.mean() + reach)


def find_student_t(confidence: float, freedom: int) -> float:
    """Return the t for which Student's t distribution is between -t and t with probability `confidence`.

    The probability is a finite sum for a whole number of degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4).
    Bisection finds t.

    Args:
        confidence: probability, above 0 and below 1.
        freedom: degrees of freedom, at least 1.
    """

    def between(t: float) -> float:
        """Return the probability of a value between -t and t."""
        angle = math.atan2(t, math.sqrt(freedom))
        cosine, odd = math.cos(angle), freedom % 2
        term, total = (cosine if odd else 1.0), 0.0
        for k in range(1 + odd, freedom, 2):
            total += term
            term *= cosine**2 * k / (k + 1)
        total *= math.sin(angle)
        return 2 / math.pi * (angle + total) if odd else total

    low, high = 0.0, 1.0
    while between(high) < confidence:
        high *= 2
    # Sixty halvings reach the precision of a double.
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if between(middle) < confidence else (low, middle)
    return high


def _find_interval_rank(n: int, confidence: float) -> Tuple[int, float]:
    """Return k and the coverage of the interval that remains when k of n values are dropped at each end. k is the
    largest number for which that interval still covers the median with probability `confidence`.
    """
    tail = 0.0
    best = (0, max(0.0, 1 - 2 * 0.5**n))
    for k in range((n + 1) // 2):
        # In logarithms, because the coefficients of hundreds of rounds overflow.
        log_share = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) - n * math.log(2)
        tail += math.exp(log_share)
        if 1 - 2 * tail < confidence:
            break
        best = (k, 1 - 2 * tail)
    return best


@dataclass(frozen=True, eq=False)
class SpeedRanking:
    """Order runners from the fastest to the slowest.

    Attributes:
        order: names, fastest first. Runners that were dropped early (see `top`) come after the others.
        settled: True if the order of the first `top` places is settled, or if it is certain that their order does not
            matter. A place is settled by statistics, or by the rule `enough` of `rank_until_settled`.
        ties: pairs of neighbours in `order` whose first runner may be slower than the second, but by no more than the
            tolerance.
        rounds: number of interleaved rounds that were measured.
        distributions: measured latencies by name.
    """

    order: Tuple[str, ...]
    settled: bool
    ties: Tuple[Tuple[str, str], ...]
    rounds: int
    distributions: Mapping[str, Distribution]


@dataclass(frozen=True)
class RaceRules:
    """Set how models are timed against each other.

    Attributes:
        sessions: number of sessions of each model.
        warmup, bursts: arguments of `rank_until_settled`.
        arguments: fields of `SettlingRules`, by name.
    """

    sessions: int
    warmup: WarmUp
    bursts: Bursts
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class SettlingRules:
    """Set when the order of runners counts as settled, and when a measurement gives up.

    Attributes:
        confidence: probability with which all settled places are right.
        tie: tolerance. Choosing a runner that is slower by at most this share costs nothing that matters.
        top: number of the fastest runners that are of interest (None: all). A runner that is certain to be slower than
            all of them is dropped from further rounds.
        keep: name of a runner that is never dropped, because the others are compared with it. If each runner has at
            least `FEWEST_SESSIONS` sessions, the measurement continues after the order is settled, until each runner
            has shared an undisturbed round with `keep` in every session.
        enough: number of undisturbed rounds after which two neighbours count as a tie if the estimate of their ratio is
            within the tolerance, however wide its interval is. A narrower interval would take many times as long, and
            gain less than the tolerance. The rule does not apply to `keep`. None: the rule never applies.
        min_rounds: number of rounds before the first check.
        max_rounds, max_duration_s: limits after which the measurement stops, with `settled` False. It also stops if the
            machine is too busy for a claim within these limits (`is_out_of_reach`).
    """

    confidence: float = 0.95
    tie: float = 0.01
    top: Optional[int] = None
    keep: str = ""
    enough: Optional[int] = None
    min_rounds: int = 6
    max_rounds: int = 400
    max_duration_s: float = 60.0


USUAL_RULES = SettlingRules()


def rank_until_settled(
    runners: Mapping[str, Runners],
    rules: SettlingRules = USUAL_RULES,
    *,
    warmup: Optional[WarmUp] = None,
    bursts: Optional[Bursts] = None,
    seed: int = 0,
    clock: Clock = time.perf_counter,
    on_round: Callable[[], None] = lambda: None,
) -> SpeedRanking:
    """Measure in interleaved rounds until the order of the runners is statistically settled.

    Two neighbours are settled when the confidence interval of their ratio shows that the first takes at most 1 +
    `rules.tie` times as long as the second. Choosing the first then costs at most this tolerance, even if the second is
    faster.

    At intervals, the function checks whether the order is settled. Repeated checks of many pairs would find differences
    that do not exist. Therefore the error allowance 1 - `rules.confidence` is divided by the number of pairs. Check
    number i then gets the share 1 / (i (i + 1)) of the result, and these shares sum to 1. After each check, the number
    of rounds grows by a quarter before the next.

    Args:
        warmup: settings of the warm-up; None if the caller has warmed up the runners.
        on_round: function that is called after each round.
    """
    if not runners:
        raise ValueError("nothing to rank: no runners")
    start = clock()
    warm_up_all(runners.values(), warmup, clock)
    active = list(runners)
    places = len(runners) if rules.top is None else max(1, min(rules.top, len(runners)))
    tie, keep, enough = rules.tie, rules.keep, rules.enough
    allowance = (1 - rules.confidence) / max(1, math.comb(len(runners), 2))
    random_order = random.Random(seed)

    def harmless(winner: str, rival: str, between: Ratio) -> bool:
        """Return whether choosing `winner` costs no more than the tolerance, according to the interval of the ratio or
        to `enough`.
        """
        if between.confidence >= sure and between.low >= 1 / (1 + tie):
            return True
        if enough is None or between.pairs < enough or keep in (winner, rival):
            return False
        return 1 / (1 + tie) <= between.estimate <= 1 + tie

    rounds, looks, next_look, undisturbed = 0, 0, rules.min_rounds, 0.0
    reference = keep if keep in runners else next(iter(runners))
    with MachineWatch(clock) as watch:
        recorders = {name: Recorder(run, bursts or Bursts(0.05, 0.01), watch) for name, run in runners.items()}
        while True:
            turn = list(active)
            random_order.shuffle(turn)
            with quiet_collector():
                quiet = {name: recorders[name].run_turn() for name in turn}
            rounds += 1
            on_round()
            if quiet.get(reference, True):
                undisturbed += sum(quiet.values()) / len(quiet)
            spent = clock() - start
            hopeless = is_out_of_reach(undisturbed, spent, rules.max_duration_s - spent)
            out_of_time = rounds >= rules.max_rounds or spent >= rules.max_duration_s or hopeless
            if rounds < next_look and not out_of_time:
                continue
            looks += 1
            next_look = rounds + max(1, rounds // 4)
            measured = {name: recorders[name].build_distribution() for name in recorders}
            sure = 1 - allowance / (looks * (looks + 1))
            ranking = _check_order(measured, active, places, rounds, sure, harmless)
            if out_of_time or (ranking.settled and _has_each_session(measured, active, keep)):
                return ranking
            slowest = ranking.order[places - 1]
            remaining = {*ranking.order[:places], keep}
            active = [n for n in active if n in remaining or not _is_slower(measured[n], measured[slowest], sure)]


_Harmless = Callable[[str, str, Ratio], bool]


def _check_order(
    measured: Mapping[str, Distribution], active: List[str], places: int, rounds: int, sure: float, harmless: _Harmless
) -> SpeedRanking:
    speed = {name: d.drop_disturbed().p50 for name, d in measured.items()}
    order = sorted(measured, key=lambda name: (name not in active, speed[name]))
    contest = order[: len(active)]
    neighbours = [(contest[i], contest[i + 1]) for i in range(places - 1)]
    # The runners behind need no order among them.
    neighbours += [(contest[places - 1], name) for name in contest[places:]]
    settled = True
    ties = []
    for winner, rival in neighbours:
        between = compute_ratio(measured[rival], measured[winner], confidence=sure)
        if harmless(winner, rival, between):
            ties += [(winner, rival)] if between.low <= 1 else []
        else:
            settled = False
    return SpeedRanking(tuple(order), settled, tuple(ties), rounds, measured)


def _has_each_session(measured: Mapping[str, Distribution], active: List[str], keep: str) -> bool:
    """Return whether each runner shares an undisturbed round with `keep` in each session. Return True if claims do not
    use sessions.
    """
    sessions = {measured[name].sessions for name in active}
    if not keep or len(sessions) > 1 or max(sessions) < FEWEST_SESSIONS:
        return True
    rivals = [measured[name] for name in active if name != keep]
    return all(compute_ratio(measured[keep], rival, by_session=True).pairs >= max(sessions) for rival in rivals)


def _is_slower(a: Distribution, b: Distribution, sure: float) -> bool:
    """Return whether `a` is certain to be slower than `b`. If `a` is far slower, fewer rounds suffice."""
    between = compute_ratio(a, b, confidence=sure)
    return between.low > (1 if between.confidence >= sure else _FAR) and between.confidence >= _FEWEST


FASTER, SLOWER, UNSETTLED, UNKNOWN = "faster", "slower", "unsettled", "unknown"
CONFIDENCE = 0.95
FEWEST_PAIRS = 6
"""Minimum number of pairs for a claim. With five, no order-statistic interval covers the median with a probability of
95 %; with six, the probability is 1 - 2 / 2**6, which is 97 %."""
WIDEST = 1.6
"""Widest interval that permits a claim, as its upper end divided by its lower end."""
ESTIMATE_ALLOWANCE = 1.25
"""Factor by which the spread of an estimate extends, at both ends, beyond the interval of its ratios. If two models
lose a core, they are not slowed by the same factor. The place of a session in memory changes its speed by a similar
amount.

Eight models were run 18 times each, next to two busy loops on two cores. With this allowance, 99 % of the spreads
contained the ratio of the quiet machine (94 % for the worst model). No estimate showed a model as faster if it was in
fact a tenth slower. Without the allowance, only 78 % of the spreads contained that ratio (28 % for the worst model),
and two estimates showed such a model as faster.
"""
FEWEST_ESTIMATED = 3
"""Minimum number of pairs of runs for an estimate."""


@dataclass(frozen=True)
class Claim:
    """Hold how many times faster a model is than a baseline, if that can be claimed.

    Attributes:
        estimate: the estimate of `Ratio` (baseline's latency / model's latency); None if nothing can be claimed.
        low, high: ends of the interval of `estimate` (see `Ratio`); None if `estimate` is None.
        confidence: coverage of the interval, 0 to 1.
        pairs: number of ratios in the estimate.
        baseline_ms, ms: median latencies in milliseconds of the pair that gave `estimate`; None if there was no pair.
        reason: why nothing can be claimed; "" if something can.
        likely: rougher estimate in place of a claim, as (estimate, low, high): how many times faster the model is, and
            the ends of the estimate's spread. None if something can be claimed, or if nothing is known.
    """

    estimate: Optional[float] = None
    low: Optional[float] = None
    high: Optional[float] = None
    confidence: float = 0.0
    pairs: int = 0
    baseline_ms: Optional[float] = None
    ms: Optional[float] = None
    reason: str = ""
    likely: Optional[Tuple[float, float, float]] = None

    @property
    def estimated(self) -> Optional[Tuple[float, float, float]]:
        """Return the estimate in place of a claim, as (estimate, low, high). Return None if something can be claimed,
        or if nothing is known.
        """
        if self.interval is not None or self.likely is None:
            return None
        about, low, high = self.likely
        return (about, low, high) if 0 < low <= about <= high < math.inf else None

    @property
    def interval(self) -> Optional[Tuple[float, float, float]]:
        """Return (estimate, low, high), or None if nothing can be claimed. The fields are checked, because they may
        come from an untrusted record.
        """
        if self.reason or self.estimate is None or self.low is None or self.high is None:
            return None
        is_sure = self.pairs >= FEWEST_SESSIONS and self.confidence >= CONFIDENCE
        ordered = 0 < self.low <= self.estimate <= self.high < math.inf
        return (self.estimate, self.low, self.high) if is_sure and ordered else None

    @property
    def verdict(self) -> str:
        """Return `FASTER` or `SLOWER` if the whole interval is on that side of 1, `UNSETTLED` if it includes 1, and
        `UNKNOWN` if there is no interval.
        """
        interval = self.interval
        if interval is None:
            return UNKNOWN
        return FASTER if interval[1] > 1 else SLOWER if interval[2] < 1 else UNSETTLED

    def sentence(self, model: str, baseline: str) -> str:
        """Return the claim as a sentence for people."""
        interval, about = self.interval, self.estimated
        if interval is None:
            why = self.reason or f"{self.pairs} pair{'' if self.pairs == 1 else 's'} of runs are too few to be sure"
            if about is None:
                return f"{model} against {baseline}: the speed is not measurable here: {why}"
            doubt = "" if about[1] > 1 or about[2] < 1 else ", and may be the slower one"
            return f"{model} runs at about {about[0]:.2f} times {baseline}'s speed ({self.figures()}){doubt}: {why}"
        if self.verdict == UNSETTLED:
            return f"{model} against {baseline}: no difference in speed is settled ({self.figures()})"
        if self.verdict == SLOWER:
            return f"{model} is SLOWER than {baseline}: {interval[0]:.2f} times its speed ({self.figures()})"
        return f"{model} runs at {interval[0]:.2f} times {baseline}'s speed ({self.figures()})"

    def figures(self) -> str:
        """Return the interval and the milliseconds as text, such as "1.90 to 2.30; 12.9 → 6.2 ms". For an estimate,
        return its spread, such as "estimated, 1.80 to 2.40". Return "" if nothing is known.
        """
        interval, about = self.interval, self.estimated
        if interval is None:
            return f"estimated, {about[1]:.2f} to {about[2]:.2f}" if about else ""
        timed = self.baseline_ms is not None and self.ms is not None
        spent = f"; {self.baseline_ms:.3g} → {self.ms:.3g} ms" if timed else ""
        return f"{interval[1]:.2f} to {interval[2]:.2f}{spent}"

    def to_dict(self) -> Dict[str, Any]:
        """Return all fields and the verdict, keyed by their names."""
        return {**asdict(self), "verdict": self.verdict}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Claim":
        """Return the claim that a record of `to_dict` describes."""
        fields = {key: record[key] for key in cls.__dataclass_fields__ if key in record}
        likely = fields.get("likely")
        return cls(**{**fields, "likely": None if likely is None else tuple(likely)})


def make_claim(baseline: Distribution, model: Distribution) -> Claim:
    """Return what can be claimed about `model` against `baseline`. The two must have been measured together.

    Only undisturbed runs count, and only rounds (or sessions, see `compute_ratio`) in which both models have
    undisturbed runs. If there are too few for an interval, if they contradict each other, or if the machine was busy,
    nothing is claimed. An estimate is then given instead.
    """
    speedup = compute_ratio(baseline, model, confidence=CONFIDENCE, by_session=True)
    reason = _describe_doubt(speedup, baseline, model)
    if reason:
        rests_on = speedup.confidence, speedup.pairs, speedup.a_ms, speedup.b_ms
        return Claim(None, None, None, *rests_on, reason, _estimate(speedup, baseline, model))
    return Claim(
        speedup.estimate, speedup.low, speedup.high, speedup.confidence, speedup.pairs, speedup.a_ms, speedup.b_ms
    )


EARLY_ERROR = 0.01
"""Probability with which `is_claim_settled` may find a difference between two equally fast models. It adds to the error
of the interval at the end of a measurement, which is 1 to 5 %."""


def is_claim_settled(measured: Mapping[str, Distribution], look: int) -> bool:
    """Return whether every model is certainly faster or certainly slower than the first one, so that a longer
    measurement would not change what is claimed.

    Repeated looks would find a difference that does not exist. Therefore look number i gets the share 1 / (i (i + 1))
    of `EARLY_ERROR`, and these shares sum to 1 (as in `rank_until_settled`).
    """
    baseline, *rivals = measured.values()
    sure = 1 - EARLY_ERROR / (look * (look + 1) * max(1, len(rivals)))
    for rival in rivals:
        between = compute_ratio(baseline, rival, confidence=sure, by_session=True)
        certain = between.confidence >= sure and not between.low <= 1 <= between.high
        if not certain or make_claim(baseline, rival).interval is None:
            return False
    return True


def _estimate(speedup: Ratio, baseline: Distribution, model: Distribution) -> Optional[Tuple[float, float, float]]:
    """Return an estimate and the ends of its spread, or None if there are too few runs.

    If enough runs were undisturbed for an interval, it is their ratio `speedup`. Otherwise, compute the ratio of mean
    latencies in each session (or round), and return the geometric mean of these ratios. Both spreads are the interval,
    extended by `ESTIMATE_ALLOWANCE`.

    Disturbed runs count in these means. The mean of a burst includes the time that other processes took. That time is
    the same share of the mean for both models, so it cancels out. A median does not have this property: short runs
    mostly end before another process gets the core, so their median contains no waits, but the median of longer runs
    does. `benchmarks/busy.py` compares means with medians, low percentiles, minima and processor time.
    """
    if speedup.confidence >= CONFIDENCE:
        return speedup.estimate, speedup.low / ESTIMATE_ALLOWANCE, speedup.high * ESTIMATE_ALLOWANCE
    count = min(len(baseline.rounds), len(model.rounds))
    group_count = baseline.sessions if baseline.sessions == model.sessions >= FEWEST_ESTIMATED else count
    means = []
    for side in (baseline, model):
        rounds = np.split(side.samples_ms, side.rounds[1:])[:count]
        groups = [rounds[offset::group_count] for offset in range(min(group_count, count))]
        means.append(np.maximum([np.concatenate(group).mean() for group in groups], 1e-12))
    logs = np.log(means[0] / means[1])
    if len(logs) < FEWEST_ESTIMATED:
        return None
    low, high = _predict_next(logs, CONFIDENCE)
    return math.exp(logs.mean()), low / ESTIMATE_ALLOWANCE, high * ESTIMATE_ALLOWANCE


def _describe_doubt(speedup: Ratio, baseline: Distribution, model: Distribution) -> str:
    """Return why nothing can be claimed, or "" if something can."""
    busy, stolen = max(baseline.busy, model.busy), max(baseline.stolen, model.stolen)
    disturbed = max(baseline.disturbed_share, model.disturbed_share)
    shares = {"other processes used or wanted": busy - stolen, "the virtual machine's host took": stolen}
    causes = [f"{who} {share:.0%} of it" for who, share in shares.items() if busy > BUSY and share > BUSY / 2]
    waited = max(baseline.waiting_share, model.waiting_share)
    causes += [f"{disturbed:.0%} of the runs were kept waiting for a core"] if disturbed > BUSY else []
    causes += [f"waits for a core took {waited:.0%} of the runs' time"] if waited > BUSY >= disturbed else []
    cause = f"the machine was busy ({' and '.join(causes)})" if causes else ""
    if speedup.confidence < CONFIDENCE:
        minimum = FEWEST_SESSIONS if baseline.sessions == model.sessions >= FEWEST_SESSIONS else FEWEST_PAIRS
        shortage = (
            f"{speedup.pairs} pair{'' if speedup.pairs == 1 else 's'} of undisturbed runs, at least {minimum} needed"
        )
        return f"{cause}; {shortage}" if cause else f"{shortage}: measure longer"
    # A NaN must fail this comparison, too.
    if not speedup.high <= speedup.low * WIDEST:
        return f"{cause or 'the runs disagree'}; the ratio was anywhere from {speedup.low:.2f} to {speedup.high:.2f}"
    return cause if max(busy, waited) > BUSY else ""
