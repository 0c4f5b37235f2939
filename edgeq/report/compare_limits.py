"""Limits of a comparison, which fail a build."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from edgeq_device.claim import Claim

from edgeq.report.compare_text import primary
from edgeq.report.numbers import difference, metric_name, times


@dataclass(frozen=True)
class Limits:
    """What B must keep to: accuracy that it may lose, and how many times A's speed it must have; None for no limit."""

    max_drop: float | None = None
    min_speedup: float | None = None


def missed(found: Mapping[str, Any], limits: Limits) -> tuple[str, ...]:
    """A sentence for each limit that is not shown to hold by the plain values of a comparison.

    A limit that could not be measured is missed, and so is a speed whose interval reaches below it: a build must not
    pass because the machine was busy. Accuracy is that of these samples, which is exact for them.
    """
    return (*_drop(found, limits.max_drop), *_speedup(found, limits.min_speedup))


def _drop(found: Mapping[str, Any], limit: float | None) -> Iterator[str]:
    if limit is None or found["same"]:
        return
    decisive = primary(found)
    if decisive is None:
        yield "how much accuracy B loses could not be measured"
        return
    name, before, after, higher = decisive
    lost = before - after if higher else after - before
    if lost > limit:
        shown, allowed = (difference(name, value).lstrip("+") for value in (lost, limit))
        yield f"B loses {shown} of {metric_name(name)}, more than the {allowed} allowed"


def _speedup(found: Mapping[str, Any], limit: float | None) -> Iterator[str]:
    ratio = (found["latency"] or {}).get("ratio")
    if limit is None or (found["same"] and limit <= 1):
        return
    if found["same"]:
        yield f"B is the same model as A, as fast, less than the {times(limit)} required"
        return
    claim = Claim.read(ratio or {"reason": "it was not timed"})
    if claim.interval is None or claim.interval[1] < limit <= claim.interval[2]:
        found_instead = claim.sentence("B", "A")
        yield f"that B is {times(limit)} as fast as A was not shown: {found_instead}; try a longer --duration"
    elif claim.interval[2] < limit:
        yield f"{claim.sentence('B', 'A')}, less than the {times(limit)} required"
