"""The tensors that lose most to their ranges: what the report draws of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import onnx_ir as ir

from edgeq.calibrate.methods import REGISTRY
from edgeq.calibrate.methods.mse import moments_of, squared_errors
from edgeq.calibrate.range_method import Grid, grid_of
from edgeq.calibrate.ranges import Range, derive_ranges
from edgeq.calibrate.statistics import Histogram, Statistics, TensorStatistics, linear_of
from edgeq.measure.comparison import decibels
from edgeq.model.graph import is_constant, name_of
from edgeq.scheme import Scheme
from edgeq.util.records import Amount, Finite, Share


@dataclass(frozen=True)
class Threshold:
    """A range and the method that gave it. `sqnr_db` is what it leaves of the tensor, quantized alone."""

    method: str
    low: Finite
    high: Finite
    sqnr_db: Finite | None = None


@dataclass(frozen=True)
class TensorHistogram:
    """What calibration saw of one tensor.

    Attributes:
        edges: of the bins, rising, one more than there are counts.
        zeros: share of values that are exactly zero; they are not in `counts`.
        clipped: share of values outside the range in use.
        chosen: method of the range in use.
    """

    tensor: str
    edges: tuple[Finite, ...]
    counts: tuple[Amount, ...]
    zeros: Share = 0.0
    clipped: Share | None = None
    chosen: str = ""
    thresholds: tuple[Threshold, ...] = ()

    def __post_init__(self) -> None:
        if len(self.edges) != len(self.counts) + 1 or not self.counts or len(self.counts) > _MOST_BINS:
            raise ValueError(f"a histogram with {len(self.edges)} edges and {len(self.counts)} counts")
        if not all(a < b for a, b in pairwise(self.edges)):
            raise ValueError("a histogram whose edges do not rise")


TENSORS = 8
BINS = 80
_MOST_BINS = 512


def worst_tensors(
    statistics: Statistics,
    ranges: Mapping[str, Range],
    scheme: Scheme,
    *,
    among: Collection[str] | None = None,
    count: int = TENSORS,
) -> list[TensorHistogram]:
    """Histograms of the tensors that keep least of themselves under `ranges`, with what other methods would choose.

    The SQNR is of the tensor alone, rounded to the scheme's integers, computed from its histogram.

    Args:
        ranges: those in use.
        among: names of tensors that are quantized at all; None takes all that have a range.
    """
    grid = grid_of(scheme.activation_type, scheme.activation_symmetric)
    losses: dict[Histogram, tuple[float, str]] = {}
    for name, tensor in statistics.tensors.items():
        if name not in ranges or (among is not None and name not in among) or not tensor.minimum < tensor.maximum:
            continue
        sqnr = sqnr_of(tensor.histogram, ranges[name], grid)
        if sqnr is not None and tensor.histogram not in losses:
            losses[tensor.histogram] = sqnr, name
    worst = [name for _, name in sorted(losses.values())[:count]]
    chosen = statistics.select(worst)
    methods = [name for name, method in REGISTRY.items() if method.compared or name == scheme.method]
    derive = partial(
        derive_ranges, chosen, activation_type=scheme.activation_type, symmetric=scheme.activation_symmetric
    )
    # What is in use can differ from what its method says alone, where tensors share a scale.
    found = {m: ranges if m == scheme.method else derive(m) for m in methods}
    return [
        _described(
            name,
            chosen.tensors[name],
            {method: spans[name] for method, spans in found.items()},
            scheme.method,
            grid,
        )
        for name in worst
    ]


def quantized_tensors(model: ir.Model) -> set[str] | None:
    """Names of the float tensors that a quantized graph rounds to constant scales; None where it has no Q/DQ nodes."""
    rounded = [node.inputs[0] for node in model.graph if node.op_type == "QuantizeLinear"]
    return {name_of(value) for value in rounded if not is_constant(value)} or None


def sqnr_of(histogram: Histogram, kept: Range, grid: Grid) -> float | None:
    """SQNR in dB of values rounded to `grid` over `kept`; None where there is nothing but zeros, or no range."""
    if not kept.low < kept.high:
        return None
    linear = linear_of(histogram)
    signal = float(linear.counts @ linear.centres() ** 2)
    noise = float(squared_errors(moments_of(linear), grid.params([kept.low], [kept.high]))[0])
    return decibels(signal, max(noise, signal * 1e-12)) if signal > 0 else None


def _described(
    name: str, tensor: TensorStatistics, thresholds: Mapping[str, Range], method: str, grid: Grid
) -> TensorHistogram:
    centres, counts, zeros = _values(tensor.histogram)
    # The histogram's outermost bins reach a little further than what was seen.
    centres = np.clip(centres, tensor.minimum, tensor.maximum)
    edges = np.linspace(tensor.minimum, tensor.maximum, BINS + 1)
    drawn, _ = np.histogram(centres, edges, weights=counts)
    used = thresholds[method]
    outside = float(counts[(centres < used.low) | (centres > used.high)].sum())
    return TensorHistogram(
        tensor=name,
        edges=tuple(float(e) for e in edges),
        counts=tuple(int(n) for n in drawn),
        zeros=zeros / max(1, tensor.count),
        clipped=outside / max(1, tensor.count),
        chosen=method,
        thresholds=tuple(
            Threshold(m, r.low, r.high, sqnr_of(tensor.histogram, r, grid)) for m, r in thresholds.items()
        ),
    )


def _values(histogram: Histogram) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], int]:
    """Centres and counts of the bins without zero's, and how many are zero."""
    lower, upper = histogram.edges()
    zero = histogram.keys == 0
    return ((lower + upper) / 2)[~zero], histogram.counts[~zero], int(histogram.counts[zero].sum())
