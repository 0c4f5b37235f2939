"""Derive ranges from statistics with any method, without running the model again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import reduce
from math import isfinite
from typing import Literal

import numpy as np
import onnx_ir as ir

from edgeq.calibration.methods import REGISTRY
from edgeq.calibration.range_method import RangeMethod
from edgeq.calibration.statistics import Histogram, Nonfinite, Statistics, TensorStatistics, linear_of, repeated
from edgeq.errors import CalibrationError
from edgeq.model.graph import (
    DATA_MOVEMENT,
    MAIN_DOMAINS,
    PERMUTATIONS,
    GraphIndex,
    clamp_bounds,
    computed_constants,
    indexed,
    is_op,
    name_of,
    only_reader,
)
from edgeq.model.quant_params import Grid, grid_of
from edgeq.model.shapes import element_types
from edgeq.scheme import IntegerType, Scheme


@dataclass(frozen=True)
class Range:
    """Hold the range of real values that an integer type must cover; low ≤ 0 ≤ high.

    Attributes:
        fixed_step: whether the step must not change because it comes from a model that was already quantized.
    """

    low: float
    high: float
    fixed_step: bool = False

    @property
    def bound(self) -> float:
        """Return the largest magnitude in the range."""
        return max(-self.low, self.high)


def derive_ranges(
    statistics: Statistics,
    method: str = "minmax",
    *,
    activation_type: IntegerType = "uint8",
    symmetric: bool = False,
    options: Mapping[str, float] | None = None,
) -> dict[str, Range]:
    """Return one range per tensor.

    Args:
        method: name of a registered calibration method (`edgeq.calibration.methods`).
        activation_type, symmetric: integer type that the range will be mapped to. With `symmetric` every range is
            -bound..bound.
        options: options of the method, for example {"percentile": 99.9} for "percentile"; missing options get their
            defaults.

    Returns:
        Ranges by tensor name. Each includes zero. The range of a tensor without elements is 0..0.

    Raises:
        UsageError: the method or an option is unknown, or an option is out of bounds.
        CalibrationError: the statistics are unfinished: some tensors have seen fewer samples than others.
    """
    range_method = REGISTRY.load(method)
    settings = range_method.settings(options or {})
    levels = grid_of(activation_type, symmetric)
    tensors = statistics.tensors
    for name, tensor in tensors.items():
        if tensor.samples != statistics.samples:
            raise CalibrationError(
                f"the statistics of tensor {name!r} are unfinished", "Finish the calibration with --resume"
            )
    # Rearranged tensors share one histogram object. Their range is computed only once.
    keys = {name: (id(t.histogram), t.minimum, t.maximum, t.minimum_sum, t.maximum_sum) for name, t in tensors.items()}
    distinct = {keys[name]: tensor for name, tensor in tensors.items()}
    ranges_by_key = {key: _range(tensor, range_method, levels, settings) for key, tensor in distinct.items()}
    return {name: ranges_by_key[keys[name]] for name in tensors}


def scheme_ranges(statistics: Statistics, scheme: Scheme) -> dict[str, Range]:
    """Return the ranges that the method of a scheme chooses for the scheme's activation type."""
    return derive_ranges(
        statistics,
        scheme.method,
        activation_type=scheme.activation_type,
        symmetric=scheme.activation_symmetric,
        options=scheme.method_options,
    )


def _range(tensor: TensorStatistics, method: RangeMethod, grid: Grid, options: Mapping[str, float]) -> Range:
    if not tensor.count:
        return Range(0.0, 0.0)
    low, high = method.range(tensor, grid, options)
    # A bin may extend beyond the outermost value in it.
    low, high = max(low, tensor.minimum), min(high, tensor.maximum)
    low, high = min(low, 0.0), max(high, 0.0)
    if grid.symmetric:
        bound = max(-low, high)
        return Range(-bound, bound)
    return Range(low, high)


def clipped_power(statistics: Statistics, ranges: Mapping[str, Range]) -> dict[str, float]:
    """Return, for each tensor, the power of its clipping error divided by the power of the tensor: a number from 0 to
    1.

    The ratio is sum n (x - clip(x))^2 / sum n x^2, where each bin of the histogram contains n values around x. Tensors
    without statistics are left out.
    """
    shares = {}
    for name, span in ranges.items():
        tensor = statistics.tensors.get(name)
        if tensor is None or not tensor.count:
            continue
        if span.low <= tensor.minimum and tensor.maximum <= span.high:
            shares[name] = 0.0
            continue
        linear = linear_of(tensor.histogram)
        centres = linear.centres()
        power = float(np.sum(linear.counts * centres**2))
        cut = centres - np.clip(centres, span.low, span.high)
        shares[name] = float(np.sum(linear.counts * cut**2)) / power if power else 0.0
    return shares


