"""Match the weights of a quantized model with those of its float model, and measure how far each one moved."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.measure.comparison import OutputComparison
from edgeq.measure.integer_uses import IntegerUse, find_integer_uses
from edgeq.measure.power_ratios import decibels
from edgeq.model.graph import (
    OPERATORS,
    GraphIndex,
    channel_axis,
    constant_tensor,
    constant_values,
    consumers,
    is_constant,
    name_of,
    node_input,
    operator_of,
)
from edgeq.model.quant_params import QuantParams
from edgeq.util.records import write_as

# Suffixes that quantizers append to the names of weights and nodes.
_WEIGHT_SUFFIX = re.compile(r"(_DequantizeLinear_Output|_quantized|_QuantizeLinear_Output)$")
NODE_SUFFIX = re.compile(r"(_MatMul)?_quant$")
# Operators that look up rows of a weight.
_LOOKUPS = frozenset({"Gather", "EmbedLayerNormalization"})
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)
_WORST_CHANNELS = 3
# Largest change of a weight, in steps, that rounding can explain. Rounding to nearest moves a weight by at most half a
# step. Other rounding methods (AdaRound) move it by less than one and a half steps.
_LARGEST_ROUNDING = 1.5
# The steps of an int32 bias are so small that a correction moves it by many steps.
_WEIGHT_BITS = 16


@dataclass(frozen=True, eq=False)
class WeightMatch:
    """Pair a weight of the float model with its counterpart in the quantized model.

    Attributes:
        name: name in the float model.
        node, op_type: the first float node that reads the weight.
        place: index of the weight among that node's inputs.
        channel_axis: axis of the output channels in the float model; None if there is none.
        quantized: name of the constant in the quantized model. It contains integers, or floats that are not rounded
            yet.
        params: scale and zero point of the integers.
        transposed: whether the last two axes are swapped in the quantized model.
    """

    name: str
    node: str
    op_type: str
    place: int
    channel_axis: int | None
    quantized: str
    params: QuantParams
    transposed: bool = False


def _channels(worst: tuple[tuple[int, float], ...]) -> list[dict[str, Any]]:
    return [{"channel": channel, "sqnr_db": db} for channel, db in worst]


@dataclass(frozen=True)
class WeightComparison:
    """Hold figures on how well a quantized weight represents the float weight.

    Attributes:
        shape: shape of the float weight.
        bits: bits of the integers; 32 for a bias.
        sqnr_db, cosine, max_abs_error: figures over all elements; see `OutputAgreement`.
        channel_axis: axis of the output channels; None if there is none.
        worst_channels: (channel, SQNR in dB), worst first; channels of zeros are left out.
        range_ratio: ratio of the largest to the median absolute maximum of the channels. It shows the cost of one scale
            for all channels.
        changed: True if the weight differs by more than rounding and clipping can explain. The weight was then changed
            before it was quantized (BatchNormalization folded, layers equalized).
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
    worst_channels: tuple[tuple[int, float], ...] = field(metadata=write_as(form=_channels))
    range_ratio: float | None
    changed: bool


def match_weights(float_graph: GraphIndex, quantized_graph: GraphIndex) -> tuple[WeightMatch, ...]:
    """Return the weights of the float model that are integers in the quantized model, in the float model's order of
    execution.

    Weights match by name, without the suffixes of quantizers, or else by the name of the node that reads them. The
    scales may be per tensor, per channel or per block. The supported formats are QDQ (constants before or after
    QuantizeLinear), QOperator and dynamic operators.
    """
    matches: dict[str, WeightMatch] = {}
    for use in _find_quantized_weights(quantized_graph):
        name = _find_float_name(float_graph, use)
        if name is None or name in matches:
            continue
        weight = float_graph.values[name]
        transposed = _is_transposed(weight, use)
        if transposed is not None:
            reader, position = _find_layer_reader(weight)
            matches[name] = WeightMatch(
                name=name,
                node=(reader.name or "") if reader is not None else "",
                op_type=reader.op_type if reader is not None else "",
                place=position,
                channel_axis=_find_channel_axis(reader, len(_shape(weight))),
                quantized=name_of(use.value),
                params=use.params,
                transposed=transposed,
            )
    order = {name_of(v): rank for rank, node in enumerate(float_graph.graph) for v in reversed(node.inputs)}
    return tuple(sorted(matches.values(), key=lambda match: (order.get(match.name, 0), match.place)))


def compare_weights(
    float_graph: GraphIndex, quantized_graph: GraphIndex, matches: Sequence[WeightMatch]
) -> tuple[WeightComparison, ...]:
    """Compare each weight with its float weight, as a whole and for its worst channels. Only one weight is in memory at
    a time.
    """
    return tuple(_compare_weight(float_graph, quantized_graph, match) for match in matches)


