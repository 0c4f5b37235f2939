"""Which integer weight of a quantized model stands for which weight of the float model, and how well."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from edgeq.measure.agreement import OutputComparison, decibels
from edgeq.measure.graphs import GraphIndex, attribute
from edgeq.measure.quantization import Quantization, integer_uses

# What quantizers append to the name of a weight and of a node.
_WEIGHT_SUFFIX = re.compile(r"(_DequantizeLinear_Output|_quantized|_QuantizeLinear_Output)$")
NODE_SUFFIX = re.compile(r"(_MatMul)?_quant$")

_LAYERS = frozenset(
    {"Conv", "ConvTranspose", "Gemm", "MatMul", "LSTM", "GRU", "RNN", "Gather", "Attention", "EmbedLayerNormalization"}
)
_WORST_CHANNELS = 3
# Rounding moves a weight by half a step at most, re-rounding (AdaRound and the like) by less than one and a half.
_LARGEST_ROUNDING = 1.5
# A bias in int32 has steps so small that correcting it moves it by many.
_WEIGHT_BITS = 16


@dataclass(frozen=True, eq=False)
class WeightMatch:
    """A weight in both models.

    Attributes:
        name: in the float model.
        node: name of the first float node that reads it, and `op_type` its type; `place` among its inputs.
        quantized: the integer (or still unrounded) constant of the quantized model.
        quantization: how its integers are to be read.
        transposed: whether the quantized one has its last two axes swapped.
    """

    name: str
    node: str
    op_type: str
    place: int
    quantized: str
    quantization: Quantization
    transposed: bool = False


@dataclass(frozen=True)
class WeightComparison:
    """How well a quantized weight stands for the float one.

    Attributes:
        shape: of the float weight.
        bits: of the integers; 32 for a bias.
        sqnr_db, cosine, max_abs_error: as `OutputAgreement` has them, over all elements.
        channel_axis: the axis of the output channels; None where there is none.
        worst_channels: (channel, SQNR in dB), worst first; channels of zeros are left out.
        range_ratio: largest over median absolute maximum of the channels: what one scale for all of them costs.
        changed: whether it differs by more than rounding and clipping can explain, so that the quantized model was not
            made from this weight as it is (BatchNormalization folded, layers equalized).
    """

    name: str
    node: str
    op_type: str
    shape: tuple[int, ...]
    bits: int
    per_channel: bool
    sqnr_db: float
    cosine: float
    max_abs_error: float
    channel_axis: int | None
    worst_channels: tuple[tuple[int, float], ...]
    range_ratio: float | None
    changed: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; an infinite SQNR is null."""
        return {
            "name": self.name,
            "node": self.node,
            "op_type": self.op_type,
            "shape": list(self.shape),
            "bits": self.bits,
            "per_channel": self.per_channel,
            "sqnr_db": finite(self.sqnr_db),
            "cosine": self.cosine,
            "max_abs_error": self.max_abs_error,
            "channel_axis": self.channel_axis,
            "worst_channels": [{"channel": c, "sqnr_db": finite(db)} for c, db in self.worst_channels],
            "range_ratio": self.range_ratio,
            "changed": self.changed,
        }


def match_weights(float_graph: GraphIndex, quantized_graph: GraphIndex) -> tuple[WeightMatch, ...]:
    """Weights of the float model that the quantized one holds as integers, in the float model's order of execution.

    Names are compared first, without what quantizers append; then the node of the same name that reads them. Per
    tensor, per channel and per block; QDQ (constants before or behind QuantizeLinear), QOperator and dynamic operators.
    """
    found: dict[str, WeightMatch] = {}
    for quantized, node, place, quantization in _quantized_weights(quantized_graph):
        name = _float_name(float_graph, quantized_graph, quantized, node, place)
        if name is None or name in found:
            continue
        reader, position = _layer_reader(float_graph, name)
        transposed = _is_transposed(float_graph, quantized_graph, name, quantized, quantization)
        if transposed is not None:
            found[name] = WeightMatch(
                name, reader.name, reader.op_type, position, quantized, quantization, transposed=transposed
            )
    order = {name: rank for rank, node in enumerate(float_graph.model.graph.node) for name in reversed(node.input)}
    return tuple(sorted(found.values(), key=lambda match: (order.get(match.name, 0), match.place)))


def compare_weights(
    float_graph: GraphIndex, quantized_graph: GraphIndex, matches: Sequence[WeightMatch]
) -> tuple[WeightComparison, ...]:
    """SQNR of each weight and of its worst channels. One weight is in memory at a time."""
    return tuple(_compare(float_graph, quantized_graph, match) for match in matches)


def weight_values(
    float_graph: GraphIndex, quantized_graph: GraphIndex, match: WeightMatch
) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """(float weight, what the quantized model computes with), both float32 and of the float weight's shape."""
    return float_graph.constant(match.name), dequantized(quantized_graph, match)


def dequantized(graph: GraphIndex, match: WeightMatch) -> NDArray[np.float32]:
    """The numbers that the quantized model computes with, in the float weight's shape."""
    stored = graph.constant(match.quantized)
    unrounded = stored.dtype.kind == "f"
    values = match.quantization.round_trip(stored) if unrounded else match.quantization.dequantize(stored)
    return np.swapaxes(values, -1, -2) if match.transposed else values


def count_quantized_weights(graph: GraphIndex) -> int:
    """How many constants of a quantized model stand for weights, matched or not."""
    return len({name for name, _, _, _ in _quantized_weights(graph)})


def finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None


