"""Limits of a comparison, which fail a build."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from edgeq_device.claim import Claim

from edgeq.report.compare_text import memory, primary
from edgeq.report.numbers import difference, metric_name, share, size, times

Outcome = Literal["held", "missed", "unsettled"]
HELD: Outcome = "held"
MISSED: Outcome = "missed"
UNSETTLED: Outcome = "unsettled"


@dataclass(frozen=True)
class Limits:
    """What B must keep to; None for no limit.

    Attributes:
        max_drop: accuracy that it may lose, in the unit of the task's deciding metric.
        min_speedup: how many times A's speed it must have.
        max_growth, max_memory_growth: by what share of A's its size, and its peak memory, may be larger.
    """

    max_drop: float | None = None
    min_speedup: float | None = None
    max_growth: float | None = None
    max_memory_growth: float | None = None


@dataclass(frozen=True)
class LimitCheck:
    """One limit and what became of it.

    Attributes:
        what: "latency", "accuracy", "size" or "memory".
        limit: for people.
        outcome: unsettled where the measurement shows neither that the limit holds nor that it does not.
        sentence: what was found; "" where the limit holds.
    """

    what: str
    limit: str
    outcome: Outcome
    sentence: str = ""


def check_limits(found: Mapping[str, Any], limits: Limits, a: str = "A", b: str = "B") -> tuple[LimitCheck, ...]:
    """What became of each limit, by the plain values of a comparison; `a` and `b` are what sentences call the two.

    A limit on what could not be measured is missed, but for a speed that the machine was too busy to tell. Accuracy is
    that of these samples, which is exact for them.
    """
    memories = (memory(found, "A"), memory(found, "B"))
    sizes = (found["a"].get("bytes"), found["b"].get("bytes"))
    return (
        *_drop(found, limits.max_drop, b),
        *_speedup(found, limits.min_speedup, a, b),
        *_growth("size", sizes, found["same"], limits.max_growth, a, b),
        *_growth("memory", memories, found["same"], limits.max_memory_growth, a, b),
    )


def missed(found: Mapping[str, Any], limits: Limits) -> tuple[str, ...]:
    """A sentence for each limit that is not shown to hold, an unsettled one too: a build must not pass because the
    machine was busy."""
    return tuple(check.sentence for check in check_limits(found, limits) if check.outcome != HELD)


def speed_outcome(found: Claim, limit: float) -> Outcome:
    """Whether a speed is at least `limit`, at most below it, or neither is shown."""
    interval = found.interval
    if interval is None or interval[1] < limit <= interval[2]:
        return UNSETTLED
    return HELD if interval[1] >= limit else MISSED


def _speedup(found: Mapping[str, Any], limit: float | None, a: str, b: str) -> Iterator[LimitCheck]:
    if limit is None:
        return
    allowed = f"at least {times(limit)} the speed"
    if found["same"]:
        outcome: Outcome = HELD if limit <= 1 else MISSED
        sentence = f"{b} is the same model as {a}, as fast, less than the {times(limit)} required"
        yield LimitCheck("latency", allowed, outcome, "" if outcome == HELD else sentence)
        return
    claim = Claim.read((found["latency"] or {}).get("ratio") or {"reason": "it was not timed"})
    outcome = speed_outcome(claim, limit)
    sentences = {
        HELD: "",
        MISSED: f"{claim.sentence(b, a)}, less than the {times(limit)} required",
        UNSETTLED: f"that {b} is {times(limit)} as fast as {a} was not shown: {claim.sentence(b, a)}; "
        "try a longer --duration",
    }
    yield LimitCheck("latency", allowed, outcome, sentences[outcome])


def _drop(found: Mapping[str, Any], limit: float | None, b: str) -> Iterator[LimitCheck]:
    if limit is None:
        return
    decisive = primary(found)
    if found["same"] or decisive is None:
        sentence = "" if found["same"] else f"how much accuracy {b} loses could not be measured"
        yield LimitCheck("accuracy", f"a loss of {limit:g}", MISSED if sentence else HELD, sentence)
        return
    name, before, after, higher = decisive
    lost = before - after if higher else after - before
    shown, allowed = (difference(name, value).lstrip("+") for value in (lost, limit))
    sentence = f"{b} loses {shown} of {metric_name(name)}, more than the {allowed} allowed" if lost > limit else ""
    yield LimitCheck("accuracy", f"a loss of {allowed}", MISSED if sentence else HELD, sentence)


def _growth(
    what: str, values: tuple[int | None, int | None], same: bool, limit: float | None, a: str, b: str
) -> Iterator[LimitCheck]:
    if limit is None:
        return
    before, after = values
    sentence = ""
    if not same and (before is None or after is None):
        sentence = f"the {what} could not be compared"
    elif not same and before is not None and after is not None and after > before * (1 + limit):
        more = share(after / before - 1) if before else size(after)
        sentence = f"{b}'s {what} is {size(after)}, {more} more than {a}'s {size(before)}; {share(limit)} is allowed"
    yield LimitCheck(what, f"{share(limit)} more", MISSED if sentence else HELD, sentence)
