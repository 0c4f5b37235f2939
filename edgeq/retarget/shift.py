"""int8 to uint8 and back, exactly: 128 more in every integer and in its zero point stand for the same number.

Integers that operators hand on (Reshape, MaxPool, Concat, Clip …) form a group, which is shifted as one. A group that
reaches an input or output of the model, or an operator that is not known to hand its input on, keeps its type, and a
QuantizeLinear and a DequantizeLinear at its edge change over, which is exact too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from edgeq.graph.operators import DATA_MOVEMENT
from edgeq.retarget.graph import INTEGERS, MAIN, Builder, Params, constant_of, is_op, params_of

# Operators by the places of their inputs that are weights.
_WEIGHTS = {
    "Conv": (1,),
    "ConvTranspose": (1,),
    "Gemm": (1,),
    "MatMul": (1,),
    "Gather": (0,),
    "GatherElements": (0,),
    "LSTM": (1, 2),
    "GRU": (1, 2),
    "RNN": (1, 2),
}
# Movers with inputs that are integers of the same kind but constants of the operator: place of the first of them.
_BOUNDS = {"Clip": 1, "Pad": 2}


@dataclass
class Group:
    """Integer tensors that have to have one type.

    Attributes:
        values: the tensors.
        dtypes: types that their Q and DQ nodes say.
        blocked: why the group cannot change its type; empty where it can.
    """

    values: list[ir.Value] = field(default_factory=list)
    dtypes: set[str] = field(default_factory=set)
    blocked: str = ""


def is_weight(node: ir.Node) -> bool:
    """Whether a DequantizeLinear gives a constant that every reader takes as its weight."""
    if constant_of(node.inputs[0]) is None:
        return False
    uses = node.outputs[0].uses()
    return bool(uses) and all(u.node.domain in MAIN and u.idx in _WEIGHTS.get(u.node.op_type, ()) for u in uses)


def shift_weights(model: ir.Model, dtype: str) -> int:
    """Give 8-bit weights of the other type this one, in place; returns how many."""
    builder, count = Builder(model), 0
    for node in list(model.graph):
        params = params_of(node) if is_op(node, "DequantizeLinear") and is_weight(node) else None
        if params is None or params.dtype == dtype or params.dtype not in INTEGERS:
            continue
        source = node.inputs[0]
        values = constant_of(source)
        assert source is not None
        assert values is not None
        node.replace_input_with(0, builder.constant(f"{source.name}/{dtype}", shifted(values, dtype)))
        _set_zero_point(node, params, dtype, builder)
        count += 1
    return count


def shift_activations(model: ir.Model, dtype: str) -> tuple[int, list[str]]:
    """Give 8-bit activations of the other type this one, in place.

    Returns:
        How many tensors changed, and what could not and why.
    """
    builder, count, kept = Builder(model), 0, []
    for group in _groups(model.graph):
        if group.dtypes == {dtype} or not group.dtypes <= set(INTEGERS):
            continue
        if group.blocked or len(group.dtypes) > 1:
            changed = _change_over(group, dtype, builder)
            names = ", ".join(sorted(str(v.name) for v in group.values)[:4])
            kept.append(
                f"{names} stays {'/'.join(sorted(group.dtypes))}: {group.blocked or 'its types differ'}"
                + (f"; {changed} QuantizeLinear/DequantizeLinear pairs at its edge change over" if changed else "")
            )
            continue
        for value in group.values:
            _shift_value(value, dtype, builder)
        count += len(group.values)
    return count, kept


def shifted(values: np.ndarray, dtype: str) -> np.ndarray:
    """8-bit integers as the other type: the same numbers less or more 128."""
    offset = {"uint8": 128, "int8": -128}[dtype]
    return values if str(values.dtype) == dtype else (values.astype(np.int16) + offset).astype(dtype)


def _groups(graph: ir.Graph) -> list[Group]:
    groups: dict[int, Group] = {}
    for node in graph:
        if not is_op(node, "QuantizeLinear", "DequantizeLinear"):
            continue
        if node.op_type == "DequantizeLinear" and is_weight(node):
            continue
        value = node.outputs[0] if node.op_type == "QuantizeLinear" else node.inputs[0]
        if value is not None and id(value) not in groups and value.dtype != ir.DataType.INT32:
            group = _grown(value, graph)
            groups.update((id(member), group) for member in group.values)
    return list({id(group): group for group in groups.values()}.values())


def _grown(seed: ir.Value, graph: ir.Graph) -> Group:
    group, waiting, seen = Group(), [seed], {id(seed)}

    def reach(values: Iterable[ir.Value | None]) -> None:
        for value in values:
            if value is not None and id(value) not in seen:
                seen.add(id(value))
                waiting.append(value)

    while waiting:
        value = waiting.pop()
        group.values.append(value)
        if value.is_graph_input() or value.is_graph_output():
            group.blocked = group.blocked or f"{value.name} is an input or output of the model"
        maker = value.producer()
        if maker is not None:
            _visit(maker, value, graph, group, reach)
        for node, place in value.uses():
            # As a bound or a fill value it is a constant of that operator, which is shifted with the group.
            if node.op_type in _BOUNDS and place >= _BOUNDS[node.op_type]:
                group.blocked = group.blocked or f"{node.op_type} {node.name} reads {value.name} as a bound"
                continue
            _visit(node, value, graph, group, reach)
    return group


def _visit(
    node: ir.Node,
    value: ir.Value,
    graph: ir.Graph,
    group: Group,
    reach: Callable[[Iterable[ir.Value | None]], None],
) -> None:
    if node.graph is not graph:
        group.blocked = group.blocked or f"the body of a control-flow node reads {value.name}"
    elif is_op(node, "QuantizeLinear", "DequantizeLinear"):
        params = params_of(node)
        if params is None:
            group.blocked = group.blocked or f"{node.op_type} {node.name} has no constant parameters of 8 bits"
        else:
            group.dtypes.add(params.dtype)
    elif node.domain in MAIN and (node.op_type in DATA_MOVEMENT or node.op_type in ("Concat", "Clip")):
        if node.op_type in _BOUNDS and not _bounds_constant(node):
            group.blocked = group.blocked or f"{node.op_type} {node.name} has bounds that are not constant"
        if node.op_type == "MaxPool" and len(node.outputs) > 1 and value is node.outputs[1]:
            return
        reach(node.inputs if node.op_type == "Concat" else node.inputs[:1])
        reach(node.outputs if node.op_type == "Split" else node.outputs[:1])
    else:
        group.blocked = group.blocked or f"{node.op_type} {node.name} works on it"


def _bounds_constant(node: ir.Node) -> bool:
    first = _BOUNDS[node.op_type]
    last = 3
    return all(v is None or constant_of(v) is not None for v in node.inputs[first:last])


def _shift_value(value: ir.Value, dtype: str, builder: Builder) -> None:
    values = constant_of(value)
    if values is not None:
        new = builder.constant(f"{value.name}/{dtype}", shifted(values, dtype))
        for node, place in list(value.uses()):
            node.replace_input_with(place, new)
            if is_op(node, "DequantizeLinear"):
                _shift_node(node, dtype, builder)
        return
    if value.type is not None:
        value.type = ir.TensorType(INTEGERS[dtype])
    maker = value.producer()
    for node in [*([maker] if maker is not None else []), *(use.node for use in value.uses())]:
        if is_op(node, "QuantizeLinear", "DequantizeLinear"):
            _shift_node(node, dtype, builder)
    if maker is not None and maker.op_type in _BOUNDS:
        _shift_bounds(maker, dtype, builder)


def _shift_node(node: ir.Node, dtype: str, builder: Builder) -> None:
    params = params_of(node)
    assert params is not None
    if params.dtype != dtype:
        _set_zero_point(node, params, dtype, builder)
        if node.attributes.get_int("output_dtype", 0):
            node.attributes["output_dtype"] = ir.AttrInt64("output_dtype", int(INTEGERS[dtype]))


def _set_zero_point(node: ir.Node, params: Params, dtype: str, builder: Builder) -> None:
    old = node.inputs[2]
    assert old is not None
    node.replace_input_with(2, builder.constant(f"{old.name}/{dtype}", shifted(params.zero_point, dtype)))


def _shift_bounds(node: ir.Node, dtype: str, builder: Builder) -> None:
    first = _BOUNDS[node.op_type]
    if node.op_type == "Pad" and (len(node.inputs) <= first or node.inputs[first] is None):
        if node.attributes.get_string("mode", "constant") != "constant":
            return
        if len(node.inputs) <= first:
            node.resize_inputs(first + 1)
        other = "int8" if dtype == "uint8" else "uint8"
        node.replace_input_with(first, builder.constant(f"{node.name}/fill", shifted(np.zeros((), other), dtype)))
        return
    for place in range(first, min(len(node.inputs), 3)):
        old = node.inputs[place]
        values = constant_of(old)
        if old is not None and values is not None:
            node.replace_input_with(place, builder.constant(f"{old.name}/{dtype}", shifted(values, dtype)))


def _change_over(group: Group, dtype: str, builder: Builder) -> int:
    """Put a pair of the wanted type behind each DQ and before each Q of a group that keeps its own; gives how many."""
    count = 0
    for value in group.values:
        maker = value.producer()
        sources = [maker] if maker is not None and is_op(maker, "QuantizeLinear") else []
        for node in [*sources, *(use.node for use in value.uses() if is_op(use.node, "DequantizeLinear"))]:
            params = params_of(node)
            if params is None or not params.scalar or params.dtype == dtype or params.dtype not in INTEGERS:
                continue
            other = Params(params.scale, shifted(params.zero_point, dtype), params.axis)
            if is_op(node, "QuantizeLinear"):
                source = node.inputs[0]
                assert source is not None
                integers = builder.quantize(source, other, f"{source.name}/{dtype}", before=node)
                node.replace_input_with(
                    0, builder.dequantize(integers, other, f"{source.name}/{dtype}/float", before=node)
                )
            else:
                _after(node, other, dtype, builder)
            count += 1
    return count


def _after(node: ir.Node, params: Params, dtype: str, builder: Builder) -> None:
    output = node.outputs[0]
    readers = list(output.uses())
    if not readers:
        return
    anchor = next(n for n in builder.graph if any(use.node is n or _inside(use.node, n) for use in readers))
    integers = builder.quantize(output, params, f"{output.name}/{dtype}", before=anchor)
    new = builder.dequantize(integers, params, f"{output.name}/{dtype}/float", before=anchor)
    for reader, place in readers:
        reader.replace_input_with(place, new)


def _inside(node: ir.Node, outer: ir.Node) -> bool:
    return any(inner is node for a in outer.attributes.values() for g in _bodies(a) for inner in g.all_nodes())


def _bodies(attribute: ir.Attr) -> list[ir.Graph]:
    if attribute.type == ir.AttributeType.GRAPH:
        return [attribute.as_graph()]
    return list(attribute.as_graphs()) if attribute.type == ir.AttributeType.GRAPHS else []
