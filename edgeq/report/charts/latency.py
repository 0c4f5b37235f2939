"""Latency distributions, a row a model, on one axis: the shape of all queries, and the percentiles marked in it."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from edgeq.report.numbers import milliseconds
from edgeq.report.scale import Scale, scale_for
from edgeq.report.svg import EM, Box, figure, fitted, join, label, tag, text_width, x_axis
from edgeq.report.timing import Latency, Timing

ROW = 112.0
_TOP = 8.0
_BOTTOM = 44.0


def latency_chart(timing: Timing, width: float) -> Markup:
    """Rows in the order of `timing.models`; empty without models."""
    models = timing.models[:8]
    if not models:
        return Markup()
    ends = [
        v
        for m in models
        for v in (m.figures.min_ms, m.p50, m.figures.p90_ms, m.figures.p99_ms)
        if v is not None and v > 0
    ]
    ends += [e for e in _occupied(timing) if e > 0]
    if not ends:
        return Markup()
    xs = scale_for(ends, 8.0, width - 8.0, pad=0.03)
    height = _TOP + ROW * len(models) + _BOTTOM
    base = height - _BOTTOM
    summary = "; ".join(f"{m.name}: median {milliseconds(m.p50)}" for m in models)
    return figure(
        width,
        height,
        f"Latency distributions. {summary}",
        x_axis(xs, base, _TOP, "latency (ms)" + (", logarithmic" if xs.log else "")),
        join(_row(m, timing, xs, _TOP + ROW * (i + 1), width) for i, m in enumerate(models)),
        class_="latency",
    )


def series(name: str, timing: Timing) -> str:
    """The class of a model's colour: the baseline's, or the others'."""
    return "base" if name == timing.baseline else "other"


def _occupied(timing: Timing) -> list[float]:
    """The outer edges of the bins that hold anything."""
    found = []
    for model in timing.models:
        bins = [i for i, n in enumerate(model.counts) if n > 0]
        if bins and len(timing.edges_ms) == len(model.counts) + 1:
            found += [timing.edges_ms[bins[0]], timing.edges_ms[bins[-1] + 1]]
    return found


def _row(model: Latency, timing: Timing, xs: Scale, base: float, width: float) -> Markup:
    kind = series(model.name, timing)
    top = base - ROW + 56
    parts = [label(xs.start, base - ROW + 26, fitted(model.name, width * 0.9), class_=f"name {kind}")]
    if len(timing.edges_ms) == len(model.counts) + 1 and any(model.counts):
        parts.append(tag("path", d=_outline(timing.edges_ms, model.counts, xs, base, top), class_=f"area {kind}"))
    parts.append(tag("line", x1=xs.start, x2=xs.end, y1=base, y2=base, class_="axis"))
    quantiles = [
        (name, value)
        for name, value in (("p50", model.p50), ("p90", model.figures.p90_ms), ("p99", model.figures.p99_ms))
        if value
    ]
    taken: list[Box] = []
    # The median's label is always there, the tail's next; those that would touch one before them are left out.
    for name, value in sorted(quantiles, key=lambda q: ("p50", "p99", "p90").index(q[0])):
        x = xs(value)
        parts.append(tag("line", x1=x, x2=x, y1=top - 4, y2=base, class_=f"quantile {kind}"))
        shown = f"{name} {milliseconds(value)}" if name == "p50" else name
        half = text_width(shown) / 2
        middle = min(max(x, xs.start + half), xs.end - half)
        box = Box(middle - half - EM / 4, top - 8 - EM, 2 * half + EM / 2, EM)
        if not any(box.overlaps(other) for other in taken):
            parts.append(label(middle, top - 8, shown, anchor="middle"))
            taken.append(box)
    return tag("g", *parts)


def _outline(edges: Sequence[float], counts: Sequence[float], xs: Scale, base: float, top: float) -> str:
    """The histogram as one closed path; heights are relative to the row's own fullest bin."""
    most = max(counts)
    path = [f"M{xs(max(edges[0], 1e-12)):.1f},{base:.1f}"]
    for i, n in enumerate(counts):
        path.append(f"V{base - (base - top) * n / most:.1f}H{xs(edges[i + 1]):.1f}")
    return "".join(path) + f"V{base:.1f}Z"
