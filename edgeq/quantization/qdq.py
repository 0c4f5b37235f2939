"""Write a float graph in Q/DQ form, for runtimes that fuse an operator with the Q/DQ pairs around it.

Each tensor that a quantized node reads or writes gets one pair, QuantizeLinear and DequantizeLinear, which all readers
share. Weights are stored as integers before a DequantizeLinear. Operators that only move values give their result the
scale and zero point of their input. A Relu or Clip is removed if it has no effect because its result is quantized.
Biases are int32:

    bias: scale = scale of the input x scale of the weight, zero point 0

If hardware computes a clamp together with the layer before (`Scheme.fused`), there is no pair between the two.

If a float node writes a tensor, quantized nodes read the tensor after its pair, and float nodes read the original
tensor.

The scales of activations and weights are computed in `edgeq.quantization.params`. The tests compare the result with
the output of ONNX Runtime's quantizer for the same settings.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.calibration.ranges import Range
from edgeq.errors import CalibrationError
from edgeq.model.edit import Editor, drop_unused_initializers, insert_behind, replace_value
from edgeq.model.graph import (
    DATA_MOVEMENT,
    channel_axis,
    clamp_bounds,
    clamps,
    constant_tensor,
    is_constant,
    is_op,
    name_of,
    node_input,
    only_reader,
    operator_of,
)
from edgeq.model.graph import maker as maker_of
from edgeq.model.quant_params import QuantParams
from edgeq.quantization.bias_fit import cut_bias, fit_to_bias, saturates_anyway
from edgeq.quantization.clamps import can_disappear
from edgeq.quantization.params import is_spread_thin, scheme_params, weight_params
from edgeq.scheme import Scheme

# The suffixes are those of ONNX Runtime's quantizer, so tools that look for its names find edgeq's.
QUANTIZE, DEQUANTIZE = "_QuantizeLinear", "_DequantizeLinear"
# These copy values of their input, so the input's scale fits exactly.
_SELECTING = DATA_MOVEMENT | {"ReduceMax", "ReduceMin", "GatherElements", "TopK"}
RESULTS: Mapping[str, Range] = {"Softmax": Range(0.0, 1.0)}
"""Operator type → range of its result, which replaces the range from the samples."""


def write_qdq(
    model: ir.Model,
    ranges: Mapping[str, Range],
    scheme: Scheme,
    nodes: Collection[str],
    *,
    source: Path,
    weight_bounds: Mapping[str, NDArray[np.floating]] | None = None,
    float_results: Collection[str] = (),
    results: Mapping[str, Range] = RESULTS,
) -> None:
    """Quantize `nodes` of a model in place.

    Args:
        model: a prepared float model: its nodes have names, its types are known, and its weights are initializers.
        ranges: range of every activation that the nodes read or write.
        scheme: the scheme; its types, symmetry, per_channel and reduce_range apply.
        nodes: names of the nodes to quantize. Operators that move or clamp values are skipped if their input stays in
            float.
        source: the model's file, for messages.
        weight_bounds: weight → `bound` for `weight_params`, for weights whose range must be wider than their values.
        float_results: operator types whose integer kernels can also return floats. Their result stays in float if only
            float nodes read it.
        results: operator type → range of its result, which replaces the range from the samples. It does not apply to a
            Softmax over so many elements that the range would leave few levels.

    Raises:
        CalibrationError: an activation has no range.
    """
    selection = _select(model.graph, ranges, scheme, nodes, source, results)
    # Clamps go before the pairs are written, because then no pair has to be moved.
    _drop_clamps(model.graph, selection)
    _fuse_clamps(model.graph, selection, scheme)
    _QdqWriter(model, selection, scheme, weight_bounds or {}, float_results).write()
    # The float weights are still there, next to their integers.
    drop_unused_initializers(model.graph)


@dataclass(frozen=True)
class _Selection:
    """Hold the nodes to quantize, in graph order, and the activations with their parameters.

    Removed nodes and replaced tensors are deleted from both.
    """

    nodes: dict[ir.Node, None]
    tensors: dict[ir.Value, QuantParams]


def _select(
    graph: ir.Graph,
    ranges: Mapping[str, Range],
    scheme: Scheme,
    names: Collection[str],
    source: Path,
    results: Mapping[str, Range],
) -> _Selection:
    selection = _Selection({}, {})
    selected_names = frozenset(names)
    # If a tensor's only reader is a clamp, only the values that the clamp lets through matter.
    clamped = {
        node.inputs[0]: node.outputs[0]
        for node in clamps(graph)
        if node.name in selected_names and clamp_bounds(node) is not None
    }

    def choose(value: ir.Value) -> None:
        """Set a tensor's parameters from its range, unless they are already set."""
        # Indices and masks have other types. They are never quantized.
        if value in selection.tensors or value.dtype != ir.DataType.FLOAT:
            return
        clamp_output = value
        while clamp_output in clamped:
            clamp_output = clamped[clamp_output]
        span = ranges.get(name_of(clamp_output), ranges.get(name_of(value)))
        if span is None:
            problem = f"{source}: tensor {name_of(value)!r} has no range"
            raise CalibrationError(problem, "The calibration belongs to another model: calibrate this one again")
        maker = value.producer()
        fixed = results.get(maker.op_type) if maker is not None and is_op(maker, maker.op_type) else None
        # A known range replaces that of the samples, because other inputs may reach its ends.
        if fixed is not None and not (is_op(maker, "Softmax") and is_spread_thin(span)):
            span = fixed
        selection.tensors[value] = scheme_params(span, scheme)

    for node in graph:
        if node.name not in selected_names:
            continue
        data = [value for value in node.inputs if value is not None]
        if is_op(node, "Relu", "Clip"):
            # A clamp whose input stays in float would need a pair of its own, only for the clamp.
            if data[0] not in selection.tensors:
                continue
            choose(node.outputs[0])
        elif node.op_type in _SELECTING:
            if data[0] not in selection.tensors:
                continue
            float_outputs = [value for value in node.outputs if value.dtype == ir.DataType.FLOAT]
            selection.tensors.update(dict.fromkeys(float_outputs, selection.tensors[data[0]]))
        elif is_op(node, "Where"):
            # The first input is a condition. Both values need pairs, or the node would mix integers and floats.
            if not selection.tensors.keys() >= {*data[1:]}:
                continue
            choose(node.outputs[0])
        else:
            bias = operator_of(node).bias
            for value in [value for place, value in enumerate(node.inputs) if place != bias]:
                if value is not None and not is_constant(value):
                    choose(value)
            for value in node.outputs:
                choose(value)
        selection.nodes[node] = None
    return selection


