"""Hold the latencies that the report draws. They come from `edgeq bench`, a build's proof, or the finalists of a tuning
run.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar

from edgeq_device.measure.claim import Claim
from markupsafe import Markup

from edgeq.errors import BoardError
from edgeq.reporting.figures import (
    EM,
    Box,
    Pairs,
    Scale,
    figure,
    fitted,
    join,
    label,
    pairs,
    scale_for,
    tag,
    text_width,
    x_axis,
)
from edgeq.reporting.tuning_record import FLOAT, TuningRecord
from edgeq.util.numbers import milliseconds, share, significant
from edgeq.util.records import Amount, Count, Finite, Positive, readable

INT8 = "int8"
# Bounds on what an untrusted record makes the page draw.
_MOST_MODELS = 16
_MOST_BINS = 400
T = TypeVar("T")


@dataclass(frozen=True)
class LatencyFigures:
    """Hold the figures that `edgeq_device` computes for a distribution of latencies, in milliseconds and samples per
    second.
    """

    p50_ms: Positive
    count: Amount | None = None
    min_ms: Positive | None = None
    p90_ms: Positive | None = None
    p99_ms: Positive | None = None
    mean_ms: Positive | None = None
    cv: Amount | None = None
    samples_per_s: Positive | None = None


@dataclass(frozen=True)
class SpeedRecord:
    """Hold a proof's `speed`, which is the latency of each model and the ratio of int8 to float32."""

    latency: Mapping[str, LatencyFigures]
    ratio: Claim | None = None


@dataclass(frozen=True)
class Latency:
    """Hold one model's latencies.

    Attributes:
        histogram: queries per bin, for the edges in `TimingRecord`; empty if there is no histogram.
        peak_bytes: the peak memory of the process, which `edgeq bench` reports separately; None if it is not known.
    """

    latency: LatencyFigures
    histogram: tuple[Amount, ...] = ()
    peak_bytes: Amount | None = None


@dataclass(frozen=True)
class TimingRecord:
    """Hold latencies of models that were timed against each other, and other data from the same report. The latencies
    are those of one scenario in the JSON of `edgeq bench`.

    Attributes:
        models: latencies by name, in the order in which they are drawn.
        ratios: each model's ratio to the baseline, keyed by model name.
        histogram_edges_ms: the edges of the histograms' bins, one more than there are bins.
        scenario: the scenario, such as "single-stream".
    """

    models: Mapping[str, Latency]
    ratios: Mapping[str, Claim] = field(default_factory=dict)
    histogram_edges_ms: tuple[Finite, ...] = ()
    scenario: str = ""
    baseline: str = FLOAT
    machine: Pairs = ()
    versions: Pairs = ()
    settings: Pairs = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class BenchModelRecord:
    """Hold what is known about a model besides its latency. `memory` has `process_peak_bytes`."""

    memory: Mapping[str, Amount] | None = None


@dataclass(frozen=True)
class BenchSettingsRecord:
    """Describe how latency was measured. See `edgeq_device.measure.bench`."""

    min_duration_s: Positive | None = None
    threads: int | None = None
    pin: tuple[int, ...] = ()


@dataclass(frozen=True)
class BenchReport:
    """Hold the parts of the JSON of `edgeq bench` (docs/bench.md) that the report draws."""

    scenarios: Mapping[str, TimingRecord] = field(default_factory=dict)
    models: Mapping[str, BenchModelRecord] = field(default_factory=dict)
    baseline: str = FLOAT
    machine: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    settings: BenchSettingsRecord = BenchSettingsRecord()
    notes: tuple[str, ...] = ()


def bench_timing(report: BenchReport) -> TimingRecord | None:
    """Return the timing of the first scenario that has latencies, or None if no scenario has any."""
    for name, scenario in report.scenarios.items():
        # The page has room for one scenario.
        if scenario.models:
            return replace(
                scenario,
                models={
                    model: _limit_latency(model, latency, report)
                    for model, latency in _first_models(scenario.models).items()
                },
                histogram_edges_ms=_edges(scenario.histogram_edges_ms),
                scenario=name,
                baseline=report.baseline,
                machine=pairs(report.machine, 12),
                versions=pairs(report.versions, 12),
                settings=_settings(report.settings),
                notes=report.notes[:12],
            )
    return None


