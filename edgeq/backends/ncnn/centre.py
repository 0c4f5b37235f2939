"""Halve the steps of layers that read the result of a Relu, in a model with Q/DQ pairs.

ncnn's int8 has no zero points, so numbers from 0 to r use only the integers 0 to 127. If the middle m of the range is
subtracted from these numbers, they use -127 to 127, at half the step. The subtraction costs nothing: the layer before
the Relu subtracts m with its bias, the Relu becomes a Clip from -m on, and the layer behind it adds m times the sums of
its weights to its bias. With step s, r = 127 s and m = r / 2, each old number is also a new one.

Padding would have to be -m, and ncnn pads with 0. So the layers behind the Relu must have no padding.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.model.edit import Editor, replace_node
from edgeq.model.graph import (
    channel_axis,
    clamp_bounds,
    constant,
    constant_values,
    geometry,
    is_constant,
    is_op,
    node_input,
    only_reader,
    opset_of,
)
from edgeq.model.quant_params import params_of

_MOST = 127
# The bounds of a Clip are inputs from this opset on.
_CLIP_INPUTS = 11


def centre(model: ir.Model) -> int:
    """Halve the steps in a model, in place, wherever that is possible.

    Returns:
        The number of tensors whose steps changed.
    """
    if opset_of(model) < _CLIP_INPUTS:
        return 0
    editor = Editor(model)
    pairs = [node for node in model.graph if is_op(node, "DequantizeLinear")]
    return sum(_centre_pair(node, editor) for node in pairs)


def _centre_pair(pair_end: ir.Node, editor: Editor) -> bool:
    pair_start = pair_end.inputs[0].producer() if pair_end.inputs[0] is not None else None
    clamp = _clamp_before(pair_start, pair_end)
    layer = clamp.inputs[0].producer() if clamp is not None and clamp.inputs[0] is not None else None
    params, bounds = params_of(pair_end), clamp_bounds(clamp) if clamp is not None else None
    if clamp is None or layer is None or pair_start is None or params is None or bounds is None:
        return False
    readers = [use.node for use in pair_end.outputs[0].uses()]
    fits = params.scale.size == 1 and bounds[0] == 0 and bounds[1] > 0 and all(_takes_offset(r) for r in readers)
    if not fits or pair_end.outputs[0].is_graph_output() or not _has_own_bias(layer):
        return False
    # Numbers beyond the largest integer are cut off, and so are those beyond the Clip.
    largest = min(bounds[1], _MOST * float(params.scale.reshape(())))
    middle = np.float32(largest / 2)
    _add_to_bias(layer, -middle, editor)
    _move_clamp(clamp, bounds, middle, editor)
    scale = editor.constant(f"{pair_start.name}/scale", np.asarray(middle / _MOST, np.float32))
    for node in (pair_start, pair_end):
        node.replace_input_with(1, scale)
    for reader in readers:
        weights = _floats(reader.inputs[1])
        axis = 0 if is_op(reader, "Conv") else channel_axis(reader) % weights.ndim
        sums = weights.astype(np.float64).sum(axis=tuple(a for a in range(weights.ndim) if a != axis))
        _add_to_bias(reader, sums * np.float64(middle), editor)
    return True


def _clamp_before(pair_start: ir.Node | None, pair_end: ir.Node) -> ir.Node | None:
    """Return the Relu or Clip between a layer and a pair, if nothing else reads the tensors between them."""
    if pair_start is None or not is_op(pair_start, "QuantizeLinear") or pair_start.inputs[0] is None:
        return None
    clamp = pair_start.inputs[0].producer()
    if clamp is None or not is_op(clamp, "Relu", "Clip") or clamp.inputs[0] is None:
        return None
    layer = clamp.inputs[0].producer()
    alone = only_reader(clamp.inputs[0]) is clamp and only_reader(clamp.outputs[0]) is pair_start
    return clamp if alone and only_reader(pair_start.outputs[0]) is pair_end and is_op(layer, "Conv", "Gemm") else None


def _takes_offset(node: ir.Node) -> bool:
    """Return whether a node is an int8 layer without padding, whose bias can take up a change of its input."""
    weight = node.inputs[1].producer() if len(node.inputs) > 1 and node.inputs[1] is not None else None
    if weight is None or not is_op(weight, "DequantizeLinear") or not is_constant(weight.inputs[0]):
        return False
    if not is_op(node, "Conv", "Gemm") or not _has_own_bias(node):
        return False
    if is_op(node, "Gemm"):
        return True
    kernel = constant_values(weight.inputs[0]).shape[2:]
    # An `auto_pad` adds nothing to a kernel of one pixel. For others, the sizes decide, which a file may leave out.
    if node.attributes.get_string("auto_pad", "NOTSET") in ("NOTSET", "VALID"):
        return not any(map(any, geometry(node, kernel, kernel).pads))
    return set(kernel) == {1}


def _has_own_bias(node: ir.Node) -> bool:
    """Return whether the bias of a layer is constant or absent, so that it can change."""
    bias = node_input(node, 2)
    factors = (node.attributes.get_float("alpha", 1.0), node.attributes.get_float("beta", 1.0))
    if is_op(node, "Gemm") and (factors != (1, 1) or node.attributes.get_int("transA", 0) != 0):
        return False
    if _constant_weight(node) is None:
        return False
    return bias is None or _floats_or_none(bias) is not None


def _add_to_bias(node: ir.Node, change: NDArray[np.float64] | np.float32, editor: Editor) -> None:
    bias = node_input(node, 2)
    weights = _constant_weight(node)
    assert weights is not None
    count = weights[0 if is_op(node, "Conv") else channel_axis(node) % len(weights)]
    old = np.zeros(count) if bias is None else np.broadcast_to(_floats(bias).astype(np.float64).ravel(), count)
    new = editor.constant(f"{node.name}/bias", (old + change).astype(np.float32))
    if len(node.inputs) < 3:
        node.resize_inputs(3)
    node.replace_input_with(2, new)


def _move_clamp(clamp: ir.Node, bounds: tuple[float, float], middle: np.float32, editor: Editor) -> None:
    moved = [np.asarray(np.float32(bound) - middle, np.float32) for bound in bounds if math.isfinite(bound)]
    constants = [editor.constant(f"{clamp.name}/bound", bound) for bound in moved]
    output = clamp.outputs[0]
    result = editor.node("Clip", [clamp.inputs[0], *constants], f"{clamp.name}/moved", before=clamp, like=output)
    replace_node(clamp, result)


def _constant_weight(node: ir.Node) -> tuple[int, ...] | None:
    """Return the shape of a layer's constant weights, or None if they are computed."""
    values = _floats_or_none(node.inputs[1])
    return None if values is None else values.shape


def _floats(value: ir.Value | None) -> NDArray[np.float32]:
    values = _floats_or_none(value)
    assert values is not None
    return values


def _floats_or_none(value: ir.Value | None) -> NDArray[np.float32] | None:
    """Return the values of a constant, or of the dequantized form of constant integers."""
    node = value.producer() if value is not None else None
    if node is not None and is_op(node, "DequantizeLinear"):
        integers, params = constant(node.inputs[0]), params_of(node)
        return None if integers is None or params is None else np.asarray(params.dequantize(integers), np.float32)
    return constant(value)
