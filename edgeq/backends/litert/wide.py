"""Give the activations of some nodes of a Q/DQ model 16 bits instead of 8.

TFLite's kernels for 16-bit activations need symmetric activations, and take weights of 8 bits and biases of 64 bits. A
tensor that an 8-bit node reads and a 16-bit node writes, or the other way round, has one pair of each type:

    wide node → Q16 → DQ16 → Q8 → DQ8 → narrow node

ONNX has no DequantizeLinear for 64-bit integers, so the biases of wide nodes are float constants here. The file gets
integers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.backends.litert.convert import lower
from edgeq.backends.litert.dialect import dialect, wide_notes, wide_operators, wide_results
from edgeq.backends.litert.network import QUANTIZED, TfliteNetwork
from edgeq.calibration.ranges import Range
from edgeq.model.edit import Editor, drop_unused_initializers
from edgeq.model.graph import (
    DATA_MOVEMENT,
    MICROSOFT,
    clamp_bounds,
    clamps,
    constant,
    constant_values,
    is_constant,
    is_op,
    maker,
    name_of,
    node_input,
    operator_of,
)
from edgeq.model.load import read_unchecked, save_model
from edgeq.model.quant_params import QuantParams
from edgeq.quantization.params import activation_params
from edgeq.quantization.qdq import insert_pair, scale_and_zero
from edgeq.scheme import ALL_NODES, Scheme

# These pass on what they read, so they compute in the type of their input.
_FOLLOWING = DATA_MOVEMENT | {"Relu", "Clip", "MaxPool"}


# More names would make a note longer than the rest of the report.
_MOST_NAMED = 6


@dataclass(frozen=True)
class WidenedFile:
    """Describe the file of a model whose scheme may name wide nodes.

    Attributes:
        network: the operators of the file.
        share: share of the elements of all quantized activations that have 16 bits.
        notes: sentences on the 16-bit activations.
    """

    network: TfliteNetwork
    share: float
    notes: tuple[str, ...]


def write_widened(
    model: ir.Model, source: ir.Model, scheme: Scheme, destination: Path, engine: str, file: Path
) -> WidenedFile:
    """Give the nodes that `scheme` names 16-bit activations, and write the Q/DQ model to `destination`.

    Args:
        model: the Q/DQ model, with int8 activations.
        source: the float model from which it was made.
        engine: name of the engine that runs the file. Nodes for which it has no 16-bit kernel stay in 8 bits.
        file: the model's file, for messages.

    Raises:
        ModelError: a .tflite file cannot express a node.
    """
    if not scheme.wide:
        save_model(model, destination)
        return WidenedFile(lower(read_unchecked(destination), file), 0.0, ())
    every = ALL_NODES in scheme.wide
    names = {str(node.name) for node in source.graph} if every else set(scheme.wide)
    widened = model.clone()
    widen(widened, source, names)
    save_model(widened, destination)
    network = lower(read_unchecked(destination), file)
    # Only the operators of the file show which kernels a node needs.
    lacking = {o.node for o in network.operators if o.type == "int16" and dialect()[o.kind].lacks(engine, o.type)}
    if lacking:
        widen(model, source, names, narrow=lacking)
        save_model(model, destination)
        network = lower(read_unchecked(destination), file)
    wide_nodes = {operator.node for operator in network.operators if operator.type == "int16"}
    notes = [wide_notes()[engine]] if wide_nodes and engine in wide_notes() else []
    # With all nodes, the list would be that of all nodes that 8 bits suit as well.
    others = names & {operator.node for operator in network.operators} - wide_nodes
    if not every and others:
        notes.append(f"no 16-bit kernel, so these nodes stay as they are: {_listed(sorted(others))}")
    return WidenedFile(network, _wide_share(network), tuple(notes))


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _wide_share(network: TfliteNetwork) -> float:
    tensors = [tensor for operator in network.operators for tensor in operator.outputs if tensor.type in QUANTIZED]
    sizes = [prod(tensor.shape) for tensor in tensors]
    wide = sum(size for tensor, size in zip(tensors, sizes, strict=True) if tensor.type == "int16")
    return wide / max(1, sum(sizes))


def widen(model: ir.Model, source: ir.Model, names: Collection[str], *, narrow: Collection[str] = ()) -> None:
    """Give the results of the nodes `names` 16 bits, in place. Nodes that only move or clamp 16-bit values follow.

    Args:
        model: a Q/DQ model with int8 activations.
        source: the float model from which it was made.
        names: names of nodes. Nodes in float and nodes without a 16-bit kernel are skipped.
        narrow: names of nodes that keep 8 bits in any case.
    """
    wide = _find_wide_nodes(model.graph, names, narrow)
    if wide:
        _Widening(model, source, wide).run()
        drop_unused_initializers(model.graph)


def _find_wide_nodes(graph: ir.Graph, names: Collection[str], narrow: Collection[str]) -> dict[ir.Node, None]:
    wide: dict[ir.Node, None] = {}
    for node in graph:
        if node.name in narrow or node.op_type not in wide_operators() or not _is_quantized(node):
            continue
        makers = [_pair_maker(value) for value in node.inputs if value is not None and not _is_stored(value)]
        follows = node.op_type in _FOLLOWING and bool(makers) and all(maker_ in wide for maker_ in makers)
        if node.name in names or follows:
            wide[node] = None
    return wide


def _is_quantized(node: ir.Node) -> bool:
    """Return whether all inputs of a node come from pairs or are constants, and all its outputs go to pairs."""
    inputs = (value for value in node.inputs if value is not None)
    outputs = (value for value in node.outputs if value.uses())
    return all(is_constant(v) or is_op(v.producer(), "DequantizeLinear") for v in inputs) and all(
        is_op(use.node, "QuantizeLinear") for v in outputs for use in v.uses()
    )


def _is_stored(value: ir.Value) -> bool:
    """Return whether a value is a constant, or the dequantized form of constant integers."""
    return is_constant(value) or (is_op(value.producer(), "DequantizeLinear") and is_constant(maker(value).inputs[0]))


def _pair_maker(value: ir.Value) -> ir.Node | None:
    """Return the node that writes the tensor whose pair ends in `value`."""
    quantize = maker(value).inputs[0]
    before = node_input(maker(quantize), 0) if quantize is not None and quantize.producer() is not None else None
    return before.producer() if before is not None else None


@dataclass(frozen=True)
class _ActivationPair:
    """Hold the QuantizeLinear and the DequantizeLinear of one activation."""

    quantize: ir.Node
    dequantize: ir.Node

    @property
    def params(self) -> QuantParams:
        """Return the parameters of the pair, which has one scale."""
        scale, zero = (constant_values(value) for value in self.quantize.inputs[1:3])
        return QuantParams(scale, zero.astype(np.int64), ir.DataType.INT8)


class _Widening:
    def __init__(self, model: ir.Model, source: ir.Model, wide: dict[ir.Node, None]) -> None:
        self._editor, self._graph, self._wide = Editor(model), model.graph, wide
        self._float_nodes = {node.name: node for node in source.graph}
        self._float_clamps = [node for node in clamps(source.graph) if clamp_bounds(node) is not None]

    def run(self) -> None:
        """Widen the pairs, restore the clamps that they replaced, and widen the constants."""
        # A pair of 8 bits clamps to its range, and a symmetric one of 16 bits does not end at 0.
        self._restore_clamps()
        for pair in list(_pairs(self._graph)):
            self._widen_pair(pair)
        for node in self._wide:
            self._widen_constants(node)

    def _restore_clamps(self) -> None:
        present = {node.name for node in self._graph}
        by_name = {node.name: node for node in self._wide}
        # `clamps` is in reverse order. In a chain of clamps, the first one must come first.
        for clamp in reversed(self._float_clamps):
            source = clamp.inputs[0]
            made_by = source.producer() if source is not None else None
            layer = by_name.get(made_by.name) if made_by is not None else None
            if clamp.name in present or layer is None:
                continue
            restored = self._restore_clamp(clamp, layer)
            self._wide[restored] = None
            by_name[clamp.name] = restored

    def _restore_clamp(self, clamp: ir.Node, layer: ir.Node) -> ir.Node:
        """Insert a clamp behind a layer, with a pair between them, and return it."""
        value = layer.outputs[0]
        quantize = next(iter(value.uses())).node
        params = _ActivationPair(quantize, quantize).params
        inputs: list[ir.Value | None] = [insert_pair(self._editor, value, params, before=quantize)[1]]
        if is_op(clamp, "Clip"):
            bounds = (np.asarray(bound, np.float32) for bound in clamp_bounds(clamp) or ())
            inputs += [self._editor.constant(f"{clamp.name}/bound", bound) for bound in bounds]
        clamped = self._editor.node(clamp.op_type, inputs, str(clamp.name), like=value, before=quantize)
        quantize.replace_input_with(0, clamped)
        return maker(clamped)

    def _widen_pair(self, pair: _ActivationPair) -> None:
        tensor, result = pair.quantize.inputs[0], pair.dequantize.outputs[0]
        assert tensor is not None
        readers = [(use.node, use.idx) for use in result.uses()]
        wide_readers = [reader for reader in readers if reader[0] in self._wide]
        made_by = tensor.producer()
        if made_by is None:
            # The input of a model is wide if nothing needs it in 8 bits.
            is_wide = bool(readers) and wide_readers == readers and not result.is_graph_output()
        else:
            is_wide = made_by in self._wide
        params = _widened(pair.params, made_by)
        if is_wide:
            narrow = [reader for reader in readers if reader not in wide_readers and _is_quantized(reader[0])]
            self._requantize(result, pair.params, narrow)
            scale, zero = scale_and_zero(self._editor, f"{name_of(tensor)}/wide", params)
            for node in (pair.quantize, pair.dequantize):
                node.replace_input_with(1, scale)
                node.replace_input_with(2, zero)
            self._set_domain(pair.quantize, pair.dequantize)
            pair.quantize.outputs[0].type = ir.TensorType(params.dtype)
        else:
            self._requantize(result, params, wide_readers)

    def _requantize(self, value: ir.Value, params: QuantParams, readers: list[tuple[ir.Node, int]]) -> None:
        """Let `readers` read `value` after another pair."""
        if not readers:
            return
        integers, restored = insert_pair(self._editor, value, params, after=maker(value))
        if params.dtype == ir.DataType.INT16:
            self._set_domain(maker(integers), maker(restored))
        for reader, index in readers:
            reader.replace_input_with(index, restored)

    def _set_domain(self, *nodes: ir.Node) -> None:
        # Before opset 21, only onnxruntime's own operators accept 16-bit integers.
        self._editor.model.opset_imports.setdefault(MICROSOFT, 1)
        for node in nodes:
            node.domain = MICROSOFT

    def _widen_constants(self, node: ir.Node) -> None:
        row = operator_of(node)
        for place, value in enumerate(node.inputs):
            if value is None or not _is_stored(value) or is_constant(value) or place in row.weights:
                continue
            numbers = self._float_values(node, place, value)
            name = f"{node.name}/{place}"
            if place == row.bias:
                node.replace_input_with(place, self._editor.constant(f"{name}/bias", numbers))
                continue
            span = Range(float(numbers.min(initial=0)), float(numbers.max(initial=0)))
            params = activation_params(span, ir.DataType.INT16, symmetric=True)
            integers = self._editor.constant(f"{name}/integers", params.quantize(numbers))
            restored = self._editor.dequantize(integers, params, f"{name}/DQ", before=node)
            self._set_domain(maker(restored))
            node.replace_input_with(place, restored)

    def _float_values(self, node: ir.Node, place: int, value: ir.Value) -> NDArray[np.float32]:
        """Return the numbers of a constant before it was stored as integers, if the float model still has them."""
        original = self._float_nodes.get(node.name)
        numbers = constant(node_input(original, place)) if original is not None else None
        if numbers is not None:
            return np.asarray(numbers, np.float32)
        stored, scale, zero = (constant_values(v) for v in maker(value).inputs)
        params = QuantParams(scale, zero.astype(np.int64), ir.DataType.INT8, maker(value).attributes.get_int("axis", 1))
        return np.asarray(params.dequantize(stored), np.float32)


def _widened(params: QuantParams, made_by: ir.Node | None) -> QuantParams:
    """Return 16-bit parameters for the range of 8-bit ones."""
    fixed: Mapping[str, float] = wide_results()
    if made_by is not None and made_by.op_type in fixed:
        scale = np.asarray(fixed[made_by.op_type], np.float32)
        return QuantParams(scale, np.asarray(0), ir.DataType.INT16)
    return activation_params(Range(*params.range), ir.DataType.INT16, symmetric=True)


def _pairs(graph: ir.Graph) -> Iterator[_ActivationPair]:
    """Yield the pairs of activations that have 8 bits."""
    for node in graph:
        # A later pass over the same model must leave 16-bit pairs alone.
        if is_op(node, "QuantizeLinear") and node.outputs[0].dtype != ir.DataType.INT16:
            for use in list(node.outputs[0].uses()):
                if is_op(use.node, "DequantizeLinear"):
                    yield _ActivationPair(node, use.node)