def _limit_latency(model: str, latency: Latency, report: BenchReport) -> Latency:
    memory = (report.models.get(model) or BenchModelRecord()).memory or {}
    peak = memory.get("process_peak_bytes") or None
    return replace(latency, histogram=latency.histogram[:_MOST_BINS], peak_bytes=peak)


def _first_models(models: Mapping[str, T]) -> dict[str, T]:
    return dict(list(models.items())[:_MOST_MODELS])


def speed_timing(speed: SpeedRecord) -> TimingRecord | None:
    """Return the latencies in a proof, or None if it contains none."""
    models = {name: Latency(figures) for name, figures in _first_models(speed.latency).items()}
    names = [name for name in models if name != FLOAT]
    ratios = {names[0]: speed.ratio} if speed.ratio is not None and names else {}
    return TimingRecord(models, ratios) if models else None


def finalists_timing(record: TuningRecord) -> TimingRecord | None:
    """Return the latencies of float32 and of the chosen candidate in a tuning run, or None if there are none."""
    models, ratios = {}, {}
    winners = [trial for trial in record.candidates if record.chosen and trial.name == record.chosen]
    for name, timing in ((FLOAT, record.float32.timing), *((trial.name, trial.timing) for trial in winners)):
        # The tuning record has more figures than the page draws, and may be untrusted.
        figures = readable(timing.latency, LatencyFigures) if timing is not None else None
        if timing is None or figures is None:
            continue
        models[name] = Latency(figures, record.histograms.counts.get(name, ()))
        if timing.speedup is not None:
            ratios[name] = timing.speedup
    return TimingRecord(models, ratios, _edges(record.histograms.edges_ms)) if models else None


def _settings(settings: BenchSettingsRecord) -> Pairs:
    seconds, threads = settings.min_duration_s, settings.threads
    facts = (
        ("measured for", f"at least {significant(seconds)} s per model" if seconds else ""),
        ("threads", "" if threads is None else str(threads) if threads else "chosen by onnxruntime"),
        ("pinned to cores", ", ".join(str(core) for core in settings.pin[:64])),
    )
    return tuple((key, value) for key, value in facts if value)


def _edges(edges: tuple[float, ...]) -> tuple[float, ...]:
    """Return `edges` if they are positive and ascending. Otherwise return an empty tuple."""
    # The axis may be logarithmic, and bars need a width.
    return edges[: _MOST_BINS + 1] if all(0 < a < b for a, b in pairwise(edges)) else ()


# The height of a model's row and the margins of the chart, in the units of `EM`.
ROW = 112.0
_TOP = 8.0
_BOTTOM = 44.0


def latency_chart(timing: TimingRecord, width: float) -> Markup:
    """Draw a row for each model, in the order of `timing.models`. Without models, return empty markup."""
    # With more rows, a reader could not see the whole chart at once.
    models = list(timing.models.items())[:8]
    if not models:
        return Markup()
    all_figures = [drawn.latency for _, drawn in models]
    ends = [v for f in all_figures for v in (f.min_ms, f.p50_ms, f.p90_ms, f.p99_ms) if v is not None]
    # Empty bins at the ends would take width from the others.
    ends += [e for e in _find_occupied_edges(timing) if e > 0]
    xs = scale_for(ends, 8.0, width - 8.0, pad=0.03)
    height = _TOP + ROW * len(models) + _BOTTOM
    base = height - _BOTTOM
    summary = "; ".join(f"{name}: median {milliseconds(drawn.latency.p50_ms)}" for name, drawn in models)
    return figure(
        width,
        height,
        f"Latency distributions. {summary}",
        x_axis(xs, base, _TOP, "latency (ms)" + (", logarithmic" if xs.log else "")),
        join(_row(name, timing, xs, _TOP + ROW * (i + 1), width) for i, (name, _) in enumerate(models)),
        class_="latency",
    )


