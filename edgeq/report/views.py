"""What the templates list: rows of tables, in the order and number in which they are drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from markupsafe import Markup

from edgeq.measure.agreement import OutputAgreement
from edgeq.measure.coverage import Coverage, FloatNode, OperatorCoverage
from edgeq.report.charts.latency import series
from edgeq.report.charts.pareto import NAMES
from edgeq.report.data import ReportData, Variant
from edgeq.report.histograms import TensorHistogram
from edgeq.report.names import isolated, shorten
from edgeq.report.numbers import (
    count,
    decibels,
    difference,
    metric,
    metric_name,
    milliseconds,
    share,
    significant,
    size,
)
from edgeq.report.timing import Latency, Timing
from edgeq.report.tuning import Candidate, Tuning
from edgeq.report.verdict import compared, timing_of, verdict_of

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
        or_dash(variant.sqnr_db, decibels),
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
