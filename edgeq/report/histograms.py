"""The tensors that lose most to their ranges: what is in them, and between which values each method would keep them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import onnx_ir as ir
from markupsafe import Markup

from edgeq.calibrate.methods import REGISTRY
from edgeq.calibrate.methods.mse import moments_of, squared_errors
from edgeq.calibrate.range_method import Grid, grid_of
from edgeq.calibrate.ranges import Range, derive_ranges
from edgeq.calibrate.statistics import Histogram, Statistics, TensorStatistics, linear_of
from edgeq.measure.comparison import decibels
from edgeq.model.graph import is_constant, name_of
from edgeq.report import numbers
from edgeq.report.svg import EM, Scale, figure, fitted, join, label, tag, text_width, x_axis
from edgeq.scheme import Scheme
from edgeq.util.records import Amount, Finite, Share


@dataclass(frozen=True)
class Threshold:
    """A range and the method that gave it. `sqnr_db` is what it leaves of the tensor, quantized alone."""

    method: str
    low: Finite
    high: Finite
    sqnr_db: Finite | None = None


@dataclass(frozen=True)
class TensorHistogram:
    """What calibration saw of one tensor.

    Attributes:
        edges: of the bins, rising, one more than there are counts.
        zeros: share of values that are exactly zero; they are not in `counts`.
        clipped: share of values outside the range in use.
        chosen: method of the range in use.
    """

    tensor: str
    edges: tuple[Finite, ...]
    counts: tuple[Amount, ...]
    zeros: Share = 0.0
    clipped: Share | None = None
    chosen: str = ""
    thresholds: tuple[Threshold, ...] = ()

    def __post_init__(self) -> None:
        if len(self.edges) != len(self.counts) + 1 or not self.counts or len(self.counts) > _MOST_BINS:
            raise ValueError(f"a histogram with {len(self.edges)} edges and {len(self.counts)} counts")
        if not all(a < b for a, b in pairwise(self.edges)):
            raise ValueError("a histogram whose edges do not rise")


TENSORS = 8
BINS = 80
_MOST_BINS = 512


def worst_tensors(
    statistics: Statistics,
    ranges: Mapping[str, Range],
    scheme: Scheme,
    *,
    among: Collection[str] | None = None,
    count: int = TENSORS,
) -> list[TensorHistogram]:
    """Histograms of the tensors that keep least of themselves under `ranges`, with what other methods would choose.

    The SQNR is of the tensor alone, rounded to the scheme's integers, computed from its histogram.

    Args:
        ranges: those in use.
        among: names of tensors that are quantized at all; None takes all that have a range.
    """
    grid = grid_of(scheme.activation_type, scheme.activation_symmetric)
    losses: dict[Histogram, tuple[float, str]] = {}
    for name, tensor in statistics.tensors.items():
        if name not in ranges or (among is not None and name not in among) or not tensor.minimum < tensor.maximum:
            continue
        sqnr = sqnr_of(tensor.histogram, ranges[name], grid)
        if sqnr is not None and tensor.histogram not in losses:
            losses[tensor.histogram] = sqnr, name
    worst = [name for _, name in sorted(losses.values())[:count]]
    chosen = statistics.select(worst)
    methods = [name for name, method in REGISTRY.items() if method.compared or name == scheme.method]
    derive = partial(
        derive_ranges, chosen, activation_type=scheme.activation_type, symmetric=scheme.activation_symmetric
    )
    # What is in use can differ from what its method says alone, where tensors share a scale.
    found = {m: ranges if m == scheme.method else derive(m) for m in methods}
    spans = {name: {method: ranges_of[name] for method, ranges_of in found.items()} for name in worst}
    return [_described(name, chosen.tensors[name], spans[name], scheme.method, grid) for name in worst]


def quantized_tensors(model: ir.Model) -> set[str] | None:
    """Names of the float tensors that a quantized graph rounds to constant scales; None where it has no Q/DQ nodes."""
    rounded = [node.inputs[0] for node in model.graph if node.op_type == "QuantizeLinear"]
    return {name_of(value) for value in rounded if not is_constant(value)} or None


def sqnr_of(histogram: Histogram, kept: Range, grid: Grid) -> float | None:
    """SQNR in dB of values rounded to `grid` over `kept`; None where there is nothing but zeros, or no range."""
    if not kept.low < kept.high:
        return None
    linear = linear_of(histogram)
    signal = float(linear.counts @ linear.centres() ** 2)
    noise = float(squared_errors(moments_of(linear), grid.params([kept.low], [kept.high]))[0])
    return decibels(signal, max(noise, signal * 1e-12)) if signal > 0 else None


def _described(
    name: str, tensor: TensorStatistics, thresholds: Mapping[str, Range], method: str, grid: Grid
) -> TensorHistogram:
    centres, counts, zeros = _values(tensor.histogram)
    # The histogram's outermost bins reach a little further than what was seen.
    centres = np.clip(centres, tensor.minimum, tensor.maximum)
    edges = np.linspace(tensor.minimum, tensor.maximum, BINS + 1)
    drawn, _ = np.histogram(centres, edges, weights=counts)
    used = thresholds[method]
    kept = [Threshold(m, r.low, r.high, sqnr_of(tensor.histogram, r, grid)) for m, r in thresholds.items()]
    outside = float(counts[(centres < used.low) | (centres > used.high)].sum())
    return TensorHistogram(
        tensor=name,
        edges=tuple(float(e) for e in edges),
        counts=tuple(int(n) for n in drawn),
        zeros=zeros / max(1, tensor.count),
        clipped=outside / max(1, tensor.count),
        chosen=method,
        thresholds=tuple(kept),
    )


def _values(histogram: Histogram) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], int]:
    """Return centres and counts of the bins without zero's, and how many are zero."""
    lower, upper = histogram.edges()
    zero = histogram.keys == 0
    return ((lower + upper) / 2)[~zero], histogram.counts[~zero], int(histogram.counts[zero].sum())