def series(name: str, timing: TimingRecord) -> str:
    """Return the class that sets a model's colour. The baseline has one class, and all other models have another."""
    return "base" if name == timing.baseline else "other"


def _find_occupied_edges(timing: TimingRecord) -> list[float]:
    """For each model, return the outer edges of the range of bins that are not empty."""
    bounds = []
    edges = timing.histogram_edges_ms
    for model in timing.models.values():
        bins = [i for i, n in enumerate(model.histogram) if n > 0]
        if bins and len(edges) == len(model.histogram) + 1:
            bounds += [edges[bins[0]], edges[bins[-1] + 1]]
    return bounds


def _row(model: str, timing: TimingRecord, xs: Scale, base: float, width: float) -> Markup:
    kind = series(model, timing)
    figures, counts, edges = timing.models[model].latency, timing.models[model].histogram, timing.histogram_edges_ms
    top = base - ROW + 56
    parts = [label(xs.start, base - ROW + 26, fitted(model, width * 0.9), class_=f"name {kind}")]
    if len(edges) == len(counts) + 1 and any(counts):
        parts.append(tag("path", d=_outline(edges, counts, xs, base, top), class_=f"area {kind}"))
    else:
        parts.append(label((xs.start + xs.end) / 2, base - 16, "no histogram was recorded", anchor="middle"))
    parts.append(tag("line", x1=xs.start, x2=xs.end, y1=base, y2=base, class_="axis"))
    percentiles = (("p50", figures.p50_ms), ("p90", figures.p90_ms), ("p99", figures.p99_ms))
    quantiles = [(name, value) for name, value in percentiles if value]
    boxes: list[Box] = []
    # The median always gets a label. Then p99 and p90 get labels, unless the label would touch an earlier one.
    for name, value in sorted(quantiles, key=lambda q: ("p50", "p99", "p90").index(q[0])):
        x = xs(value)
        parts.append(tag("line", x1=x, x2=x, y1=top - 4, y2=base, class_=f"quantile {kind}"))
        text = f"{name} {milliseconds(value)}" if name == "p50" else name
        half = text_width(text) / 2
        # Labels near an end move inwards, or the figure would cut them.
        middle = min(max(x, xs.start + half), xs.end - half)
        box = Box(middle - half - EM / 4, top - 8 - EM, 2 * half + EM / 2, EM)
        if not any(box.overlaps(obstacle) for obstacle in boxes):
            parts.append(label(middle, top - 8, text, anchor="middle"))
            boxes.append(box)
    return tag("g", *parts)


def _outline(edges: Sequence[float], counts: Sequence[float], xs: Scale, base: float, top: float) -> str:
    """Return the histogram as one closed path. Heights are relative to the fullest bin of the row."""
    highest = max(counts)
    # A logarithmic axis has no place for zero.
    path = [f"M{xs(max(edges[0], 1e-12)):.1f},{base:.1f}"]
    for i, n in enumerate(counts):
        path.append(f"V{base - (base - top) * n / highest:.1f}H{xs(edges[i + 1]):.1f}")
    return "".join(path) + f"V{base:.1f}Z"


SCHEMA = "edgeq.fleet/1"
# Rows of a table of boards.
_MOST = 1000
Table = tuple[Sequence[str], list[Sequence[str]]]


@dataclass(frozen=True)
class FleetRow:
    """Describe one board.

    Attributes:
        reason: the reason why nothing was measured, or "" if the board was measured.
        latency: the latencies, keyed by model.
        ratios: the ratios to float32, keyed by model, for models that were measured against float32.
        notes: notes on what may have disturbed the measurement.
    """

    name: str
    kind: str
    reason: str = ""
    cpu: str = ""
    latency: Mapping[str, LatencyFigures] = field(default_factory=dict)
    ratios: Mapping[str, Claim] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class KindRow:
    """Describe one model on the boards of one kind.

    Attributes:
        boards: the number of boards on which the model was measured.
        p50_ms, p90_ms, p99_ms: medians over the boards.
        spread: the difference between the p50 of the slowest board and that of the fastest board, as a share of the
            median; None if there is only one board.
        best: True if no other model is faster on boards of this kind.
    """

    kind: str
    model: str
    boards: Count
    p50_ms: Positive
    p90_ms: Positive
    p99_ms: Positive
    spread: Amount | None = None
    best: bool = False


