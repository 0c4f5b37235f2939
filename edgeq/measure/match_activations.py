"""Which tensor of a quantized model stands for which activation of the float model, whatever the format.

QDQ         X → QuantizeLinear → DequantizeLinear → readers         X itself, and how it is quantized behind that
            X_QuantizeLinear_Input → Q → DQ → X                     a graph output
QOperator   X_quantized                                             an integer tensor with a constant scale
dynamic     X → DynamicQuantizeLinear → readers                     X itself; the scale is made at run time
folded      Conv → Relu becomes Conv with a range that starts at 0  the convolution's tensor stands for the Relu's
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import onnx_ir as ir

from edgeq.graph.index import GraphIndex
from edgeq.graph.quant_params import QuantParams
from edgeq.graph.query import consumers, name_of
from edgeq.measure.match_weights import NODE_SUFFIX
from edgeq.measure.quantization import activation_params
from edgeq.model.shapes import element_types

# Activations that an integer range can take over: everything outside it is clipped anyway.
_CLIPPING = frozenset({"Relu", "Clip"})
# Operators that quantize their first input themselves.
_DYNAMIC = "DynamicQuantize"
_FLOATS = (None, ir.DataType.FLOAT, ir.DataType.FLOAT16)
INPUT = "Input"


@dataclass(frozen=True, eq=False)
class ActivationMatch:
    """An activation in both models.

    Attributes:
        name: the tensor in the float model.
        node, op_type: the float node that computes it, which is the one to exclude from quantization; "" and "Input"
            for a graph input.
        folded: type of the activation that followed that node in the float model and is part of the range now; "".
        computed: the tensor of the quantized model as its layer gives it: float before QuantizeLinear, or integers.
        integer: whether `computed` holds integers, of `params`.
        params: constant scale and zero point; None where it stays float or is quantized dynamically.
        dynamic: its scale is made at run time.
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
    def is_input(self) -> bool:
        """Whether it is an input of the model, which no layer computes."""
        return self.op_type == INPUT


def match_activations(float_graph: GraphIndex, quantized_graph: GraphIndex) -> tuple[ActivationMatch, ...]:
    """Activations that both models have, in the float model's order of execution, graph inputs first.

    Tensors computed from constants alone are left out. A tensor whose type cannot be inferred is kept: only the runtime
    knows whether it holds floats (`edgeq.measure.layer_runs.floats_only`).
    """
    matcher = _Matcher(float_graph, quantized_graph)
    types = element_types(float_graph.model)
    found: dict[str, ActivationMatch] = {}
    for name in float_graph.inputs:
        if name in quantized_graph.inputs and types.get(name) in _FLOATS:
            found[name] = matcher.describe(name, name, None)
    for node in float_graph.graph:
        for place, name in enumerate(map(name_of, node.outputs)):
            if not name or name in float_graph.computed_constants or types.get(name) not in _FLOATS:
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
    """(tensor, float node) where the quantized model's node of that name reads the tensor before it is quantized, as a
    residual Add does beside a MatMul that quantizes its input; (tensor, "") where it is a graph output like that."""
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
        """The quantized model's tensor of the same name, or the one that its node of the same name makes."""
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
            # Where an activation was folded away, the layer gives the tensor of that activation: found by its name.
            original = self._float.values.get(made.removesuffix("_quantized").removesuffix("_QuantizeLinear_Input"))
            if same and (original is None or original.producer() is None):
                return made
        return None

    def describe(self, name: str, counterpart: str, node: ir.Node | None) -> ActivationMatch:
        """Follow `counterpart` to where its layer computes it, and to how it is quantized."""
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
        """Whether the range of the tensor in front of an activation, which is gone, has taken its place."""
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
        """(tensor as computed, whether integer, its parameters, whether dynamic)."""
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
        """Nodes that read a tensor, or what quantizing and dequantizing makes of it."""
        values, readers = [self._quantized.values[computed]], []
        for value in values:
            for reader, _ in consumers(value):
                readers.append(reader)
                if reader.op_type in ("QuantizeLinear", "DequantizeLinear"):
                    values.append(reader.outputs[0])
        return readers
