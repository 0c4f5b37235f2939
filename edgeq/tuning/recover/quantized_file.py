"""Read and edit the integer layers of a quantized file in place, in every format:

- QDQ: DequantizeLinear(weight), DequantizeLinear(int32 bias) → Conv, Gemm or MatMul, named like the float node
- QOperator: QLinearConv, QGemm or QLinearMatMul, named like the float node with the suffix "_quant"
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.model.edit import set_constant
from edgeq.model.graph import (
    GraphIndex,
    is_op,
    node_input,
    only_reader,
    operator_of,
    read_count,
)
from edgeq.model.load import read_unchecked, save_model
from edgeq.model.quant_params import QuantParams
from edgeq.quantization.bias_fit import largest_bias
from edgeq.scheme import Scheme
from edgeq.tuning.recover.layers import Floats, WeightedLayer, initializer

# onnxruntime's quantizer gives this suffix to the operators that it writes in the format QOperator.
_SUFFIX = "_quant"


@dataclass(frozen=True, eq=False)
class IntegerLayer:
    """Describe a layer of the quantized file.

    Attributes:
        layer: the layer of the float model.
        node: the node in the file.
        weight: the initializer with the integer weights.
        params: float64 scales and int64 zero points of the weights [outputs]. If all outputs share one scale and zero
            point, they are repeated.
        input_scale: scale of the activation that the layer reads.
        bias: the initializer of the int32 (or float32) bias, in units of `bias_scale`; None if there is none.
        bias_scale: float64 [outputs].
        has_other_readers: whether other nodes use its weight or bias as well.
        scales: the initializers of the scales of its weight and its bias, if the layer alone reads them and they can
            change; else empty.
    """

    layer: WeightedLayer
    node: ir.Node
    weight: ir.Value
    params: QuantParams
    input_scale: float
    bias: ir.Value | None
    bias_scale: Floats
    has_other_readers: bool
    scales: tuple[ir.Value, ...] = ()

    def per_row(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return values [outputs] as [groups, outputs per group, 1]."""
        return values.reshape(self.layer.groups, -1, 1)


class QuantizedFile:
    """Edit a quantized model in memory. Only `save` writes it to a file."""

    def __init__(self, model: ir.Model, scheme: Scheme | None = None) -> None:
        self.model = model
        self._scheme = scheme or Scheme()
        self._nodes = GraphIndex(model).nodes

    @classmethod
    def load(cls, path: Path, scheme: Scheme | None = None) -> QuantizedFile:
        """Return the file at `path`.

        Args:
            scheme: the scheme of the file. None stands for the default of the fields that matter here, `bias_bits` and
                `fused`.

        Raises:
            ModelError: see `edgeq.model.load.read_own`.
        """
        return cls(read_unchecked(path), scheme)

    def save(self, path: Path) -> None:
        """Write the model to `path`."""
        save_model(self.model, path)

    def integer_layers(self, layers: Sequence[WeightedLayer]) -> tuple[IntegerLayer, ...]:
        """Return the layers among `layers` that are in integers in this file, in the same order."""
        candidates = (self._integer_layer(layer) for layer in layers)
        return tuple(f for f in candidates if f is not None)

    def output_range(self, layer: IntegerLayer) -> tuple[float, float]:
        """Return the smallest and the largest number that the integers of a layer's output can represent. Both are
        infinite if the output is in float.
        """
        node, places = layer.node, operator_of(layer.node).integer_output
        if places is None:
            # In QDQ, the operator itself computes floats, and the QuantizeLinear after it holds the range.
            reader = only_reader(node.outputs[0])
            # The hardware computes a fused clamp together with the layer, so the integers are those after it.
            if reader is not None and is_op(reader, *self._scheme.fused):
                reader = only_reader(reader.outputs[0])
            if reader is None or not is_op(reader, "QuantizeLinear"):
                return -np.inf, np.inf
            node, places = reader, (1, 2)
        scale, zero = (initializer(node_input(node, place)) for place in places)
        if scale is None or zero is None:
            return -np.inf, np.inf
        return QuantParams(scale.numpy().ravel()[:1], zero.numpy().ravel()[:1], zero.dtype).range

    def weight(self, layer: IntegerLayer) -> NDArray[np.int64]:
        """Return the integer weights minus their zero points, as int64 [groups, outputs per group, taps]."""
        rows = layer.layer.rows(_array(layer.weight).astype(np.int64))
        difference: NDArray[np.int64] = rows - layer.per_row(layer.params.zero_point)
        return difference

    def set_weight(self, layer: IntegerLayer, rows: NDArray[np.int64]) -> None:
        """Store integer weights, given in the form that `weight` returns. They must fit the stored type."""
        values = rows + layer.per_row(layer.params.zero_point)
        assert layer.params.low <= values.min(), "integers below their type"
        assert values.max() <= layer.params.high, "integers above their type"
        set_constant(layer.weight, layer.layer.unrows(values))

    def bias(self, layer: IntegerLayer) -> Floats:
        """Return the bias as float64 [outputs], in the output's unit; zeros if there is no bias."""
        if layer.bias is None:
            return np.zeros(layer.layer.outputs)
        stored = _array(layer.bias)
        return stored.astype(np.float64).ravel() * (1.0 if stored.dtype == np.float32 else layer.bias_scale)

    def set_scale(self, layer: IntegerLayer, scale: Floats) -> IntegerLayer:
        """Store scales of a layer's weights, and the scales of its bias that follow from them. Return the layer with
        them. The integers of weights and bias stay as they are, so the caller sets them next.

        Args:
            scale: float64 [outputs]; if the file has one scale for all outputs, all are equal.
        """
        scales = scale.astype(np.float32)
        units = np.float32(layer.input_scale) * scales
        for value, new in zip(layer.scales, (scales, units), strict=False):
            old = _array(value)
            set_constant(value, new.reshape(old.shape) if old.size > 1 else new[:1].reshape(old.shape))
        bias_scale = units.astype(np.float64) if len(layer.scales) > 1 else layer.bias_scale
        return replace(layer, params=replace(layer.params, scale=scale), bias_scale=bias_scale)

    def add_to_bias(self, layer: IntegerLayer, change: Floats) -> Floats:
        """Add `change` (float64 [outputs], in the output's unit) to the bias, rounded to its steps.

        Returns:
            float64 [outputs]: the change after rounding; zeros if the layer has no bias that can be changed.
        """
        if layer.bias is None:
            return np.zeros_like(change)
        old = _array(layer.bias)
        # A bias in float has no steps, so only the type rounds it.
        if old.dtype == np.float32:
            new: NDArray[Any] = (old.astype(np.float64).ravel() + change).astype(np.float32)
            added = new.astype(np.float64) - old.ravel()
        else:
            largest = largest_bias(self._scheme)
            new = np.clip(np.rint(old.ravel() + change / layer.bias_scale), -largest - 1, largest)
            added = (new - old.ravel()) * layer.bias_scale
        set_constant(layer.bias, new.reshape(old.shape))
        return np.asarray(added, np.float64)

    def _integer_layer(self, layer: WeightedLayer) -> IntegerLayer | None:
        node = self._nodes.get(layer.name)
        if node is not None and node.op_type == layer.op_type:
            source, weight, bias = (_dequantized_operand(node_input(node, place)) for place in range(3))
            # The bias of a layer in QDQ may be left in float, without a DequantizeLinear.
            bias = bias or _LayerOperand(node_input(node, 2))
            return _build_integer_layer(layer, node, source, weight, bias) if source and weight else None
        node = self._nodes.get(layer.name + _SUFFIX)
        if node is None:
            return None
        row = operator_of(node)
        if row.float_form != layer.op_type or row.integer_output is None or len(row.integers) != 2:
            return None
        source, weight = (_LayerOperand(*(node_input(node, place) for place in astuple(i))) for i in row.integers)
        return _build_integer_layer(layer, node, source, weight, _LayerOperand(node_input(node, row.bias)))


