"""Describe and draw a model's layers and the tensors with the lowest SQNR, for the report.

A layer's row combines its error and its times, which are matched by node name. A tensor's histogram shows its values
and the range that each method would choose.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from markupsafe import Markup

from edgeq.calibration.methods import REGISTRY
from edgeq.calibration.methods.mse import moments_of, squared_errors
from edgeq.calibration.ranges import Range, derive_ranges
from edgeq.calibration.statistics import Histogram, Statistics, TensorStatistics, linear_of
from edgeq.data.samples import Samples, spread_over
from edgeq.errors import EdgeqError
from edgeq.measure.accuracy import compare_sessions
from edgeq.measure.error_sources import ErrorSource
from edgeq.measure.kernel_times import KernelTime
from edgeq.measure.layers import LayerPair
from edgeq.measure.power_ratios import decibels
from edgeq.model.graph import GraphIndex, is_constant, name_of
from edgeq.model.macs import node_macs
from edgeq.model.quant_params import Grid, grid_of
from edgeq.model.sharing import shared_model
from edgeq.reporting import figures
from edgeq.reporting.figures import (
    EM,
    Scale,
    axis_width,
    figure,
    fitted,
    join,
    label,
    scale_for,
    tag,
    text_width,
    x_axis,
    y_axis,
)
from edgeq.run.session import SessionSettings, open_session
from edgeq.scheme import Scheme
from edgeq.util import numbers
from edgeq.util.display import SILENT, Progress
from edgeq.util.numbers import significant
from edgeq.util.records import Amount, Finite, Share, parse, plain

SAMPLES = 4
"""Number of samples. A few are enough, because the figures are sums over all elements of a tensor."""
# Models with more multiply-accumulates than this use half as many samples. Their tensors have many elements, and
# tracing the errors of 40 layers takes 40 float runs per sample.
_LARGE_MACS = 1_000_000_000
_ERROR_SOURCES = 10


@dataclass(frozen=True)
class Figures:
    """Describe how closely an activation matches that of the float model. `sqnr_db` is None if both are identical."""

    sqnr_db: Finite | None = None
    cosine: Finite | None = None


@dataclass(frozen=True)
class Saturated:
    """Hold the shares of values at the two ends of the integer range."""

    low: Share = 0.0
    high: Share = 0.0


@dataclass(frozen=True)
class Activation:
    """Describe one activation as the report draws it. See
    `edgeq.measure.layer_noise.ActivationComparison`.
    """

    name: str
    node: str = ""
    op_type: str = ""
    kind: str = ""
    saturated: Saturated | None = None
    accumulated: Figures = Figures()
    layer: Figures = Figures()


@dataclass(frozen=True)
class LayersRecord:
    """List activations in execution order and the layers that cost accuracy. If both are empty, `error` states why."""

    count: int = 0
    activations: tuple[Activation, ...] = ()
    error_sources: tuple[ErrorSource, ...] = ()
    error: str = ""


def layer_record(
    reference: GraphIndex,
    quantized: Path,
    samples: Samples,
    settings: SessionSettings,
    *,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Record the error sources and the figures of each activation that `edgeq debug` finds and the report draws.

    Args:
        reference: the prepared model that `quantized` was made from.
        settings: the settings of the quantized model's session.

    Returns:
        A dictionary with `activations`, `error_sources` and `samples`. If the two models cannot be compared layer by
            layer, it contains only `error`.
    """
    try:
        assert reference.path is not None, "a prepared model has a file"
        candidate = shared_model(quantized, reference)
        large = sum(node_macs(reference.model).values()) > _LARGE_MACS
        # Files are often sorted by class, so the first samples may all be of one class.
        some_samples = spread_over(samples, SAMPLES // 2 if large else SAMPLES)
        pair = LayerPair(reference, candidate, settings=settings, progress=progress)
        activations = pair.compare(some_samples)
        # The optimiser fuses nodes. Without it, the outputs belong to the same graph as the activations.
        unoptimised = replace(settings, optimization="none")
        outputs = compare_sessions(open_session(reference.path), open_session(quantized, unoptimised), some_samples)
        activations, error_sources = pair.attribute_error(activations, outputs, some_samples, limit=_ERROR_SOURCES)
    except EdgeqError as error:
        # The rest of the report does not need the layers, so it shows this error in their place.
        return {"error": error.text}
    return {
        "samples": activations.samples,
        # `Activation` has only the fields that are drawn. The record in a bundle stays small that way.
        "activations": [
            plain(parse(plain(a), Activation, "the comparison of layers")) for a in activations.activations
        ],
        "error_sources": plain(error_sources),
    }


_SPREAD, _SPREAD_US = 0.2, 2.0
"""If two times of a layer differ by no more than this share or by no more than this number of microseconds, they count
as equal.
"""


@dataclass(frozen=True)
class LayerView:
    """Describe one layer, in execution order.

    Attributes:
        sqnr_db: the SQNR of the layer's output in dB against the float model's output, including the errors of all
            layers before it.
        own_db: the SQNR of the layer's output in dB if the layer gets the float model's inputs. It shows the error that
            the layer itself makes.
        saturated: the share of the output's values that are at an end of the integer range.
        float_us, int8_us: the median time of the layer's kernels in each model, in microseconds.
        error_source: True if the layer is listed among the layers that cost accuracy.
        advice: what to do about the error.
    """

    name: str
    op_type: str = ""
    sqnr_db: float | None = None
    own_db: float | None = None
    cosine: float | None = None
    saturated: float | None = None
    float_us: float | None = None
    int8_us: float | None = None
    int8_kind: str = ""
    error_source: bool = False
    advice: str = ""

    @property
    def time_lost(self) -> float:
        """Return by how many microseconds the layer is slower in int8. The value is negative if the layer is faster in
        int8, and 0 if its times are unknown.
        """
        return self.int8_us - self.float_us if self.int8_us is not None and self.float_us is not None else 0.0

    @property
    def made_slower(self) -> bool:
        """Return whether the layer is slower in integer kernels than in float32 by more than the profiler's own cost
        and variation.
        """
        ran_in_int8 = self.int8_kind == "int8" and self.float_us is not None
        return ran_in_int8 and self.time_lost > max(_SPREAD_US, _SPREAD * (self.float_us or 0.0))

    def error_db(self, *, alone: bool) -> float | None:
        """Return the SQNR in dB by which layers are ranked. If `alone` is true, the SQNR covers only the layer's own
        error, otherwise all errors so far.

        The result is None for a layer that adds no error.
        """
        return self.own_db if alone else self.sqnr_db


def measured_alone(layers: Sequence[LayerView]) -> bool:
    """Return whether the errors of single layers are known."""
    return any(layer.own_db is not None for layer in layers)


def layer_rows(
    record: LayersRecord | None, kernels: Mapping[str, Sequence[KernelTime]]
) -> tuple[tuple[LayerView, ...], float | None]:
    """Return the layers in execution order, and the time of conversions (Q/DQ) in microseconds. The time is None if
    there are no conversions.

    Args:
        kernels: kernel times by "float32" and "int8", in execution order.
    """
    record = record or LayersRecord()
    sources = {source.name: source for source in record.error_sources}
    measured: dict[str, Activation] = {}
    for activation in record.activations:
        # A node with several outputs has several activations, and the first stands for the node.
        measured.setdefault(activation.node or activation.name, activation)
    float_times, int8_times = _sum_by_name(kernels.get("float32", ())), _sum_by_name(kernels.get("int8", ()))
    # Without a comparison, the order of the int8 model counts, because the report is about that model.
    order = dict.fromkeys([*measured, *float_times, *int8_times] if measured else [*int8_times, *float_times])
    conversions = [time.us for time in int8_times.values() if time.kind == "conversion"]
    rows = tuple(
        _layer(name, measured.get(name), float_times.get(name), int8_times.get(name), sources)
        for name in order
        if name in measured or name in float_times or int8_times[name].kind != "conversion"
    )
    return rows, sum(conversions) if conversions else None


def _layer(
    name: str,
    activation: Activation | None,
    float_time: KernelTime | None,
    int8_time: KernelTime | None,
    sources: Mapping[str, ErrorSource],
) -> LayerView:
    figures = activation or Activation(name)
    source = sources.get(figures.name)
    kernel = float_time or int8_time
    return LayerView(
        name=name,
        op_type=figures.op_type or (kernel.op_type if kernel else ""),
        sqnr_db=figures.accumulated.sqnr_db,
        own_db=figures.layer.sqnr_db,
        cosine=figures.accumulated.cosine,
        saturated=figures.saturated.low + figures.saturated.high if figures.saturated else None,
        float_us=float_time.us if float_time else None,
        int8_us=int8_time.us if int8_time else None,
        int8_kind=int8_time.kind if int8_time else "",
        error_source=source is not None,
        advice=_advice(source) if source else "",
    )


def _advice(source: ErrorSource) -> str:
    """Return the reason for the error, and the nodes to keep in float."""
    # A cell of the table has no room for more names.
    flags = f"float: {', '.join(source.exclude[:8])}" if source.exclude else ""
    return "; ".join(part for part in (source.reason, flags) if part)


def _sum_by_name(times: Iterable[KernelTime]) -> dict[str, KernelTime]:
    """Sum the times by node name. The kernels of one node are counted together and get the operator type of the first
    kernel.
    """
    sums: dict[str, KernelTime] = {}
    for time in times:
        previous = sums.get(time.name)
        sums[time.name] = time if previous is None else replace(previous, us=previous.us + time.us)
    return sums


# The height of a panel, and the gap that holds the title of the next, in the units of `EM`.
_PANEL = 120.0
_GAP = 44.0
_MOST_COLUMNS = 600
"""If there are more layers than this, several layers share a column, which shows their worst SQNR and the sum of their
times.
"""


def layer_profile(layers: Sequence[LayerView], width: float) -> Markup:
    """Draw a panel for errors and a panel for times over the same axis. A panel without data is left out. If both have
    no data, return empty markup.
    """
    layers_per_column = -(-len(layers) // _MOST_COLUMNS) or 1
    columns = [layers[i : i + layers_per_column] for i in range(0, len(layers), layers_per_column)]
    decibels = [db for layer in layers for db in (layer.sqnr_db, layer.own_db) if db is not None]
    timed = any(layer.int8_us is not None or layer.float_us is not None for layer in layers)
    if not (decibels or timed) or len(columns) < 2:
        return Markup()
    scales = []
    top = 26.0
    if decibels:
        # Show 0 dB, where noise is as strong as the signal, if a layer comes near it.
        axis_values = [*decibels, min(0.0, *decibels)] if min(decibels) < 20 else decibels
        scales.append(scale_for(axis_values, top + _PANEL, top, log=False))
        top += _PANEL + _GAP
    if timed:
        longest = max(max(_sum(c, "float_us"), _sum(c, "int8_us")) for c in columns)
        # Times of zero would give an axis of no length.
        scales.append(Scale(0, longest * 1.05 or 1.0, top + _PANEL, top))
    xs = Scale(0, len(columns), max(axis_width(scale, 4) for scale in scales), width - 6.0)
    height = scales[-1].start + 24.0
    panels = [draw for draw, values in ((_sqnr, decibels), (_time, timed)) if values]
    drawn = [draw(columns, xs, ys) for draw, ys in zip(panels, scales, strict=True)]
    foot = label((xs.start + xs.end) / 2, height - 4, "layers in execution order", anchor="middle", class_="title")
    measured = " and ".join(name for name, values in (("SQNR", decibels), ("time", timed)) if values)
    return figure(width, height, f"{measured} of {len(layers)} layers in execution order", *drawn, foot)


def _sum(column: Sequence[LayerView], field: str) -> float:
    return sum(getattr(layer, field) or 0.0 for layer in column)


def _sqnr(columns: Sequence[Sequence[LayerView]], xs: Scale, ys: Scale) -> Markup:
    """Draw a line for the error so far, and dots for the error of each layer alone. If the latter is unknown, draw the
    dots on the line.
    """
    parts = [y_axis(ys, xs.start, xs.end, "SQNR of each layer's output (dB)", limit=4)]
    alone = any(measured_alone(column) for column in columns)
    # The dots of hundreds of layers must not merge.
    small = min(2.5, max(1.3, (xs.end - xs.start) / len(columns)))
    path: list[str] = []
    dots = []
    for i, column in enumerate(columns):
        x = xs(i + 0.5)
        so_far = [layer.sqnr_db for layer in column if layer.sqnr_db is not None]
        decibels = [db for layer in column if (db := layer.error_db(alone=alone)) is not None]
        if so_far:
            path.append(f"{'L' if path else 'M'}{x:.1f},{ys(min(so_far)):.1f}")
        if decibels:
            bad = any(layer.error_source for layer in column)
            size = 1.6 * small if bad else small
            dots.append(tag("circle", cx=x, cy=ys(min(decibels)), r=size, class_="dot bad" if bad else "dot"))
    if len(path) > 1:
        parts.append(tag("path", d="".join(path), class_="joint"))
    return tag("g", *parts, *dots)


def _time(columns: Sequence[Sequence[LayerView]], xs: Scale, ys: Scale) -> Markup:
    wide = (xs.end - xs.start) / len(columns)
    bar = max(0.4, wide * 0.42)
    parts = []
    for i, column in enumerate(columns):
        for field, kind, shift in (("float_us", "base", 0.0), ("int8_us", "other", bar)):
            value = _sum(column, field)
            if value > 0:
                x, y = xs(i) + wide * 0.08 + shift, ys(value)
                parts.append(tag("rect", x=x, y=y, width=bar, height=ys.start - y, class_=f"area {kind}"))
    axis = tag("line", x1=xs.start, x2=xs.end, y1=ys.start, y2=ys.start, class_="axis")
    return join([y_axis(ys, xs.start, xs.end, "time of each layer (µs)", limit=4), *parts, axis])


@dataclass(frozen=True)
class Threshold:
    """Describe a range and the method that chose it. `sqnr_db` is the tensor's SQNR if only this tensor is
    quantized.
    """

    method: str
    low: Finite
    high: Finite
    sqnr_db: Finite | None = None


@dataclass(frozen=True)
class TensorHistogram:
    """Hold the values of one tensor during calibration.

    Attributes:
        edges: the ascending edges of the bins, one more than there are counts.
        zeros: the share of values that are exactly zero. They are not in `counts`.
        clipped: the share of values outside the range in use.
        chosen: the method that chose the range in use.
    """

    tensor: str
    edges: tuple[Finite, ...]
    counts: tuple[Amount, ...]
    zeros: Share = 0.0
    clipped: Share | None = None
    chosen: str = ""
    thresholds: tuple[Threshold, ...] = ()

    def __post_init__(self) -> None:
        # A record may be untrusted. `salvage` leaves out a histogram that raises here.
        if len(self.edges) != len(self.counts) + 1 or not self.counts or len(self.counts) > _MOST_BINS:
            raise ValueError(f"a histogram with {len(self.edges)} edges and {len(self.counts)} counts")
        if not all(a < b for a, b in pairwise(self.edges)):
            raise ValueError("a histogram whose edges do not rise")


TENSORS = 8
BINS = 80
# Bounds what an untrusted record makes the page draw.
_MOST_BINS = 512


def worst_tensors(
    statistics: Statistics,
    ranges: Mapping[str, Range],
    scheme: Scheme,
    *,
    among: Collection[str] | None = None,
    count: int = TENSORS,
) -> list[TensorHistogram]:
    """Return histograms of the tensors that have the lowest SQNR with `ranges`. The histograms include the ranges that
    other methods would choose.

    The SQNR is computed from the tensor's histogram, as if only this tensor were rounded to the scheme's integers.

    Args:
        ranges: the ranges in use.
        among: names of the tensors that are quantized, or None for all tensors with a range.
    """
    grid = grid_of(scheme.activation_type, scheme.activation_symmetric, scheme.scale)
    losses: dict[Histogram, tuple[float, str]] = {}
    for name, tensor in statistics.tensors.items():
        if name not in ranges or (among is not None and name not in among) or not tensor.minimum < tensor.maximum:
            continue
        sqnr = sqnr_of(tensor.histogram, ranges[name], grid)
        # Tensors between operators that only move values have the same histogram, and one of them is enough.
        if sqnr is not None and tensor.histogram not in losses:
            losses[tensor.histogram] = sqnr, name
    worst = [name for _, name in sorted(losses.values())[:count]]
    selection = statistics.select(worst)
    methods = [name for name, method in REGISTRY.items() if method.compared or name == scheme.method]
    derive = partial(
        derive_ranges,
        selection,
        activation_type=scheme.activation_type,
        symmetric=scheme.activation_symmetric,
        form=scheme.scale,
    )
    # If tensors share a scale, the range in use can differ from the range that its method gives.
    ranges_by_method = {m: ranges if m == scheme.method else derive(m) for m in methods}
    spans = {name: {method: ranges_of[name] for method, ranges_of in ranges_by_method.items()} for name in worst}
    return [_build_histogram(name, selection.tensors[name], spans[name], scheme.method, grid) for name in worst]


def quantized_tensors(model: ir.Model) -> set[str] | None:
    """Return the names of the float tensors that a quantized graph rounds with constant scales, or None if the graph
    has no Q/DQ nodes.
    """
    rounded = [node.inputs[0] for node in model.graph if node.op_type == "QuantizeLinear"]
    return {name_of(value) for value in rounded if not is_constant(value)} or None


def sqnr_of(histogram: Histogram, kept_range: Range, grid: Grid) -> float | None:
    """Return the SQNR in dB of values that are rounded to `grid` over the range `kept_range`, or None if all values are
    zero or the range is empty.
    """
    if not kept_range.low < kept_range.high:
        return None
    linear = linear_of(histogram)
    signal = float(linear.counts @ linear.centres() ** 2)
    noise = float(squared_errors(moments_of(linear), grid.params([kept_range.low], [kept_range.high]))[0])
    # Values that are all on the grid have no noise. 120 dB stands for that, because infinity cannot be drawn.
    return decibels(signal, max(noise, signal * 1e-12)) if signal > 0 else None


def _build_histogram(
    name: str, tensor: TensorStatistics, thresholds: Mapping[str, Range], method: str, grid: Grid
) -> TensorHistogram:
    centres, counts, zeros = _values(tensor.histogram)
    # The outermost bins of the histogram extend a little beyond the extrema.
    centres = np.clip(centres, tensor.minimum, tensor.maximum)
    edges = np.linspace(tensor.minimum, tensor.maximum, BINS + 1)
    drawn, _ = np.histogram(centres, edges, weights=counts)
    used = thresholds[method]
    thresholds_text = [Threshold(m, r.low, r.high, sqnr_of(tensor.histogram, r, grid)) for m, r in thresholds.items()]
    outside = float(counts[(centres < used.low) | (centres > used.high)].sum())
    return TensorHistogram(
        tensor=name,
        edges=tuple(float(e) for e in edges),
        counts=tuple(int(n) for n in drawn),
        zeros=zeros / max(1, tensor.count),
        clipped=outside / max(1, tensor.count),
        chosen=method,
        thresholds=tuple(thresholds_text),
    )


def _values(histogram: Histogram) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], int]:
    """Return the centres and counts of all bins except the zero bin, and the number of zeros."""
    lower, upper = histogram.edges()
    zero = histogram.keys == 0
    return ((lower + upper) / 2)[~zero], histogram.counts[~zero], int(histogram.counts[zero].sum())