def _drop_clamps(graph: ir.Graph, selection: _Selection) -> None:
    """Remove each chosen clamp that has no effect because its result is quantized.

    The node before the clamp must be chosen too. It then writes the clamp's result, so every node reads the result
    after the Q/DQ pair.
    """
    for node in [node for node in clamps(graph) if node in selection.nodes]:
        source, result = node.inputs[0], node.outputs[0]
        assert source is not None
        if source.producer() in selection.nodes and can_disappear(node, selection.tensors[result]):
            selection.tensors[source] = selection.tensors.pop(result)
            del selection.nodes[node]
            replace_value(result, source, keep_name=True)
            graph.remove(node, safe=True)


def _fuse_clamps(graph: ir.Graph, selection: _Selection, scheme: Scheme) -> None:
    """Drop the parameters of each tensor between a layer with weights and a clamp that the hardware computes together
    with the layer.
    """
    for node in [node for node in clamps(graph) if node in selection.nodes and is_op(node, *scheme.fused)]:
        source = node.inputs[0]
        maker = source.producer() if source is not None else None
        if source is not None and maker in selection.nodes and operator_of(maker).weights:
            selection.tensors.pop(source, None)


def insert_pair(editor: Editor, value: ir.Value, params: QuantParams, **place: Any) -> tuple[ir.Value, ir.Value]:
    """Insert a QuantizeLinear for a tensor and a DequantizeLinear after it, and return their outputs. No node reads
    these outputs yet.

    Args:
        place: `before` or `after`, as for `Editor.node`.
    """
    name = name_of(value)
    parameters, pair = scale_and_zero(editor, name, params), [value]
    for suffix, dtype in ((QUANTIZE, params.dtype), (DEQUANTIZE, ir.DataType.FLOAT)):
        inserted = editor.node(
            suffix.removeprefix("_"),
            [pair[-1], *parameters],
            name + suffix,
            output=f"{name}{suffix}_Output",
            like=value,
            dtype=dtype,
            **place,
        )
        pair.append(inserted)
        place = {"after": maker_of(inserted)}
    return pair[1], pair[2]


