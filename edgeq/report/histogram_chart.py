"""What a tensor holds, and between which values each method would keep it."""

from __future__ import annotations

import math

from markupsafe import Markup

from edgeq.report.histograms import TensorHistogram
from edgeq.report.numbers import decibels, shorten, significant
from edgeq.report.svg import EM, Scale, figure, fitted, join, label, tag, text_width, x_axis

_PLOT = 96.0
_STRIP = 17.0
_BOTTOM = 22.0
_BOLD = 1.12
"""How much wider the name of the chosen method is, which is bold."""


def histogram_chart(tensor: TensorHistogram, width: float) -> Markup:
    """Counts on a logarithmic axis above a strip for each method's range, in the order of `tensor.thresholds`."""
    if len(tensor.edges) != len(tensor.counts) + 1 or not any(tensor.counts):
        return Markup()
    low, high = tensor.edges[0], tensor.edges[-1]
    for threshold in tensor.thresholds:
        low, high = min(low, threshold.low), max(high, threshold.high)
    names = max((text_width(t.method) for t in tensor.thresholds), default=0.0)
    left = min(names * _BOLD + 8, width * 0.35) if tensor.thresholds else 8.0
    xs = Scale(low, high, left, width - 10.0)
    base = 8.0 + _PLOT
    height = base + _BOTTOM + _STRIP * len(tensor.thresholds)
    ranges = "; ".join(f"{t.method}: {significant(t.low)} to {significant(t.high)}" for t in tensor.thresholds)
    return figure(
        width,
        height,
        f"Histogram of {shorten(tensor.tensor, 200)} from {significant(tensor.edges[0])} to "
        f"{significant(tensor.edges[-1])}. {ranges}",
        x_axis(xs, base, 8.0, "", most=6),
        tag("path", d=_bars(tensor, xs, base), class_="area base"),
        _chosen(tensor, xs, base),
        join(_strip(tensor, i, xs, base + _BOTTOM + _STRIP * (i + 0.5), left) for i in range(len(tensor.thresholds))),
        class_="histogram",
    )


def _bars(tensor: TensorHistogram, xs: Scale, base: float) -> str:
    """One path for all bars. Every bin that is not empty is seen, however few it holds."""
    top = math.log1p(max(tensor.counts))
    path = []
    for i, n in enumerate(tensor.counts):
        if n > 0:
            left, right = xs(tensor.edges[i]), xs(tensor.edges[i + 1])
            path.append(
                f"M{left:.1f},{base:.1f}V{base - max(1.5, _PLOT * math.log1p(n) / top):.1f}H{right:.1f}V{base:.1f}Z"
            )
    return "".join(path)


def _chosen(tensor: TensorHistogram, xs: Scale, base: float) -> Markup:
    """What the chosen range leaves out is shaded, its ends are lines."""
    parts = []
    for threshold in tensor.thresholds:
        if threshold.method == tensor.chosen:
            low, high = xs(threshold.low), xs(threshold.high)
            for x, width in ((xs.start, low - xs.start), (high, xs.end - high)):
                if width > 0.5:
                    parts.append(tag("rect", x=x, y=8.0, width=width, height=base - 8.0, class_="outside"))
            parts += [tag("line", x1=x, x2=x, y1=4, y2=base, class_="threshold") for x in (low, high)]
    return join(parts)


def _strip(tensor: TensorHistogram, index: int, xs: Scale, y: float, left: float) -> Markup:
    threshold = tensor.thresholds[index]
    kind = "chosen" if threshold.method == tensor.chosen else ""
    low, high = xs(threshold.low), xs(threshold.high)
    parts = [
        label(left - 8, y + EM * 0.35, fitted(threshold.method, left - 8), anchor="end", class_=f"tick {kind}"),
        tag("line", x1=low, x2=high, y1=y, y2=y, class_=f"range {kind}"),
        *(tag("line", x1=end, x2=end, y1=y - 4, y2=y + 4, class_=f"range {kind}") for end in (low, high)),
    ]
    if threshold.sqnr_db is not None:
        shown = decibels(threshold.sqnr_db)
        margin = text_width(shown)
        if high - low > margin + 2 * EM:
            parts.append(label((low + high) / 2, y + EM * 0.35, shown, anchor="middle", class_=f"tick on-range {kind}"))
        elif high + 8 + margin <= xs.end:
            parts.append(label(high + 8, y + EM * 0.35, shown, class_=f"tick {kind}"))
        else:
            parts.append(label(low - 8, y + EM * 0.35, shown, anchor="end", class_=f"tick {kind}"))
    return tag("g", *parts)
