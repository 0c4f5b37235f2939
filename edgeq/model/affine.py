"""Fold products and sums with constants into the weights and bias of the preceding layer.

Exporters write a learnt scale, a bias or a normalization as separate nodes: Conv, Mul, Add. ONNX Runtime folds
constants with one value per channel, but not a single value for all channels. Each node that remains is quantized
separately, which takes time and rounds to 8 bits once more.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgeq.model.edit import Editor, replace_node, rewrite_nodes
from edgeq.model.fold import fold_into
from edgeq.model.graph import (
    is_op,
    only_reader,
)
from edgeq.model.parameters import Array, float_constant, output_channels

_LAYERS = ("Conv", "ConvTranspose", "Gemm")
_STEPS = ("Mul", "Div", "Add", "Sub")


def fold_affine(model: ir.Model) -> int:
    """Fold every Mul, Div, Add and Sub with a constant into the preceding layer, in place. The layer must be a Conv,
    ConvTranspose or Gemm with constant weights.

    The constant must be one number, or one for each channel, and the folded node must be the only reader of the layer's
    result. The layer keeps its name, and its result takes over the name of the last folded result. New weights are
    computed in float64 and stored in their old type.

    Returns:
        The number of nodes that were folded.
    """
    return rewrite_nodes(model, _fold, *_STEPS)  # After a fold, the next node reads the layer's result.


def _layer(step: ir.Node) -> ir.Node | None:
    """Return the layer whose result is read only by `step`, a node with a constant operand. Return None if there is no
    such layer.
    """
    for place, value in enumerate(step.inputs[:2]):
        producer = value.producer() if value is not None else None
        if value is not None and producer is not None and is_op(producer, *_LAYERS) and only_reader(value) is step:
            return producer if float_constant(step.inputs[1 - place]) is not None else None
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
    # A zero factor would leave weights without a scale, and an overflow would make them infinite.
    if not (factor.all() and np.isfinite(factor).all() and np.isfinite(shift).all()):
        return False
    if fold_into(editor, layer, factor, shift):
        return False
    replace_node(step, result)
    return True


def _by_channel(layer: ir.Node, values: Array | None) -> Array | None:
    """Return, as float64[channels], a constant that broadcasts to the layer's result. Return None if it varies along
    another axis.
    """
    weight = layer.inputs[1]
    if values is None or weight is None or weight.shape is None or not weight.shape.is_static():
        return None
    sizes = weight.shape.numpy()
    channels, rank = output_channels(layer, sizes), len(sizes)
    if values.ndim > rank or values.size not in (1, channels):
        return None
    shape = (1,) * (rank - values.ndim) + values.shape
    return np.broadcast_to(values.ravel(), (channels,)) if values.size == 1 or shape[1] == channels else None
