"""Read and replace the weights and biases of layers."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgeq.model.edit import Editor
from edgeq.model.graph import constant_tensor, node_input

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def float_constant(value: ir.Value | None) -> Array | None:
    """Return the values of a float constant as float64. Return None for computed values and for constants of other
    types.
    """
    tensor = constant_tensor(value)
    if tensor is None or not tensor.dtype.is_floating_point():
        return None
    with np.errstate(invalid="ignore"):  # A weight may be a signalling NaN.
        return np.asarray(tensor.numpy()).astype(np.float64)


def output_channels(layer: ir.Node, weight: tuple[int, ...]) -> int:
    """Return the number of output channels of a Conv, ConvTranspose, Gemm or MatMul whose weight has this shape."""
    if layer.op_type == "ConvTranspose":
        return weight[1] * int(layer.attributes.get_int("group", 1))
    outputs_first = layer.op_type == "Conv" or layer.attributes.get_int("transB", 0) != 0
    return weight[0 if outputs_first else 1]


def set_parameter(editor: Editor, layer: ir.Node, place: int, values: Array) -> None:
    """Make `values` the weights (`place` 1) or the bias (2) of a layer, with the element type of its weights. If other
    nodes read the old tensor, it does not change for them.
    """
    weight, old = layer.inputs[1], node_input(layer, place)
    assert weight is not None
    assert weight.dtype is not None
    name = f"{old.name}.folded" if old is not None else f"{layer.name}.bias"
    editor.set_input(layer, place, values.astype(weight.dtype.numpy()), name)
