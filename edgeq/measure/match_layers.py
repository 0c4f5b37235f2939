"""Match the tensors and weights of a quantized model with those of its float model.

For each activation X of the float model, find the corresponding tensor of the quantized model, in any format:

    QDQ         X → QuantizeLinear → DequantizeLinear → readers         X itself; it is quantized afterwards
                X_QuantizeLinear_Input → Q → DQ → X                     a graph output
    QOperator   X_quantized                                             an integer tensor with a constant scale
    dynamic     X → DynamicQuantizeLinear → readers                     X itself; the scale is computed at run time
    folded      Conv → Relu becomes Conv with a range that starts at 0  the convolution's tensor matches the Relu's
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.measure.comparison import OutputComparison, decibels
from edgeq.model.graph import (
    DATA_MOVEMENT,
    OPERATORS,
    GraphIndex,
    channel_axis,
    constant,
    constant_tensor,
    constant_values,
    consumers,
    integer_inputs,
    is_constant,
    name_of,
    node_input,
    operator_of,
)
from edgeq.model.quant_params import LIMITS, QuantParams, dynamic_params, params_at
from edgeq.model.shapes import element_types
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
class IntegerUse:
    """Describe an integer tensor, and how a node that reads it interprets it.

    Attributes:
        value: the tensor, an activation or a constant.
        node: the node that reads the tensor.
        place: index of the tensor among the node's inputs.
        params: scale and zero point of the tensor for this node.
    """

    value: ir.Value
    node: ir.Node
    place: int
    params: QuantParams


def integer_uses(graph: GraphIndex) -> Iterator[IntegerUse]:
    """Yield every integer input of every quantized operator, in order, if its scale is constant. This includes int32
    biases.
    """
    for node in graph.graph:
        for places in integer_inputs(node):
            value = node_input(node, places.value)
            if value is None:
                continue
            if places.scale is None:
                params = _scaled_sums(node, value, places.zero_point)
            else:
                axis = channel_axis(node)
                params = params_at(node, places.scale, places.zero_point, integers=value, axis=axis)
            if params is not None:
                yield IntegerUse(value, node, places.value, params)
        bias = _bias(node)
        if bias is not None:
            yield bias


def activation_params(graph: GraphIndex) -> dict[str, QuantParams]:
    """Return the scale and zero point of each integer activation by name, if they are constant."""
    found: dict[str, QuantParams] = {}
    for use in integer_uses(graph):
        if not is_constant(use.value):
            found.setdefault(name_of(use.value), use.params)
    for node in graph.graph:
        places = operator_of(node).integer_output
        if places is not None:
            made = params_at(node, *places, integers=node.outputs[0])
            if made is not None:
                found.setdefault(name_of(node.outputs[0]), made)
        elif node.op_type in DATA_MOVEMENT and node.inputs:
            moved = found.get(name_of(node.inputs[0]))
            if moved is not None:
                for output in node.outputs:
                    found.setdefault(name_of(output), moved)
    return found


def _scaled_sums(node: ir.Node, weight: ir.Value, zero_point: int) -> QuantParams | None:
    """Return the parameters of the weight of a ConvInteger or MatMulInteger. Return None if its scale is not found.

    The nodes after the operator cast its sums and multiply them by (activation scale x weight scale).
    """
    tensor = constant_tensor(weight)
    if tensor is None or tensor.dtype not in LIMITS:
        return None
    scale, zero_value = _constant_factor(node.outputs[0], depth=3), node_input(node, zero_point)
    zeros = constant(zero_value)
    if scale is None or (zero_value is not None and zeros is None):
        return None
    zero = np.zeros((), np.int64) if zeros is None else zeros.astype(np.int64)
    return QuantParams(scale.astype(np.float32), zero, tensor.dtype, axis=channel_axis(node))


def _constant_factor(value: ir.Value, *, depth: int) -> NDArray[Any] | None:
    """Return the constant by which a tensor is multiplied. The constant may be the other factor of a product, or a part
    of that factor.
    """
    for node, place in value.uses() if depth else []:
        if node.op_type == "Cast":
            return _constant_factor(node.outputs[0], depth=depth - 1)
        if node.op_type == "Mul":
            other = node.inputs[1 - place]
            maker = other.producer() if other is not None else None
            parts = [other, *(maker.inputs if maker is not None and maker.op_type == "Mul" else ())]
            return next((found for found in map(constant, parts) if found is not None), None)
    return None


def _bias(node: ir.Node) -> IntegerUse | None:
    """Return the int32 bias of a QLinearConv or QGemm. Its zero point is 0, and its scale is the scale of the input
    times that of the weight.
    """
    row = operator_of(node)
    bias = node_input(node, row.bias)
    if bias is None or row.bias is None or row.integer_output is None or not is_constant(bias):
        return None
    scales = [constant(node_input(node, places.scale)) for places in row.integers]
    if scales[0] is None or scales[1] is None:
        return None
    scale = (scales[0] * scales[1]).astype(np.float32)
    return IntegerUse(bias, node, row.bias, QuantParams(scale, np.zeros((), np.int64), ir.DataType.INT32))


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
    found: dict[str, WeightMatch] = {}
    for use in _quantized_weights(quantized_graph):
        name = _float_name(float_graph, use)
        if name is None or name in found:
            continue
        weight = float_graph.values[name]
        transposed = _is_transposed(weight, use)
        if transposed is not None:
            reader, position = _layer_reader(weight)
            found[name] = WeightMatch(
                name=name,
                node=(reader.name or "") if reader is not None else "",
                op_type=reader.op_type if reader is not None else "",
                place=position,
                channel_axis=_channel_axis(reader, len(_shape(weight))),
                quantized=name_of(use.value),
                params=use.params,
                transposed=transposed,
            )
    order = {name_of(v): rank for rank, node in enumerate(float_graph.graph) for v in reversed(node.inputs)}
    return tuple(sorted(found.values(), key=lambda match: (order.get(match.name, 0), match.place)))


def compare_weights(
    float_graph: GraphIndex, quantized_graph: GraphIndex, matches: Sequence[WeightMatch]
) -> tuple[WeightComparison, ...]:
    """Compare each weight with its float weight, as a whole and for its worst channels. Only one weight is in memory at
    a time.
    """
    return tuple(_compare(float_graph, quantized_graph, match) for match in matches)


def weight_values(
    float_graph: GraphIndex, quantized_graph: GraphIndex, match: WeightMatch
) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Return the float weight, and the values with which the quantized model computes.

    Both arrays have the shape of the float weight. The second array is float32.
    """
    values = _dequantized(quantized_graph.constant(match.quantized), match.params)
    return float_graph.constant(match.name), np.swapaxes(values, -1, -2) if match.transposed else values


