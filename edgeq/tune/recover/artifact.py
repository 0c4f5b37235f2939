"""The integer layers of a quantized file, read and edited in place, in every format.

QDQ          DequantizeLinear(weight), DequantizeLinear(int32 bias) → Conv, Gemm or MatMul of the float model's name
QOperator    QLinearConv, QGemm or QLinearMatMul, named after the float node with the suffix "_quant"

Integer operators written out: QLinearConv as DequantizeLinear, Conv and QuantizeLinear, and so on.

The result of a layer before it is rounded to integers is a tensor then, which can be read and changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.model.edit import Editor, replace_value, set_constant
from edgeq.model.graph import (
    GraphIndex,
    Operator,
    channel_axis,
    constant,
    is_op,
    name_of,
    node_input,
    only_reader,
    operator_of,
    read_count,
)
from edgeq.model.load import read_own, save_model
from edgeq.model.quant_params import LIMITS, QuantParams
from edgeq.tune.recover.layers import Floats, Layer, initializer

_SUFFIX = "_quant"


@dataclass(frozen=True, eq=False)
class IntegerLayer:
    """A layer of the quantized file.

    Attributes:
        layer: of the float model.
        node: of the file.
        weight: the initializer of the integers.
        params: of the weights: float64 scales and int64 zero points [outputs]; one that serves all is repeated.
        input_scale: of the activation that the layer reads.
        bias: the initializer of the int32 (or float32) bias; None where there is none. Its unit is `bias_scale`.
        bias_scale: float64 [outputs].
        shared: whether its weight or bias serves other nodes too.
    """

    layer: Layer
    node: ir.Node
    weight: ir.Value
    params: QuantParams
    input_scale: float
    bias: ir.Value | None
    bias_scale: Floats
    shared: bool

    def per_row(self, values: NDArray[Any]) -> NDArray[Any]:
        """Values [outputs] as [groups, outputs per group, 1]."""
        return values.reshape(self.layer.groups, -1, 1)


class QuantizedFile:
    """A quantized model in memory, edited in place. Nothing is written before `save`."""

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self._nodes = GraphIndex(model).nodes

    @classmethod
    def read(cls, path: Path) -> QuantizedFile:
        """The file at `path`.

        Raises:
            ModelError: as `edgeq.model.load.read_own`.
        """
        return cls(read_own(path))

    def save(self, path: Path) -> None:
        """Write the model to `path`."""
        save_model(self.model, path)

    def integer_layers(self, layers: Sequence[Layer]) -> tuple[IntegerLayer, ...]:
        """Those of `layers` that are in integers here, in the same order."""
        found = (self._integer_layer(layer) for layer in layers)
        return tuple(f for f in found if f is not None)

    def output_range(self, layer: IntegerLayer) -> tuple[float, float]:
        """The smallest and largest number that the integers of a layer's output represent; infinite for floats."""
        node, places = layer.node, operator_of(layer.node).integer_output
        if places is None:
            reader = only_reader(node.outputs[0])
            if reader is None or not is_op(reader, "QuantizeLinear"):
                return -np.inf, np.inf
            node, places = reader, (1, 2)
        scale, zero = (initializer(node_input(node, place)) for place in places)
        if scale is None or zero is None:
            return -np.inf, np.inf
        return QuantParams(scale.numpy().ravel()[:1], zero.numpy().ravel()[:1], zero.dtype).range

    def weight(self, layer: IntegerLayer) -> NDArray[np.int64]:
        """Integers as int64 [groups, outputs per group, taps], less their zero points."""
        rows = layer.layer.rows(_array(layer.weight).astype(np.int64))
        difference: NDArray[np.int64] = rows - layer.per_row(layer.params.zero_point)
        return difference

    def set_weight(self, layer: IntegerLayer, rows: NDArray[np.int64]) -> None:
        """Store integers as `weight` gives them; they must fit the type."""
        values = rows + layer.per_row(layer.params.zero_point)
        assert layer.params.low <= values.min(), "integers below their type"
        assert values.max() <= layer.params.high, "integers above their type"
        set_constant(layer.weight, layer.layer.unrows(values))

    def bias(self, layer: IntegerLayer) -> Floats:
        """float64 [outputs], in the output's unit; zeros where there is none."""
        if layer.bias is None:
            return np.zeros(layer.layer.outputs)
        stored = _array(layer.bias)
        return stored.astype(np.float64).ravel() * (1.0 if stored.dtype == np.float32 else layer.bias_scale)

    def add_to_bias(self, layer: IntegerLayer, change: Floats) -> Floats:
        """Add `change` (float64 [outputs], in the output's unit) to the bias, rounded to its steps.

        Returns:
            float64 [outputs]: the change after rounding; zeros where the layer has no bias that could be changed.
        """
        if layer.bias is None:
            return np.zeros_like(change)
        old = _array(layer.bias)
        if old.dtype == np.float32:
            new: NDArray[Any] = (old.astype(np.float64).ravel() + change).astype(np.float32)
            added = new.astype(np.float64) - old.ravel()
        else:
            new = np.clip(np.rint(old.ravel() + change / layer.bias_scale), *LIMITS[ir.DataType.INT32])
            added = (new - old.ravel()) * layer.bias_scale
        set_constant(layer.bias, new.reshape(old.shape))
        return np.asarray(added, np.float64)

    def _integer_layer(self, layer: Layer) -> IntegerLayer | None:
        node = self._nodes.get(layer.name)
        if node is not None and node.op_type == layer.op_type:
            source, weight, bias = (_dequantized(node_input(node, place)) for place in range(3))
            bias = bias or _Operand(node_input(node, 2))
            return _describe(layer, node, source, weight, bias) if source and weight else None
        node = self._nodes.get(layer.name + _SUFFIX)
        if node is None:
            return None
        row = operator_of(node)
        if row.float_form != layer.op_type or row.integer_output is None or len(row.integers) != 2:
            return None
        source, weight = (_Operand(*(node_input(node, place) for place in astuple(i))) for i in row.integers)
        return _describe(layer, node, source, weight, _Operand(node_input(node, row.bias)))


