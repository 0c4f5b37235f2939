"""The rows that the report draws of layers: errors and times, joined by node name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from edgeq.data.samples import Samples, Subset
from edgeq.errors import EdgeqError
from edgeq.measure.accuracy import compare_sessions
from edgeq.measure.coverage import KernelTime
from edgeq.measure.error_sources import ErrorSource
from edgeq.measure.layers import LayerPair
from edgeq.model.graph import GraphIndex
from edgeq.model.load import shared_model
from edgeq.model.macs import node_macs
from edgeq.report.svg import Scale, axis_width, figure, join, label, scale_for, tag, y_axis
from edgeq.run.session import SessionSettings, open_session
from edgeq.util.display import SILENT, Progress
from edgeq.util.records import Finite, Share, parse, plain

SAMPLES = 4
"""Sums over all elements of a tensor are telling after a few."""
# Of a model with more multiply-accumulates than these half as many: its tensors have many elements, and to follow
# errors of 40 layers takes 40 float runs a sample.
_LARGE_MACS = 1_000_000_000
_ERROR_SOURCES = 10


@dataclass(frozen=True)
class Figures:
    """How an activation follows the float model's. `sqnr_db` is None where both are equal."""

    sqnr_db: Finite | None = None
    cosine: Finite | None = None


@dataclass(frozen=True)
class Saturated:
    """Shares of values at the two ends of the integer range."""

    low: Share = 0.0
    high: Share = 0.0


@dataclass(frozen=True)
class Activation:
    """What the report draws of one activation; see `edgeq.measure.error_sources.ActivationComparison`."""

    name: str
    node: str = ""
    op_type: str = ""
    kind: str = ""
    saturated: Saturated | None = None
    accumulated: Figures = Figures()
    layer: Figures = Figures()


@dataclass(frozen=True)
class LayersRecord:
    """Activations in execution order and the layers that cost accuracy, or why there are none."""

    count: int = 0
    activations: tuple[Activation, ...] = ()
    culprits: tuple[ErrorSource, ...] = ()
    error: str = ""


