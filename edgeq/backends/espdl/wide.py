"""Give some nodes of a Q/DQ model 16-bit activations and weights.

ESP-DL's kernels read integers of one width: a layer with 16-bit activations has 16-bit weights. A tensor between an
8-bit and a 16-bit node has one pair of each type:

    wide node → Q16 → DQ16 → Q8 → DQ8 → narrow node

ONNX has no DequantizeLinear for 64-bit integers, so biases of wide layers are float constants here, and so are the
constant operands of sums and products. The file gets integers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.backends.espdl.chips import EspWide, wide_kernels
from edgeq.backends.espdl.network import LIMITS, EspGraph
from edgeq.model.edit import Editor, drop_unused_initializers
from edgeq.model.graph import (
    DATA_MOVEMENT,
    MICROSOFT,
    clamp_bounds,
    constant,
    is_constant,
    is_op,
    maker,
    moves_data,
    node_input,
    only_reader,
    operator_of,
)
from edgeq.model.quant_params import QuantParams, params_of
from edgeq.quantization.qdq import insert_pair, restore_constant, scale_and_zero
from edgeq.scheme import ALL_NODES, Scheme

# These pass on what they read, or give floats, so they compute in the type of their input.
_FOLLOWING = DATA_MOVEMENT | {"MaxPool", "Relu", "Softmax"}
# The runtime shifts an int of 32 bits by the exponent of a tensor.
_FINEST = 2.0**-30
_FINER = 2.0**-8
"""The scale of 16 bits relative to that of 8 bits with the same range."""
# More names would make a note longer than the rest of the report.
_MOST_NAMED = 6


def widen_nodes(model: ir.Model, source: ir.Model, scheme: Scheme) -> tuple[str, ...]:
    """Give the nodes that `scheme` names 16-bit activations and weights, in place. Nodes that only pass on 16-bit
    values follow.

    Args:
        model: a Q/DQ model with symmetric int8 activations and power-of-two scales.
        source: the float model from which it was made.

    Returns:
        Sentences on named nodes that keep 8 bits, because the runtime has no exact kernel for them.
    """
    every = ALL_NODES in scheme.wide
    names = {str(node.name) for node in source.graph} if every else set(scheme.wide)
    layers = _wide_layers(model.graph, names)
    if layers:
        _WideWriter(model, source, [layer.node for layer in layers]).run()
        drop_unused_initializers(model.graph)
    widened = {name for layer in layers for name in layer.names}
    narrow = [str(node.name) for node in source.graph if node.name in names - widened]
    if every or not narrow:
        # With all nodes, the list would be that of all nodes that 8 bits suit as well.
        return ()
    more = len(narrow) - _MOST_NAMED
    listed = ", ".join(narrow[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
    return (f"no exact 16-bit kernel, so these nodes keep 8 bits: {listed}",)


def wide_share(graph: EspGraph) -> float:
    """Return the share of the elements of all integer activations that have 16 bits."""
    tensors = [tensor for node in graph.nodes for tensor in node.outputs if tensor.type in LIMITS]
    wide = sum(prod(tensor.shape) for tensor in tensors if tensor.type == "int16")
    return wide / max(1, sum(prod(tensor.shape) for tensor in tensors))


@dataclass(frozen=True)
class _WideLayer:
    """Hold a node with the clamps behind it, which become part of the node."""

    node: ir.Node
    clamps: tuple[ir.Node, ...]

    @property
    def names(self) -> set[str]:
        return {str(node.name) for node in (self.node, *self.clamps)}

    @property
    def result(self) -> ir.Value:
        return (self.node, *self.clamps)[-1].outputs[0]


def _wide_layers(graph: ir.Graph, names: Collection[str]) -> list[_WideLayer]:
    wide: dict[ir.Node, _WideLayer] = {}
    for node in graph:
        if node.op_type not in wide_kernels().operators or not is_op(node, node.op_type):
            continue
        layer = _layer_of(node)
        if not _has_kernel(layer):
            continue
        makers = [_pair_maker(value) for value in node.inputs if value is not None and not _is_stored(value)]
        follows = node.op_type in _FOLLOWING and bool(makers) and all(maker_ in wide for maker_ in makers)
        if layer.names.intersection(names) or follows:
            wide[node] = layer
    return list(wide.values())


def _layer_of(node: ir.Node) -> _WideLayer:
    clamps: list[ir.Node] = []
    reader = only_reader(node.outputs[0])
    while reader is not None and clamp_bounds(reader) is not None:
        clamps.append(reader)
        reader = only_reader(reader.outputs[0])
    return _WideLayer(node, tuple(clamps))


def _has_kernel(layer: _WideLayer) -> bool:
    """Return whether a layer has integers around it, and no clamp that would need a table of 16 bits."""
    computed = [value for value in layer.node.inputs if value is not None and not is_constant(value)]
    # Nodes that move elements may stand between an input of the model and its QuantizeLinear.
    before = [value for value in computed if not (value.is_graph_input() and moves_data(layer.node))]
    if not all(is_op(value.producer(), "DequantizeLinear") for value in before):
        return False
    uses = list(layer.result.uses())
    if is_op(layer.node, "Softmax") and not uses:
        return True
    if not uses or not all(is_op(use.node, "QuantizeLinear") for use in uses):
        return False
    params = params_of(uses[0].node)
    if params is None:
        return False
    least, most = _widened(params).range
    bounds = [clamp_bounds(clamp) or (least, most) for clamp in layer.clamps]
    # Saturation clips to these numbers, and a Relu to 0.
    return all((low == 0 or low <= least) and high >= most for low, high in bounds)


def _is_stored(value: ir.Value) -> bool:
    """Return whether a value is a constant, or the dequantized form of constant integers."""
    return is_constant(value) or (is_op(value.producer(), "DequantizeLinear") and is_constant(maker(value).inputs[0]))


def _pair_maker(value: ir.Value) -> ir.Node | None:
    """Return the node, without clamps behind it, that writes the tensor whose pair ends in `value`."""
    quantize = maker(value).inputs[0] if value.producer() is not None else None
    return None if quantize is None or quantize.producer() is None else _made_by(node_input(maker(quantize), 0))


def _made_by(value: ir.Value | None) -> ir.Node | None:
    node = value.producer() if value is not None else None
    while node is not None and clamp_bounds(node) is not None:
        before = node.inputs[0].producer() if node.inputs[0] is not None else None
        # A clamp with a pair in front of it is a node of its own.
        if before is None or is_op(before, "DequantizeLinear"):
            return node
        node = before
    return node


def _widened(params: QuantParams) -> QuantParams:
    """Return 16-bit parameters for the range of 8-bit ones."""
    scale = np.maximum(params.scale * np.float32(_FINER), np.float32(_FINEST))
    return QuantParams(np.asarray(scale, np.float32), np.asarray(0), ir.DataType.INT16)


def _pairs(graph: ir.Graph) -> Iterator[tuple[ir.Node, ir.Node, QuantParams]]:
    """Yield the QuantizeLinear and DequantizeLinear of each 8-bit activation, with their parameters."""
    for node in graph:
        params = params_of(node) if is_op(node, "QuantizeLinear") else None
        if params is not None and params.dtype == ir.DataType.INT8:
            for use in node.outputs[0].uses():
                if is_op(use.node, "DequantizeLinear"):
                    yield node, use.node, params


class _WideWriter:
    def __init__(self, model: ir.Model, source: ir.Model, wide: Collection[ir.Node]) -> None:
        self._editor, self._model, self._wide = Editor(model), model, dict.fromkeys(wide)
        self._float_nodes: Mapping[str | None, ir.Node] = {node.name: node for node in source.graph}

    def run(self) -> None:
        """Widen the pairs of activations, then the constants, whose exponents depend on them."""
        for quantize, dequantize, params in list(_pairs(self._model.graph)):
            self._widen_pair(quantize, dequantize, params)
        for node in self._wide:
            for place, value in enumerate(node.inputs):
                if value is not None and _is_stored(value) and not is_constant(value):
                    self._widen_constant(node, place, value)

    def _widen_pair(self, quantize: ir.Node, dequantize: ir.Node, params: QuantParams) -> None:
        tensor, result = quantize.inputs[0], dequantize.outputs[0]
        assert tensor is not None
        readers = [(use.node, use.idx) for use in result.uses()]
        wide_readers = [reader for reader in readers if reader[0] in self._wide]
        if tensor.producer() is None:
            # The input of a model is wide if nothing needs it in 8 bits.
            is_wide = bool(readers) and wide_readers == readers and not result.is_graph_output()
        else:
            is_wide = _made_by(tensor) in self._wide
        widened = _widened(params)
        if not is_wide:
            self._requantize(result, widened, wide_readers)
            return
        self._requantize(result, params, [reader for reader in readers if reader not in wide_readers])
        parameters = scale_and_zero(self._editor, f"{tensor.name}/wide", widened)
        for node in (quantize, dequantize):
            for place, value in enumerate(parameters, 1):
                node.replace_input_with(place, value)
        quantize.outputs[0].type = ir.TensorType(widened.dtype)

    def _requantize(self, value: ir.Value, params: QuantParams, readers: list[tuple[ir.Node, int]]) -> None:
        """Let `readers` read `value` after another pair."""
        if not readers:
            return
        _, restored = insert_pair(self._editor, value, params, after=maker(value))
        for reader, index in readers:
            reader.replace_input_with(index, restored)

    def _widen_constant(self, node: ir.Node, place: int, value: ir.Value) -> None:
        numbers, name = self._float_values(node, place, value), f"{node.name}/{place}/wide"
        if place not in operator_of(node).weights:
            node.replace_input_with(place, self._editor.constant(name, numbers))
            return
        data = node.inputs[0]
        params = params_of(maker(data)) if data is not None else None
        assert params is not None
        bias_place = operator_of(node).bias
        bias = constant(node_input(node, bias_place)) if bias_place is not None else None
        if bias is None and bias_place is not None and node_input(node, bias_place) is not None:
            stored = node.inputs[bias_place]
            assert stored is not None
            bias = self._float_values(node, bias_place, stored)
        channels_first = is_op(node, "Conv") or bool(node.attributes.get_int("transB", 0))
        rows = numbers.reshape(len(numbers), -1) if channels_first else numbers.T
        scale = weight_scale(rows, bias, float(params.scale), wide_kernels())
        weights = QuantParams(np.asarray(scale, np.float32), np.asarray(0), ir.DataType.INT16)
        node.replace_input_with(place, restore_constant(self._editor, name, numbers, weights, node))

    def _float_values(self, node: ir.Node, place: int, value: ir.Value) -> NDArray[np.float32]:
        """Return the numbers of a constant before it was stored as integers, if the float model still has them."""
        original = self._float_nodes.get(node.name)
        numbers = constant(node_input(original, place)) if original is not None else None
        if numbers is not None and numbers.shape == tuple(value.shape or ()):
            return np.asarray(numbers, np.float32)
        stored, params = constant(maker(value).inputs[0]), params_of(maker(value))
        assert stored is not None
        assert params is not None
        return np.asarray(params.dequantize(stored), np.float32)


def mark_wide_pairs(model: ir.Model) -> None:
    """Give the 16-bit QuantizeLinear and DequantizeLinear nodes onnxruntime's domain, in place. Before opset 21, only
    that domain has them.
    """
    for node in model.graph:
        params = params_of(node) if is_op(node, "QuantizeLinear", "DequantizeLinear") else None
        if params is not None and params.dtype == ir.DataType.INT16:
            model.opset_imports.setdefault(MICROSOFT, 1)
            node.domain = MICROSOFT


def weight_scale(rows: NDArray[np.float32], bias: NDArray[Any] | None, data_scale: float, kernels: EspWide) -> float:
    """Return the least power-of-two scale of 16-bit weights with which no sum can leave the accumulators.

    Args:
        rows: [output channels, weights of a channel].
        bias: one number, or one for each output channel.
        data_scale: the scale of the 16-bit input.
    """
    _, most = LIMITS["int16"]
    largest = float(np.abs(rows).max(initial=0))
    scale = max(2.0 ** int(np.ceil(np.log2(largest / most))) if largest else 1.0, _FINEST)
    offset = np.abs(np.zeros(1) if bias is None else np.asarray(bias, np.float64).ravel())
    limit = 2 ** (kernels.accumulator_bits - 1)
    while True:
        magnitudes = np.abs(np.rint(rows / scale)).sum(axis=1)
        # An input is at least -32768. The rounding of a bias adds at most 1.
        if np.all(magnitudes * (most + 1) + offset / (data_scale * scale) + 1 < limit):
            return scale
        scale *= 2
