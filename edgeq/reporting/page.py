"""Draw the whole page: one HTML file that refers to nothing outside of it."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from edgeq import __version__
from edgeq.arguments import as_options
from edgeq.bundle.sbom import read_tool_versions
from edgeq.measure.agreement import OutputAgreement, SliceAgreement
from edgeq.measure.coverage import Coverage, FloatNode, OperatorCoverage
from edgeq.reporting import figures
from edgeq.reporting.figures import escaped, isolated, shorten
from edgeq.reporting.layers import LayerView, TensorHistogram, histogram_chart, layer_profile, measured_alone
from edgeq.reporting.pareto import NAMES, accuracy_text, mark, measured_texts, pareto, ring
from edgeq.reporting.read import ReportData, VariantRecord, compared_model, read_report, timing_of, verdict_of
from edgeq.reporting.timing import TimingRecord, board_table, failures, kind_table, latency_chart, series
from edgeq.reporting.tuning import trial_settings, tuning_facts
from edgeq.reporting.tuning_record import TrialRecord, TuningRecord
from edgeq.util import numbers
from edgeq.util.numbers import count, decibels, difference, metric, metric_name, milliseconds, share, significant, size
from edgeq.util.records import plain, round_floats

Row = Sequence[str]
Table = tuple[Row, list[Row]]
"""The heads and the rows of a table."""

DASH = "–"
# Rows of tables. A model may have thousands of nodes, and the page must stay small.
_SHOWN_OPERATORS, _SHOWN_REASONS, _TABLE_NODES = 10, 20, 500
_SHOWN_SLICES = 8
# The chosen candidate is the answer, and float32 is what it is compared with.
_FIRST = {"chosen": 0, "float32": 1}
_RULED_OUT = ("short", "slow", "dropped")


def or_dash(value: float | None, write: Callable[..., str], *arguments: str) -> str:
    """Return `write(*before, value)`, or a dash if the value is None."""
    return DASH if value is None else write(*arguments, value)


def known_columns(heads: Row, rows: list[Row], always: int = 1) -> Table:
    """Leave out the columns that contain only dashes. Always keep the first `always` columns."""
    # A column of dashes takes space and only shows that nobody measured the figure.
    columns = [i for i in range(len(heads)) if i < always or any(row[i] != DASH for row in rows)]
    return [heads[i] for i in columns], [[row[i] for i in columns] for row in rows]


def ordered_candidates(tuning: TuningRecord) -> list[TrialRecord]:
    """Return the chosen candidate, then float32, then the candidates that are accurate enough, then the others. Each
    group is sorted by latency.
    """
    # For an error rate, less is better.
    sign = 1.0 if tuning.metric.higher_is_better else -1.0

    def rank(trial: TrialRecord) -> tuple[int, float, str]:
        """Return a key that sorts the chosen candidate first, then float32, then the candidates that are accurate
        enough, then the others. Within a group, it sorts by latency.
        """
        least_accuracy, value = tuning.least_accuracy, tuning.accuracy_of(trial)
        short = least_accuracy is not None and value is not None and sign * value < sign * least_accuracy
        out = 3 if short or trial.mark in _RULED_OUT else 2
        return _FIRST.get(trial.mark, out), tuning.latency_of(trial) or math.inf, trial.name

    return sorted(tuning.drawn, key=rank)


def statuses_drawn(tuning: TuningRecord, chart: str) -> list[tuple[str, str]]:
    """Return the entries of the legend: each status whose mark is in `chart`, with its name."""
    # Slow and dropped candidates have the same mark as those that are not accurate enough.
    present = {trial.mark if trial.mark in NAMES else "short" for trial in tuning.drawn}
    return [(status, name) for status, name in NAMES.items() if status in present or f"mark {status}" in chart]


def candidate_figures(trial: TrialRecord, tuning: TuningRecord) -> str:
    """Return the known figures of a candidate as text: latency, accuracy, size and coverage."""
    texts = measured_texts(trial, tuning)
    if total := tuning.bytes_of(trial):
        texts.append(size(total))
    if trial.screening is not None:
        texts.append(f"{share(trial.screening.int8_mac_share)} in int8")
    return ", ".join(texts)


def variant_rows(data: ReportData) -> list[Row]:
    """Return a row for each variant: name, target, verdict, median, accuracy, SQNR, coverage, size, and where it was
    checked.
    """
    rows: list[Row] = []
    for variant in data.variants:
        primary, timing = variant.primary, timing_of(data, variant)
        model = compared_model(timing, variant)
        row = [
            isolated(variant.name, 40),
            isolated(variant.title or DASH, 60),
            verdict_of(data, variant).status,
            milliseconds(timing.models[model].latency.p50_ms) if timing and model else DASH,
            metric(primary.name, primary.int8) if primary and primary.int8 is not None else DASH,
            or_dash(variant.worst_db, decibels),
            _coverage_cell(variant.coverage),
            or_dash(variant.bytes, size),
            {True: "on its own kernels", False: "on others' kernels", None: DASH}[variant.native],
        ]
        rows.append(row)
    return rows


def _coverage_cell(coverage: Coverage | None) -> str:
    if coverage is None or coverage.int8_mac_share is None:
        return DASH
    return f"{share(coverage.int8_mac_share)}{' (forecast)' if coverage.basis == 'forecast' else ''}"


def latency_table(timing: TimingRecord) -> Table:
    """Return a row for each model."""
    heads = ["model", "p50", "p90", "p99", "mean", "variation", "samples/s", "peak memory", "queries"]
    rows: list[Row] = []
    for name, model in timing.models.items():
        f = model.latency
        key = Markup('<span class="key {}">{}</span>').format(series(name, timing), isolated(name, 60))
        latencies = (or_dash(ms, milliseconds) for ms in (f.p50_ms, f.p90_ms, f.p99_ms, f.mean_ms))
        rates = (or_dash(f.cv, share), or_dash(f.samples_per_s, count))
        rows.append([key, *latencies, *rates, or_dash(model.peak_bytes, size), or_dash(f.count, "{:.0f}".format)])
    return known_columns(heads, rows)


def metric_rows(variant: VariantRecord) -> list[Row]:
    """Return a row for each metric."""
    rows: list[Row] = []
    for m in variant.metrics:
        values = (or_dash(value, metric, m.name) for value in (m.float32, m.int8))
        rows.append([isolated(metric_name(m.name), 60), *values, or_dash(m.gain, difference, m.name)])
    return rows


def output_table(variant: VariantRecord) -> Table:
    """Return a row for each output, and a row for each of its slices that has a different scale."""
    heads = ("output", "SQNR", "around the mean", "cosine", "largest error", "same top answer")
    rows = [row for output in variant.outputs[:24] for row in (_output_row(output), *_slice_rows(output))]
    return known_columns(heads, rows)


def _output_row(output: OutputAgreement) -> Row:
    name, top1 = isolated(output.name, 80), or_dash(output.top1, share)
    if output.equal:
        return [name, "equal", DASH, "1", "0", top1]
    if not output.compared:
        return [name, "not compared", DASH, DASH, DASH, DASH]
    # Integers, such as class indices, are equal or not. Noise in dB would mean nothing.
    if output.same is not None:
        return [name, f"{share(output.same)} the same", DASH, DASH, significant(output.max_abs_error), top1]
    finite = math.isfinite(output.sqnr_db)
    sqnr = decibels(output.sqnr_db) if finite else DASH
    return [name, sqnr, _around(output), f"{output.cosine:.6f}", significant(output.max_abs_error), top1]


def _around(figures: OutputAgreement | SliceAgreement) -> str:
    """Return the SQNR around the mean if it says more than the SQNR."""
    return decibels(figures.centred_db) if figures.offset and figures.centred_db is not None else DASH


def _slice_rows(output: OutputAgreement) -> Iterator[Row]:
    """Yield a row for each of the worst slices."""
    # Choose the worst slices, then list them in the order of the output.
    worst = sorted(output.slices, key=lambda part: part.least_db)[:_SHOWN_SLICES]
    for part in sorted(worst, key=lambda part: (part.axis, part.first)):
        sqnr = decibels(part.sqnr_db) if math.isfinite(part.sqnr_db) else DASH
        name = isolated(f"{output.name}, {part.location}", 120)
        yield [name, sqnr, _around(part), f"{part.cosine:.6f}", significant(part.max_abs_error), DASH]


def coverage_text(coverage: Coverage) -> str:
    """Return a sentence on the share of work in integers and on how the share is known."""
    if coverage.int8_mac_share is None:
        return f"The share that runs on integers is not known: {coverage.how}."
    source = "by ONNX Runtime's own profile of the optimised graph, which may differ from the graph in the file"
    precisions = [f"{count(macs)} in {name}" for name, macs in coverage.precisions.items() if name != "int8" and macs]
    precisions_text = f" ({', '.join(precisions)})" if precisions else ""
    share_of = f"{share(coverage.int8_mac_share)} of the multiply-accumulates run on integers{precisions_text}"
    return f"{share_of}, {coverage.origin or source}."


def operators_drawn(coverage: Coverage) -> tuple[float, list[OperatorCoverage]]:
    """Return the total number of MACs (at least 1), and the operators that have MACs. If no operator has any, return
    all operators.
    """
    # The bars divide by the total.
    total = sum(o.int8_macs + o.float_macs for o in coverage.operators) or 1
    with_macs = [o for o in coverage.operators if o.int8_macs + o.float_macs > 0]
    return total, (with_macs or list(coverage.operators))[:_SHOWN_OPERATORS]


def reason_rows(coverage: Coverage) -> list[Row]:
    """Return the nodes in float, grouped by reason."""
    groups: dict[str, list[FloatNode]] = {}
    for node in coverage.float_nodes:
        groups.setdefault(node.reason or "no reason recorded", []).append(node)
    rows = []
    for reason, nodes in groups.items():
        operators = ", ".join(shorten(name, 40) for name in sorted({n.op_type for n in nodes})[:6])
        macs = sum(n.macs for n in nodes)
        rows.append(
            # Most work first, then most nodes. The reason itself makes the order the same every time.
            (-macs, -len(nodes), reason, [isolated(reason, 300, "why"), operators, str(len(nodes)), count(macs)])
        )
    return [row for *_, row in sorted(rows)[:_SHOWN_REASONS]]


def float_node_rows(coverage: Coverage) -> tuple[str, list[Row]]:
    """Return a title, and rows for the float nodes that have the most MACs."""
    nodes = sorted(coverage.float_nodes, key=lambda node: -node.macs)
    listed = nodes[:_TABLE_NODES]
    more = f" (the {len(listed)} largest of {len(nodes)})" if len(nodes) > len(listed) else ""
    rows: list[Row] = []
    for n in listed:
        operator = shorten(" ".join(filter(None, (n.op_type, n.precision))), 40)
        rows.append([isolated(n.name, 80), operator, isolated(n.reason, 200, "why"), count(n.macs)])
    return f"Nodes in float: {len(listed)}{more}", rows


def histogram_texts(tensor: TensorHistogram) -> list[str]:
    """Return texts on the values that the histogram does not show, which are zeros and clipped values."""
    # A smaller share would be shown as 0.0 %.
    texts = [f"{share(tensor.zeros)} are exactly zero and not drawn"] if tensor.zeros >= 0.0005 else []
    if tensor.clipped is not None:
        texts.append(f"{share(tensor.clipped, 3)} clipped" if tensor.clipped else "nothing clipped")
    return texts


# Bars for the worst layers, and rows in the table of all of them.
_SHOWN_LAYERS, _TABLE_LAYERS = 12, 1000
_LOW_DB = 15.0
"""A layer whose SQNR in dB is below this is flagged. At this SQNR, the noise has about a sixth of the output's
amplitude.
"""
# Layers in the suggested command. A longer line would not be typed.
_NAMED = 8


def layers_view(variant: VariantRecord) -> dict[str, Any] | None:
    """Return the values that layers.html shows, or None if there are no layers. layers.html shows the worst layers if
    errors are known, otherwise the slowest layers.

    `top` is the best SQNR of all layers in dB, which a bar of full length represents. `slowest` is the longest time in
    microseconds. `folded` is the summary line of the table of all layers, or "" if the bars already show all layers.
    """
    layers, conversion_us = variant.drawn_layers
    if not layers:
        return None
    alone = measured_alone(layers)
    errors = [db for layer in layers if (db := layer.error_db(alone=alone)) is not None]
    times = [us for layer in layers for us in (layer.float_us, layer.int8_us) if us is not None]

    def rank(layer: LayerView) -> tuple[bool, float]:
        """Return a key that sorts error sources first, then the layers with the largest errors. If errors are not
        known, the slowest layers come first.
        """
        if not errors:
            return False, -(layer.int8_us or layer.float_us or 0.0)
        error = layer.error_db(alone=alone)
        # A low SQNR may come from layers before this one, so layers known to cost accuracy go first.
        return not layer.error_source, error if error is not None else math.inf

    worst = sorted(layers, key=rank)[:_SHOWN_LAYERS]
    summary = "All layers" if len(worst) == len(layers) else f"{len(worst)} of {len(layers)} layers"
    order = f"{'error sources, then ' if any(layer.error_source for layer in worst) else ''}the lowest SQNR first"
    every = f"All {len(layers)} layers in execution order"
    full_title = f"The first {_TABLE_LAYERS} of {len(layers)} layers"
    sqnr = "SQNR of this layer alone" if alone else "SQNR of its output"
    return {
        "lead": _lead(bool(errors), alone),
        "title": f"{summary}, {order if errors else 'the slowest first'}",
        "heads": ("layer", *([sqnr] if errors else []), *(["time, float32 and int8"] if times else [])),
        "worst": worst,
        "by_error": bool(errors),
        "timed": bool(times),
        "alone": alone,
        # A bar cannot be shorter than nothing.
        "top": max([0.0, *errors]),
        "slowest": max(times, default=0.0) or 1.0,
        "conversions": _conversions(layers, conversion_us),
        "slower": _slower(layers),
        "exclude": as_options(
            " ".join(f"⟨exclude⟩ {shlex.quote(layer.name)}" for layer in _made_slower(layers)[:_NAMED])
        ),
        "folded": "" if len(layers) == len(worst) else every if len(layers) <= _TABLE_LAYERS else full_title,
        "low_db": -math.inf if variant.healthy else _LOW_DB,
    }


def _made_slower(layers: Sequence[LayerView]) -> list[LayerView]:
    """Return the layers that int8 made slower. The layers that lost most time come first."""
    return sorted((layer for layer in layers if layer.made_slower), key=lambda layer: -layer.time_lost)


def _slower(layers: Sequence[LayerView]) -> str:
    slower_layers = _made_slower(layers)
    if not slower_layers:
        return ""
    lost = sum(layer.time_lost for layer in slower_layers)
    named = "1 layer takes" if len(slower_layers) == 1 else f"{len(slower_layers)} layers take"
    suffix = "" if len(slower_layers) <= _NAMED else f" (the {_NAMED} that lose the most)"
    by = f"by {significant(lost)} µs in this profile"
    return f"{named} longer in int8 than in float32, {by}. To keep them in float{suffix}:"


def _lead(by_error: bool, alone: bool) -> str:
    if not by_error:
        return "The time of each layer."
    if alone:
        return (
            "The SQNR of each layer's output against float32's. Dots: the error of the layer itself. "
            "Line: all errors so far."
        )
    return "The SQNR of each layer's output against float32's, with all errors so far."


def _conversions(layers: Sequence[LayerView], conversion_us: float | None) -> str:
    total = sum(layer.int8_us or 0.0 for layer in layers)
    if not conversion_us or not total:
        return ""
    part = conversion_us / (total + conversion_us)
    figures = f"{significant(conversion_us)} µs, {share(part)} of the int8 model's kernel time"
    return f"Converting between float and int8 takes {figures}."


def layer_table(variant: VariantRecord) -> Table:
    """Return a row for each layer, in execution order."""
    heads = ("layer", "operator", "alone dB", "SQNR dB", "cosine", "clipped", "float32 µs", "int8 µs")
    rows: list[Row] = []
    for layer in variant.drawn_layers[0][:_TABLE_LAYERS]:
        errors = (or_dash(db, "{:.1f}".format) for db in (layer.own_db, layer.sqnr_db))
        closeness = (or_dash(layer.cosine, "{:.5f}".format), or_dash(layer.saturated, share))
        times = (or_dash(us, significant) for us in (layer.float_us, layer.int8_us))
        rows.append((isolated(layer.name, 80), shorten(layer.op_type, 40) or DASH, *errors, *closeness, *times))
    return known_columns(heads, rows, always=2)


_HERE = Path(__file__).parent
# Rows of a table in a notebook, which keeps its outputs in its file.
_LISTED = 500
_DETAILED = 8
"""The number of variants shown in full. Any other variants have only their row in the table."""


def render(data: ReportData) -> str:
    """Return the report as one HTML document. The same data always give the same text."""
    script = (_HERE / "script.js").read_text("utf-8")
    main = data.main
    title = (main.title or main.name) if main and len(data.variants) == 1 else ""
    facts = dict(data.machine)
    machine = facts.get("board") or facts.get("cpu name") or facts.get("cpu") or ""
    return (
        _environment()
        .get_template("page.html")
        .render(
            **_template_values(data),
            about=[text for text in ("int8 report", title, machine) if text],
            policy=_policy(script),
            style=Markup(_style()),
            script=Markup(script),
            version=__version__,
        )
    )


def fragment(data: ReportData, tables: Sequence[tuple[str, Row, Sequence[Row]]] = ()) -> str:
    """Return the report's sections for embedding in another page, such as a notebook. The sections contain no script,
    and their style applies only to them.

    Args:
        tables: tables to show before the sections: caption, heads and rows of text.
    """
    css = f"{_style()}{(_HERE / 'notebook.css').read_text('utf-8')}"
    # A notebook has a root and a body of its own, so the rules apply to the report's element.
    for ours, theirs in ((":root", "&"), ("body {", "& {"), ("@media (max-width", "@container (max-width")):
        css = css.replace(ours, theirs)
    # The class is repeated three times to override a notebook's own rules, which name up to two classes.
    style = Markup(f".edgeq.edgeq.edgeq {{{css}}}")
    parts = [
        (caption, heads, [[isolated(cell, 200) for cell in row] for row in rows[:_LISTED]])
        for caption, heads, rows in tables
    ]
    return _environment().get_template("notebook.html").render(**_template_values(data), style=style, tables=parts)


def _template_values(data: ReportData) -> dict[str, Any]:
    return {"data": data, "main": data.main, "verdict": verdict_of(data, data.main), "detailed": _DETAILED}


def _style() -> str:
    return (_HERE / "style.css").read_text("utf-8")


@cache
def _environment() -> Environment:
    """Return the environment of the templates. The environment escapes everything that a template prints, and shows
    control characters and bidirectional-text characters as codes.
    """
    environment = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        # A misspelt name in a template raises an error instead of leaving a gap in the page.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=escaped,
    )
    environment.filters.update(isolated=isolated, shorten=shorten, or_dash=or_dash)
    charts = (histogram_chart, latency_chart, layer_profile, mark, pareto, ring)
    tables = (board_table, kind_table, latency_table, layer_table, output_table)
    rows = (accuracy_text, candidate_figures, float_node_rows, metric_rows, reason_rows, variant_rows)
    texts = (coverage_text, failures, histogram_texts, statuses_drawn, trial_settings, tuning_facts)
    functions = (layers_view, operators_drawn, ordered_candidates, timing_of, verdict_of)
    environment.globals.update(
        {function.__name__: function for function in (*charts, *tables, *rows, *texts, *functions)}
    )
    environment.globals.update(numbers=numbers, pairs=figures.pairs, status_names=NAMES)
    return environment


def _policy(script: str) -> str:
    """Return a content security policy that allows only this script and forbids loading anything. So injected text
    could do nothing.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    only = f"script-src 'sha256-{digest}'; style-src 'unsafe-inline'"
    # Pictures are inside the page, and a browser runs no code of an image.
    return f"default-src 'none'; {only}; img-src data:; base-uri 'none'; form-action 'none'"


