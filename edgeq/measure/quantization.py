"""Scale and zero point: the arithmetic, and where a quantized graph keeps them.

    q = saturate(round_half_even(x / scale) + zero_point)        x' = (q - zero_point) scale

as QuantizeLinear and DequantizeLinear of ONNX have it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from edgeq.graph.operators import DATA_MOVEMENT
from edgeq.measure.graphs import GraphIndex, attribute

# Type → smallest and largest integer. 16-bit ones are how accelerators mix precisions; 4-bit ones hold weights.
_LEVELS: dict[int, tuple[int, int]] = {
    TensorProto.UINT8: (0, 255),
    TensorProto.INT8: (-128, 127),
    TensorProto.UINT16: (0, 65535),
    TensorProto.INT16: (-32768, 32767),
    TensorProto.INT32: (-(2**31), 2**31 - 1),
    TensorProto.UINT4: (0, 15),
    TensorProto.INT4: (-8, 7),
}

# Operator → its integer inputs as (value, scale, zero point), and its integer output as (scale, zero point): places in
# its list of inputs.
_INTEGER_INPUTS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "DequantizeLinear": ((0, 1, 2),),
    "QLinearConv": ((0, 1, 2), (3, 4, 5)),
    "QLinearMatMul": ((0, 1, 2), (3, 4, 5)),
    "QGemm": ((0, 1, 2), (3, 4, 5)),
    "QLinearAdd": ((0, 1, 2), (3, 4, 5)),
    "QLinearMul": ((0, 1, 2), (3, 4, 5)),
    "QLinearWhere": ((1, 2, 3), (4, 5, 6)),
    "DynamicQuantizeMatMul": ((1, 2, 3),),
    "MatMulIntegerToFloat": ((0, 2, 4), (1, 3, 5)),
    "QAttention": ((0, 3, 6), (1, 4, 7)),
    "DynamicQuantizeLSTM": ((1, 8, 9), (2, 10, 11)),
}
_INTEGER_OUTPUTS: dict[str, tuple[int, int]] = {
    "QuantizeLinear": (1, 2),
    "QLinearConv": (6, 7),
    "QLinearMatMul": (6, 7),
    "QGemm": (7, 8),
    "QLinearAdd": (6, 7),
    "QLinearMul": (6, 7),
    "QLinearWhere": (7, 8),
    "QLinearConcat": (0, 1),
}
_UNARY = frozenset(
    {
        "QLinearSigmoid",
        "QLinearLeakyRelu",
        "QLinearSoftmax",
        "QLinearReduceMean",
        "QLinearAveragePool",
        "QLinearGlobalAveragePool",
    }
)


@dataclass(frozen=True, eq=False)
class Quantization:
    """How integers stand for numbers.

    Attributes:
        scale: float32; one number, one per channel along `axis`, or one per block of `block` elements along `axis`.
        zero_point: int64, of the shape of `scale` or one number.
        low, high: smallest and largest integer of the type.
        axis: the channel axis.
        block: elements along `axis` that share a scale; 0 where the scale is not per block.
    """

    scale: NDArray[np.float32]
    zero_point: NDArray[np.int64]
    low: int
    high: int
    axis: int = 0
    block: int = 0

    @property
    def bits(self) -> int:
        return (self.high - self.low).bit_length()

    @property
    def per_channel(self) -> bool:
        return self.scale.size > 1

    @property
    def range(self) -> tuple[float, float]:
        """The smallest and largest number that can be represented, over all channels."""
        scale, zero_point = self.scale.astype(np.float64), self.zero_point
        return float(((self.low - zero_point) * scale).min()), float(((self.high - zero_point) * scale).max())

    def dequantize(self, integers: NDArray[Any]) -> NDArray[np.float32]:
        """Numbers (float32) that integers of any shape stand for."""
        scale, zero_point = self._spread(integers.shape)
        numbers: NDArray[np.float32] = (integers.astype(np.int64) - zero_point).astype(np.float32) * scale
        return numbers

    def round_trip(self, values: NDArray[Any]) -> NDArray[np.float32]:
        """What is left of values after quantizing and dequantizing them."""
        scale, zero_point = self._spread(values.shape)
        steps = np.rint(values.astype(np.float32, copy=False) / scale)
        np.clip(steps, self.low - zero_point, self.high - zero_point, out=steps)
        steps *= scale
        return np.asarray(steps, np.float32)

    def saturated(self, values: NDArray[Any]) -> tuple[int, int]:
        """How many values lie so far below and above the range that clipping costs more than rounding does: by more
        than half a step."""
        scale, zero_point = self._spread(values.shape)
        below = values < (self.low - zero_point - 0.5) * scale
        above = values > (self.high - zero_point + 0.5) * scale
        return int(np.count_nonzero(below)), int(np.count_nonzero(above))

    def to_tensors(self, scale: str, zero_point: str) -> tuple[TensorProto, TensorProto]:
        """Both as constants of these names, as QuantizeLinear takes them."""
        kind = next(kind for kind, levels in _LEVELS.items() if levels == (self.low, self.high))
        zeros = np.broadcast_to(self.zero_point, self.scale.shape)
        return (
            onnx.numpy_helper.from_array(self.scale, scale),
            onnx.helper.make_tensor(zero_point, kind, self.scale.shape, zeros.ravel().tolist()),
        )

    def step(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """The scale, broadcastable to `shape`."""
        return self._spread(shape)[0]

    def _spread(self, shape: tuple[int, ...]) -> tuple[NDArray[np.float32], NDArray[Any]]:
        return self._spread_one(self.scale, shape), self._spread_one(self.zero_point, shape)

    def _spread_one(self, parameter: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        if parameter.size == 1:
            # float32, so that a float32 array divided by it stays one.
            return parameter.reshape(())
        axis = self.axis % len(shape)
        if self.block:
            return np.repeat(parameter, self.block, axis).take(range(shape[axis]), axis)
        if parameter.ndim == 2 and len(shape) == 3:  # LSTM: directions and columns
            return parameter[:, None, :]
        spread = [1] * len(shape)
        spread[axis] = parameter.size
        return parameter.reshape(spread)


def dynamic_quantization(values: NDArray[Any]) -> Quantization:
    """What DynamicQuantizeLinear takes for `values`: 8 bits from the smallest to the largest, zero among them."""
    low, high = float(values.min(initial=0)), float(values.max(initial=0))
    if not np.isfinite([low, high]).all():  # an attention mask may hold infinities
        values = values[np.isfinite(values)]
        low, high = float(values.min(initial=0)), float(values.max(initial=0))
    scale = np.float32((high - low) / 255) or np.float32(1)
    return Quantization(np.asarray(scale), np.asarray(round(-low / float(scale)), np.int64), 0, 255)


@dataclass(frozen=True, eq=False)
class IntegerUse:
    """An integer tensor and how the node that reads it understands it."""

    name: str
    node: onnx.NodeProto
    place: int
    quantization: Quantization


def integer_uses(graph: GraphIndex) -> Iterator[IntegerUse]:
    """Every integer input of every quantized operator, constants and activations, with constant scale; in order."""
    for node in graph.model.graph.node:
        for value, scale, zero_point in _integer_inputs(node):
            found = _read(graph, node, value, scale, zero_point)
            if found is not None:
                yield IntegerUse(node.input[value], node, value, found)
        if node.op_type in ("ConvInteger", "MatMulInteger"):
            yield from _scaled_afterwards(graph, node)
        yield from _bias(graph, node)


def activation_quantizations(graph: GraphIndex) -> dict[str, Quantization]:
    """Integer activation → its scale and zero point, in a static model."""
    found: dict[str, Quantization] = {}
    for use in integer_uses(graph):
        if not graph.is_constant(use.name):
            found.setdefault(use.name, use.quantization)
    for node in graph.model.graph.node:
        places = (3, 4) if node.op_type in _UNARY else _INTEGER_OUTPUTS.get(node.op_type)
        if places is not None:
            made = _parameters(graph, node, *places, tensor="")
            if made is not None:
                found.setdefault(node.output[0], made)
        elif node.op_type in DATA_MOVEMENT and node.input and node.input[0] in found:
            for name in node.output:
                found.setdefault(name, found[node.input[0]])
    return found


def _integer_inputs(node: onnx.NodeProto) -> tuple[tuple[int, int, int], ...]:
    if node.op_type in _UNARY:
        return ((0, 1, 2),)
    if node.op_type == "QLinearConcat":
        return tuple((place, place + 1, place + 2) for place in range(2, len(node.input), 3))
    return _INTEGER_INPUTS.get(node.op_type, ())


def _read(graph: GraphIndex, node: onnx.NodeProto, value: int, scale: int, zero_point: int) -> Quantization | None:
    if len(node.input) <= value or not node.input[value]:
        return None
    return _parameters(graph, node, scale, zero_point, tensor=node.input[value], axis=_axis(node))


def _parameters(
    graph: GraphIndex, node: onnx.NodeProto, scale: int, zero_point: int, *, tensor: str, axis: int = 0
) -> Quantization | None:
    """None where the scale is computed at run time or the type is no integer."""
    if len(node.input) <= scale or not graph.is_constant(node.input[scale]):
        return None
    steps = graph.constant(node.input[scale]).astype(np.float32)
    given = node.input[zero_point] if len(node.input) > zero_point else ""
    if given and not graph.is_constant(given):
        return None
    if given:
        kind, zero = graph.tensor(given).data_type, graph.constant(given).astype(np.int64)
    else:
        known = graph.is_constant(tensor)
        kind = graph.tensor(tensor).data_type if known else attribute(node, "output_dtype", 0) or TensorProto.UINT8
        zero = np.zeros((), np.int64)
    if kind not in _LEVELS:
        return None
    return Quantization(steps, zero, *_LEVELS[kind], axis=axis, block=attribute(node, "block_size", 0))


def _axis(node: onnx.NodeProto) -> int:
    """Along which axis of its weight (or activation) a scale per channel runs."""
    if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
        return attribute(node, "axis", 1)
    if node.op_type == "QGemm":
        return 0 if attribute(node, "transB", 0) else -1
    return 0 if node.op_type in ("QLinearConv", "ConvInteger", "DynamicQuantizeLSTM") else -1


def _scaled_afterwards(graph: GraphIndex, node: onnx.NodeProto) -> Iterator[IntegerUse]:
    """ConvInteger and MatMulInteger: the sum is cast and multiplied by (activation scale x weight scale)."""
    weight = node.input[1]
    if not graph.is_constant(weight) or graph.tensor(weight).data_type not in _LEVELS:
        return
    scale = _constant_factor(graph, node.output[0], depth=3)
    if scale is None:
        return
    given = node.input[3] if len(node.input) > 3 else ""
    zero = graph.constant(given).astype(np.int64) if given else np.zeros((), np.int64)
    levels = _LEVELS[graph.tensor(weight).data_type]
    yield IntegerUse(weight, node, 1, Quantization(scale.astype(np.float32), zero, *levels, axis=_axis(node)))


def _constant_factor(graph: GraphIndex, tensor: str, *, depth: int) -> NDArray[Any] | None:
    """The constant that a tensor is multiplied by, directly or as a part of the other factor."""
    for node, place in graph.consumers.get(tensor, []) if depth else []:
        if node.op_type == "Cast":
            return _constant_factor(graph, node.output[0], depth=depth - 1)
        if node.op_type == "Mul":
            other = node.input[1 - place]
            maker = graph.producers.get(other)
            parts = [other, *(maker.input if maker is not None and maker.op_type == "Mul" else ())]
            constant = next((name for name in parts if graph.is_constant(name)), None)
            return None if constant is None else graph.constant(constant)
    return None


def _bias(graph: GraphIndex, node: onnx.NodeProto) -> Iterator[IntegerUse]:
    """int32 bias of QLinearConv and QGemm: zero point 0, scale = input's x weight's, by definition of both."""
    place = {"QLinearConv": 8, "QGemm": 6}.get(node.op_type)
    if place is None or len(node.input) <= place or not graph.is_constant(node.input[place]):
        return
    if all(graph.is_constant(node.input[scale]) for scale in (1, 4)):
        scale = (graph.constant(node.input[1]) * graph.constant(node.input[4])).astype(np.float32)
        levels = _LEVELS[TensorProto.INT32]
        yield IntegerUse(node.input[place], node, place, Quantization(scale, np.zeros((), np.int64), *levels, axis=0))
