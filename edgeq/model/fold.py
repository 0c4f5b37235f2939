"""Fold BatchNormalization into the layer before it.

At inference, BatchNormalization computes y = x * factor + shift for each channel, with factor = scale / sqrt(var +
epsilon) and shift = bias - mean * factor (the definition of the ONNX operator). BatchNormalization can be folded into a
preceding layer that is linear in its weights. The weights and the bias of the layer are multiplied by factor, and shift
is added to the bias.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgeq.model.edit import Editor, replace_node, rewrite_nodes
from edgeq.model.graph import is_op, node_input, only_reader
from edgeq.model.parameters import Array, float_constant, output_channels, set_parameter

_LISTED = 4
_NO_LAYER = "no Conv, ConvTranspose, Gemm or MatMul comes right before it"
_LINEAR = ("Conv", "ConvTranspose", "Gemm", "MatMul")


def fold_batch_norms(model: ir.Model, notes: list[str] | None = None) -> int:
    """Fold every BatchNormalization into the layer that it follows, in place, if possible.

    The layer must be a Conv, ConvTranspose, Gemm or 2-D MatMul with constant weights, and its result must have no other
    use. A Reshape of a MatMul's rows may be in between. The layer keeps its name, and its result takes over the name of
    the BatchNormalization's result. New weights are computed in float64 and stored in their old type.

    Args:
        notes: a list to which the function adds one line for each reason why nodes were not folded. The line contains
            the names of the nodes.

    Returns:
        The number of nodes that were folded.
    """
    reasons: dict[str, list[str]] = {}

    def fold(norm: ir.Node, editor: Editor) -> bool:
        """Fold `norm` and return True. If this is not possible, record the reason and return False."""
        reason = _fold(norm, editor)
        if reason:
            reasons.setdefault(reason, []).append(repr(norm.name))
        return not reason

    folded = rewrite_nodes(model, fold, "BatchNormalization")
    if notes is not None:
        notes.extend(f"BatchNormalization {_listing(names)}: {reason}" for reason, names in reasons.items())
    return folded


def _listing(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{', '.join(names[:_LISTED])}{more} {'stays' if len(names) == 1 else 'stay'}"


def _fold(norm: ir.Node, editor: Editor) -> str:
    """Fold one BatchNormalization and return "". If this is not possible, return the reason."""
    source = norm.inputs[0]
    layer = source.producer() if source is not None else None
    if source is not None and layer is not None and is_op(layer, "Reshape"):
        return _fold_through(norm, layer, editor)
    if source is None or layer is None or not is_op(layer, *_LINEAR):
        return _NO_LAYER
    # Another reader needs the result without the norm.
    if only_reader(source) is not norm:
        return f"the result of {layer.name!r} is used elsewhere too"
    factors = norm_factors(norm)
    if isinstance(factors, str):
        return factors
    reason = fold_into(editor, layer, *factors)
    if reason:
        return reason
    replace_node(norm, source)
    return ""


def _fold_through(norm: ir.Node, reshape: ir.Node, editor: Editor) -> str:
    """Fold one BatchNormalization that follows a MatMul and a Reshape from [batch, rows, channels] to [batch x rows,
    channels], as in LeViT. The factor is multiplied into the weights, and an Add before the Reshape adds the shift.
    Return "", or the reason why this is not possible.
    """
    product = reshape.inputs[0]
    layer = product.producer() if product is not None else None
    if product is None or layer is None or not is_op(layer, "MatMul"):
        return _NO_LAYER
    weight, shape = float_constant(layer.inputs[1]), reshape.outputs[0].shape
    if only_reader(product) is not reshape or only_reader(reshape.outputs[0]) is not norm:
        return f"the result of {layer.name!r} is used elsewhere too"
    factors = norm_factors(norm)
    if isinstance(factors, str):
        return factors
    if weight is None or weight.ndim != 2 or shape is None or len(shape) != 2 or shape[1] != weight.shape[1]:
        return f"its channels are not known to be those of {layer.name!r}"
    dtype = layer.inputs[1].dtype  # type: ignore[union-attr]
    assert dtype is not None
    set_parameter(editor, layer, 1, weight * factors[0])
    shift = editor.constant(f"{layer.name}.bias", factors[1].astype(dtype.numpy()))
    moved = editor.node("Add", [product, shift], f"{layer.name}/bias", before=reshape, like=product)
    reshape.replace_input_with(0, moved)
    replace_node(norm, reshape.outputs[0])
    return ""


def norm_factors(norm: ir.Node) -> tuple[Array, Array] | str:
    """Return the factor and the shift of a BatchNormalization, each float64[channels]. If they cannot be computed,
    return the reason.
    """
    training = norm.attributes.get_int("training_mode", 0)
    if training or any(o.uses() or o.is_graph_output() for o in norm.outputs[1:]):
        return "it is in training mode"
    parameters = [float_constant(v) for v in norm.inputs[1:5]]
    if len(parameters) < 4 or any(p is None for p in parameters):
        return "its parameters are not constant"
    scale, bias, mean, variance = (p.ravel() for p in parameters if p is not None)
    spread = variance + norm.attributes.get_float("epsilon", 1e-5)
    # The root of zero would divide by zero.
    if not np.all(spread > 0):
        return "its variance is not positive"
    factor = scale / np.sqrt(spread)
    return factor, bias - mean * factor


def fold_into(editor: Editor, layer: ir.Node, factor: Array, shift: Array) -> str:
    """Multiply the result of a layer by `factor` and add `shift`, by changing the layer's weights and bias.

    Args:
        layer: a Conv, ConvTranspose, Gemm or MatMul.
        factor, shift: float64[channels].

    Returns:
        "" if the layer was changed. Otherwise the reason why it was not.
    """
    data = layer.inputs[0]
    if layer.op_type == "MatMul" and (data is None or data.shape is None or len(data.shape) != 2):
        return f"{layer.name!r} is a MatMul whose result is not known to be two-dimensional"
    weight = float_constant(layer.inputs[1])
    if weight is None:
        return f"the weights of {layer.name!r} are not constant"
    bias = _read_bias(layer, len(factor))
    if bias is None:
        return f"the bias of {layer.name!r} is not one constant per channel"
    scaled = _scale_weight(layer, weight, factor)
    if scaled is None:
        return "its channels do not match the layer's"
    beta = layer.attributes.get_float("beta", 1.0)  # Gemm: Y = alpha A B + beta C
    if layer.op_type == "MatMul":
        layer.op_type = "Gemm"
    set_parameter(editor, layer, 1, scaled)
    set_parameter(editor, layer, 2, beta * bias * factor + shift)
    layer.attributes.pop("beta", None)
    return ""


def _scale_weight(layer: ir.Node, weight: Array, factor: Array) -> Array | None:
    """Return the weights times the factors of their output channels; None if the numbers of channels differ."""
    convolves = layer.op_type in ("Conv", "ConvTranspose")
    if (not convolves and weight.ndim != 2) or output_channels(layer, weight.shape) != len(factor):
        return None
    if layer.op_type == "Conv":
        return weight * factor.reshape(-1, *(1,) * (weight.ndim - 1))
    if layer.op_type == "ConvTranspose":
        groups = layer.attributes.get_int("group", 1)
        # [C_in, C_out / groups, ...]: the output channels of group g are computed from the input channels of group g.
        grouped = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
        return (grouped * factor.reshape(groups, 1, -1, *(1,) * (weight.ndim - 2))).reshape(weight.shape)
    return weight * (factor[:, None] if layer.attributes.get_int("transB", 0) else factor)


def _read_bias(layer: ir.Node, channels: int) -> Array | None:
    """Return the bias of a layer as [channels], or zeros if it has none. Return None if the bias is not one constant
    per channel.
    """
    bias_input = node_input(layer, 2)
    if bias_input is None:
        return np.zeros(channels)
    bias = float_constant(bias_input)
    if bias is None or bias.size not in (1, channels) or bias.shape[-1:] not in ((), (1,), (channels,)):
        return None
    return np.broadcast_to(bias.ravel(), (channels,))