class _LayerOperand(NamedTuple):
    integers: ir.Value | None
    scale: ir.Value | None = None
    zero_point: ir.Value | None = None


def _dequantized_operand(value: ir.Value | None) -> _LayerOperand | None:
    """Return the integers that a value is dequantized from, with their parameters; None if it is not dequantized."""
    producer = value.producer() if value is not None else None
    return _LayerOperand(*producer.inputs) if producer is not None and is_op(producer, "DequantizeLinear") else None


def _build_integer_layer(
    layer: WeightedLayer, node: ir.Node, source: _LayerOperand, weight: _LayerOperand, bias: _LayerOperand
) -> IntegerLayer | None:
    stored, added = initializer(weight.integers), initializer(bias.integers)
    if weight.integers is None or stored is None or any(initializer(o.scale) is None for o in (source, weight)):
        return None
    scale = _spread(weight.scale, layer)
    bias_is_float = added is not None and added.dtype == ir.DataType.FLOAT
    if bias.scale is not None:
        bias_scale = _spread(bias.scale, layer)
    elif bias_is_float:
        bias_scale = np.ones(layer.outputs)
    else:
        # An int32 bias without a scale of its own has the unit of the products that it is added to.
        bias_scale = _spread(source.scale, layer) * scale
    zero = np.zeros(layer.outputs) if weight.zero_point is None else _spread(weight.zero_point, layer)
    # A bias that is one number for all outputs cannot be corrected for each of them.
    changeable = bias.integers if added is not None and added.size == layer.outputs else None
    scales = [operand.scale for operand in (weight, bias) if operand.scale is not None]
    # The scale of a bias that stays as it is must stay as well.
    follows = changeable is not None and (bias.scale is not None or bias_is_float)
    variable = (bias.integers is None or follows) and all(read_count(value) == 1 for value in scales)
    return IntegerLayer(
        layer,
        node,
        weight.integers,
        QuantParams(scale, zero.astype(np.int64), stored.dtype),
        float(_array(source.scale).ravel()[0]),
        changeable,
        bias_scale,
        any(_is_shared(value) for value in (weight.integers, changeable) if value is not None),
        tuple(scales) if variable else (),
    )


def _is_shared(value: ir.Value) -> bool:
    """Return whether an initializer, or the tensor that is dequantized from it, is read more than once."""
    dequantized = (use.node.outputs[0] for use in value.uses() if is_op(use.node, "DequantizeLinear") and not use.idx)
    return read_count(value) > 1 or any(read_count(output) > 1 for output in dequantized)


def _array(value: ir.Value | None) -> NDArray[Any]:
    tensor = initializer(value)
    assert tensor is not None, "no initializer"
    return tensor.numpy()


def _spread(value: ir.Value | None, layer: WeightedLayer) -> Floats:
    """Return a scale or zero point as float64 [outputs]."""
    return np.broadcast_to(_array(value).astype(np.float64).ravel(), (layer.outputs,)).copy()
