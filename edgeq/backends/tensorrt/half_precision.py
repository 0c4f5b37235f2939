"""Cast the nodes that are not in int8 to 16 bits, if calibration shows that their values fit.

A node computes in 16 bits if four conditions are true: its operator supports 16-bit types, no tensor that it reads or
makes exceeded the type's limit in calibration, no such tensor must be exact (an index, a large whole number, a large
angle), and no constant overflows or vanishes in the type. Every other node stays in float32, and edgeq records the
reason. Cast nodes connect the two types. Inputs and outputs of the graph keep their types.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from edgeq.backends.tensorrt.options import facts
from edgeq.backends.tensorrt.pairs import RESTORED
from edgeq.backends.tensorrt.placement import ADD
from edgeq.calibration.ranges import Range
from edgeq.model.edit import Editor, drop_unused_initializers, insert_behind
from edgeq.model.exact import Exactness, is_layer_output
from edgeq.model.graph import MAIN_DOMAINS, GraphIndex, bodies, constant_values, is_op, maker, name_of, opset_of
from edgeq.model.shapes import element_types

_FLOAT = ir.DataType.FLOAT
_Q, _DQ, _CAST = "QuantizeLinear", "DequantizeLinear", "Cast"
_RADIANS = 0.01
"""Largest rounding error of an angle."""

# These operators read any type without a Cast.
_INDIFFERENT = frozenset({_Q, _CAST, "Shape", "Size"})
# An operator with one of these attributes states the type of its output, so its output cannot follow its inputs.
_TYPED_BY_ATTRIBUTE = frozenset({"dtype", "to", "output_dtype"})
Slots = tuple[tuple[bool, ...], tuple[bool, ...]]
"""Whether each input and each output of a node may be in 16 bits."""


def cast_float_nodes(model: ir.Model, half: str, observed: Mapping[str, Range]) -> dict[str, str]:
    """Cast the float nodes of `model` to 16 bits in place, if their values fit.

    Args:
        half: "float16" or "bfloat16".
        observed: smallest and largest value of each tensor in calibration.

    Returns:
        The reason why a node stays in float32, by node name, for nodes with float data.
    """
    caster = _Caster(model, half, observed)
    reasons = caster.decide()
    caster.rewrite({str(node.name) for node in model.graph} - set(reasons))
    return reasons


class _Caster:
    def __init__(self, model: ir.Model, half: str, observed: Mapping[str, Range]) -> None:
        self._model, self._half = model, half
        self._type = ir.DataType[half.upper()]
        # The limit leaves room above the calibrated range, because other inputs may reach further than the samples.
        self._limit = facts().rest_types[half].limit
        self._observed = observed
        self._types = element_types(model)
        self._captured = GraphIndex(model).captured
        self._opset = opset_of(model)
        self._exact = self._exact_tensors()
        self._slots = {node: self._slots_of(node) for node in model.graph}
        self._editor = Editor(model)

    # Choice of types.

    def decide(self) -> dict[str, str]:
        """Return the reason why a node stays in float32, by node name."""
        reasons = {}
        for node in self._model.graph:
            floats = any(self._is_float(value) for value in (*node.inputs, *node.outputs))
            if floats and node.op_type not in (_Q, _DQ):
                reason = self._float_reason(node)
                if reason:
                    reasons[str(node.name)] = reason
        # A second pass, because the reason of a layer may come after that of the Add that fuses into it.
        for node in self._model.graph:
            self._keep_together(node, reasons)
        return reasons

    def _keep_together(self, add: ir.Node, reasons: dict[str, str]) -> None:
        """Give a residual Add the same type as the layer into which it fuses, because a Cast between them would prevent
        the fusion.
        """
        makers = [value.producer() for value in add.inputs if value is not None]
        # Exactly one dequantized operand marks the Add as residual: that operand is the skip branch.
        if add.op_type != ADD or sum(is_op(maker, _DQ) for maker in makers) != 1:
            return
        pair = [str(node.name) for node in (add, *makers) if node is not None and not is_op(node, _DQ)]
        reason = next((reasons[name] for name in pair if name in reasons), None)
        if reason is not None:
            for name in pair:
                reasons.setdefault(name, reason)

    def _float_reason(self, node: ir.Node) -> str:
        reads, makes = self._slots[node]
        if _has_body(node):
            return "stays in fp32: edgeq does not change its body"
        if self._other_than_tensors(node):
            return "stays in fp32: an input or output is not a tensor, and keeps the type of its elements"
        if node.domain not in MAIN_DOMAINS:
            return f"stays in fp32: {node.domain}.{node.op_type} is not a standard operator"
        # These operators stay in float32 although their inputs and results fit: inside, sums and powers can leave the
        # range.
        if node.op_type in facts().float32_operators:
            return facts().float32_operators[node.op_type]
        if not any(reads) and not any(makes):
            return f"stays in fp32: {node.op_type} supports no other type here"
        places = [*zip(node.inputs, reads, strict=True), *zip(node.outputs, makes, strict=True)]
        for value in (value for value, allowed in places if allowed and value is not None and self._is_float(value)):
            name = name_of(value)
            if name in self._exact:
                return f"stays in fp32: {self._exact[name]}"
            if name in self._captured:
                return f"stays in fp32: the body of a loop or branch reads {name!r}"
            reason = self._constant_problem(value) if value.is_initializer() else self._range_problem(name)
            if reason:
                return reason
        return ""

    def _exact_tensors(self) -> dict[str, str]:
        """Return tensor → reason, for tensors that the 16-bit type would round to another index, whole number or angle.

        The type contains all whole numbers up to two divided by the distance from 1 to the next number.
        """
        exactness = Exactness(self._model)
        largest_whole = 2 / float(self._type.eps)
        reasons: dict[str, str] = {}

        def keep(value: ir.Value, reason: str) -> None:
            for origin in exactness.origins(value):
                # The type of a layer's output decides the type of the layer.
                if not is_layer_output(origin) or self._bound(origin) > largest_whole:
                    reasons.setdefault(name_of(origin), reason)

        for cast, reader in exactness.index_casts().items():
            if cast.inputs[0] is not None:
                limits = f"whole numbers only up to {largest_whole:.0f}"
                keep(cast.inputs[0], f"it leads to an index of {reader.name!r}, and {self._half} has all {limits}")
        for value in exactness.whole_numbers():
            if self._bound(value) > largest_whole:
                name, reached = value.name, f"{self._bound(value):.4g}"
                keep(
                    value,
                    f"tensor {name!r} has whole numbers up to {reached}, over {largest_whole:.0f} for {self._half}",
                )
        for value in exactness.angles():
            if self._bound(value) / largest_whole > _RADIANS:
                name, reached = value.name, f"{self._bound(value):.4g}"
                keep(value, f"tensor {name!r} is an angle up to {reached}, which {self._half} rounds too coarsely")
        return reasons

    def _bound(self, value: ir.Value) -> float:
        # Calibration saw the float model, which has the tensor without its pair.
        span = self._observed.get(name_of(value).removesuffix(RESTORED))
        return span.bound if span is not None else 0.0

    def _other_than_tensors(self, node: ir.Node) -> bool:
        """Return whether an input or output of `node` is a sequence, an optional or a map."""
        values = (value for value in (*node.inputs, *node.outputs) if value is not None)
        return any(self._types.get(name_of(value)) == ir.DataType.UNDEFINED for value in values)

    def _range_problem(self, name: str) -> str:
        source = name.removesuffix(RESTORED)
        if source != name and source not in self._observed:
            # The tensor is a dequantized weight. Its values are not larger than those of the float weight.
            return ""
        span = self._observed.get(source)
        if span is None:
            return f"stays in fp32: calibration saw no values of tensor {source!r}"
        if span.bound > self._limit:
            return f"stays in fp32: tensor {source!r} reaches {span.bound:.4g}, over {self._limit:.4g} for {self._half}"
        return ""

    def _constant_problem(self, value: ir.Value) -> str:
        values = np.abs(constant_values(value))
        # Attention masks are full of infinities, but 16-bit types have infinities too.
        finite = values[np.isfinite(values)]
        largest = float(np.max(finite, initial=0.0))
        # Constants need no room for other inputs, which the limit halves.
        if largest > 2 * self._limit:
            return f"stays in fp32: constant {value.name!r} reaches {largest:.4g}, more than the range of {self._half}"
        # A single number that becomes 0 changes its operator: an epsilon no longer guards a division. In an array, tiny
        # elements beside large ones do not matter.
        if values.size == 1 and largest > 0 and not np.any(values.astype(self._type.numpy())):
            return f"stays in fp32: constant {value.name!r} is {largest:.4g}, which is 0 in {self._half}"
        return ""

    def _slots_of(self, node: ir.Node) -> Slots:
        if node.domain not in MAIN_DOMAINS or _has_body(node) or self._other_than_tensors(node):
            return (False,) * len(node.inputs), (False,) * len(node.outputs)
        # ONNX's own schema says which inputs take the 16-bit type. A list in edgeq would have to follow each opset.
        schema = onnx.defs.get_schema(node.op_type, self._opset, "")
        fixed = not _TYPED_BY_ATTRIBUTE.isdisjoint(node.attributes)
        inputs = tuple(self._takes(schema.inputs, place) for place in range(len(node.inputs)))
        floats = any(ok and self._is_float(value) for ok, value in zip(inputs, node.inputs, strict=True))
        outputs = tuple(
            floats and not fixed and self._takes(schema.outputs, place) and self._is_float(value)
            for place, value in enumerate(node.outputs)
        )
        return inputs, outputs

    def _takes(self, parameters: object, place: int) -> bool:
        listed = list(parameters)  # type: ignore[call-overload]
        # The last parameter of a variadic operator stands for all further inputs.
        return bool(listed) and f"tensor({self._half})" in listed[min(place, len(listed) - 1)].types

    def _is_float(self, value: ir.Value | None) -> bool:
        if value is None:
            return False
        tensor = value.const_value if value.is_initializer() else None
        return (tensor.dtype if tensor is not None else self._types.get(name_of(value))) == _FLOAT

    # Rewrite of the graph in these types.

    def rewrite(self, halved: set[str]) -> None:
        """Give the nodes in `halved` 16-bit inputs and outputs, and insert a Cast wherever the type changes."""
        graph = self._model.graph
        self._made = {value: _FLOAT for value in graph.inputs if self._is_float(value)}
        self._copies: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}
        self._scales: dict[ir.Value, Any] = {}
        restored: dict[ir.Value, ir.Node] = {}
        # The loop inserts and moves nodes, so it iterates over a copy.
        nodes = tuple(graph)
        # A Cast behind a node goes in front of the following one; None appends it to the graph.
        for node, following in zip(nodes, [*nodes[1:], None], strict=True):
            if node.op_type == _DQ:
                # The node moves down to its readers. Each type that they need gets its own copy.
                restored[node.outputs[0]] = node
                continue
            small, (reads, makes) = node.name in halved, self._slots[node]
            for place, value in enumerate(node.inputs):
                if value is None:
                    continue
                kind = self._type if small and reads[place] else _FLOAT
                if value in restored:
                    node.replace_input_with(place, self._restore(restored[value], kind, node))
                elif self._is_float(value) and node.op_type not in _INDIFFERENT:
                    node.replace_input_with(place, self._as(value, kind, node))
            if node.op_type == _Q:
                self._type_scale(node)
            for place, output in enumerate(node.outputs):
                if self._is_float(output):
                    self._set_type(output, self._type if small and makes[place] else _FLOAT)
                    self._restore_output(output, following)
        drop_unused_initializers(graph)

    def _set_type(self, value: ir.Value, kind: ir.DataType) -> None:
        self._made[value] = kind
        # The interface of the model keeps float32, see `_restore_output`.
        if value.type is not None and not value.is_graph_output():
            value.type = ir.TensorType(kind)

    def _as(self, value: ir.Value, kind: ir.DataType, reader: ir.Node) -> ir.Value:
        """Return `value` in the type `kind`: unchanged, as a converted constant, or as the output of a Cast. Each copy
        is made only once.
        """
        constant_value = value.is_initializer()
        if kind == (_FLOAT if constant_value else self._made.get(value, _FLOAT)):
            return value
        if (value, kind) not in self._copies:
            name = f"{value.name}_{self._half}"
            if constant_value:
                copy = self._editor.constant(name, constant_values(value).astype(self._type.numpy()))
            else:
                copy = self._cast(value, f"{value.name}_to_{'fp32' if kind == _FLOAT else self._half}", kind, reader)
            self._copies[value, kind] = copy
        return self._copies[value, kind]

    def _cast(self, value: ir.Value, name: str, kind: ir.DataType, following: ir.Node | None) -> ir.Value:
        return self._editor.node(_CAST, [value], f"{name}_Cast", output=name, before=following, attributes={"to": kind})

    def _type_scale(self, node: ir.Node) -> None:
        """Change the scale of a QuantizeLinear to the type of its input."""
        data, scale = node.inputs[:2]
        assert data is not None
        assert scale is not None
        node.replace_input_with(1, self._as(scale, self._made.get(data, _FLOAT), node))

    def _restore(self, node: ir.Node, kind: ir.DataType, reader: ir.Node) -> ir.Value:
        """Return the output of a DequantizeLinear in the type `kind`, placed before its first reader in that type. The
        type of the scale decides the type of the output.
        """
        original = node.outputs[0]
        if (original, kind) not in self._copies:
            self._scales.setdefault(original, node.inputs[1])
            scale = self._as(self._scales[original], kind, reader)
            # The node itself serves the first type, and every other type gets a copy of the node with another scale.
            if any(value is original for value, _ in self._copies):
                restored = self._editor.node(
                    _DQ,
                    [node.inputs[0], scale, *node.inputs[2:]],
                    f"{node.name}_again",
                    output=f"{original.name}_again",
                    before=reader,
                    attributes=node.attributes,
                )
            else:
                restored = original
                node.replace_input_with(1, scale)
                self._model.graph.remove(node)
                self._model.graph.insert_before(reader, node)
            self._set_type(restored, kind)
            self._copies[original, kind] = restored
        return self._copies[original, kind]

    def _restore_output(self, value: ir.Value, following: ir.Node | None) -> None:
        """Keep the type of a graph output at float32, and keep its name."""
        if value.is_graph_output() and self._made[value] != _FLOAT:
            name = str(value.name)
            wide = self._cast(value, f"{name}_wide", _FLOAT, following)
            insert_behind(value, wide, wide, f"{name}_{self._half}")
            maker(wide).name = f"{name}_Cast"
            self._made[wide] = _FLOAT
            # A later reader in 16 bits takes the tensor in front of the Cast instead of casting back.
            self._copies[wide, self._made[value]] = value


def _has_body(node: ir.Node) -> bool:
    return next(bodies(node), None) is not None
