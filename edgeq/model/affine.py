"""Products and sums with constants behind a layer, folded into its weights and bias.

Exporters write a learnt scale, a bias or a normalisation as nodes of their own: Conv, Mul, Add. ONNX Runtime folds
those with one constant for each channel, not those with one for all. What is not folded is quantized by itself: an int8
product takes time and rounds to 8 bits once more.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgeq.graph.edit import Editor, replace_node, rewrite_nodes
from edgeq.graph.query import is_op, only_reader
from edgeq.model.constants import Array, float_constant, output_channels
from edgeq.model.fold import fold_into

_LAYERS = ("Conv", "ConvTranspose", "Gemm")
_STEPS = ("Mul", "Div", "Add", "Sub")


def fold_affine(model: ir.Model) -> int:
    """Fold every Mul, Div, Add and Sub with a constant, one number or one for each channel, that alone reads the result
    of a Conv, ConvTranspose or Gemm with constant weights, in place. The layer keeps its name; its result takes the
    name of the last one's. Computed in float64, stored in the weights' own type.

    Returns:
        How many were folded.
    """
    return rewrite_nodes(model, _fold, *_STEPS)  # behind one that is folded the next one reads the layer


def _layer(step: ir.Node) -> ir.Node | None:
    """The layer whose result a step with a constant alone reads."""
    for place, value in enumerate(step.inputs[:2]):
        made = value.producer() if value is not None else None
        if value is not None and made is not None and is_op(made, *_LAYERS) and only_reader(value) is step:
            return made if float_constant(step.inputs[1 - place]) is not None else None
    return None


def _fold(step: ir.Node, editor: Editor) -> bool:
    layer = _layer(step)
    if layer is None or layer.graph is not step.graph:
        return False
    result = layer.outputs[0]
    number = _by_channel(layer, float_constant(step.inputs[1 if step.inputs[0] is result else 0]))
    if number is None:
        return False
    ones: Array = np.ones(len(number))
    factor, shift = ones, 0 * ones
    if step.op_type == "Mul":
        factor = number
    elif step.op_type == "Div":
        if step.inputs[0] is not result or not number.all():
            return False
        factor = 1 / number
    elif step.op_type == "Add":
        shift = number
    else:
        factor, shift = (ones, -number) if step.inputs[0] is result else (-ones, number)
    # A layer of zeros has no scale, and what overflows no value.
    if not (factor.all() and np.isfinite(factor).all() and np.isfinite(shift).all()):
        return False
    if fold_into(editor, layer, factor, shift):
        return False
    replace_node(step, result)
    return True


def _by_channel(layer: ir.Node, values: Array | None) -> Array | None:
    """float64[channels]: a constant that broadcasts to the layer's result; None where it differs along another axis."""
    weight = layer.inputs[1]
    if values is None or weight is None or weight.shape is None or not weight.shape.is_static():
        return None
    sizes = weight.shape.numpy()
    channels, rank = output_channels(layer, sizes), len(sizes)
    if values.ndim > rank or values.size not in (1, channels):
        return None
    shape = (1,) * (rank - values.ndim) + values.shape
    return np.broadcast_to(values.ravel(), (channels,)) if values.size == 1 or shape[1] == channels else None