_PLOT = 96.0
_STRIP = 17.0
_TOP = 20.0
_BOTTOM = 40.0
_BOLD = 1.12
"""The factor by which bold text is wider. The name of the chosen method is bold."""


def histogram_chart(tensor: TensorHistogram, width: float) -> Markup:
    """Draw the counts on a logarithmic axis. Below them, draw a strip for each method's range in the order of
    `tensor.thresholds`.
    """
    if len(tensor.edges) != len(tensor.counts) + 1 or not any(tensor.counts):
        return Markup()
    low, high = tensor.edges[0], tensor.edges[-1]
    for threshold in tensor.thresholds:
        low, high = min(low, threshold.low), max(high, threshold.high)
    names = max((text_width(t.method) for t in tensor.thresholds), default=0.0)
    # Long names of methods must leave most of the width to the plot.
    margin = min(names * _BOLD + 8, width * 0.35) if tensor.thresholds else 8.0
    xs = Scale(low, high, margin, width - 10.0)
    base = _TOP + _PLOT
    height = base + _BOTTOM + _STRIP * len(tensor.thresholds)
    spans = [(tensor.edges[0], tensor.edges[-1]), *((t.low, t.high) for t in tensor.thresholds)]
    full_span, *spans_text = (f"{significant(start)} to {significant(end)}" for start, end in spans)
    ranges = "; ".join(f"{t.method}: {span}" for t, span in zip(tensor.thresholds, spans_text, strict=True))
    return figure(
        width,
        height,
        f"Histogram of {figures.shorten(tensor.tensor, 200)} from {full_span}. {ranges}",
        x_axis(xs, base, _TOP, "value", limit=6),
        label(0, EM, "count (log)", class_="title"),
        tag("path", d=_bars(tensor, xs, base), class_="area base"),
        _chosen_range(tensor, xs, base),
        join(_strip(tensor, i, xs, base + _BOTTOM + _STRIP * (i + 0.5), margin) for i in range(len(tensor.thresholds))),
        class_="histogram",
    )