def count_quantized_weights(graph: GraphIndex) -> int:
    """Return how many constants of a quantized model are weights, whether they match a float weight or not."""
    return len({use.value for use in _quantized_weights(graph)})


def _dequantized(stored: NDArray[Any], params: QuantParams) -> NDArray[np.float32]:
    return params.fake_quant(stored) if stored.dtype.kind == "f" else params.dequantize(stored)


def _quantized_weights(graph: GraphIndex) -> Iterator[IntegerUse]:
    """Yield each constant that is a weight, with the node that computes with it."""
    for use in integer_uses(graph):
        # A float constant may be quantized by a QuantizeLinear at run time, as TensorRT requires.
        maker = use.value.producer()
        weight = maker.inputs[0] if maker is not None and maker.op_type == "QuantizeLinear" else use.value
        readers = [(use.node, use.place)]
        if use.node.op_type == "DequantizeLinear":
            readers = consumers(use.node.outputs[0])
        if weight is not None and is_constant(weight) and readers:
            yield IntegerUse(weight, *readers[0], use.params)


def _float_name(float_graph: GraphIndex, use: IntegerUse) -> str | None:
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
    own, its = ((*r.activations, *r.weights, r.bias) for r in (row, OPERATORS.get(row.float_form, row)))
    place = dict(zip(own, its, strict=False)).get(use.place)
    weight = node_input(counterpart, use.place if place is None else place)
    return name_of(weight) if is_constant(weight) else None


def _layer_reader(weight: ir.Value) -> tuple[ir.Node | None, int]:
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
    shape, other = _shape(weight), _shape(use.value)
    swapped = (*other[:-2], *reversed(other[-2:]))
    if shape not in (other, swapped):
        return None
    if other != swapped or len(other) < 2:
        return shape != other
    values, straight = constant_values(weight).astype(np.float32), _dequantized(constant_values(use.value), use.params)
    off = np.abs(values - straight).sum()
    return bool(off > np.abs(values - np.swapaxes(straight, -1, -2)).sum())


