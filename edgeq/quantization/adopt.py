"""Convert quantized models back to float, and keep the scales of their quantization if possible.

The models contain Q/DQ pairs from PyTorch, TFLite converters or quantization-aware training.

The float weights have the rounded values. When the backend `tiles` quantizes them again, it finds the same grid. If the
backend's array supports the old scale, the scale and the integers therefore stay the same. Activation scales are kept
if the zero point is 0. Other activations get the symmetric scale that covers the same values, and a note states how
much the steps grow. If the integers of a tensor could not represent negative values, its quantization replaced a ReLU,
because quantizers remove a ReLU that has no further effect. edgeq then restores the ReLU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from edgeq.calibration.ranges import Range
from edgeq.errors import ModelError
from edgeq.model.edit import Editor, replace_value
from edgeq.model.graph import DATA_MOVEMENT, constant_values, is_constant, is_op, is_quantized_operator
from edgeq.model.load import read_model, save_model
from edgeq.model.quant_params import QuantParams, params_of

# Largest integer of the array's symmetric int8.
_LARGEST = 127
# Operators whose results are not negative if their inputs are not.
_KEEP_SIGN = DATA_MOVEMENT | {"AveragePool", "GlobalAveragePool", "ReduceMean", "Concat"}
_FLOAT_FIX = "Give the float32 model that it was made from"
_PAIR = ("QuantizeLinear", "DequantizeLinear")


@dataclass(frozen=True)
class Adoption:
    """Describe a quantized model that was converted back to float.

    Attributes:
        model: file of the float model.
        ranges: for each tensor, the symmetric range that covers all values that its old quantization could represent.
        notes: sentences with figures on what changed.
    """

    model: Path
    ranges: Mapping[str, Range]
    notes: tuple[str, ...]


def adopt(source: Path, destination: Path) -> Adoption:
    """Read the Q/DQ model `source` and write it to `destination` without its QuantizeLinear and DequantizeLinear nodes.

    Raises:
        ModelError: the model is quantized in another form (such as QLinearConv), or its scales are computed at run
            time.
    """
    model = read_model(source)
    editor = Editor(model)
    params_by_tensor: dict[ir.Value, QuantParams] = {}
    relus: dict[ir.Value, ir.Value] = {}
    for node in list(model.graph):
        if node.op_type not in _PAIR and is_quantized_operator(node.op_type):
            raise ModelError(f"{source}: {node.op_type} {node.name!r} is not a Q/DQ pair", _FLOAT_FIX)
        if not is_op(node, "DequantizeLinear"):
            continue
        params = params_of(node)
        if params is None:
            raise ModelError(f"{source}: the scale of {node.name!r} is computed", _FLOAT_FIX)
        if is_constant(node.inputs[0]):
            _bypass(editor, node, editor.constant(node.outputs[0].name or "", _dequantized(node, params)))
            continue
        origin = _origin(node, params, source)
        # The pair clipped negative values, like the Relu that its quantizer had removed.
        if params.zero_point == params.low and not _nonnegative(origin):
            if origin not in relus:
                relus[origin] = editor.node("Relu", [origin], f"{origin.name}/floor", before=node, like=origin)
            origin = relus[origin]
        _bypass(editor, node, origin)
        params_by_tensor[origin] = params
    # The QuantizeLinear nodes have lost their readers.
    RemoveUnusedNodesPass()(model)
    save_model(model, destination)
    steps = {value.name or "": params for value, params in params_by_tensor.items()}
    return Adoption(destination, {name: _covered(params) for name, params in steps.items()}, _notes(steps))


def _origin(node: ir.Node, params: QuantParams, source: Path) -> ir.Value:
    """Return the float tensor that goes into the Q/DQ pair of a DequantizeLinear."""
    pair = node.inputs[0].producer() if node.inputs[0] is not None else None
    if pair is None or not is_op(pair, "QuantizeLinear") or pair.inputs[0] is None:
        raise ModelError(f"{source}: DequantizeLinear {node.name!r} has no QuantizeLinear before it", _FLOAT_FIX)
    # A range is one pair of numbers for a tensor, so scales per channel cannot be kept.
    if params.per_channel:
        raise ModelError(f"{source}: {node.name!r} has a scale for each channel of an activation", _FLOAT_FIX)
    return pair.inputs[0]


def _bypass(editor: Editor, node: ir.Node, value: ir.Value) -> None:
    """Replace a node's output by `value` in all nodes that read it. An output of the model keeps its name."""
    output = node.outputs[0]
    for reader, place in tuple(output.uses()):
        reader.replace_input_with(place, value)
    if output.is_graph_output():
        replace_value(output, editor.node("Identity", [value], f"{output.name}/float", before=node))


def _nonnegative(tensor: ir.Value | None) -> bool:
    """Return whether the current graph shows that a tensor has no negative values."""
    node = tensor.producer() if tensor is not None else None
    if node is None:
        return False
    if node.op_type in ("Relu", "Sigmoid", "Softmax"):
        return True
    if node.op_type not in _KEEP_SIGN:
        return False
    return all(_nonnegative(value) for value in (node.inputs if node.op_type == "Concat" else node.inputs[:1]))


def _covered(params: QuantParams) -> Range:
    # A symmetric int8 scale can also represent -128, but that one value does not justify a larger step.
    symmetric = params.dtype == ir.DataType.INT8 and not params.zero_point.any()
    low, high = replace(params, narrow=symmetric).range
    bound = max(-low, high)
    return Range(-bound, bound, fixed_step=True)


def _notes(steps: Mapping[str, QuantParams]) -> tuple[str, ...]:
    notes = []
    growth = {name: _covered(params).high / _LARGEST / params.scale.item() for name, params in steps.items()}
    # Growth below a thousandth is the rounding of float32 scales.
    grown = {name: factor for name, factor in growth.items() if factor > 1.001}
    unchanged_count = len(steps) - len(grown)
    if unchanged_count:
        notes.append(f"{unchanged_count} activation scales of the quantized model are kept")
    if grown:
        worst = max(grown, key=lambda name: grown[name])
        notes.append(
            f"WARNING: {len(grown)} activations are asymmetric or uint8, which the array does not support: their steps "
            f"grow by {np.mean(list(grown.values())):.2f} times, at most {grown[worst]:.2f} times ({worst})"
        )
    return tuple(notes)


def _dequantized(node: ir.Node, params: QuantParams) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Return the float32 values of weights or int32 biases. Each product is rounded only once."""
    exact = replace(params, scale=params.scale.astype(np.float64))
    return exact.dequantize(constant_values(node.inputs[0])).astype(np.float32)