_PLOT = 96.0
_STRIP = 17.0
_BOTTOM = 22.0
_BOLD = 1.12
"""How much wider the name of the chosen method is, which is bold."""


def histogram_chart(tensor: TensorHistogram, width: float) -> Markup:
    """Draw counts on a logarithmic axis above a strip for each method's range, in the order of `tensor.thresholds`."""
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
    spans = [(tensor.edges[0], tensor.edges[-1]), *((t.low, t.high) for t in tensor.thresholds)]
    whole, *others = (f"{numbers.significant(start)} to {numbers.significant(end)}" for start, end in spans)
    ranges = "; ".join(f"{t.method}: {span}" for t, span in zip(tensor.thresholds, others, strict=True))
    return figure(
        width,
        height,
        f"Histogram of {numbers.shorten(tensor.tensor, 200)} from {whole}. {ranges}",
        x_axis(xs, base, 8.0, "", most=6),
        tag("path", d=_bars(tensor, xs, base), class_="area base"),
        _chosen(tensor, xs, base),
        join(_strip(tensor, i, xs, base + _BOTTOM + _STRIP * (i + 0.5), left) for i in range(len(tensor.thresholds))),
        class_="histogram",
    )


def _bars(tensor: TensorHistogram, xs: Scale, base: float) -> str:
    """Write one path for all bars. Every bin that is not empty is seen, however little is in it."""
    top = math.log1p(max(tensor.counts))
    path = []
    for (left, right), n in zip(pairwise(map(xs, tensor.edges)), tensor.counts, strict=True):
        if n > 0:
            y = base - max(1.5, _PLOT * math.log1p(n) / top)
            path.append(f"M{left:.1f},{base:.1f}V{y:.1f}H{right:.1f}V{base:.1f}Z")
    return "".join(path)


def _chosen(tensor: TensorHistogram, xs: Scale, base: float) -> Markup:
    """Shade what the chosen range leaves out, and draw its ends as lines."""
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
        shown = numbers.decibels(threshold.sqnr_db)
        margin = text_width(shown)
        if high - low > margin + 2 * EM:
            x, anchor, on = (low + high) / 2, "middle", "on-range "
        elif high + 8 + margin <= xs.end:
            x, anchor, on = high + 8, "start", ""
        else:
            x, anchor, on = low - 8, "end", ""
        parts.append(label(x, y + EM * 0.35, shown, anchor=anchor, class_=f"tick {on}{kind}"))
    return tag("g", *parts)
