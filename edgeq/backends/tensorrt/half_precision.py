"""The part of a graph that is not in int8, cast to 16 bits in the graph itself, where calibration says that it fits.

A node computes in 16 bits if its operator takes them, no tensor that it reads or makes was seen to be larger than the
type's limit, and none of its constants leaves the type's range or vanishes in it. Every other node stays in float32
with its reason, and Cast nodes stand where the two meet. Inputs and outputs of the graph keep their types.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edgeq.backends.tensorrt.explicit import RESTORED, drop_unused
from edgeq.backends.tensorrt.facts import Facts
from edgeq.backends.tensorrt.placement import ADD
from edgeq.backends.tensorrt.wiring import has_body, wire
from edgeq.calibrate.ranges import Range
from edgeq.graph.convert import from_proto
from edgeq.model.shapes import element_types

_FLOAT = TensorProto.FLOAT
_TYPES = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
_SPELLED = {"float16": "tensor(float16)", "bfloat16": "tensor(bfloat16)"}
_NUMPY: Mapping[str, type] = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
_Q, _DQ, _CAST = "QuantizeLinear", "DequantizeLinear", "Cast"
# They read any type as it comes.
_INDIFFERENT = frozenset({_Q, _CAST, "Shape", "Size"})
_TYPED_BY_ATTRIBUTE = frozenset({"dtype", "to", "output_dtype"})


@dataclass(frozen=True)
class Slots:
    """Which inputs and outputs of a node may be in 16 bits, by place."""

    inputs: tuple[bool, ...]
    outputs: tuple[bool, ...]


def cast_float_nodes(model: onnx.ModelProto, half: str, observed: Mapping[str, Range], facts: Facts) -> dict[str, str]:
    """Cast `model` in place.

    Args:
        half: "float16" or "bfloat16".
        observed: smallest and largest value that calibration saw, by tensor.

    Returns:
        Node name → why it stays in float32, for those with float data.
    """
    caster = _Caster(model, half, observed, facts)
    reasons = caster.decide()
    caster.rewrite({node.name for node in model.graph.node} - set(reasons))
    return reasons


class _Caster:
    def __init__(self, model: onnx.ModelProto, half: str, observed: Mapping[str, Range], facts: Facts) -> None:
        self._model, self._half, self._facts = model, half, facts
        self._limit = facts.halves[half].limit
        self._observed = observed
        self._types = element_types(from_proto(model))
        self._wiring = wire(model)
        self._opset = next(o.version for o in model.opset_import if o.domain in ("", "ai.onnx"))
        self._slots = {node.name: self._slots_of(node) for node in model.graph.node}

    # What computes in which type.

    def decide(self) -> dict[str, str]:
        reasons = {}
        for node in self._model.graph.node:
            floats = any(self._is_float(name) for name in (*node.input, *node.output))
            if floats and node.op_type not in (_Q, _DQ):
                reason = self._why_not(node)
                if reason:
                    reasons[node.name] = reason
        for node in self._model.graph.node:
            self._keep_together(node, reasons)
        return reasons

    def _keep_together(self, add: onnx.NodeProto, reasons: dict[str, str]) -> None:
        """A residual Add and the layer that it fuses into have one type: a Cast between them would part them."""
        makers = [self._wiring.makers.get(name) for name in add.input]
        if add.op_type != ADD or sum(m is not None and m.op_type == _DQ for m in makers) != 1:
            return
        pair = [add, *(m for m in makers if m is not None and m.op_type != _DQ)]
        reason = next((reasons[node.name] for node in pair if node.name in reasons), None)
        if reason is not None:
            for node in pair:
                reasons.setdefault(node.name, reason)

    def _why_not(self, node: onnx.NodeProto) -> str:
        slots = self._slots[node.name]
        if has_body(node):
            return "stays in fp32: its body is left as it is"
        if node.domain not in ("", "ai.onnx"):
            return f"stays in fp32: {node.domain}.{node.op_type} is not a standard operator"
        if node.op_type in self._facts.float32_operators:
            return self._facts.float32_operators[node.op_type]
        if not any(slots.outputs) and not any(slots.inputs):
            return f"stays in fp32: {node.op_type} takes nothing else here"
        for name in (*self._halved(node.input, slots.inputs), *self._halved(node.output, slots.outputs)):
            if name in self._wiring.captured:
                return f"stays in fp32: the body of a loop or branch reads {name!r}"
            constant = name in self._wiring.initializers
            reason = self._constant_problem(name) if constant else self._range_problem(name)
            if reason:
                return reason
        return ""

    def _halved(self, names: object, allowed: tuple[bool, ...]) -> list[str]:
        return [n for n, ok in zip(names, allowed, strict=True) if n and ok and self._is_float(n)]  # type: ignore[call-overload]

    def _range_problem(self, name: str) -> str:
        source = name.removesuffix(RESTORED)
        if source != name and source not in self._observed:
            return ""  # a weight's integers times their scale, which are smaller than the weight
        span = self._observed.get(source)
        if span is None:
            return f"stays in fp32: calibration saw nothing of tensor {source!r}"
        if span.bound > self._limit:
            return f"stays in fp32: tensor {source!r} reaches {span.bound:.4g}, over {self._limit:.4g} for {self._half}"
        return ""

    def _constant_problem(self, name: str) -> str:
        values = np.abs(numpy_helper.to_array(self._wiring.initializers[name]))
        finite = values[np.isfinite(values)]  # masks of attention are full of infinities, which 16 bits have too
        largest = float(np.max(finite, initial=0.0))
        if largest > 2 * self._limit:
            return f"stays in fp32: constant {name!r} reaches {largest:.4g}, over what {self._half} holds"
        if values.size == 1 and largest > 0 and not np.any(values.astype(_NUMPY[self._half])):
            return f"stays in fp32: constant {name!r} is {largest:.4g}, which is 0 in {self._half}"
        return ""

    def _slots_of(self, node: onnx.NodeProto) -> Slots:
        none = Slots((False,) * len(node.input), (False,) * len(node.output))
        if node.domain not in ("", "ai.onnx") or has_body(node):
            return none
        schema = onnx.defs.get_schema(node.op_type, self._opset, "")
        fixed = any(a.name in _TYPED_BY_ATTRIBUTE for a in node.attribute)
        inputs = tuple(self._takes(schema.inputs, place) for place in range(len(node.input)))
        floats = any(ok and self._is_float(name) for ok, name in zip(inputs, node.input, strict=True))
        outputs = tuple(
            floats and not fixed and self._takes(schema.outputs, place) and self._is_float(name)
            for place, name in enumerate(node.output)
        )
        return Slots(inputs, outputs)

    def _takes(self, parameters: object, place: int) -> bool:
        listed = list(parameters)  # type: ignore[call-overload]
        return bool(listed) and _SPELLED[self._half] in listed[min(place, len(listed) - 1)].types

    def _is_float(self, name: str) -> bool:
        return bool(name) and (name in self._wiring.initializers or name in self._types) and self._type(name) == _FLOAT

    def _type(self, name: str) -> int:
        held = self._wiring.initializers.get(name)
        return int(held.data_type) if held is not None else self._types.get(name, 0)

    # The graph in those types.

    def rewrite(self, halved: set[str]) -> None:
        graph = self._model.graph
        self._made: dict[str, int] = {i.name: _FLOAT for i in graph.input if self._type(i.name) == _FLOAT}
        self._nodes: list[onnx.NodeProto] = []
        self._copies: dict[tuple[str, int], str] = {}
        restored: dict[str, onnx.NodeProto] = {}
        for node in list(graph.node):
            if node.op_type == _DQ:
                restored[node.output[0]] = node  # written in front of its readers, in the type that each needs
                continue
            small = node.name in halved
            slots = self._slots[node.name]
            for place, name in enumerate(node.input):
                if name in restored:
                    kind = _TYPES[self._half] if small and slots.inputs[place] else _FLOAT
                    node.input[place] = self._restore(restored[name], kind)
                elif self._is_float(name) and node.op_type not in _INDIFFERENT:
                    kind = _TYPES[self._half] if small and slots.inputs[place] else _FLOAT
                    node.input[place] = self._as(name, kind)
            if node.op_type == _Q:
                self._type_scale(node)
            self._nodes.append(node)
            for place, name in enumerate(node.output):
                if self._is_float(name):
                    self._made[name] = _TYPES[self._half] if small and slots.outputs[place] else _FLOAT
            self._restore_outputs(node)
        del graph.node[:]
        graph.node.extend(self._nodes)
        for value in graph.value_info:
            if value.name in self._made:
                value.type.tensor_type.elem_type = self._made[value.name]
        drop_unused(self._model)

    def _as(self, name: str, kind: int) -> str:
        """The name under which `name` is there in type `kind`; a Cast or a converted constant is made if need be."""
        if name in self._wiring.initializers:
            return name if kind == _FLOAT else self._constant(name, kind)
        if self._made.get(name, _FLOAT) == kind:
            return name
        key = (name, kind)
        if key not in self._copies:
            copy = f"{name}_to_{'fp32' if kind == _FLOAT else self._half}"
            self._nodes.append(helper.make_node(_CAST, [name], [copy], f"{copy}_Cast", to=kind))
            self._copies[key] = copy
        return self._copies[key]

    def _constant(self, name: str, kind: int) -> str:
        key = (name, kind)
        if key not in self._copies:
            copy = f"{name}_{self._half}"
            values: NDArray[np.floating] = numpy_helper.to_array(self._wiring.initializers[name])
            self._model.graph.initializer.append(numpy_helper.from_array(values.astype(_NUMPY[self._half]), copy))
            self._copies[key] = copy
        return self._copies[key]

    def _type_scale(self, node: onnx.NodeProto) -> None:
        """A QuantizeLinear's scale has the type of what it reads."""
        node.input[1] = self._as(node.input[1], self._made.get(node.input[0], _FLOAT))

    def _restore(self, node: onnx.NodeProto, kind: int) -> str:
        """The DequantizeLinear in type `kind`: its scale decides it."""
        key = (node.output[0], kind)
        if key not in self._copies:
            again = onnx.NodeProto()
            again.CopyFrom(node)
            again.input[1] = self._as(node.input[1], kind)
            if any(name == node.output[0] for name, _ in self._copies):
                again.name, again.output[0] = f"{node.name}_again", f"{node.output[0]}_again"
            self._nodes.append(again)
            self._made[again.output[0]] = kind
            self._copies[key] = again.output[0]
        return self._copies[key]

    def _restore_outputs(self, node: onnx.NodeProto) -> None:
        """Outputs of the graph stay in float32, under their names."""
        for place, name in enumerate(node.output):
            if name in self._wiring.outputs and self._made.get(name, _FLOAT) != _FLOAT:
                inner = f"{name}_{self._half}"
                node.output[place] = inner
                kind = self._made.pop(name)
                self._made[name], self._made[inner] = _FLOAT, kind
                self._copies[name, kind] = inner
                self._nodes.append(helper.make_node(_CAST, [inner], [name], f"{name}_Cast", to=_FLOAT))
