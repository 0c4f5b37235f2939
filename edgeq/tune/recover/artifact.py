"""The integer layers of a quantized file, to be read and edited in place, whatever the format.

QDQ          DequantizeLinear(weight), DequantizeLinear(int32 bias) → Conv, Gemm or MatMul of the float model's name
QOperator    QLinearConv, QGemm or QLinearMatMul, named after the float node with "_quant" behind
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from edgeq.model.load import load_model, save_model
from edgeq.tune.recover.layers import Floats, Layer
from edgeq.tune.recover.uses import uses

# Places of (input scale, weight, weight scale, weight zero point, bias) among a node's inputs.
_PLACES = {"QLinearConv": (1, 3, 4, 5, 8), "QLinearMatMul": (1, 3, 4, 5, None), "QGemm": (1, 3, 4, 5, 6)}
# Places of (scale, zero point) of the output.
_OUTPUTS = {"QLinearConv": (6, 7), "QLinearMatMul": (6, 7), "QGemm": (7, 8)}
_SUFFIX = "_quant"
_INT32 = np.iinfo(np.int32)


@dataclass(frozen=True, eq=False)
class IntegerLayer:
    """A layer of the quantized file.

    Attributes:
        layer: of the float model.
        node: name of the node in the file.
        weight: initializer of the integers.
        scale: float64 [outputs], of the weights; one that is for all is repeated.
        zero_point: int64 [outputs].
        input_scale: of the activation that it reads.
        bias: initializer of the int32 bias; "" where there is none. Its unit is `bias_scale`.
        bias_scale: float64 [outputs].
        shared: whether its weight or bias serves other nodes too.
    """

    layer: Layer
    node: str
    weight: str
    scale: Floats
    zero_point: NDArray[np.int64]
    input_scale: float
    bias: str
    bias_scale: Floats
    shared: bool


class QuantizedFile:
    """A quantized model in memory. Nothing is written before `save`."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model
        self._constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self._dequantized = {n.output[0]: n for n in model.graph.node if n.op_type == "DequantizeLinear"}
        self._nodes = {node.name: node for node in model.graph.node}
        self._uses = uses(model)

    @classmethod
    def read(cls, path: Path) -> QuantizedFile:
        return cls(load_model(path, external_data="all"))

    def save(self, path: Path) -> None:
        save_model(self.model, path)

    def integer_layers(self, layers: Sequence[Layer]) -> tuple[IntegerLayer, ...]:
        """Those of `layers` that are in integers here, in the same order."""
        found = (self._integer_layer(layer) for layer in layers)
        return tuple(f for f in found if f is not None)

    def output_range(self, layer: IntegerLayer) -> tuple[float, float]:
        """The smallest and largest number that the integers of a layer's output can stand for; infinite for floats."""
        node = self._nodes[layer.node]
        if node.op_type in _OUTPUTS:
            places = _OUTPUTS[node.op_type]
            scale, zero = (node.input[p] if len(node.input) > p else "" for p in places)
        else:
            readers = [n for n in self.model.graph.node if node.output[0] in n.input]
            if len(readers) != 1 or readers[0].op_type != "QuantizeLinear" or len(readers[0].input) < 3:
                return -np.inf, np.inf
            scale, zero = readers[0].input[1:3]
        if scale not in self._constants or zero not in self._constants:
            return -np.inf, np.inf
        limits = np.iinfo(onnx.helper.tensor_dtype_to_np_dtype(self._constants[zero].data_type))
        step, middle = float(self._array(scale).ravel()[0]), int(self._array(zero).ravel()[0])
        return (limits.min - middle) * step, (limits.max - middle) * step

    def weight(self, layer: IntegerLayer) -> NDArray[np.int64]:
        """Integers as [groups, outputs per group, taps], less their zero points."""
        rows = layer.layer.rows(numpy_helper.to_array(self._constants[layer.weight]).astype(np.int64))
        difference: NDArray[np.int64] = rows - self.per_row(layer, layer.zero_point)
        return difference

    def set_weight(self, layer: IntegerLayer, rows: NDArray[np.int64]) -> None:
        """Store integers as `weight` gives them; they must fit the type."""
        tensor = self._constants[layer.weight]
        values = rows + self.per_row(layer, layer.zero_point)
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
        limits = np.iinfo(dtype)
        assert limits.min <= values.min(), "integers below their type"
        assert values.max() <= limits.max, "integers above their type"
        tensor.CopyFrom(numpy_helper.from_array(layer.layer.unrows(values).astype(dtype), layer.weight))

    def bias(self, layer: IntegerLayer) -> Floats:
        """float64 [outputs], in the output's unit; zeros where there is none."""
        if not layer.bias:
            return np.zeros(layer.layer.outputs)
        stored = self._array(layer.bias)
        return stored.astype(np.float64).ravel() * (1.0 if stored.dtype == np.float32 else layer.bias_scale)

    def add_to_bias(self, layer: IntegerLayer, change: Floats) -> Floats:
        """Add `change` (float64 [outputs], in the output's unit) to the bias, rounded to its steps.

        Returns:
            What was really added, zeros where the layer has no bias that could be changed.
        """
        if not layer.bias:
            return np.zeros_like(change)
        old = numpy_helper.to_array(self._constants[layer.bias])
        if old.dtype == np.float32:
            new = (old.astype(np.float64).ravel() + change).astype(np.float32)
            added = new.astype(np.float64) - old.ravel()
        else:
            steps = np.clip(np.rint(old.ravel() + change / layer.bias_scale), _INT32.min, _INT32.max)
            new = steps.astype(np.int32)
            added = (steps - old.ravel()) * layer.bias_scale
        self._constants[layer.bias].CopyFrom(numpy_helper.from_array(new.reshape(old.shape), layer.bias))
        return np.asarray(added, np.float64)

    @staticmethod
    def per_row(layer: IntegerLayer, values: NDArray[Any]) -> NDArray[Any]:
        """Values [outputs] as [groups, outputs per group, 1]."""
        return values.reshape(layer.layer.groups, -1, 1)

    def _integer_layer(self, layer: Layer) -> IntegerLayer | None:
        node = self._nodes.get(layer.name)
        if node is not None and node.op_type == layer.op_type:
            return self._from_qdq(layer, node)
        node = self._nodes.get(layer.name + _SUFFIX)
        if node is not None and node.op_type in _PLACES:
            return self._from_operator(layer, node)
        return None

    def _from_qdq(self, layer: Layer, node: onnx.NodeProto) -> IntegerLayer | None:
        source, weight = (self._dequantized.get(name) for name in node.input[:2])
        if source is None or weight is None or weight.input[0] not in self._constants:
            return None
        bias, bias_scale = "", np.ones(layer.outputs)
        if len(node.input) > 2 and node.input[2]:
            made = self._dequantized.get(node.input[2])
            if made is not None:
                bias, bias_scale = made.input[0], self._spread(made.input[1], layer)
            elif node.input[2] in self._constants:
                bias = node.input[2]
        return self._describe(
            layer,
            node,
            source.input[1],
            weight.input[0],
            weight.input[1],
            weight.input[2] if len(weight.input) > 2 else "",
            bias,
            bias_scale,
        )

    def _from_operator(self, layer: Layer, node: onnx.NodeProto) -> IntegerLayer | None:
        source, weight, scale, zero, place = _PLACES[node.op_type]
        if node.input[weight] not in self._constants:
            return None
        bias = node.input[place] if place is not None and len(node.input) > place else ""
        bias_scale = self._spread(node.input[source], layer) * self._spread(node.input[scale], layer)
        return self._describe(
            layer, node, node.input[source], node.input[weight], node.input[scale], node.input[zero], bias, bias_scale
        )

    def _describe(
        self,
        layer: Layer,
        node: onnx.NodeProto,
        input_scale: str,
        weight: str,
        scale: str,
        zero: str,
        bias: str,
        bias_scale: Floats,
    ) -> IntegerLayer | None:
        if any(name not in self._constants for name in (input_scale, scale)):
            return None
        zero_point = self._spread(zero, layer) if zero else np.zeros(layer.outputs)
        if bias not in self._constants or self._array(bias).size != layer.outputs:
            bias = ""
        return IntegerLayer(
            layer,
            node.name,
            weight,
            self._spread(scale, layer),
            zero_point.astype(np.int64),
            float(self._array(input_scale).ravel()[0]),
            bias,
            bias_scale,
            self._shared(weight) or bool(bias and self._shared(bias)),
        )

    def _shared(self, name: str) -> bool:
        """Whether an initializer, or what is dequantized from it, is read more than once."""
        readers = [n for n in self._dequantized.values() if n.input[0] == name]
        return self._uses[name] > 1 or any(self._uses[n.output[0]] > 1 for n in readers)

    def _spread(self, name: str, layer: Layer) -> Floats:
        return np.broadcast_to(self._array(name).astype(np.float64).ravel(), (layer.outputs,)).copy()

    def _array(self, name: str) -> NDArray[Any]:
        return numpy_helper.to_array(self._constants[name])