class _Operand(NamedTuple):
    integers: ir.Value | None
    scale: ir.Value | None = None
    zero_point: ir.Value | None = None


def _dequantized(value: ir.Value | None) -> _Operand | None:
    """What a value is dequantized from; None where it is not."""
    made = value.producer() if value is not None else None
    return _Operand(*made.inputs) if made is not None and is_op(made, "DequantizeLinear") else None


def _describe(layer: Layer, node: ir.Node, source: _Operand, weight: _Operand, bias: _Operand) -> IntegerLayer | None:
    stored, added = initializer(weight.integers), initializer(bias.integers)
    if weight.integers is None or stored is None or any(initializer(o.scale) is None for o in (source, weight)):
        return None
    scale = _spread(weight.scale, layer)
    if bias.scale is not None:
        bias_scale = _spread(bias.scale, layer)
    elif added is not None and added.dtype == ir.DataType.FLOAT:
        bias_scale = np.ones(layer.outputs)
    else:
        bias_scale = _spread(source.scale, layer) * scale
    zero = np.zeros(layer.outputs) if weight.zero_point is None else _spread(weight.zero_point, layer)
    changeable = bias.integers if added is not None and added.size == layer.outputs else None
    return IntegerLayer(
        layer,
        node,
        weight.integers,
        QuantParams(scale, zero.astype(np.int64), stored.dtype),
        float(_array(source.scale).ravel()[0]),
        changeable,
        bias_scale,
        any(_is_shared(value) for value in (weight.integers, changeable) if value is not None),
    )


def _is_shared(value: ir.Value) -> bool:
    """Whether an initializer, or what is dequantized from it, is read more than once."""
    dequantized = (use.node.outputs[0] for use in value.uses() if is_op(use.node, "DequantizeLinear") and not use.idx)
    return read_count(value) > 1 or any(read_count(output) > 1 for output in dequantized)


def _array(value: ir.Value | None) -> NDArray[Any]:
    tensor = initializer(value)
    assert tensor is not None, "no initializer"
    return tensor.numpy()


def _spread(value: ir.Value | None, layer: Layer) -> Floats:
    """A scale or zero point as float64 [outputs]."""
    return np.broadcast_to(_array(value).astype(np.float64).ravel(), (layer.outputs,)).copy()


PLAIN = "/plain"
"""Suffix of the name of an expanded layer's float tensor, behind the name of its integer output."""


def expanded(model: ir.Model) -> ir.Model:
    """A copy of `model` with QLinearConv, QLinearMatMul and QGemm written out; their nodes' names are gone."""
    model = model.clone()
    editor = Editor(model)
    for node in model.graph:
        row = operator_of(node)
        if row.integer_output and row.weights and len(row.integers) == 2:
            _expand(editor, node, row)
    return model


def _expand(editor: Editor, node: ir.Node, row: Operator) -> None:
    assert row.integer_output is not None
    output = node.outputs[0]
    stem = name_of(output)
    inputs: list[ir.Value | None] = []
    for operand, axis in zip(row.integers, (0, channel_axis(node)), strict=True):
        sources = [node_input(node, place) for place in (operand.value, operand.scale, operand.zero_point)]
        name = f"{stem}/input{len(inputs)}"
        inputs.append(editor.node("DequantizeLinear", sources, name, before=node, attributes={"axis": axis}))
    bias = node_input(node, row.bias)
    if bias is not None:
        scales = [constant(node_input(node, operand.scale)) for operand in row.integers]
        assert scales[0] is not None
        assert scales[1] is not None
        # In the unit of the integers' product: it is added before alpha scales them.
        product = scales[0] * scales[1] * np.float32(node.attributes.get_float("alpha", 1.0))
        scale = editor.constant(f"{stem}/bias_scale", product if product.size > 1 else product.reshape(()))
        inputs.append(
            editor.node("DequantizeLinear", [bias, scale], f"{stem}/bias", before=node, attributes={"axis": 0})
        )
    attributes = dict(node.attributes)
    plain = editor.node(row.float_form, inputs, stem + PLAIN, before=node, attributes=attributes)
    parameters = [node_input(node, place) for place in row.integer_output]
    # QGemm without a scale for its output computes floats.
    op_type = "QuantizeLinear" if parameters[0] is not None else "Identity"
    sources = [plain, *parameters] if parameters[0] is not None else [plain]
    rounded = editor.node(op_type, sources, f"{stem}/rounded", before=node, like=output)
    replace_value(output, rounded)
    editor.graph.remove(node)