def _bars(tensor: TensorHistogram, xs: Scale, base: float) -> str:
    """Return one SVG path for all bars. Every bin that is not empty is visible, however small its count."""
    top = math.log1p(max(tensor.counts))
    path = []
    for (start, right), n in zip(pairwise(map(xs, tensor.edges)), tensor.counts, strict=True):
        if n > 0:
            y = base - max(1.5, _PLOT * math.log1p(n) / top)
            path.append(f"M{start:.1f},{base:.1f}V{y:.1f}H{right:.1f}V{base:.1f}Z")
    return "".join(path)


def _chosen_range(tensor: TensorHistogram, xs: Scale, base: float) -> Markup:
    """Shade the values outside the chosen range, and draw the ends of the range as lines."""
    parts = []
    for threshold in tensor.thresholds:
        if threshold.method == tensor.chosen:
            low, high = xs(threshold.low), xs(threshold.high)
            for x, width in ((xs.start, low - xs.start), (high, xs.end - high)):
                if width > 0.5:
                    parts.append(tag("rect", x=x, y=_TOP, width=width, height=_PLOT, class_="outside"))
            parts += [tag("line", x1=x, x2=x, y1=_TOP - 4, y2=base, class_="threshold") for x in (low, high)]
    return join(parts)


def _strip(tensor: TensorHistogram, index: int, xs: Scale, y: float, start: float) -> Markup:
    threshold = tensor.thresholds[index]
    kind = "chosen" if threshold.method == tensor.chosen else ""
    low, high = xs(threshold.low), xs(threshold.high)
    parts = [
        label(start - 8, y + EM * 0.35, fitted(threshold.method, start - 8), anchor="end", class_=f"tick {kind}"),
        tag("line", x1=low, x2=high, y1=y, y2=y, class_=f"range {kind}"),
        *(tag("line", x1=end, x2=end, y1=y - 4, y2=y + 4, class_=f"range {kind}") for end in (low, high)),
    ]
    if threshold.sqnr_db is not None:
        text = numbers.decibels(threshold.sqnr_db)
        margin = text_width(text)
        # The figure goes onto the bar if it fits there, otherwise next to it on the side with more space.
        if high - low > margin + 2 * EM:
            x, anchor, on = (low + high) / 2, "middle", "on-range "
        elif high + 8 + margin <= xs.end:
            x, anchor, on = high + 8, "start", ""
        else:
            x, anchor, on = low - 8, "end", ""
        parts.append(label(x, y + EM * 0.35, text, anchor=anchor, class_=f"tick {on}{kind}"))
    return tag("g", *parts)
