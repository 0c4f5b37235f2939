"""The layers of an optimised graph whose kernels add two products in 16 bits, and what one of them computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.emulate.saturation.arithmetic import exact_product, saturating_product, watched_product
from edgeq.emulate.saturation.operators import Computed, compute
from edgeq.graph.index import GraphIndex
from edgeq.graph.operators import is_depthwise, operator_of
from edgeq.graph.query import constant, constant_tensor, name_of, node_input
from edgeq.model.products import integers
from edgeq.model.saturation import (
    PAIR_LIMIT,
    SaturatingPath,
    SaturationTable,
    conv_rows,
    pair_sums,
    possible_sums,
    saturation_table,
)

_TYPES = {ir.DataType.UINT8: "uint8", ir.DataType.INT8: "int8"}


@dataclass(frozen=True, eq=False)
class Layer:
    """One node on a saturating path.

    Attributes:
        node: in the optimised graph.
        path: the kernel that it takes.
        rows: its constant weight as [output channels, K] in the order of k; None where the weight is computed, or is of
            a form that has no single matrix.
        channels: of its image that one output sees; 0 where it is no convolution.
    """

    node: ir.Node
    path: SaturatingPath
    rows: NDArray[Any] | None
    channels: int = 0

    @property
    def pair_sums(self) -> NDArray[Any] | None:
        """Of `rows`: `edgeq.model.saturation.pair_sums` of all pairs that its kernels may make."""
        if self.rows is None:
            return None
        return possible_sums(self.rows, self.channels) if self.path.any_neighbours else pair_sums(self.rows)

    @property
    def name(self) -> str:
        """The node's, or that of its output where it has none."""
        return self.node.name or name_of(self.node.outputs[0])

    @property
    def suspects(self) -> NDArray[np.bool_] | None:
        """Per output channel, whether some input makes it saturate; None where the weight is not known."""
        sums = self.pair_sums
        return None if sums is None else np.asarray((sums > PAIR_LIMIT).any(axis=1))

    def compute(
        self, inputs: Sequence[NDArray[Any] | None], *, saturating: bool = True, watched: bool = False
    ) -> Computed:
        """What it makes of its inputs, which come in the node's order; where it does not saturate, `watched` counts
        what would have been clipped."""
        exact = watched_product if watched else exact_product
        return compute(self.node, inputs, saturating_product if saturating else exact, self.path)


def find_layers(
    graph: GraphIndex, config: Mapping[str, str], table: SaturationTable | None = None
) -> tuple[Layer, ...]:
    """Every node of an optimised graph on a saturating path.

    Args:
        config: session options that the model runs with; one of them makes kernels exact.
        table: whose kernels; None: ONNX Runtime's own.
    """
    table = table or saturation_table()
    precise = table.precision_operators if config.get(table.precision_option) == "1" else frozenset()
    found = []
    for node in graph.graph:
        row = operator_of(node)
        if not row.integers or row.weight is None:
            continue
        activation = "uint8" if row.dynamic else _dtype(*integers(node, 0))
        path = table.path(node.op_type, activation, _dtype(*integers(node, row.weight)))
        array = constant(node_input(node, row.weight))
        if path is None or (array is not None and node.op_type in precise):
            continue
        if path.exact_depthwise and array is not None and is_depthwise(node, array.shape):
            continue
        channels = array.shape[1] if array is not None and "Conv" in node.op_type else 0
        found.append(Layer(node, path, None if array is None else _rows(node, array, path), channels))
    return tuple(found)


def _dtype(*values: ir.Value | None) -> str:
    """Type of the bytes of a tensor, by itself or by its zero point, whichever is known; "" where neither is."""
    for value in values:
        tensor = constant_tensor(value)
        dtype = tensor.dtype if tensor is not None else value.dtype if value is not None else None
        if dtype in _TYPES:
            return _TYPES[dtype]
        maker = value.producer() if value is not None else None
        if maker is not None and maker.op_type == "DynamicQuantizeLinear":
            return "uint8"
    return ""


def _rows(node: ir.Node, weight: NDArray[Any], path: SaturatingPath) -> NDArray[Any] | None:
    if node.op_type in ("QLinearConv", "ConvInteger"):
        return conv_rows(weight, path.order)
    if not path.modelled or weight.ndim < 2:
        return None
    if weight.ndim > 2:  # a stack of matrices: one row for every column of every matrix
        return np.moveaxis(weight, -2, -1).reshape(-1, weight.shape[-2])
    transposed = node.op_type == "QGemm" and node.attributes.get_int("transB", 0) == 1
    return weight if transposed else weight.T
