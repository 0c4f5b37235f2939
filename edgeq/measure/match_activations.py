"""Match the activations of a quantized model with those of its float model.

For each activation X of the float model, find the corresponding tensor of the quantized model, in any format:

    QDQ         X → QuantizeLinear → DequantizeLinear → readers         X itself; it is quantized afterwards
                X_QuantizeLinear_Input → Q → DQ → X                     a graph output
    QOperator   X_quantized                                             an integer tensor with a constant scale
    dynamic     X → DynamicQuantizeLinear → readers                     X itself; the scale is computed at run time
    folded      Conv → Relu becomes Conv with a range that starts at 0  the convolution's tensor matches the Relu's
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.measure.integer_uses import find_activation_params
from edgeq.measure.match_weights import NODE_SUFFIX
from edgeq.model.graph import (
    GraphIndex,
    consumers,
    name_of,
)
from edgeq.model.quant_params import QuantParams, dynamic_params
from edgeq.model.shapes import element_types

# Activation functions that an integer range can replace, because the range clips all values outside anyway.
_CLIPPING = frozenset({"Relu", "Clip"})
# Prefix of operators that quantize their first input themselves.
_DYNAMIC = "DynamicQuantize"
# None stands for a type that shape inference did not find.
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
    matches: dict[str, ActivationMatch] = {}
    for name in float_graph.inputs:
        if name in quantized_graph.inputs and types.get(name) in _ACTIVATION_TYPES:
            matches[name] = matcher.describe(name, name, None)
    for node in float_graph.graph:
        for place, name in enumerate(map(name_of, node.outputs)):
            if not name or name in float_graph.computed_constants or types.get(name) not in _ACTIVATION_TYPES:
                continue
            counterpart = matcher.counterpart(name, node, place)
            previous = matches.get(name_of(node.inputs[0])) if node.op_type in _CLIPPING else None
            if counterpart is not None:
                matches[name] = matcher.describe(name, counterpart, node)
            elif previous is not None and matcher.is_folded(previous, node):
                # The quantized layer computes the result of the activation function, so the tensor before it has no
                # counterpart.
                del matches[previous.name]
                matches[name] = matcher.describe(name, previous.computed, node)
    return tuple(matches.values())


def find_exact_readers(
    float_graph: GraphIndex, quantized_graph: GraphIndex, matches: Iterable[ActivationMatch]
) -> frozenset[tuple[str, str]]:
    """Return (tensor, float node) for each node that, in the quantized model, reads a tensor before it is quantized.

    An example is a residual Add next to a MatMul that quantizes its input. For a graph output of this kind, the pair is
    (tensor, "").
    """
    pairs = set()
    for match in matches:
        # Integers are read only in rounded form, and a tensor that stays float has no other form.
        if match.integer or (match.params is None and not match.dynamic):
            continue
        for reader, _ in consumers(quantized_graph.values[match.computed]):
            counterpart = float_graph.nodes.get(reader.name or "")
            if counterpart is not None and counterpart.op_type == reader.op_type:
                pairs.add((match.name, reader.name or ""))
        if match.computed in quantized_graph.outputs:
            pairs.add((match.name, ""))
    return frozenset(pairs)


class _Matcher:
    def __init__(self, float_graph: GraphIndex, quantized_graph: GraphIndex) -> None:
        self._float = float_graph
        self._quantized = quantized_graph
        self._integers = find_activation_params(quantized_graph)

    def counterpart(self, name: str, node: ir.Node, place: int) -> str | None:
        """Return the quantized model's tensor of the same name, or else the output of its node of the same name. Return
        None if neither exists.
        """
        if self._maker(name) is not None:
            return name
        # ONNX Runtime's quantizer gives this name to the integers of a tensor in QOperator format.
        if f"{name}_quantized" in self._integers:
            return f"{name}_quantized"
        for candidate in (node.name, f"{node.name}_quant") if node.name else ():
            quantized_node = self._quantized.nodes.get(candidate)
            if quantized_node is None or len(quantized_node.outputs) <= place:
                continue
            tensor = name_of(quantized_node.outputs[place])
            fits = tensor in self._integers or quantized_node.op_type == node.op_type
            # If an activation function was folded away, the layer computes the tensor of that function, which is found
            # by its name.
            original = self._float.values.get(tensor.removesuffix("_quantized").removesuffix("_QuantizeLinear_Input"))
            if fits and (original is None or original.producer() is None):
                return tensor
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

    def is_folded(self, previous: ActivationMatch, activation: ir.Node) -> bool:
        """Return whether an activation function was removed because the range of the tensor before it has the same
        effect.
        """
        params = previous.params
        if params is None:
            return False
        if any(reader.op_type in _CLIPPING for reader in self._readers(previous.computed)):
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
