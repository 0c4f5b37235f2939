"""The layers of an optimised graph whose kernels add two products in 16 bits, and what one of them computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from edgeq.emulate.saturation.arithmetic import exact_product, saturating_product
from edgeq.emulate.saturation.operators import Computed, compute
from edgeq.measure.graphs import GraphIndex, attribute
from edgeq.model.saturation import PAIR_LIMIT, SaturatingPath, conv_rows, pair_sums, saturation_table

# Operator → where its activation, its weight, and the zero points of both stand among its inputs.
_OPERANDS = {
    "QLinearConv": (0, 3, 2, 5),
    "QLinearMatMul": (0, 3, 2, 5),
    "QGemm": (0, 3, 2, 5),
    "ConvInteger": (0, 1, 2, 3),
    "MatMulInteger": (0, 1, 2, 3),
    "MatMulIntegerToFloat": (0, 1, 4, 5),
    "DynamicQuantizeMatMul": (0, 1, 0, 3),
    "DynamicQuantizeLSTM": (0, 1, 0, 9),
    "QAttention": (0, 1, 6, 7),
}
# These take float and make unsigned bytes of it themselves.
_DYNAMIC = frozenset({"DynamicQuantizeMatMul", "DynamicQuantizeLSTM"})
_TYPES: dict[int, str] = {TensorProto.UINT8: "uint8", TensorProto.INT8: "int8"}


@dataclass(frozen=True, eq=False)
class Layer:
    """One node on a saturating path.

    Attributes:
        node: in the optimised graph.
        path: the kernel that it takes.
        rows: its constant weight as [output channels, K] in the order of k; None where the weight is computed, or is of
            a form that has no single matrix.
    """

    node: onnx.NodeProto
    path: SaturatingPath
    rows: NDArray[Any] | None

    @property
    def name(self) -> str:
        return str(self.node.name or self.node.output[0])

    @property
    def suspects(self) -> NDArray[np.bool_] | None:
        """Per output channel, whether some input makes it saturate; None where the weight is not known."""
        if self.rows is None:
            return None
        return np.asarray((pair_sums(self.rows) > PAIR_LIMIT).any(axis=1))

    def compute(self, inputs: Sequence[NDArray[Any] | None], *, saturating: bool = True) -> Computed:
        """What it makes of its inputs, which come in the node's order."""
        return compute(self.node, inputs, saturating_product if saturating else exact_product, self.path)


def find_layers(graph: GraphIndex, config: Mapping[str, str]) -> tuple[Layer, ...]:
    """Every node of an optimised graph on a saturating path.

    Args:
        config: session options that the model runs with; one of them makes kernels exact.
    """
    table = saturation_table()
    precise = table.precision_operators if config.get(table.precision_option) == "1" else frozenset()
    found = []
    for node in graph.model.graph.node:
        if node.op_type not in _OPERANDS:
            continue
        activation, weight, a_zero, w_zero = (
            node.input[place] if place < len(node.input) else "" for place in _OPERANDS[node.op_type]
        )
        kind = "uint8" if node.op_type in _DYNAMIC else _dtype(graph, activation, a_zero)
        path = table.path(node.op_type, kind, _dtype(graph, weight, w_zero))
        constant = graph.is_constant(weight)
        if path is None or (constant and node.op_type in precise):
            continue
        array = graph.constant(weight) if constant else None
        if path.exact_depthwise and array is not None and _is_depthwise(node, array):
            continue
        found.append(Layer(node, path, None if array is None else _rows(node, array, path)))
    return tuple(found)


def simulate_layer(
    node: onnx.NodeProto, inputs: Sequence[NDArray[Any] | None], *, saturating: bool = True
) -> NDArray[Any]:
    """The output of one integer node by its inputs, in its own order: as a kernel with 16-bit sums of products gives it
    where there is such a path for its types, else exact.

    Raises:
        KeyError: an operator without a model.
    """
    activation, weight = (np.asarray(inputs[place]) for place in _OPERANDS[node.op_type][:2])
    kind = "uint8" if node.op_type in _DYNAMIC else str(activation.dtype)
    path = saturation_table().path(node.op_type, kind, str(weight.dtype))
    exact = path is None or (path.exact_depthwise and _is_depthwise(node, weight))
    swapped = node.op_type == "ConvInteger"
    layer = Layer(node, path or SaturatingPath((node.op_type,), "", "", swapped=swapped), None)
    return layer.compute(inputs, saturating=saturating and not exact).output


def _dtype(graph: GraphIndex, *names: str) -> str:
    """Type of the bytes of a tensor, by itself or by its zero point, whichever tells; "" where neither does."""
    for name in filter(None, names):
        if graph.is_constant(name):
            return _TYPES.get(graph.tensor(name).data_type, "")
        maker = graph.producers.get(name)
        if maker is not None and maker.op_type == "DynamicQuantizeLinear":
            return "uint8"
    given = {value.name: value.type.tensor_type.elem_type for value in graph.model.graph.input}
    return next((_TYPES[given[name]] for name in names if given.get(name) in _TYPES), "")


def _is_depthwise(node: onnx.NodeProto, weight: NDArray[Any]) -> bool:
    return weight.shape[1] == 1 and len(weight) == attribute(node, "group", 1)


def _rows(node: onnx.NodeProto, weight: NDArray[Any], path: SaturatingPath) -> NDArray[Any] | None:
    if node.op_type in ("QLinearConv", "ConvInteger"):
        return conv_rows(weight, path.order)
    if not path.modelled or weight.ndim < 2:
        return None
    if weight.ndim > 2:  # a stack of matrices: one row for every column of every matrix
        return np.moveaxis(weight, -2, -1).reshape(-1, weight.shape[-2])
    return weight if node.op_type == "QGemm" and attribute(node, "transB", 0) else weight.T