def range_noise(statistics: Statistics, ranges: Mapping[str, Range], grid: Grid) -> dict[str, float]:
    """Return, for each tensor, the power of its quantization error divided by the power of the tensor. The power of the
    quantization error is that of the clipping error plus a twelfth of the squared step.
    """
    found = clipped_power(statistics, ranges)
    for name, clipped in found.items():
        linear = linear_of(statistics.tensors[name].histogram)
        power = float(np.sum(linear.counts * linear.centres() ** 2)) / max(float(linear.counts.sum()), 1.0)
        step = float(grid.params(ranges[name].low, ranges[name].high).scale)
        found[name] = clipped + (step**2 / 12 / power if power else 0.0)
    return found


_FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16})


@dataclass(frozen=True)
class DerivedTensor:
    """Describe a tensor whose statistics follow exactly from the statistics of other tensors.

    Attributes:
        kind: "clip" or "union". "clip" means that there is one source, which is clipped to low..high. "union" means
            that the tensor contains every element of its sources once; with one source, the elements are only
            rearranged.
    """

    name: str
    kind: Literal["clip", "union"]
    sources: tuple[str, ...]
    low: float = float("-inf")
    high: float = float("inf")

    def histogram(self, histograms: Mapping[str, Histogram], nonfinite: Mapping[str, Nonfinite]) -> Histogram:
        """Return the histogram of the tensor. `histograms` contains the histograms of its sources, and `nonfinite`
        contains the numbers of NaN and infinite elements in them.
        """
        union = reduce(Histogram.merge, (histograms[source] for source in self.sources))
        if self.kind == "union":
            return union
        moved, _ = self.clipped(nonfinite[self.sources[0]])
        return reduce(Histogram.merge, (repeated(b, n) for n, b in moved), union.clip(self.low, self.high))

    def clipped(self, nonfinite: Nonfinite) -> tuple[tuple[tuple[int, float], ...], Nonfinite]:
        """Return the effect of a clip on infinities.

        Returns:
            A pair (number of infinities, bound) for each bound that infinities are clipped to; and the numbers of NaN
            and infinite elements that remain.
        """
        below, above = (
            number if isfinite(bound) else 0
            for number, bound in ((nonfinite.below, self.low), (nonfinite.above, self.high))
        )
        moved = tuple((n, bound) for n, bound in ((below, self.low), (above, self.high)) if n)
        return moved, Nonfinite(nonfinite.nan, nonfinite.below - below, nonfinite.above - above)


@dataclass(frozen=True)
class StatisticsPlan:
    """Plan how to get the statistics of some tensors.

    Attributes:
        inputs: graph inputs, which each sample already contains.
        fetched: tensors that are fetched from the session.
        derived: all other tensors, each after its sources.
        outputs: outputs of the model that are among these tensors.
    """

    inputs: tuple[str, ...]
    fetched: tuple[str, ...]
    derived: tuple[DerivedTensor, ...]
    outputs: tuple[str, ...] = ()

    @property
    def counted_names(self) -> tuple[str, ...]:
        """Return the tensors whose elements are counted."""
        return (*self.inputs, *self.fetched)

    @property
    def names(self) -> tuple[str, ...]:
        """Return all tensors of the plan, each after its sources."""
        return (*self.counted_names, *(tensor.name for tensor in self.derived))

    def histograms(
        self, counted_histograms: Mapping[str, Histogram], nonfinite: Mapping[str, Nonfinite]
    ) -> dict[str, Histogram]:
        """Return the histograms of all tensors, given the histograms of the counted tensors. `nonfinite` contains, for
        every tensor, the numbers of NaN and infinite elements.
        """
        histograms = dict(counted_histograms)
        for tensor in self.derived:
            histograms[tensor.name] = tensor.histogram(histograms, nonfinite)
        return histograms


def quantizable_tensors(model: ir.Model | GraphIndex) -> tuple[str, ...]:
    """Return the names of the float tensors that some backend may quantize, in graph order. These are inputs,
    activations and outputs of the main graph.

    Weights, and tensors computed only from weights, are left out. A layer's output that only a BatchNormalization reads
    is also left out, because every backend folds the BatchNormalization into the layer. A tensor whose type cannot be
    inferred is listed; `collect` drops it if ONNX Runtime infers a type other than float.
    """
    graph = indexed(model)
    constants, types = graph.computed_constants, element_types(graph)
    outputs = [value for node in graph.graph for value in node.outputs if value.name]
    return tuple(
        name
        for value in (*graph.graph.inputs, *outputs)
        if (name := name_of(value)) not in constants
        and types.get(name, ir.DataType.FLOAT) in _FLOATS
        and not _is_folded(value, constants)
    )