def restore_constant(
    editor: Editor, name: str, values: NDArray[np.float32], params: QuantParams, reader: ir.Node
) -> ir.Value:
    """Store a constant as integers, insert a DequantizeLinear before the node `reader`, and return the float tensor."""
    integers = editor.constant(f"{name}_quantized", params.quantize(values))
    return editor.node(
        "DequantizeLinear",
        [integers, *scale_and_zero(editor, name, params)],
        name + DEQUANTIZE,
        output=f"{name}{DEQUANTIZE}_Output",
        like=integers,
        dtype=ir.DataType.FLOAT,
        before=reader,
        attributes={"axis": params.axis} if params.scale.ndim else {},
    )


def scale_and_zero(editor: Editor, name: str, params: QuantParams) -> tuple[ir.Value, ir.Value]:
    """Return the constants of a tensor's scale and zero point. The first call creates them."""
    name = f"{name}_quantized" if params.dtype == ir.DataType.INT32 else name
    scale = params.scale.astype(np.float32)
    zero = np.asarray(np.broadcast_to(params.zero_point, scale.shape).astype(params.dtype.numpy()))
    return editor.constant(f"{name}_scale", scale), editor.constant(f"{name}_zero_point", zero)


class _QdqWriter:
    def __init__(
        self,
        model: ir.Model,
        selection: _Selection,
        scheme: Scheme,
        bounds: Mapping[str, NDArray[np.floating]],
        float_results: Collection[str] = (),
    ) -> None:
        self._editor, self._graph, self._selection = Editor(model), model.graph, selection
        self._scheme, self._bounds, self._float_results = scheme, bounds, float_results
        self._weights: dict[tuple[ir.Value, int | None], QuantParams] = {}
        self._restored: dict[tuple[ir.Value, object], ir.Value] = {}

    def write(self) -> None:
        """Write the weights and biases of all chosen nodes, then the Q/DQ pairs."""
        # Weights that several nodes read must have their final scales before the first node is written.
        for node in self._selection.nodes:
            self._measure_weights(node)
        for node in self._selection.nodes:
            if not is_op(node, "Relu", "Clip", "Where"):
                self._write_constants(node)
        for value, params in self._selection.tensors.items():
            self._write_pair(value, params)

    def _measure_weights(self, node: ir.Node) -> None:
        """Choose the parameters of a node's weights, with scales so large that the node's bias fits its width."""
        for place in operator_of(node).weights:
            value, weight = node.inputs[place], _floats(node.inputs[place])
            if value is None or weight is None:
                continue
            axis = self._axis(node, weight.ndim)
            params = self._weights.get((value, axis))
            if params is None:
                params = weight_params(weight, axis, self._scheme, self._bounds.get(name_of(value)))
            bias, data = _bias(node, params.scale), self._selection.tensors.get(_data_input(node))
            if bias is not None and data is not None and not params.zero_point.any():
                saturated = partial(self._saturated, node, weight, bias, data)
                params = fit_to_bias(params, bias, data, saturated, self._scheme)
            self._weights[value, axis] = params

    def _saturated(
        self,
        node: ir.Node,
        weight: NDArray[np.float32],
        bias: NDArray[np.float32],
        data: QuantParams,
        params: QuantParams,
    ) -> NDArray[np.bool_]:
        """Return for each bias whether it may be cut off if the weight has `params`, because the results of its output
        saturate either way.
        """
        axis, result = channel_axis(node) % weight.ndim, node.outputs[0]
        low, high = -np.inf, np.inf
        # All results beyond the bounds of a clamp are equal, whether they are rounded before it or not.
        if (clamp := only_reader(result)) is not None and clamp in self._selection.nodes:
            low, high = clamp_bounds(clamp) or (low, high)
            result = clamp.outputs[0] if np.isfinite([low, high]).any() else result
        span = self._selection.tensors.get(result)
        if span is None or bias.size != weight.shape[axis]:
            return np.zeros(bias.shape, np.bool_)
        limits = max(span.range[0], low), min(span.range[1], high)
        return saturates_anyway(params, weight, axis, bias.reshape(-1), data, limits, self._scheme).reshape(bias.shape)

    def _write_constants(self, node: ir.Node) -> None:
        row = operator_of(node)
        weight: QuantParams | None = None
        for place, value in enumerate(node.inputs):
            # The other inputs of these operators are indices and sizes.
            if value is None or place == row.bias or (place and node.op_type in _SELECTING):
                continue
            values = _floats(value)
            if place in row.weights:
                axis = self._axis(node, values.ndim) if values is not None else None
                weight = self._weights[value, axis] if values is not None else self._selection.tensors.get(value)
                if values is not None and weight is not None:
                    node.replace_input_with(place, self._restore((value, axis), values, weight, node))
            elif values is not None:
                spread = Range(float(values.min(initial=0)), float(values.max(initial=0)))
                params = scheme_params(spread, self._scheme)
                node.replace_input_with(place, self._restore((value, "activation"), values, params, node))
        if weight is not None and row.bias is not None:
            self._write_bias(node, row.bias, weight)

    def _write_bias(self, node: ir.Node, place: int, weight: QuantParams) -> None:
        data, bias = self._selection.tensors.get(_data_input(node)), _bias(node, weight.scale)
        if data is None or bias is None:
            return
        scale = (data.scale * weight.scale).astype(np.float64)  # float32 cannot represent every int32
        params = QuantParams(scale, np.zeros(scale.shape, np.int64), ir.DataType.INT32)
        bias = cut_bias(bias, scale, self._scheme)
        value = node.inputs[place]
        assert value is not None
        node.replace_input_with(place, self._restore((value, scale.tobytes()), bias, params, node))

    def _restore(
        self, key: tuple[ir.Value, object], values: NDArray[np.float32], params: QuantParams, node: ir.Node
    ) -> ir.Value:
        """Return the float tensor of a constant that is stored as integers. The first call for a constant writes it
        before `node`.
        """
        if key not in self._restored:
            self._restored[key] = restore_constant(self._editor, name_of(key[0]), values, params, node)
        return self._restored[key]

    def _write_pair(self, value: ir.Value, params: QuantParams) -> None:
        """Write a Q/DQ pair after a tensor. If a chosen node writes the tensor, all readers read it after the pair;
        otherwise only chosen readers do.
        """
        name, maker = name_of(value), value.producer()
        is_selected = maker in self._selection.nodes
        readers = [(use.node, use.idx) for use in value.uses() if use.node in self._selection.nodes]
        # If the kernel can return floats and only float nodes read them, a pair would only add rounding.
        stays = (
            is_selected and not value.is_graph_output() and maker is not None and maker.op_type in self._float_results
        )
        if not readers and (not is_selected or stays):
            return
        # Pairs of model inputs come first, because any node may read them.
        place: dict[str, Any] = {"before": self._graph[0]} if maker is None else {"after": maker}
        quantized, restored = insert_pair(self._editor, value, params, **place)
        # The output keeps its name, so the tensor before the pair gets a new one.
        if is_selected and value.is_graph_output():
            insert_behind(value, quantized, restored, self._editor.free_value_name(f"{name}{QUANTIZE}_Input"))
            value.type, value.shape = restored.type, restored.shape
        elif is_selected:
            value.replace_all_uses_with(restored)
            maker_of(quantized).replace_input_with(0, value)
        else:
            for reader, index in readers:
                reader.replace_input_with(index, restored)

    def _axis(self, node: ir.Node, rank: int) -> int | None:
        return channel_axis(node) % rank if self._scheme.per_channel and rank > 1 else None


def _data_input(node: ir.Node) -> ir.Value:
    value = node.inputs[0]
    assert value is not None, node.name
    return value


def _floats(value: ir.Value | None) -> NDArray[np.float32] | None:
    """Return the values of a float32 constant, or None for any other value."""
    tensor = constant_tensor(value)
    return np.asarray(tensor.numpy()) if tensor is not None and tensor.dtype == ir.DataType.FLOAT else None


def _bias(node: ir.Node, scale: NDArray[np.float32]) -> NDArray[np.float32] | None:
    """Return a node's constant bias in the shape of its weight's scales. Return None if it has no bias of such a
    shape.
    """
    bias = _floats(node_input(node, operator_of(node).bias))
    if bias is None or not scale.ndim:
        return bias
    if bias.size == 1:
        return np.full(scale.shape, bias.reshape(()))
    return bias.reshape(scale.shape) if bias.size == scale.size else None
