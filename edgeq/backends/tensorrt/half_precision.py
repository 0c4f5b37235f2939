"""The part of a graph that is not in int8, cast to 16 bits in the graph itself, where calibration says that it fits.

A node computes in 16 bits if its operator takes them, no tensor that it reads or makes was seen to be larger than the
type's limit, and none of its constants leaves the type's range or vanishes in it. Every other node stays in float32
with its reason, and Cast nodes stand where the two meet. Inputs and outputs of the graph keep their types.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from edgeq.backends.tensorrt.explicit import ADD, RESTORED
from edgeq.backends.tensorrt.facts import Facts
from edgeq.calibrate.ranges import Range
from edgeq.model.edit import Editor, drop_unused_initializers, insert_behind
from edgeq.model.graph import MAIN_DOMAINS, GraphIndex, bodies, constant_values, is_op, maker, name_of, opset_of
from edgeq.model.shapes import element_types

_FLOAT = ir.DataType.FLOAT
_Q, _DQ, _CAST = "QuantizeLinear", "DequantizeLinear", "Cast"
# They read any type as it comes.
_INDIFFERENT = frozenset({_Q, _CAST, "Shape", "Size"})
_TYPED_BY_ATTRIBUTE = frozenset({"dtype", "to", "output_dtype"})


@dataclass(frozen=True)
class Slots:
    """Which inputs and outputs of a node may be in 16 bits, by place."""

    inputs: tuple[bool, ...]
    outputs: tuple[bool, ...]


def cast_float_nodes(model: ir.Model, half: str, observed: Mapping[str, Range], facts: Facts) -> dict[str, str]:
    """Cast `model` in place.

    Args:
        half: "float16" or "bfloat16".
        observed: smallest and largest value that calibration saw, by tensor.

    Returns:
        Node name → why it stays in float32, for those with float data.
    """
    caster = _Caster(model, half, observed, facts)
    reasons = caster.decide()
    caster.rewrite({str(node.name) for node in model.graph} - set(reasons))
    return reasons


class _Caster:
    def __init__(self, model: ir.Model, half: str, observed: Mapping[str, Range], facts: Facts) -> None:
        self._model, self._half, self._facts = model, half, facts
        self._type = ir.DataType[half.upper()]
        self._limit = facts.rest[half].limit
        self._observed = observed
        self._types = element_types(model)
        self._captured = GraphIndex(model).captured
        self._opset = opset_of(model)
        self._slots = {node: self._slots_of(node) for node in model.graph}
        self._editor = Editor(model)

    # What computes in which type.

    def decide(self) -> dict[str, str]:
        """Node name → why it stays in float32."""
        reasons = {}
        for node in self._model.graph:
            floats = any(self._is_float(value) for value in (*node.inputs, *node.outputs))
            if floats and node.op_type not in (_Q, _DQ):
                reason = self._why_not(node)
                if reason:
                    reasons[str(node.name)] = reason
        for node in self._model.graph:
            self._keep_together(node, reasons)
        return reasons

    def _keep_together(self, add: ir.Node, reasons: dict[str, str]) -> None:
        """A residual Add and the layer that it fuses into have one type: a Cast between them would part them."""
        makers = [value.producer() for value in add.inputs if value is not None]
        if add.op_type != ADD or sum(is_op(maker, _DQ) for maker in makers) != 1:
            return
        pair = [str(node.name) for node in (add, *makers) if node is not None and not is_op(node, _DQ)]
        reason = next((reasons[name] for name in pair if name in reasons), None)
        if reason is not None:
            for name in pair:
                reasons.setdefault(name, reason)

    def _why_not(self, node: ir.Node) -> str:
        slots = self._slots[node]
        if _has_body(node):
            return "stays in fp32: its body is left as it is"
        if self._other_than_tensors(node):
            return "stays in fp32: what it reads or makes is no tensor, and keeps the type of its elements"
        if node.domain not in MAIN_DOMAINS:
            return f"stays in fp32: {node.domain}.{node.op_type} is not a standard operator"
        if node.op_type in self._facts.float32_operators:
            return self._facts.float32_operators[node.op_type]
        if not any(slots.outputs) and not any(slots.inputs):
            return f"stays in fp32: {node.op_type} takes nothing else here"
        places = [*zip(node.inputs, slots.inputs, strict=True), *zip(node.outputs, slots.outputs, strict=True)]
        for value in (value for value, allowed in places if allowed and value is not None and self._is_float(value)):
            name = name_of(value)
            if name in self._captured:
                return f"stays in fp32: the body of a loop or branch reads {name!r}"
            reason = self._constant_problem(value) if value.is_initializer() else self._range_problem(name)
            if reason:
                return reason
        return ""

    def _other_than_tensors(self, node: ir.Node) -> bool:
        """Tell whether a value of `node` is a sequence, an optional or a map."""
        values = (value for value in (*node.inputs, *node.outputs) if value is not None)
        return any(self._types.get(name_of(value)) == ir.DataType.UNDEFINED for value in values)

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

    def _constant_problem(self, value: ir.Value) -> str:
        values = np.abs(constant_values(value))
        finite = values[np.isfinite(values)]  # masks of attention are full of infinities, which 16 bits have too
        largest = float(np.max(finite, initial=0.0))
        if largest > 2 * self._limit:
            return f"stays in fp32: constant {value.name!r} reaches {largest:.4g}, over what {self._half} holds"
        if values.size == 1 and largest > 0 and not np.any(values.astype(self._type.numpy())):
            return f"stays in fp32: constant {value.name!r} is {largest:.4g}, which is 0 in {self._half}"
        return ""

    def _slots_of(self, node: ir.Node) -> Slots:
        if node.domain not in MAIN_DOMAINS or _has_body(node) or self._other_than_tensors(node):
            return Slots((False,) * len(node.inputs), (False,) * len(node.outputs))
        schema = onnx.defs.get_schema(node.op_type, self._opset, "")
        fixed = not _TYPED_BY_ATTRIBUTE.isdisjoint(node.attributes)
        inputs = tuple(self._takes(schema.inputs, place) for place in range(len(node.inputs)))
        floats = any(ok and self._is_float(value) for ok, value in zip(inputs, node.inputs, strict=True))
        outputs = tuple(
            floats and not fixed and self._takes(schema.outputs, place) and self._is_float(value)
            for place, value in enumerate(node.outputs)
        )
        return Slots(inputs, outputs)

    def _takes(self, parameters: object, place: int) -> bool:
        listed = list(parameters)  # type: ignore[call-overload]
        return bool(listed) and f"tensor({self._half})" in listed[min(place, len(listed) - 1)].types

    def _is_float(self, value: ir.Value | None) -> bool:
        if value is None:
            return False
        held = value.const_value if value.is_initializer() else None
        return (held.dtype if held is not None else self._types.get(name_of(value))) == _FLOAT

    # The graph in those types.

    def rewrite(self, halved: set[str]) -> None:
        """Give the nodes of these names 16-bit operands and results, with a Cast wherever the type changes."""
        graph = self._model.graph
        self._made = {value: _FLOAT for value in graph.inputs if self._is_float(value)}
        self._copies: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}
        self._scales: dict[ir.Value, Any] = {}
        restored: dict[ir.Value, ir.Node] = {}
        nodes = tuple(graph)
        for node, following in zip(nodes, [*nodes[1:], None], strict=True):
            if node.op_type == _DQ:
                restored[node.outputs[0]] = node  # moved in front of its readers, in the type that each needs
                continue
            small, slots = node.name in halved, self._slots[node]
            for place, value in enumerate(node.inputs):
                if value is None:
                    continue
                kind = self._type if small and slots.inputs[place] else _FLOAT
                if value in restored:
                    node.replace_input_with(place, self._restore(restored[value], kind, node))
                elif self._is_float(value) and node.op_type not in _INDIFFERENT:
                    node.replace_input_with(place, self._as(value, kind, node))
            if node.op_type == _Q:
                self._type_scale(node)
            for place, output in enumerate(node.outputs):
                if self._is_float(output):
                    self._set_type(output, self._type if small and slots.outputs[place] else _FLOAT)
                    self._restore_output(output, following)
        drop_unused_initializers(graph)

    def _set_type(self, value: ir.Value, kind: ir.DataType) -> None:
        self._made[value] = kind
        if value.type is not None and not value.is_graph_output():
            value.type = ir.TensorType(kind)

    def _as(self, value: ir.Value, kind: ir.DataType, before: ir.Node) -> ir.Value:
        """`value` in type `kind`: itself, or a converted constant or the output of a Cast, which are made once."""
        constant_value = value.is_initializer()
        if kind == (_FLOAT if constant_value else self._made.get(value, _FLOAT)):
            return value
        if (value, kind) not in self._copies:
            name = f"{value.name}_{self._half}"
            if constant_value:
                copy = self._editor.constant(name, constant_values(value).astype(self._type.numpy()))
            else:
                copy = self._cast(value, f"{value.name}_to_{'fp32' if kind == _FLOAT else self._half}", kind, before)
            self._copies[value, kind] = copy
        return self._copies[value, kind]

    def _cast(self, value: ir.Value, name: str, kind: ir.DataType, before: ir.Node | None) -> ir.Value:
        return self._editor.node(_CAST, [value], f"{name}_Cast", output=name, before=before, attributes={"to": kind})

    def _type_scale(self, node: ir.Node) -> None:
        """A QuantizeLinear's scale has the type of what it reads."""
        data, scale = node.inputs[:2]
        assert data is not None
        assert scale is not None
        node.replace_input_with(1, self._as(scale, self._made.get(data, _FLOAT), node))

    def _restore(self, node: ir.Node, kind: ir.DataType, before: ir.Node) -> ir.Value:
        """The DequantizeLinear in type `kind`, in front of the first node that reads it so: its scale decides the
        type."""
        original = node.outputs[0]
        if (original, kind) not in self._copies:
            self._scales.setdefault(original, node.inputs[1])
            scale = self._as(self._scales[original], kind, before)
            if any(value is original for value, _ in self._copies):
                made = self._editor.node(
                    _DQ,
                    [node.inputs[0], scale, *node.inputs[2:]],
                    f"{node.name}_again",
                    output=f"{original.name}_again",
                    before=before,
                    attributes=node.attributes,
                )
            else:
                made = original
                node.replace_input_with(1, scale)
                self._model.graph.remove(node)
                self._model.graph.insert_before(before, node)
            self._set_type(made, kind)
            self._copies[original, kind] = made
        return self._copies[original, kind]

    def _restore_output(self, value: ir.Value, before: ir.Node | None) -> None:
        """An output of the graph stays in float32, under its name."""
        if value.is_graph_output() and self._made[value] != _FLOAT:
            name = str(value.name)
            wide = self._cast(value, f"{name}_wide", _FLOAT, before)
            insert_behind(value, wide, wide, f"{name}_{self._half}")
            maker(wide).name = f"{name}_Cast"
            self._made[wide] = _FLOAT
            self._copies[wide, self._made[value]] = value


def _has_body(node: ir.Node) -> bool:
    return next(bodies(node), None) is not None