def _compare(float_graph: GraphIndex, quantized_graph: GraphIndex, match: WeightMatch) -> WeightComparison:
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


def _channel_axis(reader: ir.Node | None, rank: int) -> int | None:
    """Return the axis of the output channels of a weight with `rank` axes. Return None if it has fewer than two
    axes.
    """
    if rank < 2 or reader is None:
        return None if rank < 2 else rank - 1
    # Gates and units share the second axis, after the directions.
    return 1 if operator_of(reader).mac_rule == "recurrent" else channel_axis(reader) % rank


# Activation functions that an integer range can replace, because the range clips all values outside anyway.
_CLIPPING = frozenset({"Relu", "Clip"})
# Prefix of operators that quantize their first input themselves.
_DYNAMIC = "DynamicQuantize"
_ACTIVATION_TYPES = (None, ir.DataType.FLOAT, ir.DataType.FLOAT16)
INPUT = "Input"
Kind = Literal["static", "dynamic", "float"]


@dataclass(frozen=True, eq=False)
class ActivationMatch:
    """Pair an activation of the float model with its counterpart in the quantized model.

    Attributes:
        name: name of the tensor in the float model.
        node, op_type: the float node that computes the tensor, which is the node to exclude from quantization; "" and
            "Input" for a graph input.
        folded: type of an activation function that follows the node in the float model, and that the range replaces in
            the quantized model; "" if there is none.
        computed: name of the tensor that the layer computes in the quantized model. It contains floats before
            QuantizeLinear, or integers.
        integer: whether `computed` contains integers with `params`.
        params: constant scale and zero point; None if the tensor stays float or is quantized dynamically.
        dynamic: whether the scale is computed at run time.
    """

    name: str
    node: str
    op_type: str
    computed: str
    folded: str = ""
    integer: bool = False
    params: QuantParams | None = None
    dynamic: bool = False

    @property
    def kind(self) -> Kind:
        """Return the kind of quantization: "static", "dynamic", or "float" if the tensor is not quantized."""
        return "static" if self.params is not None else "dynamic" if self.dynamic else "float"

    @property
    def range(self) -> tuple[float, float] | None:
        """Return the smallest and the largest number that the tensor can represent. Return None if it has no static
        scale.
        """
        return None if self.params is None else self.params.range

    def as_read(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the values that readers of the tensor get in the quantized model if the layer computes `values`."""
        if self.params is not None and values.dtype.kind in "iu":
            return self.params.dequantize(values)
        params = dynamic_params(values) if self.dynamic else self.params
        return values if params is None else params.fake_quant(values)

    @property
    def is_input(self) -> bool:
        """Return whether the activation is an input of the model, which no layer computes."""
        return self.op_type == INPUT


def match_activations(float_graph: GraphIndex, quantized_graph: GraphIndex) -> tuple[ActivationMatch, ...]:
    """Return the activations that both models have, in the float model's order of execution. Graph inputs come first.

    Tensors computed only from constants are left out. A tensor whose type cannot be inferred is kept, because only the
    runtime knows whether it contains floats (`edgeq.measure.layers.LayerPair`).
    """
    matcher = _Matcher(float_graph, quantized_graph)
    types = element_types(float_graph)
    found: dict[str, ActivationMatch] = {}
    for name in float_graph.inputs:
        if name in quantized_graph.inputs and types.get(name) in _ACTIVATION_TYPES:
            found[name] = matcher.describe(name, name, None)
    for node in float_graph.graph:
        for place, name in enumerate(map(name_of, node.outputs)):
            if not name or name in float_graph.computed_constants or types.get(name) not in _ACTIVATION_TYPES:
                continue
            counterpart = matcher.counterpart(name, node, place)
            before = found.get(name_of(node.inputs[0])) if node.op_type in _CLIPPING else None
            if counterpart is not None:
                found[name] = matcher.describe(name, counterpart, node)
            elif before is not None and matcher.is_folded(before, node):
                del found[before.name]
                found[name] = matcher.describe(name, before.computed, node)
    return tuple(found.values())


def exact_readers(
    float_graph: GraphIndex, quantized_graph: GraphIndex, matches: Iterable[ActivationMatch]
) -> frozenset[tuple[str, str]]:
    """Return (tensor, float node) for each node that, in the quantized model, reads a tensor before it is quantized.

    An example is a residual Add next to a MatMul that quantizes its input. For a graph output of this kind, the pair is
    (tensor, "").
    """
    found = set()
    for match in matches:
        if match.integer or (match.params is None and not match.dynamic):
            continue
        for reader, _ in consumers(quantized_graph.values[match.computed]):
            counterpart = float_graph.nodes.get(reader.name or "")
            if counterpart is not None and counterpart.op_type == reader.op_type:
                found.add((match.name, reader.name or ""))
        if match.computed in quantized_graph.outputs:
            found.add((match.name, ""))
    return frozenset(found)


class _Matcher:
    def __init__(self, float_graph: GraphIndex, quantized_graph: GraphIndex) -> None:
        self._float = float_graph
        self._quantized = quantized_graph
        self._integers = activation_params(quantized_graph)

    def counterpart(self, name: str, node: ir.Node, place: int) -> str | None:
        """Return the quantized model's tensor of the same name, or else the output of its node of the same name. Return
        None if neither exists.
        """
        if self._maker(name) is not None:
            return name
        if f"{name}_quantized" in self._integers:
            return f"{name}_quantized"
        for candidate in (node.name, f"{node.name}_quant") if node.name else ():
            other = self._quantized.nodes.get(candidate)
            if other is None or len(other.outputs) <= place:
                continue
            made = name_of(other.outputs[place])
            same = made in self._integers or other.op_type == node.op_type
            # If an activation function was folded away, the layer computes the tensor of that function, which is found
            # by its name.
            original = self._float.values.get(made.removesuffix("_quantized").removesuffix("_QuantizeLinear_Input"))
            if same and (original is None or original.producer() is None):
                return made
        return None

    def describe(self, name: str, counterpart: str, node: ir.Node | None) -> ActivationMatch:
        """Return the match for `counterpart`: which tensor its layer computes, and how it is quantized."""
        computed, integer, params, dynamic = self._computed(counterpart)
        if node is None:
            return ActivationMatch(name, "", INPUT, computed, "", integer, params, dynamic)
        layer, folded = node, ""
        maker = self._maker(computed)
        if node.op_type in _CLIPPING and maker is not None and maker.op_type != node.op_type:
            made_by = maker.name or ""
            source = self._float.nodes.get(made_by) or self._float.nodes.get(NODE_SUFFIX.sub("", made_by))
            if source is not None:
                layer, folded = source, node.op_type
        return ActivationMatch(name, layer.name or "", layer.op_type, computed, folded, integer, params, dynamic)

    def is_folded(self, before: ActivationMatch, activation: ir.Node) -> bool:
        """Return whether an activation function was removed because the range of the tensor before it has the same
        effect.
        """
        params = before.params
        if params is None:
            return False
        if any(reader.op_type in _CLIPPING for reader in self._readers(before.computed)):
            return False
        return activation.op_type != "Relu" or params.range[0] >= -0.5 * float(params.scale.min())

    def _maker(self, name: str) -> ir.Node | None:
        value = self._quantized.values.get(name)
        return value.producer() if value is not None else None

    def _computed(self, counterpart: str) -> tuple[str, bool, QuantParams | None, bool]:
        """Return (tensor that the layer computes, whether it is integer, its parameters, whether its scale is
        dynamic).
        """
        maker = self._maker(counterpart)
        if maker is not None and maker.op_type == "DequantizeLinear":
            integers = name_of(maker.inputs[0])
            if integers in self._integers:
                source = self._maker(integers)
                if source is not None and source.op_type == "QuantizeLinear":
                    return name_of(source.inputs[0]), False, self._integers[integers], False
                return integers, True, self._integers[integers], False
        if counterpart in self._integers:
            return counterpart, True, self._integers[counterpart], False
        readers = consumers(self._quantized.values[counterpart])
        for reader, _ in readers:
            if reader.op_type == "QuantizeLinear" and name_of(reader.outputs[0]) in self._integers:
                return counterpart, False, self._integers[name_of(reader.outputs[0])], False
        dynamic = any(reader.op_type.startswith(_DYNAMIC) and place == 0 for reader, place in readers)
        return counterpart, False, None, dynamic

    def _readers(self, computed: str) -> list[ir.Node]:
        """Return the nodes that read a tensor, directly or after it is quantized and dequantized."""
        values, readers = [self._quantized.values[computed]], []
        for value in values:
            for reader, _ in consumers(value):
                readers.append(reader)
                if reader.op_type in ("QuantizeLinear", "DequantizeLinear"):
                    values.append(reader.outputs[0])
        return readers
