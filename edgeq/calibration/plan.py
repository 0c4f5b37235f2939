"""Plan which tensors to fetch in a calibration run, and which statistics follow from those of other tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import reduce
from math import isfinite
from typing import Literal

import onnx_ir as ir

from edgeq.calibration.statistics import Histogram, Nonfinite, repeated
from edgeq.model.graph import (
    MAIN_DOMAINS,
    PERMUTATIONS,
    GraphIndex,
    clamp_bounds,
    indexed,
    is_op,
    name_of,
    only_reader,
)
from edgeq.model.shapes import element_types

# The types whose values an observer can count.
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
        # The histogram of the source lacks infinities, which the clip turns into values.
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
    # Samples contain the inputs, so no session has to return them.
    inputs = tuple(name for value in model.graph.inputs if (name := name_of(value)) in requested)
    available = set(inputs)
    fetched: list[str] = []
    derived: list[DerivedTensor] = []
    for node in model.graph:
        for name in map(name_of, node.outputs):
            if name not in requested or name in available:
                continue
            derivation = _derivation(node)
            # A tensor that is derived costs nothing. A tensor that is fetched is written to memory and read again.
            if derivation is not None and available.issuperset(derivation.sources) and name not in underived:
                derived.append(derivation)
            else:
                fetched.append(name)
            available.add(name)
    # Outputs are checked more strictly than inner tensors, so the plan names them.
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
    # An operator of another domain may do anything, whatever its name is.
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
