"""What the templates list: rows of tables, in the order and number in which they are drawn."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from edgeq.measure.agreement import OutputAgreement
from edgeq.measure.coverage import Coverage, FloatNode, OperatorCoverage
from edgeq.report.histograms import TensorHistogram
from edgeq.report.layers import Layer, measured_alone
from edgeq.report.numbers import (
    count,
    decibels,
    difference,
    isolated,
    metric,
    metric_name,
    milliseconds,
    share,
    shorten,
    significant,
    size,
)
from edgeq.report.read import ReportData, Variant, compared, timing_of, verdict_of
from edgeq.report.timing import Latency, Timing, series
from edgeq.report.tuning import NAMES, Candidate, Tuning

Row = Sequence[str]
Table = tuple[Row, list[Row]]
"""Heads and rows."""

DASH = "–"
_SHOWN_OPERATORS, _SHOWN_REASONS, _TABLE_NODES = 10, 20, 500
_SHOWN_SLICES = 8
_FIRST = {"chosen": 0, "float32": 1}
_RULED_OUT = ("short", "slow", "dropped")


def or_dash(value: float | None, shown: Callable[..., str], *before: str) -> str:
    """`shown(*before, value)`, a dash where there is no value."""
    return DASH if value is None else shown(*before, value)


def known_columns(heads: Row, rows: list[Row], always: int = 1) -> Table:
    """Without the columns that hold nothing but dashes, but for the first `always`."""
    kept = [i for i in range(len(heads)) if i < always or any(row[i] != DASH for row in rows)]
    return [heads[i] for i in kept], [[row[i] for i in kept] for row in rows]


def ordered_candidates(tuning: Tuning) -> list[Candidate]:
    """The chosen one, float32, then what meets the limits, then what was ruled out, each by latency."""
    sign = 1.0 if tuning.higher_is_better else -1.0

    def rank(candidate: Candidate) -> tuple[int, float, str]:
        """Sorts the chosen first, then what meets the least accuracy, then the rest; each group by latency."""
        least, value = tuning.least_accuracy, candidate.accuracy
        short = least is not None and value is not None and sign * value < sign * least
        out = 3 if short or candidate.status in _RULED_OUT else 2
        return _FIRST.get(candidate.status, out), candidate.latency_ms or math.inf, candidate.name

    return sorted(tuning.candidates, key=rank)


def statuses_drawn(tuning: Tuning, chart: str) -> list[tuple[str, str]]:
    """The legend: statuses whose marks are in `chart`, with their names."""
    present = {c.status if c.status in NAMES else "short" for c in tuning.candidates}
    return [(status, name) for status, name in NAMES.items() if status in present or f"mark {status}" in chart]


def candidate_figures(candidate: Candidate, tuning: Tuning) -> str:
    """Latency, accuracy, size and coverage, as far as they are known."""
    texts = [
        milliseconds(candidate.latency_ms) if candidate.latency_ms else "",
        f"{metric_name(tuning.metric)} {metric(tuning.metric, candidate.accuracy)}"
        if candidate.accuracy is not None
        else "",
        size(candidate.bytes) if candidate.bytes else "",
        f"{share(candidate.coverage)} in int8" if candidate.coverage is not None else "",
    ]
    return ", ".join(text for text in texts if text)


def variant_rows(data: ReportData) -> list[Row]:
    """One row a variant: name, target, verdict, median, accuracy, SQNR, coverage, size, where it was checked."""
    return [_variant_row(data, variant) for variant in data.variants]


def _variant_row(data: ReportData, variant: Variant) -> Row:
    primary = variant.primary
    pair = compared(timing_of(data, variant), variant)
    return [
        isolated(variant.name, 40),
        isolated(variant.title or DASH, 60),
        verdict_of(data, variant).status,
        milliseconds(pair[1].p50) if pair else DASH,
        metric(primary.name, primary.int8) if primary and primary.int8 is not None else DASH,
        or_dash(variant.worst_db, decibels),
        _coverage_cell(variant.coverage),
        or_dash(variant.bytes, size),
        {True: "on its own kernels", False: "on others' kernels", None: DASH}[variant.native],
    ]


def _coverage_cell(coverage: Coverage | None) -> str:
    if coverage is None or coverage.int8_mac_share is None:
        return DASH
    return f"{share(coverage.int8_mac_share)}{' (forecast)' if coverage.basis == 'forecast' else ''}"


def latency_table(timing: Timing) -> Table:
    """One row a model."""
    heads = ["model", "p50", "p90", "p99", "mean", "variation", "samples/s", "peak memory", "queries"]
    return known_columns(heads, [_latency_row(model, timing) for model in timing.models])


def _latency_row(model: Latency, timing: Timing) -> Row:
    f = model.figures
    key = Markup('<span class="key {}">{}</span>').format(series(model.name, timing), isolated(model.name, 60))
    return [
        key,
        milliseconds(f.p50_ms),
        or_dash(f.p90_ms, milliseconds),
        or_dash(f.p99_ms, milliseconds),
        or_dash(f.mean_ms, milliseconds),
        or_dash(f.cv, share),
        or_dash(f.samples_per_s, count),
        or_dash(model.peak_bytes, size),
        or_dash(f.count, "{:.0f}".format),
    ]


def metric_rows(variant: Variant) -> list[Row]:
    """One row a metric."""
    return [
        [
            isolated(metric_name(m.name), 60),
            or_dash(m.float32, metric, m.name),
            or_dash(m.int8, metric, m.name),
            or_dash(m.gain, difference, m.name),
        ]
        for m in variant.metrics
    ]


def output_table(variant: Variant) -> Table:
    """One row an output, and one for each of its slices of unlike scale."""
    heads = ("output", "SQNR", "cosine", "largest error", "same top answer")
    rows = [row for output in variant.outputs[:24] for row in (_output_row(output), *_slice_rows(output))]
    return known_columns(heads, rows)


def _output_row(output: OutputAgreement) -> Row:
    name, top1 = isolated(output.name, 80), or_dash(output.top1, share)
    if output.equal:
        return [name, "equal", "1", "0", top1]
    if not output.compared:
        return [name, "not compared", DASH, DASH, DASH]
    if output.same is not None:
        return [name, f"{share(output.same)} the same", DASH, significant(output.max_abs_error), top1]
    finite = math.isfinite(output.sqnr_db)
    sqnr = decibels(output.sqnr_db) if finite else DASH
    return [name, sqnr, f"{output.cosine:.6f}", significant(output.max_abs_error), top1]


def _slice_rows(output: OutputAgreement) -> list[Row]:
    """One row a slice, the worst ones."""
    shown = sorted(
        sorted(output.slices, key=lambda part: part.sqnr_db)[:_SHOWN_SLICES], key=lambda s: (s.axis, s.first)
    )
    return [
        [
            isolated(f"{output.name}, {part.where}", 120),
            decibels(part.sqnr_db) if math.isfinite(part.sqnr_db) else DASH,
            f"{part.cosine:.6f}",
            significant(part.max_abs_error),
            DASH,
        ]
        for part in shown
    ]


def coverage_text(coverage: Coverage) -> str:
    """What the share is and what it rests on."""
    if coverage.int8_mac_share is None:
        return f"How much runs on integers is not known: {coverage.how}."
    own = "as ONNX Runtime's own profile of the optimised graph shows, which is not always what the file asks for"
    rest = [f"{count(macs)} in {name}" for name, macs in coverage.precisions.items() if name != "int8" and macs]
    others = f" ({', '.join(rest)})" if rest else ""
    share_of = f"{share(coverage.int8_mac_share)} of the multiply-accumulates run on integers{others}"
    return f"{share_of}, {coverage.origin or own}."


def operators_drawn(coverage: Coverage) -> tuple[float, list[OperatorCoverage]]:
    """All MACs (at least 1), and the operators that have any; all operators where none has."""
    total = sum(o.int8_macs + o.float_macs for o in coverage.operators) or 1
    with_macs = [o for o in coverage.operators if o.int8_macs + o.float_macs > 0]
    return total, (with_macs or list(coverage.operators))[:_SHOWN_OPERATORS]


def reason_rows(coverage: Coverage) -> list[Row]:
    """Nodes in float, grouped by why."""
    groups: dict[str, list[FloatNode]] = {}
    for node in coverage.float_nodes:
        groups.setdefault(node.reason or "no reason recorded", []).append(node)
    ordered = sorted(groups.items(), key=lambda item: (-sum(n.macs for n in item[1]), -len(item[1]), item[0]))
    return [
        [
            isolated(reason, 300, "why"),
            ", ".join(shorten(name, 40) for name in sorted({n.op_type for n in group})[:6]),
            str(len(group)),
            count(sum(n.macs for n in group)),
        ]
        for reason, group in ordered[:_SHOWN_REASONS]
    ]


def float_node_rows(coverage: Coverage) -> tuple[str, list[Row]]:
    """A title, and the nodes in float with the most MACs."""
    nodes = sorted(coverage.float_nodes, key=lambda node: -node.macs)
    shown = nodes[:_TABLE_NODES]
    more = f" (the {len(shown)} largest of {len(nodes)})" if len(nodes) > len(shown) else ""
    rows: list[Row] = [
        [
            isolated(n.name, 80),
            shorten(" ".join(filter(None, (n.op_type, n.precision))), 40),
            isolated(n.reason, 200, "why"),
            count(n.macs),
        ]
        for n in shown
    ]
    return f"Nodes in float: {len(shown)}{more}", rows


def histogram_texts(tensor: TensorHistogram) -> list[str]:
    """What the histogram does not show: zeros, and what is clipped."""
    texts = [f"{share(tensor.zeros)} are exactly zero, not drawn"] if tensor.zeros >= 0.0005 else []
    if tensor.clipped is not None:
        texts.append(f"{share(tensor.clipped, 3)} clipped" if tensor.clipped else "nothing clipped")
    return texts


_SHOWN_LAYERS, _TABLE_LAYERS = 12, 1000
_LOW_DB = 15.0
"""A layer's SQNR under this is pointed out: a tenth of its output's amplitude and more is noise."""
_NAMED = 8


@dataclass(frozen=True)
class LayersView:
    """The layers that are drawn as bars, and how.

    Attributes:
        top: the best SQNR of all layers, dB, which is the full length; slowest: the longest time, microseconds.
        alone: whether errors are of each layer alone.
        folded: the summary of the table of all layers; "" where the bars show all.
    """

    lead: str
    title: str
    heads: tuple[str, ...]
    worst: tuple[Layer, ...]
    by_error: bool
    timed: bool
    alone: bool
    top: float
    slowest: float
    conversions: str
    slower: str
    exclude: str
    folded: str
    low_db: float = _LOW_DB


def layers_view(variant: Variant) -> LayersView | None:
    """The worst layers where errors are known, else the slowest; None without layers."""
    layers, conversion_us = variant.drawn_layers
    if not layers:
        return None
    alone = measured_alone(layers)
    errors = [db for layer in layers if (db := layer.error_db(alone=alone)) is not None]
    times = [us for layer in layers for us in (layer.float_us, layer.int8_us) if us is not None]

    def by_error(layer: Layer) -> tuple[bool, float]:
        """Sorts the layers that make the most error themselves first."""
        error = layer.error_db(alone=alone)
        return (not layer.error_source, error if error is not None else math.inf)

    def by_time(layer: Layer) -> float:
        """Sorts the layers that take longest first."""
        return -(layer.int8_us or layer.float_us or 0.0)

    worst = tuple(sorted(layers, key=by_error if errors else by_time)[:_SHOWN_LAYERS])
    shown = "All layers" if len(worst) == len(layers) else f"{len(worst)} of {len(layers)} layers"
    order = f"{'error sources, then ' if any(layer.error_source for layer in worst) else ''}the lowest SQNR first"
    every = f"All {len(layers)} layers in execution order"
    first = f"The first {_TABLE_LAYERS} of {len(layers)} layers"
    sqnr = "SQNR of this layer alone" if alone else "SQNR of its output"
    return LayersView(
        lead=_lead(bool(errors), alone),
        title=f"{shown}, {order if errors else 'the slowest first'}",
        heads=("layer", *([sqnr] if errors else []), *(["time, float32 and int8"] if times else [])),
        worst=worst,
        by_error=bool(errors),
        timed=bool(times),
        alone=alone,
        top=max([0.0, *errors]),
        slowest=max(times, default=0.0) or 1.0,
        conversions=_conversions(layers, conversion_us),
        slower=_slower(layers),
        exclude=" ".join(f"--exclude {shlex.quote(layer.name)}" for layer in _made_slower(layers)[:_NAMED]),
        folded="" if len(layers) == len(worst) else every if len(layers) <= _TABLE_LAYERS else first,
    )


def _made_slower(layers: Sequence[Layer]) -> list[Layer]:
    """What int8 made slower, the most time lost first."""
    return sorted((layer for layer in layers if layer.made_slower), key=lambda layer: -layer.time_lost)


def _slower(layers: Sequence[Layer]) -> str:
    found = _made_slower(layers)
    if not found:
        return ""
    lost = sum(layer.time_lost for layer in found)
    named = "1 layer takes" if len(found) == 1 else f"{len(found)} layers take"
    most = "" if len(found) <= _NAMED else f"; those {_NAMED} that lose the most"
    by = f"by {significant(lost)} µs in this profile"
    return f"{named} longer in int8 than in float32, {by}. To keep them in float{most}:"


def _lead(by_error: bool, alone: bool) -> str:
    if not by_error:
        return "The time that each layer takes."
    if alone:
        return (
            "How much of each layer's output is signal, compared with float32's. Dots: the error that arises in the "
            "layer itself. Line: all errors so far."
        )
    return "How much of each layer's output is signal, compared with float32's, with all errors so far."


def _conversions(layers: Sequence[Layer], conversion_us: float | None) -> str:
    total = sum(layer.int8_us or 0.0 for layer in layers)
    if not conversion_us or not total:
        return ""
    part = conversion_us / (total + conversion_us)
    shown = f"{significant(conversion_us)} µs, {share(part)} of the int8 model's kernel time"
    return f"Converting between float and int8 takes {shown}."


def layer_table(variant: Variant) -> Table:
    """One row a layer, in execution order."""
    heads = ("layer", "operator", "alone dB", "SQNR dB", "cosine", "clipped", "float32 µs", "int8 µs")
    rows: list[Row] = [
        (
            isolated(layer.name, 80),
            shorten(layer.op_type, 40) or DASH,
            or_dash(layer.own_db, "{:.1f}".format),
            or_dash(layer.sqnr_db, "{:.1f}".format),
            or_dash(layer.cosine, "{:.5f}".format),
            or_dash(layer.saturated, share),
            or_dash(layer.float_us, significant),
            or_dash(layer.int8_us, significant),
        )
        for layer in variant.drawn_layers[0][:_TABLE_LAYERS]
    ]
    return known_columns(heads, rows, always=2)
