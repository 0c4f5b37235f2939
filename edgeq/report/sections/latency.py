"""Latency: distributions and the table behind them."""

from __future__ import annotations

from edgeq.report.charts.latency import latency_chart, series
from edgeq.report.data import Latency, ReportData, Timing, Variant
from edgeq.report.markup import Markup, isolated, tag
from edgeq.report.numbers import count, milliseconds, share, size
from edgeq.report.sections.blocks import facts, notes, section, table
from edgeq.report.svg import both
from edgeq.report.verdict import timing_of


def latency_section(data: ReportData, variant: Variant | None) -> Markup:
    """Chart, table and what may have disturbed the measurement."""
    timing = timing_of(data, variant)
    if timing is None or not timing.models:
        return Markup()
    wide = latency_chart(timing, 880)
    scenario = timing.scenario.replace("-", " ") or "single stream"
    return section(
        "latency",
        "Latency",
        tag("div", both(wide, latency_chart(timing, 350)), class_="plot") if wide else None,
        _table(timing),
        notes(timing.notes),
        facts(timing.settings, class_="two"),
        lead=f"Measured interleaved, so that noise hits all alike ({scenario}). Each shape is one model.",
    )


def _table(timing: Timing) -> Markup:
    heads = ["model", "p50", "p90", "p99", "mean", "variation", "samples/s", "peak memory", "queries"]
    known = [True, *(any(_cells(m)[i] != "–" for m in timing.models) for i in range(1, len(heads)))]
    return table(
        [h for h, k in zip(heads, known, strict=True) if k],
        (
            [
                tag("span", isolated(m.name, limit=60), class_=f"key {series(m.name, timing)}") if i == 0 else cell
                for i, cell in enumerate(_cells(m))
                if known[i]
            ]
            for m in timing.models
        ),
        caption="Latency of each model",
    )


def _cells(model: Latency) -> list[str]:
    def or_dash(value: float | None, shown: object) -> str:
        return str(shown) if value is not None else "–"

    return [
        model.name,
        milliseconds(model.p50),
        or_dash(model.p90, milliseconds(model.p90 or 0)),
        or_dash(model.p99, milliseconds(model.p99 or 0)),
        or_dash(model.mean, milliseconds(model.mean or 0)),
        or_dash(model.cv, share(model.cv or 0)),
        or_dash(model.samples_per_s, count(model.samples_per_s or 0)),
        or_dash(model.peak_bytes, size(model.peak_bytes or 0)),
        or_dash(model.queries, model.queries),
    ]
