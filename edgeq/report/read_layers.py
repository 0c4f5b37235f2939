"""Layers, coverage and histograms from a record."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from edgeq.report.data import Coverage, FloatNode, Layer, Operator, TensorHistogram, Threshold
from edgeq.report.plain import listed, mapping, number, positive, rows, string, strings

MOST_LAYERS = 20_000
MOST_FLOAT_NODES = 2000
_MOST_HISTOGRAMS = 24
_MOST_BINS = 512


def read_layers(layers: object, kernels: object) -> tuple[tuple[Layer, ...], float | None]:
    """Layers in execution order, SQNR and times joined by node name; and what conversions (Q/DQ) take, microseconds.

    Args:
        layers: what `edgeq debug` says of activations, or rows with node, op_type, sqnr_db, cosine, saturated; in
            execution order.
        kernels: "float32" and "int8", each rows of name, op_type, kind, us; in execution order.
    """
    error_sources = {string(row.get("name")): row for row in rows(mapping(layers).get("culprits"), 200)}
    measured: dict[str, Mapping[str, Any]] = {}
    for row in rows(mapping(layers).get("activations") or layers, MOST_LAYERS):
        name = string(row.get("node")) or string(row.get("name")) or string(row.get("tensor"))
        measured.setdefault(name, row)
    times = {which: _times(mapping(kernels).get(which)) for which in ("float32", "int8")}
    order = list(dict.fromkeys([*measured, *times["float32"], *times["int8"]]))
    if not measured:
        order = list(dict.fromkeys([*times["int8"], *times["float32"]]))
    conversions = [t for t in times["int8"].values() if t["kind"] == "conversion"]
    found = []
    for name in order:
        row, before, after = measured.get(name, {}), times["float32"].get(name, {}), times["int8"].get(name, {})
        if after.get("kind") == "conversion" and not row and not before:
            continue
        found.append(
            Layer(
                name=name,
                op_type=string(row.get("op_type")) or before.get("op_type", "") or after.get("op_type", ""),
                sqnr_db=_figure(row, "accumulated", "sqnr_db"),
                own_db=_figure(row, "layer", "sqnr_db"),
                cosine=_figure(row, "accumulated", "cosine"),
                saturated=_saturated(row.get("saturated")),
                float_us=before.get("us"),
                int8_us=after.get("us"),
                int8_kind=after.get("kind", ""),
                error_source=string(row.get("name")) in error_sources,
                advice=_advice(error_sources.get(string(row.get("name")), {})),
            )
        )
    return tuple(found), sum(t["us"] for t in conversions) if conversions else None


def _advice(error_source: Mapping[str, Any]) -> str:
    """Why, and which nodes to keep in float."""
    exclude = strings(error_source.get("exclude"), 8)
    flags = f"float: {', '.join(exclude)}" if exclude else ""
    return "; ".join(part for part in (string(error_source.get("reason")), flags) if part)


def _figure(row: Mapping[str, Any], which: str, key: str) -> float | None:
    """From the report of `edgeq debug`, or from a flat row, which has no figures of the layer alone."""
    if which in row:
        return number(mapping(row[which]).get(key))
    return number(row.get(key)) if which == "accumulated" else None


def _saturated(value: object) -> float | None:
    """A share, or the shares at both ends."""
    if isinstance(value, Mapping):
        return (number(value.get("low")) or 0.0) + (number(value.get("high")) or 0.0)
    return number(value)


def _times(value: object) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for row in rows(value, MOST_LAYERS):
        us = number(row.get("us"))
        if us is None or us < 0:
            continue
        name = string(row.get("name"))
        entry = found.setdefault(
            name, {"us": 0.0, "kind": string(row.get("kind")), "op_type": string(row.get("op_type"))}
        )
        entry["us"] += us
    return found


def read_coverage(value: object) -> Coverage | None:
    plain = mapping(value)
    share = number(plain.get("int8_mac_share"))
    if share is None or not 0 <= share <= 1:
        return None
    nodes = rows(plain.get("float_nodes"), MOST_LAYERS)
    read = [
        FloatNode(
            string(row.get("name")),
            string(row.get("op_type")),
            positive(row.get("macs")) or 0.0,
            string(row.get("reason")),
        )
        for row in nodes
    ]
    read.sort(key=lambda node: -node.macs)
    return Coverage(
        share=share,
        int8_macs=number(plain.get("int8_macs")),
        float_macs=number(plain.get("float_macs")),
        operators=tuple(_operator(row) for row in rows(plain.get("operators"), 200)),
        float_nodes=tuple(read[:MOST_FLOAT_NODES]),
        float_node_count=len(read),
    )


def _operator(row: Mapping[str, Any]) -> Operator:
    def amount(key: str) -> float:
        return positive(row.get(key)) or 0.0

    return Operator(
        string(row.get("op_type")),
        amount("int8_macs"),
        amount("float_macs"),
        round(amount("int8_kernels")),
        round(amount("float_kernels")),
    )


def read_histograms(value: object) -> tuple[TensorHistogram, ...]:
    found = []
    for row in rows(value, _MOST_HISTOGRAMS):
        edges = [number(e) for e in listed(row.get("edges"))[: _MOST_BINS + 1]]
        counts = [number(n) for n in listed(row.get("counts"))[:_MOST_BINS]]
        rising = [e for e in edges if e is not None]
        if len(rising) != len(counts) + 1 or not counts or any(n is None or n < 0 for n in counts):
            continue
        if any(not a < b for a, b in pairwise(rising)):
            continue
        found.append(
            TensorHistogram(
                name=string(row.get("tensor")),
                edges=tuple(rising),
                counts=tuple(n or 0.0 for n in counts),
                thresholds=tuple(t for t in map(_threshold, rows(row.get("thresholds"), 8)) if t is not None),
                chosen=string(row.get("chosen")),
                zeros=min(1.0, max(0.0, number(row.get("zeros")) or 0.0)),
                clipped=number(row.get("clipped")),
            )
        )
    return tuple(found)


def _threshold(row: Mapping[str, Any]) -> Threshold | None:
    low, high = number(row.get("low")), number(row.get("high"))
    if low is None or high is None or not low < high:
        return None
    return Threshold(string(row.get("method")), low, high, number(row.get("sqnr_db")))
