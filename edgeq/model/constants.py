"""Float weights as the passes compute with them: read as float64, written in the weights' own type."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgeq.graph.edit import Editor
from edgeq.graph.query import constant_tensor, node_input

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def float_constant(value: ir.Value | None) -> Array | None:
    """The values of a constant of floats, as float64; None for what is computed, and for other types."""
    tensor = constant_tensor(value)
    if tensor is None or not tensor.dtype.is_floating_point():
        return None
    with np.errstate(invalid="ignore"):  # a weight may be a signalling NaN
        return np.asarray(tensor.numpy()).astype(np.float64)


def output_channels(layer: ir.Node, weight: tuple[int, ...]) -> int:
    """How many channels a Conv, ConvTranspose, Gemm or MatMul with a weight of that shape gives."""
    if layer.op_type == "ConvTranspose":
        return weight[1] * int(layer.attributes.get_int("group", 1))
    outputs_first = layer.op_type == "Conv" or layer.attributes.get_int("transB", 0) != 0
    return weight[0 if outputs_first else 1]


def set_parameter(editor: Editor, layer: ir.Node, place: int, values: Array) -> None:
    """Make `values` the weights (`place` 1) or the bias (2) of a layer, in the element type of its weights. What other
    nodes read too is left to them."""
    weight, old = layer.inputs[1], node_input(layer, place)
    assert weight is not None
    assert weight.dtype is not None
    name = f"{old.name}.folded" if old is not None else f"{layer.name}.bias"
    editor.set_input(layer, place, values.astype(weight.dtype.numpy()), name)
