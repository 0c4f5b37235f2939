"""Scales and zero points that retargeting can work with: constants, of 8-bit integers."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from edgeq.graph import quant_params
from edgeq.graph.quant_params import QuantParams
from edgeq.graph.query import node_input

INTEGERS: Mapping[str, ir.DataType] = {"uint8": ir.DataType.UINT8, "int8": ir.DataType.INT8}
"""Types of activations and weights by the names that users give."""
_KNOWN = (*INTEGERS.values(), ir.DataType.INT32)


def type_name(dtype: ir.DataType) -> str:
    """ "uint8" for `UINT8`."""
    return dtype.name.lower()


def params_of(node: ir.Node) -> QuantParams | None:
    """Parameters of a Q or DQ node; None where they are not constant, or neither of 8 bits nor of 32 (a bias)."""
    return _known(quant_params.params_of(node), node, 2)


def float32_params_of(node: ir.Node) -> QuantParams | None:
    """`params_of` of a Q or DQ node of 8-bit integers and float32 numbers; None for others."""
    params, scale = params_of(node), node.inputs[1]
    if params is None or params.dtype not in INTEGERS.values() or scale is None:
        return None
    return params if scale.dtype is ir.DataType.FLOAT else None


def params_at(node: ir.Node, scale: int, axis: int = 0) -> QuantParams | None:
    """The same of an operator's scale at a place, behind which its zero point stands."""
    return _known(quant_params.params_at(node, scale, scale + 1, axis=axis), node, scale + 1)


def _known(params: QuantParams | None, node: ir.Node, zero_point: int) -> QuantParams | None:
    explicit = node_input(node, zero_point) is not None
    return params if params is not None and explicit and params.dtype in _KNOWN else None
