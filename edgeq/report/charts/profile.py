"""All layers in execution order: where the error comes in, and where the time goes."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from edgeq.report.layer_rows import Layer, measured_alone
from edgeq.report.scale import Scale, scale_for
from edgeq.report.svg import axis_width, figure, join, label, tag, y_axis

_PANEL = 120.0
_GAP = 44.0
_MOST_COLUMNS = 600
"""More layers than this are drawn several to a column: the worst SQNR, the summed time."""


def layer_profile(layers: Sequence[Layer], width: float) -> Markup:
    """Two panels over one axis, either left out where nothing is known; empty where nothing is."""
    columns = _columns(layers)
    has_sqnr = any(layer.own_db is not None or layer.sqnr_db is not None for layer in layers)
    has_time = any(layer.int8_us is not None or layer.float_us is not None for layer in layers)
    panels = [_sqnr] * has_sqnr + [_time] * has_time
    if not panels or len(columns) < 2:
        return Markup()
    scales = []
    for i, panel in enumerate(panels):
        top = 26.0 + i * (_PANEL + _GAP)
        scales.append(_sqnr_scale(layers, top) if panel is _sqnr else _time_scale(columns, top))
    left = max(axis_width(scale, 4) for scale in scales)
    xs = Scale(0, len(columns), left, width - 6.0)
    height = 26.0 + len(panels) * (_PANEL + _GAP) - _GAP + 24.0
    drawn = [panel(columns, xs, ys) for panel, ys in zip(panels, scales, strict=True)]
    foot = label((xs.start + xs.end) / 2, height - 4, "layers in execution order", anchor="middle", class_="title")
    measured = " and ".join(["SQNR"] * has_sqnr + ["time"] * has_time)
    return figure(width, height, f"{measured} of {len(layers)} layers in execution order", *drawn, foot)


def _columns(layers: Sequence[Layer]) -> list[Sequence[Layer]]:
    each = -(-len(layers) // _MOST_COLUMNS) if layers else 1
    return [layers[i : i + each] for i in range(0, len(layers), each)]


def _sqnr_scale(layers: Sequence[Layer], top: float) -> Scale:
    known = [db for layer in layers for db in (layer.sqnr_db, layer.own_db) if db is not None]
    return scale_for([*known, min(0.0, *known)] if min(known) < 20 else known, top + _PANEL, top, log=False)


def _time_scale(columns: Sequence[Sequence[Layer]], top: float) -> Scale:
    most = max(max(_sum(c, "float_us"), _sum(c, "int8_us")) for c in columns)
    return Scale(0, most * 1.05 or 1.0, top + _PANEL, top)


def _sum(column: Sequence[Layer], which: str) -> float:
    return sum(getattr(layer, which) or 0.0 for layer in column)


def _sqnr(columns: Sequence[Sequence[Layer]], xs: Scale, ys: Scale) -> Markup:
    """A line for the error so far, and a dot for what each layer alone adds, where that is known; else on the line."""
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
