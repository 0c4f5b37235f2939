"""Compute the extrema and a part of large tensors in the graph, and prove that tensors are finite.

A NaN is not always visible in the extrema. A convolution or an addition of moderate numbers is always finite, so for
these operators it is enough to check the magnitudes of their inputs (`Bounds`). For other operators the graph also
returns the sum, which is NaN if an element is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from edgeq.calibration.layout import Links, attribute_values, is_standard
from edgeq.calibration.observer import Part
from edgeq.model.graph import PERMUTATIONS
from edgeq.model.parsing import opset_of_proto

MODERATE, MAX_WEIGHT = 1e30, 1e6
"""Limits under which the output of a layer is finite: the largest magnitude of an activation, and the largest sum of
the magnitudes of a layer's weights or of its bias. The product of the limits is far inside the range of float32."""
# Smallest, best and largest number of elements in the rows into which a tensor is split before it is reduced. ONNX
# Runtime's kernels reduce such rows in two thirds of the time that they need for one long row.
_ROW = (96, 192, 768)
# Prefix of the names of nodes and tensors that are added to a graph.
_ADDED = "edgeq/reduced"
_REARRANGED = PERMUTATIONS | {"Relu", "ReorderInput", "ReorderOutput"}


class Bounds:
    """Find measured tensors whose values prove that another tensor of the graph is finite.

    Args:
        graph: the graph.
        measured: names of the tensors whose values are observed.
        folder: folder of the weights that are stored outside the graph.
    """

    def __init__(self, graph: onnx.GraphProto, measured: Collection[str], folder: Path) -> None:
        self._makers, self._measured, self._folder = Links(graph).makers, measured, folder
        self._constants = {tensor.name: tensor for tensor in graph.initializer}

    def of(self, name: str) -> frozenset[str] | None:
        """Return the measured tensors that bound the tensor `name`. If no magnitude in them exceeds `MODERATE`, all
        values of `name` are finite. Return None if no such tensors are known.
        """
        node = self._makers.get(name)
        if node is None:
            return None
        if is_standard(node, "Add", "Sub"):
            data = list(node.input)
        elif node.op_type == "Conv" and attribute_values(node).get("activation", b"") in (b"", b"Relu"):
            constants = [self._constant(value) for value in node.input[1:3] if value]
            if any(c is None or not np.abs(c).sum(dtype=np.float64) <= MAX_WEIGHT for c in constants):
                return None
            data = [node.input[0], *node.input[3:]]
        else:
            return None
        sources = [self._source(value) for value in data]
        return frozenset(name for name in sources if name is not None) if None not in sources else None

    def _constant(self, name: str) -> NDArray[Any] | None:
        tensor = self._constants.get(name)
        return None if tensor is None else onnx.numpy_helper.to_array(tensor, str(self._folder))

    def _source(self, name: str) -> str | None:
        """Return the measured tensor whose values bound those of `name`."""
        while name not in self._measured:
            node = self._makers.get(name)
            if node is None or not (node.op_type in _REARRANGED or self._is_moderate_clip(node)):
                return None
            name = node.input[0]
        return name

    def _is_moderate_clip(self, node: onnx.NodeProto) -> bool:
        if not is_standard(node, "Clip"):
            return False
        attributes = attribute_values(node)
        bounds: list[Any] = []
        for place, attribute, otherwise in ((1, "min", -math.inf), (2, "max", math.inf)):
            name = node.input[place] if place < len(node.input) else ""
            bounds.append(self._constant(name) if name else attributes.get(attribute, otherwise))
        low, high = bounds
        return low is not None and high is not None and bool(low <= MODERATE and high >= -MODERATE)


def is_moderate(values: NDArray[Any] | Part | None) -> bool:
    """Return whether no value is larger than `MODERATE` in magnitude. An empty array is moderate, NaN is not."""
    array = np.asarray(values)
    return not array.size or bool(max(array.max(), -array.min()) <= MODERATE)


def reduce_large(
    model: onnx.ModelProto, names: Sequence[str], large: dict[str, tuple[int, int]], summed: Sequence[str]
) -> None:
    """Replace the outputs of an optimised graph, in place. The first output is a vector with the figures of all `large`
    tensors. The other tensors of `names` follow, each once.

    The vector is float32. It contains the minima of all rows (see `row_length`), then their maxima, in the order of
    `large`. The sums of `summed` follow, then the parts.

    Args:
        large: tensor name → (number of elements, distance between the elements of its part).
        summed: names of tensors whose sums are needed.
    """
    graph = model.graph

    def add(op_type: str, inputs: Sequence[str], name: str, **attributes: Any) -> str:
        """Append a node and return the name of its output."""
        graph.node.append(onnx.helper.make_node(op_type, inputs, [f"{_ADDED}/{name}"], **attributes))
        return f"{_ADDED}/{name}"

    def constant(name: str, *values: int) -> str:
        """Append an initializer and return its name."""
        graph.initializer.append(onnx.numpy_helper.from_array(np.array(values), f"{_ADDED}/{name}"))
        return f"{_ADDED}/{name}"

    # Constants that all tensors share are added once.
    zero = constant("zero", 0)
    # Since opset 18 the axes are an input.
    as_input = opset_of_proto(model) >= 18
    axis = [constant("axis", 1)] if as_input else []
    along: dict[str, Any] = {"keepdims": 0} if as_input else {"keepdims": 0, "axes": [1]}
    outputs_by_kind: dict[str, dict[str, str]] = {"ReduceMin": {}, "ReduceMax": {}, "ReduceSum": {}, "Slice": {}}
    # ONNX Runtime orders the nodes by walking back from an output, and visits the node that is last in the file first.
    # With the tensors in reverse order, it reduces the first tensor as soon as that tensor exists. The tensor is then
    # still in the caches, and the next operator may overwrite it.
    for name, (size, stride) in reversed(large.items()):
        length, step = constant(f"{name}/length", size), constant(f"{name}/step", stride)
        rows = add("Reshape", [name, constant(f"{name}/row", -1, row_length(size))], f"{name}/rows")
        for kind in ("ReduceMin", "ReduceMax"):
            outputs_by_kind[kind][name] = add(kind, [rows, *axis], f"{name}/{kind}", **along)
        flat = add("Reshape", [name, length], f"{name}/flat")
        if name in summed:
            outputs_by_kind["ReduceSum"][name] = add("ReduceSum", [flat], f"{name}/ReduceSum")
        outputs_by_kind["Slice"][name] = add("Slice", [flat, zero, length, zero, step], f"{name}/part")
    parts = [kind_outputs[name] for kind_outputs in outputs_by_kind.values() for name in large if name in kind_outputs]
    outputs = [add("Concat", parts, "all", axis=0), *(name for name in dict.fromkeys(names) if name not in large)]
    del graph.output[:]
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)


def row_length(size: int) -> int:
    """Return the length of the rows into which a tensor of `size` elements is split before it is reduced. Return `size`
    if no length in the range of `_ROW` divides it.
    """
    shortest, best, longest = _ROW
    lengths = [length for length in range(shortest, longest + 1) if size % length == 0]
    return min(lengths, key=lambda length: abs(math.log(length / best)), default=size)