SCHEMA = "edgeq.report/1"
RECORD, PAGE, TUNING = "report.json", "report.html", "tuning.json"
DEVICE_COMMANDS = ("edgeq report BUNDLE ⟨bench⟩", "edgeq verify BUNDLE", "python edgeq_run.py bench   # on the device")
# More digits than the page shows anywhere, and few enough to hide the last bits of sums.
DIGITS = 5


def make_record(
    name: str,
    variants: Mapping[str, Mapping[str, Any]],
    *,
    model: Mapping[str, Any] | None = None,
    commands: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the content of report.json. docs/report.md lists the keys.

    Args:
        variants: the record of each variant by name, as in the JSON of `edgeq package`, with `title`, `histograms`,
            `layers` and `kernels` if they are known.
        model: the sha256 and the size in bytes of the float32 model.
    """
    return {
        "schema": SCHEMA,
        "name": name,
        "model": dict(model or {}),
        "variants": {name: dict(body) for name, body in variants.items()},
        "versions": read_tool_versions(),
        "identity": {},
        "commands": list(commands),
        "notes": list(notes),
    }


def report_files(record: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the report files of a bundle (`BundleSpec.extras`): report.json and report.html.

    Numbers are rounded, so that differences in the last bit of a sum do not change the bundle.
    """
    content = round_floats(plain(record), DIGITS)
    return {
        RECORD: (json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False) + "\n").encode("utf-8"),
        PAGE: page_of(content),
    }


def page_of(record: Mapping[str, Any]) -> bytes:
    """Return the HTML page of a record, which may be untrusted."""
    return render(read_report(record)).encode("utf-8")


def draw(record: Mapping[str, Any]) -> str:
    """Return HTML for a notebook's cell. It contains the report of `record` with its own style, and the "tables" in
    `record` (caption, heads, rows of text).

    Names in the HTML come from models. They are escaped and shortened as on the page.
    """
    return fragment(read_report(record), record.get("tables", ()))