def weight_values(
    float_graph: GraphIndex, quantized_graph: GraphIndex, match: WeightMatch
) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Return the float weight, and the values with which the quantized model computes.

    Both arrays have the shape of the float weight. The second array is float32.
    """
    values = _dequantize(quantized_graph.constant(match.quantized), match.params)
    return float_graph.constant(match.name), np.swapaxes(values, -1, -2) if match.transposed else values


def count_quantized_weights(graph: GraphIndex) -> int:
    """Return how many constants of a quantized model are weights, whether they match a float weight or not."""
    return len({use.value for use in _find_quantized_weights(graph)})


def _dequantize(stored: NDArray[Any], params: QuantParams) -> NDArray[np.float32]:
    return params.fake_quant(stored) if stored.dtype.kind == "f" else params.dequantize(stored)


def _find_quantized_weights(graph: GraphIndex) -> Iterator[IntegerUse]:
    """Yield each constant that is a weight, with the node that computes with it."""
    for use in find_integer_uses(graph):
        # A float constant may be quantized by a QuantizeLinear at run time, as TensorRT requires.
        maker = use.value.producer()
        weight = maker.inputs[0] if maker is not None and maker.op_type == "QuantizeLinear" else use.value
        readers = [(use.node, use.place)]
        if use.node.op_type == "DequantizeLinear":
            readers = consumers(use.node.outputs[0])
        if weight is not None and is_constant(weight) and readers:
            yield IntegerUse(weight, *readers[0], use.params)


def _find_float_name(float_graph: GraphIndex, use: IntegerUse) -> str | None:
    """Return the name of the float constant from which a quantized constant was made. Return None if it is not
    found.
    """
    read_as, stored_as = name_of(use.node.inputs[use.place]), name_of(use.value)
    for candidate in (read_as, _WEIGHT_SUFFIX.sub("", read_as), _WEIGHT_SUFFIX.sub("", stored_as), stored_as):
        tensor = constant_tensor(float_graph.values.get(candidate))
        if tensor is not None and tensor.dtype in _FLOATS:
            return candidate
    name = use.node.name or ""
    counterpart = float_graph.nodes.get(name) or float_graph.nodes.get(NODE_SUFFIX.sub("", name))
    if counterpart is None:
        return None
    # In the float form of a node, the weight may be another input.
    row = operator_of(use.node)
    places, float_places = ((*r.activations, *r.weights, r.bias) for r in (row, OPERATORS.get(row.float_form, row)))
    place = dict(zip(places, float_places, strict=False)).get(use.place)
    weight = node_input(counterpart, use.place if place is None else place)
    return name_of(weight) if is_constant(weight) else None


def _find_layer_reader(weight: ir.Value) -> tuple[ir.Node | None, int]:
    """Return the first layer that reads a weight, with the index of the input. If no layer reads it, return the first
    node that does.
    """
    readers = consumers(weight)
    layers = [(node, place) for node, place in readers if operator_of(node).weights or node.op_type in _LOOKUPS]
    return next(iter([*layers, *readers]), (None, 0))


def _shape(value: ir.Value) -> tuple[int, ...]:
    tensor = constant_tensor(value)
    assert tensor is not None
    return tuple(int(size) for size in tensor.shape)  # type: ignore[arg-type]


def _is_transposed(weight: ir.Value, use: IntegerUse) -> bool | None:
    """Return whether the last two axes are swapped in the quantized model. Return None if the shapes do not fit either
    way.
    """
    shape, quantized_shape = _shape(weight), _shape(use.value)
    swapped = (*quantized_shape[:-2], *reversed(quantized_shape[-2:]))
    if shape not in (quantized_shape, swapped):
        return None
    if quantized_shape != swapped or len(quantized_shape) < 2:
        return shape != quantized_shape
    values, straight = constant_values(weight).astype(np.float32), _dequantize(constant_values(use.value), use.params)
    off = np.abs(values - straight).sum()
    return bool(off > np.abs(values - np.swapaxes(straight, -1, -2)).sum())


def _compare_weight(float_graph: GraphIndex, quantized_graph: GraphIndex, match: WeightMatch) -> WeightComparison:
    values, numbers = weight_values(float_graph, quantized_graph, match)
    total = OutputComparison(match.name)
    total.update(values, numbers)
    agreement = total.result()
    axis = match.channel_axis
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
        bits=match.params.bits,
        per_channel=match.params.per_channel,
        sqnr_db=agreement.sqnr_db,
        cosine=agreement.cosine,
        max_abs_error=agreement.max_abs_error,
        channel_axis=axis,
        worst_channels=worst,
        range_ratio=ratio,
        changed=_is_changed(values, numbers, match),
    )


def _is_changed(values: NDArray[Any], numbers: NDArray[np.float32], match: WeightMatch) -> bool:
    if match.params.bits > _WEIGHT_BITS:
        return False
    if match.transposed:
        values, numbers = np.swapaxes(values, -1, -2), np.swapaxes(numbers, -1, -2)
    moved = np.abs(match.params.fake_quant(values) - numbers)
    return bool((moved > _LARGEST_ROUNDING * match.params.spread(numbers.shape)[0]).any())


def _find_channel_axis(reader: ir.Node | None, rank: int) -> int | None:
    """Return the axis of the output channels of a weight with `rank` axes. Return None if it has fewer than two
    axes.
    """
    if rank < 2 or reader is None:
        return None if rank < 2 else rank - 1
    # Gates and units share the second axis, after the directions.
    return 1 if operator_of(reader).mac_rule == "recurrent" else channel_axis(reader) % rank
