"""The layers of a variant as the page lists them: bars of the worst, and the table of all."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from edgeq.report.data import Variant
from edgeq.report.layer_rows import Layer, measured_alone
from edgeq.report.names import isolated, shorten
from edgeq.report.numbers import share, significant
from edgeq.report.views import DASH, Row, Table, known_columns, or_dash

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
    layers = variant.layers
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
        conversions=_conversions(variant),
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


def _conversions(variant: Variant) -> str:
    total = sum(layer.int8_us or 0.0 for layer in variant.layers)
    if not variant.conversion_us or not total:
        return ""
    part = variant.conversion_us / (total + variant.conversion_us)
    shown = f"{significant(variant.conversion_us)} µs, {share(part)} of the int8 model's kernel time"
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
        for layer in variant.layers[:_TABLE_LAYERS]
    ]
    return known_columns(heads, rows, always=2)