def plan_statistics(model: ir.Model, requested: Collection[str], underived: Collection[str] = ()) -> StatisticsPlan:
    """Plan how to get the statistics of `requested` with the fewest fetched tensors.

    If the input of a Relu or Clip is wanted as well, the statistics of its output are derived from those of its input.
    The same applies to operators that only rearrange elements, and to Concat.

    Args:
        underived: tensors whose values themselves are needed (for channel extrema). They are never derived.
    """
    requested = set(requested)
    inputs = tuple(name for value in model.graph.inputs if (name := name_of(value)) in requested)
    available = set(inputs)
    fetched: list[str] = []
    derived: list[DerivedTensor] = []
    for node in model.graph:
        for name in map(name_of, node.outputs):
            if name not in requested or name in available:
                continue
            derivation = _derivation(node)
            if derivation is not None and available.issuperset(derivation.sources) and name not in underived:
                derived.append(derivation)
            else:
                fetched.append(name)
            available.add(name)
    outputs = tuple(dict.fromkeys(name for value in model.graph.outputs if (name := name_of(value)) in available))
    return StatisticsPlan(inputs, tuple(fetched), tuple(derived), outputs)


def _is_folded(value: ir.Value, constants: Collection[str]) -> bool:
    """Return whether the only reader of a layer's output is a BatchNormalization with constant parameters."""
    norm = only_reader(value) if is_op(value.producer(), "Conv", "ConvTranspose", "Gemm") else None
    return (
        norm is not None
        and norm.op_type == "BatchNormalization"
        and all(name_of(parameter) in constants for parameter in norm.inputs[1:])
    )


def _derivation(node: ir.Node) -> DerivedTensor | None:
    if node.domain not in MAIN_DOMAINS or len(node.outputs) != 1:
        return None
    name = name_of(node.outputs[0])
    sources = tuple(map(name_of, node.inputs))
    if node.op_type in PERMUTATIONS:
        return DerivedTensor(name, "union", sources[:1])
    if node.op_type == "Concat":
        return DerivedTensor(name, "union", sources)
    bounds = clamp_bounds(node)
    return DerivedTensor(name, "clip", sources[:1], *bounds) if bounds is not None and bounds[0] <= bounds[1] else None


SHARING = DATA_MOVEMENT | {"Concat"}
"""Operators whose integer kernels copy values and cannot rescale them, and Concat."""
_ALL_INPUTS = frozenset({"Concat", "Max", "Min"})


def scale_groups(model: ir.Model, op_types: Collection[str] = SHARING) -> tuple[tuple[str, ...], ...]:
    """Return groups of at least two tensors that must share a scale, because they are connected by operators of
    `op_types`, which preserve the scale.

    The groups contain only data inputs and outputs, without shapes, axes and constants. Names and groups are sorted.
    """
    constants = computed_constants(model.graph)
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        """Return the representative of a tensor's group, and shorten the path to it."""
        parent.setdefault(name, name)
        while parent[name] != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    for node in model.graph:
        if node.op_type not in op_types or node.domain not in MAIN_DOMAINS:
            continue
        data = node.inputs if node.op_type in _ALL_INPUTS else node.inputs[:1]
        # The second output of MaxPool contains indices.
        results = node.outputs if node.op_type == "Split" else node.outputs[:1]
        members = [name for value in (*data, *results) if (name := name_of(value)) and name not in constants]
        for name in members[1:]:
            parent[root(name)] = root(members[0])
    groups: dict[str, list[str]] = {}
    for name in parent:
        groups.setdefault(root(name), []).append(name)
    return tuple(sorted(tuple(sorted(group)) for group in groups.values() if len(group) > 1))


def share_ranges(model: ir.Model, ranges: Mapping[str, Range], op_types: Collection[str] = SHARING) -> dict[str, Range]:
    """Return a copy of `ranges` in which all members of a group have the same range: the smallest range that covers all
    ranges of the group. Tensors outside of groups keep their range.
    """
    common_ranges = dict(ranges)
    for group in scale_groups(model, op_types):
        members = [name for name in group if name in ranges]
        if members:
            union = Range(min(ranges[n].low for n in members), max(ranges[n].high for n in members))
            common_ranges.update(dict.fromkeys(members, union))
    return common_ranges