@dataclass(frozen=True)
class FleetRecord:
    """Hold the JSON of `edgeq bench` for a fleet, which is one scenario on every board."""

    boards: tuple[FleetRow, ...]
    kinds: tuple[KindRow, ...] = ()
    scenario: str = ""
    schema: str = SCHEMA

    def check(self) -> None:
        """Raise BoardError if no board could be measured."""
        # A fleet with one measured board is a result, and `failures` names the others.
        if all(row.reason for row in self.boards):
            raise BoardError(f"no board could be measured: {self.boards[0].reason}")

    def tables(self) -> list[Table]:
        """Return two tables, each as heads and rows. The first lists boards, the second kinds of boards."""
        return [board_table(self), *([kind_table(self)] if self.kinds else [])]

    def lines(self) -> list[str]:
        """Return lines on why boards failed and on what may have disturbed the others."""
        notes = [f"{board.name}: {note}" for board in self.boards for note in board.notes]
        return [*failures(self), *notes]


def summarise_boards(boards: Sequence[FleetRow], scenario: str) -> FleetRecord:
    """Return the rows of the boards together with a summary row for each model on each kind of board."""
    kinds = dict.fromkeys(row.kind for row in boards)
    return FleetRecord(
        tuple(boards),
        tuple(row for kind in kinds for row in _kind(kind, [b for b in boards if b.kind == kind])),
        scenario,
    )


def _kind(kind: str, boards: Sequence[FleetRow]) -> Iterator[KindRow]:
    models = dict.fromkeys(model for board in boards for model in board.latency)
    rows = []
    for model in models:
        latencies = [board.latency[model] for board in boards if model in board.latency]
        p50 = [figures.p50_ms for figures in latencies]
        middle = statistics.median(p50)
        rows.append(
            KindRow(
                kind,
                model,
                len(latencies),
                middle,
                # A board may lack the upper percentiles. They are at least its median.
                statistics.median(f.p90_ms or f.p50_ms for f in latencies),
                statistics.median(f.p99_ms or f.p50_ms for f in latencies),
                (max(p50) - min(p50)) / middle if len(p50) > 1 else None,
            )
        )
    fastest = min((row.p50_ms for row in rows), default=0.0)
    yield from (replace(row, best=row.p50_ms == fastest) for row in rows)


def board_table(record: FleetRecord) -> Table:
    """Return the heads, and a row for each model on each board. If a board has no figures, `failures` gives the
    reason.
    """
    heads = ("board", "kind", "model", "p50", "p90", "p99", "times float32")
    rows: list[Sequence[str]] = []
    for board in record.boards[:_MOST]:
        if board.reason:
            rows.append((board.name, board.kind, "failed", "", "", "", ""))
        for model, figures in board.latency.items():
            claim = board.ratios.get(model)
            # float32 against itself is always 1.
            times = claim.figures() if claim is not None and model != FLOAT else ""
            rows.append((board.name, board.kind, model, *_latencies(figures), times))
    return heads, rows


def failures(record: FleetRecord) -> list[str]:
    """Return a line with the reason for each board that has no figures."""
    return [f"{board.name}: {board.reason}" for board in record.boards[:_MOST] if board.reason]


def kind_table(record: FleetRecord) -> Table:
    """Return heads and a row for each model on each kind of board."""
    heads = ("kind", "model", "boards", "p50", "p90", "p99", "spread of p50", "")
    return heads, [
        (
            *(row.kind, row.model, str(row.boards), *_latencies(row)),
            share(row.spread) if row.spread is not None else "",
            "best" if row.best else "",
        )
        for row in record.kinds[:_MOST]
    ]


def _latencies(figures: LatencyFigures | KindRow) -> tuple[str, ...]:
    values = (figures.p50_ms, figures.p90_ms, figures.p99_ms)
    return tuple("" if value is None else milliseconds(value) for value in values)
