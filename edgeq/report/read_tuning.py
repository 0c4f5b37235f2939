"""A tuning record (docs/tune.md) as what the report draws."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeq.report.data import Candidate, Pairs, Tuning
from edgeq.report.numbers import difference, metric_name
from edgeq.report.plain import listed, mapping, number, pairs, positive, string, strings

MOST_CANDIDATES = 300
_AGAINST_FLOAT = ("top-1 agreement", "agreement", "cosine")
"""Metrics of agreement with float32, which by nature has 1."""
# What a scheme has where nothing special was chosen: not worth a line in each candidate's settings.
_USUAL = {"mode": "static", "weight_symmetric": "yes", "activation_symmetric": "no", "reduce_range": "no"}


def read_tuning(value: object) -> Tuning | None:
    plain = mapping(value)
    entries = [e for e in listed(plain.get("candidates")) if isinstance(e, Mapping)]
    if not entries:
        return None
    described = mapping(plain.get("metric"))
    metric = string(described.get("name")) or "accuracy"
    higher = described.get("higher_is_better") is not False
    base = _float_accuracy(plain, metric)
    drop = number(mapping(plain.get("goal")).get("max_drop"))
    # The chosen ones first, so that a limit never takes them away.
    keep = sorted(entries, key=lambda e: (e.get("status") != "chosen", e.get("pareto") is not True))[:MOST_CANDIDATES]
    kept = [e for e in entries if any(e is k for k in keep)]
    float32 = mapping(plain.get("float32"))
    baseline = Candidate(
        name="float32",
        accuracy=base,
        latency_ms=_latency(float32 or {"timing": plain.get("baseline")}).get("p50_ms"),
        bytes=positive(float32.get("bytes")),
        status="float32",
    )
    sign = 1.0 if higher else -1.0
    return Tuning(
        metric=metric,
        candidates=(baseline, *(_candidate(e, metric, base, sign) for e in kept)),
        higher_is_better=higher,
        least_accuracy=None if base is None or drop is None else base - sign * drop,
        allowed_loss=drop,
        met=bool(plain["chosen"]) if "chosen" in plain else None,
        facts=_facts(plain, metric, len(entries)),
        notes=(*strings(plain.get("verdict"), 12), *strings(plain.get("needed"), 12)),
        left_out=len(entries) - len(kept),
    )


def _candidate(entry: Mapping[str, Any], metric: str, base: float | None, sign: float) -> Candidate:
    screening = mapping(entry.get("screening"))
    latency = _latency(entry)
    status = {"chosen": "chosen", "short": "short", "eliminated": "dropped", "slow": "slow"}.get(
        string(entry.get("status")), "behind"
    )
    if entry.get("pareto") is True and status != "chosen":
        status = "front"
    return Candidate(
        name=string(entry.get("name")),
        settings=_settings(entry),
        accuracy=_accuracy(mapping(entry.get("accuracy")), metric, base, sign),
        latency_ms=latency.get("p50_ms"),
        low_ms=latency.get("low_ms"),
        high_ms=latency.get("high_ms"),
        bytes=positive(screening.get("bytes")),
        coverage=number(screening.get("int8_mac_share")),
        status=status,
        reason=string(entry.get("reason")),
    )


def _settings(entry: Mapping[str, Any]) -> Pairs:
    scheme = [(k, v) for k, v in pairs(entry.get("scheme"), 30) if _USUAL.get(k) != v]
    rest = pairs({k: entry.get(k) for k in ("recoveries", "threads", "builder", "parent")}, 10)
    return (*scheme, *((k, v) for k, v in rest if v != "0"))


def _accuracy(plain: Mapping[str, Any], metric: str, base: float | None, sign: float) -> float | None:
    """The value of the metric. Of what was measured on a part of the samples only the loss can be compared with others,
    because float32 has another value on that part."""
    found = number(mapping(plain.get("metrics")).get(metric))
    if found is not None and plain.get("complete") is not False:
        return found
    drop = number(plain.get("drop"))
    return None if base is None or drop is None else base - sign * drop


def _float_accuracy(plain: Mapping[str, Any], metric: str) -> float | None:
    found = number(mapping(mapping(plain.get("float32")).get("accuracy")).get(metric))
    return 1.0 if found is None and metric in _AGAINST_FLOAT else found


def _latency(entry: Mapping[str, Any]) -> dict[str, float | None]:
    plain = mapping(mapping(entry.get("timing")).get("latency"))
    return {key: positive(plain.get(key)) for key in ("p50_ms", "low_ms", "high_ms")}


def _facts(plain: Mapping[str, Any], metric: str, tried: int) -> Pairs:
    goal = mapping(plain.get("goal"))
    drop, budget, elapsed = (number(v) for v in (goal.get("max_drop"), goal.get("budget_s"), plain.get("elapsed_s")))
    facts = [
        ("objective", string(goal.get("objective"))),
        (
            "allowed loss",
            difference(metric, drop).lstrip("+") + f" of {metric_name(metric)}" if drop is not None else "",
        ),
        ("budget", _seconds(budget)),
        ("took", _seconds(elapsed)),
        ("candidates", str(tried)),
        ("order of the finalists", _settled(plain.get("settled"))),
        ("ended", "by the budget" if plain.get("out_of_time") is True else ""),
    ]
    return tuple((key, value) for key, value in facts if value)


def _settled(value: object) -> str:
    return "" if not isinstance(value, bool) else "settled" if value else "not settled"


def _seconds(value: float | None) -> str:
    if value is None or not 0 <= value < 1e9:
        return ""
    minutes, seconds = divmod(round(value), 60)
    return f"{minutes} min {seconds:02d} s" if minutes else f"{value:.1f} s" if value < 10 else f"{seconds} s"
