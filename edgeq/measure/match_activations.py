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

import onnx

from edgeq.measure.graphs import GraphIndex
from edgeq.measure.match_weights import NODE_SUFFIX
from edgeq.measure.quantization import Quantization, activation_quantizations
from edgeq.model.skeleton import proto_skeleton

# Activations that an integer range can take over: everything outside it is clipped anyway.
_CLIPPING = frozenset({"Relu", "Clip"})
# Operators that quantize the float tensor in their first place themselves.
_DYNAMIC = frozenset({"DynamicQuantizeLinear", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM"})
_FLOATS = frozenset({onnx.TensorProto.UNDEFINED, onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16})
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
        integer: whether `computed` holds integers, to be read by `quantization`.
        quantization: constant scale and zero point; None where it stays float or is quantized dynamically.
        dynamic: its scale is made at run time.
    """

    name: str
    node: str
    op_type: str
    computed: str
    folded: str = ""
    integer: bool = False
    quantization: Quantization | None = None
    dynamic: bool = False

    @property
    def is_input(self) -> bool:
        return self.op_type == INPUT


def match_activations(float_graph: GraphIndex, quantized_graph: GraphIndex) -> tuple[ActivationMatch, ...]:
    """Activations that both models have, in the float model's order of execution, graph inputs first.

    A tensor that is computed from constants alone is none. Where types cannot be inferred, whoever fetches the tensor
    learns whether it holds floats.
    """
    matcher = _Matcher(float_graph, quantized_graph)
    types = element_types(float_graph.model)
    found: dict[str, ActivationMatch] = {}
    for name in float_graph.inputs:
        if name in quantized_graph.inputs and types.get(name, 0) in _FLOATS:
            found[name] = matcher.describe(name, name, None)
    for node in float_graph.model.graph.node:
        for place, name in enumerate(node.output):
            if not name or name in float_graph.computed_constants or types.get(name, 0) not in _FLOATS:
                continue
            counterpart = matcher.counterpart(name, node, place)
            if counterpart is not None:
                found[name] = matcher.describe(name, counterpart, node)
            elif node.op_type in _CLIPPING and node.input[0] in found:
                before = found[node.input[0]]
                if matcher.is_folded(before, node):
                    del found[node.input[0]]
                    found[name] = matcher.describe(name, before.computed, node)
    return tuple(found.values())


def exact_readers(
    float_graph: GraphIndex, quantized_graph: GraphIndex, matches: Iterable[ActivationMatch]
) -> frozenset[tuple[str, str]]:
    """(tensor, float node) where the quantized model's node of that name reads the tensor before it is quantized, as a
    residual Add does beside a MatMul that quantizes its input; (tensor, "") where it is a graph output like that."""
    found = set()
    for match in matches:
        if match.integer or (match.quantization is None and not match.dynamic):
            continue
        for reader, _ in quantized_graph.consumers.get(match.computed, []):
            counterpart = float_graph.nodes.get(reader.name)
            if counterpart is not None and counterpart.op_type == reader.op_type:
                found.add((match.name, counterpart.name))
        if match.computed in quantized_graph.outputs:
            found.add((match.name, ""))
    return frozenset(found)


class _Matcher:
    def __init__(self, float_graph: GraphIndex, quantized_graph: GraphIndex) -> None:
        self._float = float_graph
        self._quantized = quantized_graph
        self._integers = activation_quantizations(quantized_graph)

    def counterpart(self, name: str, node: onnx.NodeProto, place: int) -> str | None:
        """The quantized model's tensor of the same name, or the one that its node of the same name makes."""
        if name in self._quantized.producers:
            return name
        if f"{name}_quantized" in self._integers:
            return f"{name}_quantized"
        for candidate in (node.name, f"{node.name}_quant") if node.name else ():
            other = self._quantized.nodes.get(candidate)
            if other is None or len(other.output) <= place:
                continue
            made = str(other.output[place])
            same = made in self._integers or other.op_type == node.op_type
            # Where an activation was folded away, the layer gives the tensor of that activation: found by its name.
            original = made.removesuffix("_quantized").removesuffix("_QuantizeLinear_Input")
            if same and original not in self._float.producers:
                return made
        return None

    def describe(self, name: str, counterpart: str, node: onnx.NodeProto | None) -> ActivationMatch:
        """Follow `counterpart` to where its layer computes it, and to how it is quantized."""
        computed, integer, quantization, dynamic = self._computed(counterpart)
        if node is None:
            return ActivationMatch(name, "", INPUT, computed, "", integer, quantization, dynamic)
        layer, folded = node, ""
        maker = self._quantized.producers.get(computed)
        if node.op_type in _CLIPPING and maker is not None and maker.op_type != node.op_type:
            source = self._float.nodes.get(maker.name) or self._float.nodes.get(NODE_SUFFIX.sub("", maker.name))
            if source is not None and source.name:
                layer, folded = source, node.op_type
        return ActivationMatch(name, layer.name, layer.op_type, computed, folded, integer, quantization, dynamic)

    def is_folded(self, before: ActivationMatch, activation: onnx.NodeProto) -> bool:
        """Whether the range of the tensor in front of an activation, which is gone, has taken its place."""
        how = before.quantization
        if how is None:
            return False
        readers = [node for name in self._carriers(before.computed) for node, _ in self._quantized.consumers[name]]
        if any(reader.op_type in _CLIPPING for reader in readers):
            return False
        return activation.op_type != "Relu" or how.range[0] >= -0.5 * float(how.scale.min())

    def _computed(self, counterpart: str) -> tuple[str, bool, Quantization | None, bool]:
        """(tensor as computed, whether integer, quantization, whether dynamic)."""
        maker = self._quantized.producers.get(counterpart)
        if maker is not None and maker.op_type == "DequantizeLinear" and maker.input[0] in self._integers:
            integers = maker.input[0]
            source = self._quantized.producers.get(integers)
            if source is not None and source.op_type == "QuantizeLinear":
                return source.input[0], False, self._integers[integers], False
            return integers, True, self._integers[integers], False
        if counterpart in self._integers:
            return counterpart, True, self._integers[counterpart], False
        readers = self._quantized.consumers.get(counterpart, [])
        for reader, _ in readers:
            if reader.op_type == "QuantizeLinear" and reader.output[0] in self._integers:
                return counterpart, False, self._integers[reader.output[0]], False
        dynamic = any(reader.op_type in _DYNAMIC and place == 0 for reader, place in readers)
        return counterpart, False, None, dynamic

    def _carriers(self, computed: str) -> list[str]:
        """The tensor, and what quantizing and dequantizing makes of it."""
        names = [computed]
        for name in names:
            for reader, _ in self._quantized.consumers.get(name, []):
                if reader.op_type in ("QuantizeLinear", "DequantizeLinear"):
                    names.append(reader.output[0])
        return [name for name in names if name in self._quantized.consumers]


def element_types(model: onnx.ModelProto) -> dict[str, int]:
    """ONNX's number of each tensor's element type where inference can tell; -1 for what is no tensor."""
    inferred = onnx.shape_inference.infer_shapes(proto_skeleton(model)).graph
    return {
        value.name: int(value.type.tensor_type.elem_type) if value.type.WhichOneof("value") == "tensor_type" else -1
        for value in [*inferred.value_info, *inferred.input, *inferred.output]
        if value.type.WhichOneof("value")
    }
