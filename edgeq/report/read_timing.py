"""Latencies from a record: the report of `edgeq bench`, or the short form that a build's proof has."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from edgeq.report.data import FLOAT, Latency, Pairs, Ratio, Timing
from edgeq.report.numbers import significant
from edgeq.report.plain import listed, mapping, number, pairs, positive, string, strings, whole

_MOST_MODELS = 16
_MOST_BINS = 400


def read_bench(value: object) -> Timing | None:
    """`edgeq bench --json` (docs/bench.md); of several scenarios the first."""
    plain = mapping(value)
    for scenario, body in mapping(plain.get("scenarios")).items():
        body = mapping(body)
        models = mapping(plain.get("models"))
        read = []
        for name, entry in list(mapping(body.get("models")).items())[:_MOST_MODELS]:
            memory = mapping(mapping(models.get(name)).get("memory"))
            latency = _latency(
                string(name),
                mapping(entry).get("latency"),
                mapping(entry).get("histogram"),
                memory.get("process_peak_bytes"),
            )
            if latency is not None:
                read.append(latency)
        if not read:
            continue
        return Timing(
            models=tuple(read),
            scenario=string(scenario),
            baseline=string(plain.get("baseline")) or FLOAT,
            edges_ms=_edges(body.get("histogram_edges_ms")),
            ratios=_ratios(body.get("ratios")),
            machine=pairs(plain.get("machine"), 12),
            versions=pairs(plain.get("versions"), 12),
            settings=_settings(mapping(plain.get("settings"))),
            notes=strings(plain.get("notes"), 12),
        )
    return None


def read_speed(value: object) -> Timing | None:
    """A proof's `speed`: ratio of int8 to float32, and the latency of each."""
    plain = mapping(value)
    models = [
        _latency(string(name), entry) for name, entry in list(mapping(plain.get("latency")).items())[:_MOST_MODELS]
    ]
    known = tuple(m for m in models if m is not None)
    if not known:
        return None
    found = read_ratio(plain.get("ratio"))
    others = [m.name for m in known if m.name != FLOAT]
    return Timing(known, ratios={others[0]: found} if found is not None and others else {})


def read_finalists(plain: Mapping[str, Any], chosen: str) -> Timing | None:
    """float32 and the chosen candidate from a tuning record (docs/tune.md)."""
    histograms = mapping(plain.get("histograms"))
    counts = mapping(histograms.get("counts"))
    float32 = mapping(mapping(plain.get("float32")).get("timing") or plain.get("baseline"))
    found = [_latency(FLOAT, float32.get("latency"), counts.get(FLOAT))]
    ratios = {}
    for entry in listed(plain.get("candidates")):
        if chosen and string(mapping(entry).get("name")) == chosen:
            timing = mapping(mapping(entry).get("timing"))
            found.append(_latency(chosen, timing.get("latency"), counts.get(chosen)))
            ratio = read_ratio(timing.get("speedup"))
            if ratio is not None:
                ratios[chosen] = ratio
    known = tuple(m for m in found if m is not None)
    if not known:
        return None
    return Timing(known, edges_ms=_edges(histograms.get("edges_ms")), ratios=ratios)


def read_ratio(value: object) -> Ratio | None:
    plain = mapping(value)
    estimate = positive(plain.get("estimate"))
    return Ratio(estimate, number(plain.get("low")), number(plain.get("high"))) if estimate is not None else None


def _latency(name: str, value: object, histogram: object = None, peak: object = None) -> Latency | None:
    plain = mapping(value)
    p50 = positive(plain.get("p50_ms"))
    if p50 is None:
        return None
    counts = tuple(max(0.0, number(n) or 0.0) for n in listed(histogram)[:_MOST_BINS])
    return Latency(
        name=name,
        p50=p50,
        p90=positive(plain.get("p90_ms")),
        p99=positive(plain.get("p99_ms")),
        least=positive(plain.get("min_ms")),
        mean=positive(plain.get("mean_ms")),
        cv=number(plain.get("cv")),
        queries=whole(plain.get("count")),
        samples_per_s=positive(plain.get("samples_per_s")),
        peak_bytes=positive(peak),
        counts=counts,
    )


def _settings(plain: Mapping[str, Any]) -> Pairs:
    seconds, threads = positive(plain.get("min_duration_s")), whole(plain.get("threads"))
    pinned = ", ".join(string(core) for core in listed(plain.get("pin"))[:64])
    found = (
        ("measured for", f"{significant(seconds)} s a model at least" if seconds else ""),
        ("threads", "" if threads is None else str(threads) if threads else "as many as onnxruntime chooses"),
        ("pinned to cores", pinned),
    )
    return tuple((key, value) for key, value in found if value)


def _ratios(value: object) -> dict[str, Ratio]:
    found = {string(name): read_ratio(entry) for name, entry in list(mapping(value).items())[:_MOST_MODELS]}
    return {name: ratio for name, ratio in found.items() if ratio is not None}


def _edges(value: object) -> tuple[float, ...]:
    """Rising positive edges, else none."""
    edges = [positive(e) for e in listed(value)[: _MOST_BINS + 1]]
    known = [e for e in edges if e is not None]
    rising = all(a < b for a, b in pairwise(known))
    return tuple(known) if len(known) == len(edges) and rising else ()