def layer_record(
    reference: GraphIndex,
    quantized: Path,
    samples: Samples,
    settings: SessionSettings,
    *,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Record what `edgeq debug` would say of each activation, cut to what the report draws, and the error sources.

    Args:
        reference: the prepared model that `quantized` was made from.
        settings: of the quantized model's session.

    Returns:
        `activations`, `error_sources` and `count`; `error` instead where the two cannot be compared layer by layer.
    """
    try:
        assert reference.path is not None, "a prepared model has a file"
        candidate = shared_model(quantized)
        large = sum(node_macs(reference.model).values()) > _LARGE_MACS
        few = Subset(samples, range(min(SAMPLES // 2 if large else SAMPLES, len(samples))))
        pair = LayerPair(reference, candidate, settings=settings, progress=progress)
        found = pair.compare(few)
        written = replace(settings, optimization="none")
        outputs = compare_sessions(open_session(reference.path), open_session(quantized, written), few)
        found, error_sources = pair.attribute_error(found, outputs, few, most=_ERROR_SOURCES)
    except EdgeqError as error:
        return {"error": str(error)}
    return {
        "count": found.count,
        "activations": [plain(parse(plain(a), Activation, "the comparison of layers")) for a in found.activations],
        "culprits": plain(error_sources),
    }


_SPREAD, _SPREAD_US = 0.2, 2.0
"""By how much two times of a layer differ without being pointed out: a share, and microseconds."""


@dataclass(frozen=True)
class Layer:
    """One layer, in execution order.

    Attributes:
        sqnr_db: of its output against the float model's, dB, with all errors of the layers before it.
        own_db: of what this layer alone makes of the float model's inputs: the error that arises here.
        saturated: share of its output's values at an end of the integer range.
        float_us, int8_us: median time of what runs it in either model, microseconds.
        error_source: named as one that costs accuracy.
        advice: what would be done about it.
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
        """Microseconds that it takes longer in int8; negative where it takes less, 0 where that is not known."""
        return self.int8_us - self.float_us if self.int8_us is not None and self.float_us is not None else 0.0

    @property
    def made_slower(self) -> bool:
        """Whether integer kernels run it slower than float32 did, by more than the profiler's own cost and spread."""
        ran_in_int8 = self.int8_kind == "int8" and self.float_us is not None
        return ran_in_int8 and self.time_lost > max(_SPREAD_US, _SPREAD * (self.float_us or 0.0))

    def error_db(self, *, alone: bool) -> float | None:
        """What layers are ranked by: their own error, where that was measured at all (`alone`), else the error so far.

        A layer that adds no error has none to be ranked by.
        """
        return self.own_db if alone else self.sqnr_db


def measured_alone(layers: Sequence[Layer]) -> bool:
    """Tell whether it is known what layers add by themselves."""
    return any(layer.own_db is not None for layer in layers)


def layer_rows(
    record: LayersRecord | None, kernels: Mapping[str, Sequence[KernelTime]]
) -> tuple[tuple[Layer, ...], float | None]:
    """Return layers in execution order, and what conversions (Q/DQ) take, microseconds; None where there are none.

    Args:
        kernels: by "float32" and "int8", in execution order.
    """
    record = record or LayersRecord()
    sources = {source.name: source for source in record.culprits}
    measured: dict[str, Activation] = {}
    for activation in record.activations:
        measured.setdefault(activation.node or activation.name, activation)
    before, after = _summed(kernels.get("float32", ())), _summed(kernels.get("int8", ()))
    order = dict.fromkeys([*measured, *before, *after] if measured else [*after, *before])
    conversions = [time.us for time in after.values() if time.kind == "conversion"]
    found = tuple(
        _layer(name, measured.get(name), before.get(name), after.get(name), sources)
        for name in order
        if name in measured or name in before or after[name].kind != "conversion"
    )
    return found, sum(conversions) if conversions else None


def _layer(
    name: str,
    activation: Activation | None,
    before: KernelTime | None,
    after: KernelTime | None,
    sources: Mapping[str, ErrorSource],
) -> Layer:
    seen = activation or Activation(name)
    source = sources.get(seen.name)
    kernel = before or after
    return Layer(
        name=name,
        op_type=seen.op_type or (kernel.op_type if kernel else ""),
        sqnr_db=seen.accumulated.sqnr_db,
        own_db=seen.layer.sqnr_db,
        cosine=seen.accumulated.cosine,
        saturated=seen.saturated.low + seen.saturated.high if seen.saturated else None,
        float_us=before.us if before else None,
        int8_us=after.us if after else None,
        int8_kind=after.kind if after else "",
        error_source=source is not None,
        advice=_advice(source) if source else "",
    )


def _advice(source: ErrorSource) -> str:
    """Say why, and which nodes to keep in float."""
    flags = f"float: {', '.join(source.exclude[:8])}" if source.exclude else ""
    return "; ".join(part for part in (source.reason, flags) if part)


def _summed(times: Iterable[KernelTime]) -> dict[str, KernelTime]:
    """Add up times by node name; several kernels of one node count together, under the first one's type."""
    found: dict[str, KernelTime] = {}
    for time in times:
        known = found.get(time.name)
        found[time.name] = time if known is None else replace(known, us=known.us + time.us)
    return found


_PANEL = 120.0
_GAP = 44.0
_MOST_COLUMNS = 600
"""More layers than this are drawn several to a column: the worst SQNR, the summed time."""


def layer_profile(layers: Sequence[Layer], width: float) -> Markup:
    """Draw two panels over one axis, either left out where nothing is known; nothing where neither is."""
    each = -(-len(layers) // _MOST_COLUMNS) or 1
    columns = [layers[i : i + each] for i in range(0, len(layers), each)]
    known = [db for layer in layers for db in (layer.sqnr_db, layer.own_db) if db is not None]
    timed = any(layer.int8_us is not None or layer.float_us is not None for layer in layers)
    if not (known or timed) or len(columns) < 2:
        return Markup()
    scales = []
    top = 26.0
    if known:
        shown = [*known, min(0.0, *known)] if min(known) < 20 else known
        scales.append(scale_for(shown, top + _PANEL, top, log=False))
        top += _PANEL + _GAP
    if timed:
        most = max(max(_sum(c, "float_us"), _sum(c, "int8_us")) for c in columns)
        scales.append(Scale(0, most * 1.05 or 1.0, top + _PANEL, top))
    xs = Scale(0, len(columns), max(axis_width(scale, 4) for scale in scales), width - 6.0)
    height = scales[-1].start + 24.0
    panels = [draw for draw, wanted in ((_sqnr, known), (_time, timed)) if wanted]
    drawn = [draw(columns, xs, ys) for draw, ys in zip(panels, scales, strict=True)]
    foot = label((xs.start + xs.end) / 2, height - 4, "layers in execution order", anchor="middle", class_="title")
    measured = " and ".join(name for name, wanted in (("SQNR", known), ("time", timed)) if wanted)
    return figure(width, height, f"{measured} of {len(layers)} layers in execution order", *drawn, foot)


def _sum(column: Sequence[Layer], which: str) -> float:
    return sum(getattr(layer, which) or 0.0 for layer in column)


def _sqnr(columns: Sequence[Sequence[Layer]], xs: Scale, ys: Scale) -> Markup:
    """Draw a line for the error so far, and a dot for what each layer alone adds, where that is known; else on the
    line."""
    parts = [y_axis(ys, xs.start, xs.end, "SQNR of each layer's output (dB)", most=4)]
    alone = any(measured_alone(column) for column in columns)
    small = min(2.5, max(1.3, (xs.end - xs.start) / len(columns)))
    path: list[str] = []
    dots = []
    for i, column in enumerate(columns):
        x = xs(i + 0.5)
        so_far = [layer.sqnr_db for layer in column if layer.sqnr_db is not None]
        own = [db for layer in column if (db := layer.error_db(alone=alone)) is not None]
        if so_far:
            path.append(f"{'L' if path else 'M'}{x:.1f},{ys(min(so_far)):.1f}")
        if own:
            bad = any(layer.error_source for layer in column)
            size = 1.6 * small if bad else small
            dots.append(tag("circle", cx=x, cy=ys(min(own)), r=size, class_="dot bad" if bad else "dot"))
    if len(path) > 1:
        parts.append(tag("path", d="".join(path), class_="joint"))
    return tag("g", *parts, *dots)


def _time(columns: Sequence[Sequence[Layer]], xs: Scale, ys: Scale) -> Markup:
    wide = (xs.end - xs.start) / len(columns)
    bar = max(0.4, wide * 0.42)
    parts = []
    for i, column in enumerate(columns):
        for which, kind, shift in (("float_us", "base", 0.0), ("int8_us", "other", bar)):
            value = _sum(column, which)
            if value > 0:
                x, y = xs(i) + wide * 0.08 + shift, ys(value)
                parts.append(tag("rect", x=x, y=y, width=bar, height=ys.start - y, class_=f"area {kind}"))
    axis = tag("line", x1=xs.start, x2=xs.end, y1=ys.start, y2=ys.start, class_="axis")
    return join([y_axis(ys, xs.start, xs.end, "time of each layer (µs)", most=4), *parts, axis])
