"""Layers: where the error comes in, and where the time goes."""

from __future__ import annotations

from collections.abc import Sequence

from edgeq.report.charts.profile import layer_profile
from edgeq.report.data import Layer, Variant, measured_alone
from edgeq.report.markup import Markup, isolated, join, tag
from edgeq.report.numbers import decibels, share, significant
from edgeq.report.sections.blocks import SERIES, bar, folded, legend, section, table
from edgeq.report.svg import both

_SHOWN = 12
_TABLE = 1000
_LOW_DB = 15.0
"""A layer's SQNR under this is pointed out: a tenth of its output's amplitude and more is noise."""


def layers_section(variant: Variant, anchor: str = "layers") -> Markup:
    """Profile over execution order, the worst or slowest layers as bars, all of them in a folded table."""
    layers = variant.layers
    if not layers:
        return Markup()
    alone = measured_alone(layers)
    errors = [db for layer in layers if (db := layer.error_db(alone=alone)) is not None]
    by_error = bool(errors)
    timed = any(layer.int8_us is not None or layer.float_us is not None for layer in layers)
    worst = sorted(layers, key=(lambda layer: _error_key(layer, alone)) if by_error else _time_key)[:_SHOWN]
    wide = layer_profile(layers, 880)
    order = "the lowest SQNR first" if by_error else "the slowest first"
    more = len(layers) - _TABLE
    return section(
        anchor,
        "Layers",
        tag("div", both(wide, layer_profile(layers, 350)), legend(SERIES) if timed else None, class_="plot")
        if wide
        else None,
        tag("h3", f"{'All layers' if len(worst) == len(layers) else f'{len(worst)} of {len(layers)} layers'}, {order}"),
        _bars(worst, max(errors, default=0.0) if by_error else None, timed, alone),
        _conversions(variant) if timed else None,
        folded(
            f"All {len(layers)} layers in execution order"
            if more <= 0
            else f"The first {_TABLE} of {len(layers)} layers",
            _table(layers[:_TABLE]),
        )
        if len(layers) > len(worst)
        else None,
        lead=_lead(layers, by_error),
    )


def _lead(layers: Sequence[Layer], by_error: bool) -> str:
    if not by_error:
        return "The time that each layer takes."
    if measured_alone(layers):
        return (
            "How much of each layer's output is signal, compared with float32's. Dots: the error that arises in the "
            "layer itself. Line: all errors so far."
        )
    return "How much of each layer's output is signal, compared with float32's, with all errors so far."


def _error_key(layer: Layer, alone: bool) -> tuple[bool, float]:
    error = layer.error_db(alone=alone)
    return (not layer.error_source, error if error is not None else float("inf"))


def _time_key(layer: Layer) -> float:
    return -(layer.int8_us or layer.float_us or 0.0)


def _bars(layers: Sequence[Layer], top: float | None, timed: bool, alone: bool) -> Markup:
    """`top`: the best SQNR of all layers, dB, which is the full length; None leaves SQNR out."""
    by_error = top is not None
    slowest = max((v for layer in layers for v in (layer.float_us, layer.int8_us) if v is not None), default=0.0) or 1.0
    items = []
    for layer in layers:
        parts = [tag("div", isolated(layer.name, limit=70, class_="layer"), " ", _kind(layer, alone), class_="who")]
        if by_error:
            parts.append(tag("div", _sqnr_bar(layer, top or 1.0, alone), class_="what"))
        if timed:
            parts.append(tag("div", _time_bars(layer, slowest), class_="what"))
        items.append(tag("li", *parts))
    heads = [
        "layer",
        ("SQNR of this layer alone" if alone else "SQNR of its output") if by_error else "",
        "time, float32 and int8" if timed else "",
    ]
    two = " two" if by_error and timed else ""
    return join(
        [
            tag("div", *(tag("span", h) for h in heads if h), class_=f"heads{two}", aria_hidden="true"),
            tag("ol", *items, class_=f"layers{two}"),
        ]
    )


def _kind(layer: Layer, alone: bool) -> Markup:
    error = layer.error_db(alone=alone)
    low = error is not None and error < _LOW_DB
    return join(
        [
            tag("span", layer.op_type, class_="op") if layer.op_type else None,
            tag("span", "runs in float", class_="flag") if layer.int8_kind == "float" else None,
            tag("span", "culprit" if layer.error_source else "low", class_="flag bad")
            if layer.error_source or low
            else None,
            tag("span", f"{share(layer.saturated)} clipped", class_="flag") if layer.saturated else None,
            tag("span", isolated(layer.advice, limit=200), class_="advice") if layer.advice else None,
        ],
        " ",
    )


def _sqnr_bar(layer: Layer, top: float, alone: bool) -> Markup:
    error = layer.error_db(alone=alone)
    if error is None:
        return tag("span", "–", class_="muted")
    bad = layer.error_source or error < _LOW_DB
    drawn = bar([(error / top, "bad" if bad else "other")], decibels(error), label="SQNR")
    if layer.own_db is None or layer.sqnr_db is None:
        return drawn
    return join([drawn, tag("span", f"{decibels(layer.sqnr_db)} with all errors so far", class_="muted small")])


def _time_bars(layer: Layer, slowest: float) -> Markup:
    drawn = []
    for value, kind, name in ((layer.float_us, "base", "float32"), (layer.int8_us, "other", "int8")):
        if value is not None:
            drawn.append(bar([(value / slowest, kind)], f"{significant(value)} µs", label=name))
    return join(drawn) if drawn else tag("span", "–", class_="muted")


def _conversions(variant: Variant) -> Markup | None:
    total = sum(layer.int8_us or 0.0 for layer in variant.layers)
    if not variant.conversion_us or not total:
        return None
    part = variant.conversion_us / (total + variant.conversion_us)
    shown = f"{significant(variant.conversion_us)} µs, {share(part)} of the int8 model's kernel time"
    return tag("p", f"Converting between float and int8 takes {shown}.", class_="muted")


def _table(layers: Sequence[Layer]) -> Markup:
    heads = ("layer", "operator", "alone dB", "SQNR dB", "cosine", "clipped", "float32 µs", "int8 µs")
    rows = [
        (
            isolated(layer.name, limit=80),
            layer.op_type or "–",
            f"{layer.own_db:.1f}" if layer.own_db is not None else "–",
            f"{layer.sqnr_db:.1f}" if layer.sqnr_db is not None else "–",
            f"{layer.cosine:.5f}" if layer.cosine is not None else "–",
            share(layer.saturated) if layer.saturated is not None else "–",
            significant(layer.float_us) if layer.float_us is not None else "–",
            significant(layer.int8_us) if layer.int8_us is not None else "–",
        )
        for layer in layers
    ]
    known = [i < 2 or any(row[i] != "–" for row in rows) for i in range(len(heads))]
    return table(
        [h for h, k in zip(heads, known, strict=True) if k],
        ([cell for cell, k in zip(row, known, strict=True) if k] for row in rows),
        text_columns=(0, 1),
        caption="Layers",
    )