def _quantized_weights(graph: GraphIndex) -> Iterator[tuple[str, onnx.NodeProto, int, Quantization]]:
    """(constant, node that computes with it, place among that node's inputs, quantization)."""
    for use in integer_uses(graph):
        name = use.name
        if not graph.is_constant(name):
            # A float constant that goes through QuantizeLinear at run time, as TensorRT wants it.
            maker = graph.producers.get(name)
            if maker is None or maker.op_type != "QuantizeLinear" or not graph.is_constant(maker.input[0]):
                continue
            name = maker.input[0]
        node, place = use.node, use.place
        if node.op_type == "DequantizeLinear":
            readers = graph.consumers.get(node.output[0], [])
            if not readers:
                continue
            node, place = readers[0]
        yield name, node, place, use.quantization


def _float_name(
    float_graph: GraphIndex, quantized_graph: GraphIndex, quantized: str, node: onnx.NodeProto, place: int
) -> str | None:
    read_as = node.input[place]
    for candidate in (read_as, _WEIGHT_SUFFIX.sub("", read_as), _WEIGHT_SUFFIX.sub("", quantized), quantized):
        if float_graph.is_constant(candidate) and float_graph.tensor(candidate).data_type in _FLOATS:
            return candidate
    counterpart = float_graph.nodes.get(node.name) or float_graph.nodes.get(NODE_SUFFIX.sub("", node.name))
    # QLinearConv and its kin have the weight in place 3, the float operators in place 1.
    position = {3: 1, 8: 2, 6: 2}.get(place, place) if node.op_type.startswith("Q") else place
    if (
        counterpart is None
        or len(counterpart.input) <= position
        or not float_graph.is_constant(counterpart.input[position])
    ):
        return None
    return str(counterpart.input[position])


_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE)


def _layer_reader(graph: GraphIndex, name: str) -> tuple[onnx.NodeProto, int]:
    readers = graph.consumers.get(name, [])
    layers = [(node, place) for node, place in readers if node.op_type in _LAYERS]
    return next(iter([*layers, *readers]), (onnx.NodeProto(), 0))


def _is_transposed(
    float_graph: GraphIndex, quantized_graph: GraphIndex, name: str, quantized: str, quantization: Quantization
) -> bool | None:
    """Whether the last two axes are swapped; None where the shapes do not fit either way."""
    shape = tuple(float_graph.tensor(name).dims)
    other = tuple(quantized_graph.tensor(quantized).dims)
    swapped = (*other[:-2], *reversed(other[-2:]))
    if shape not in (other, swapped):
        return None
    if other != swapped or len(other) < 2:
        return shape != other
    values = float_graph.constant(name).astype(np.float32)
    match = WeightMatch(name, "", "", 0, quantized, quantization)
    straight = dequantized(quantized_graph, match)
    return bool(np.abs(values - straight).sum() > np.abs(values - np.swapaxes(straight, -1, -2)).sum())


def _compare(float_graph: GraphIndex, quantized_graph: GraphIndex, match: WeightMatch) -> WeightComparison:
    values, numbers = weight_values(float_graph, quantized_graph, match)
    total = OutputComparison(match.name)
    total.update(values, numbers)
    agreement = total.result()
    axis = _channel_axis(float_graph, match, values.ndim)
    worst: tuple[tuple[int, float], ...] = ()
    ratio = None
    if axis is not None:
        rows = np.moveaxis(values, axis, 0).reshape(values.shape[axis], -1).astype(np.float64)
        errors = np.moveaxis(values - numbers, axis, 0).reshape(values.shape[axis], -1).astype(np.float64)
        signal, noise = np.square(rows).sum(1), np.square(errors).sum(1)
        channels = [(c, decibels(float(signal[c]), float(noise[c]))) for c in np.flatnonzero(signal).tolist()]
        worst = tuple(sorted(channels, key=lambda pair: pair[1])[:_WORST_CHANNELS])
        extrema = np.abs(rows).max(1, initial=0)
        middle = float(np.median(extrema))
        ratio = float(extrema.max()) / middle if middle else None
    return WeightComparison(
        name=match.name,
        node=match.node,
        op_type=match.op_type,
        shape=tuple(values.shape),
        bits=match.quantization.bits,
        per_channel=match.quantization.per_channel,
        sqnr_db=agreement.sqnr_db,
        cosine=agreement.cosine,
        max_abs_error=agreement.max_abs_error,
        channel_axis=axis,
        worst_channels=worst,
        range_ratio=ratio,
        changed=_is_changed(values, numbers, match),
    )


def _is_changed(values: NDArray[Any], numbers: NDArray[np.float32], match: WeightMatch) -> bool:
    if match.quantization.bits > _WEIGHT_BITS:
        return False
    if match.transposed:
        values, numbers = np.swapaxes(values, -1, -2), np.swapaxes(numbers, -1, -2)
    moved = np.abs(match.quantization.round_trip(values) - numbers)
    return bool((moved > _LARGEST_ROUNDING * match.quantization.step(numbers.shape)).any())


def _channel_axis(graph: GraphIndex, match: WeightMatch, rank: int) -> int | None:
    """Output channels of the operators whose weights have them."""
    if rank < 2:
        return None
    if match.op_type == "Conv":
        return 0
    if match.op_type == "ConvTranspose":
        return 1
    if match.op_type == "Gemm":
        node = graph.nodes.get(match.node)
        return 0 if node is not None and attribute(node, "transB", 0) else 1
    if match.op_type in ("LSTM", "GRU", "RNN"):
        return 1
    return rank - 1
