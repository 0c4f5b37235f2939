"""Convert int8 to uint8 and back, exactly. Integers still represent the same numbers after 128 is added to all of them
and to their zero point.

Integers that operators pass on unchanged (Reshape, MaxPool, Concat, Clip …) form a group, which is shifted as a whole.
A group keeps its type if it reaches an input or output of the model, or an operator that may change the integers. In
that case, a QuantizeLinear and a DequantizeLinear at the edge of the group convert the type, which is also exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from edgeq.model import quant_params
from edgeq.model.edit import Editor
from edgeq.model.graph import (
    MAIN_DOMAINS,
    constant,
    constant_values,
    every_node,
    is_constant,
    is_op,
    moves_data,
    name_of,
    node_input,
    operator_of,
    readers,
)
from edgeq.model.integer_products import integers
from edgeq.model.quant_params import QuantParams

INTEGERS: Mapping[str, ir.DataType] = {"uint8": ir.DataType.UINT8, "int8": ir.DataType.INT8}
"""Types of activations and weights, keyed by the names that users write."""
_KNOWN = (*INTEGERS.values(), ir.DataType.INT32)


def type_name(dtype: ir.DataType) -> str:
    """Return the name of a type in the form that users write: "uint8" for `UINT8`."""
    return dtype.name.lower()


def params_of(node: ir.Node) -> QuantParams | None:
    """Return the parameters of a Q or DQ node. Return None if they are not constant, or if the integers have neither 8
    bits nor 32 bits (a bias).
    """
    return _static_params(quant_params.params_of(node), node, 2)


def float32_params_of(node: ir.Node) -> QuantParams | None:
    """Return `params_of` for a Q or DQ node with 8-bit integers and float32 numbers. Return None for other nodes."""
    params, scale = params_of(node), node.inputs[1]
    if params is None or params.dtype not in INTEGERS.values() or scale is None:
        return None
    return params if scale.dtype is ir.DataType.FLOAT else None


def params_at(node: ir.Node, scale: int, axis: int = 0) -> QuantParams | None:
    """Return the parameters at an operator's inputs: the scale is input number `scale`, and the zero point is the next
    input. Return None in the same cases as `params_of`.
    """
    return _static_params(quant_params.params_at(node, scale, scale + 1, axis=axis), node, scale + 1)


def _static_params(params: QuantParams | None, node: ir.Node, zero_point: int) -> QuantParams | None:
    explicit = node_input(node, zero_point) is not None
    return params if params is not None and explicit and params.dtype in _KNOWN else None


# These operators look up rows or elements of a weight, which is their first input.
_LOOKUPS = frozenset({"Gather", "GatherElements"})
# These data-movement operators also have constant inputs of the same type as their data. The value is the index of the
# first such input.
_BOUNDS = {"Clip": 1, "Pad": 2}


@dataclass
class TypeGroup:
    """Hold integer tensors that must have one common type.

    Attributes:
        values: the tensors.
        dtypes: types of the Q and DQ nodes of the tensors.
        blocked: the reason why the group cannot change its type; "" if it can.
    """

    values: list[ir.Value] = field(default_factory=list)
    dtypes: set[ir.DataType] = field(default_factory=set)
    blocked: str = ""


def is_weight(node: ir.Node) -> bool:
    """Return whether a DequantizeLinear reads a constant, and all readers of its output use that output as a weight."""
    uses = node.outputs[0].uses()
    return is_constant(node.inputs[0]) and bool(uses) and all(_is_weight_place(use.node, use.idx) for use in uses)


def _is_weight_place(node: ir.Node, place: int) -> bool:
    weights = (0,) if node.op_type in _LOOKUPS else operator_of(node).weights
    return node.domain in MAIN_DOMAINS and place in weights


def shift_weights(model: ir.Model, dtype: ir.DataType) -> int:
    """Change 8-bit weights to `dtype`, in place, and return the number of changed weights."""
    editor, count = Editor(model), 0
    for node in list(model.graph):
        params = params_of(node) if is_op(node, "DequantizeLinear") and is_weight(node) else None
        if params is None or params.dtype == dtype or params.dtype not in INTEGERS.values():
            continue
        node.replace_input_with(0, _shift_constant(node.inputs[0], dtype, editor))
        _shift_zero_point(node, dtype, editor)
        count += 1
    return count


def limit_weights(model: ir.Model, limit: int) -> int:
    """Raise int8 weights that are below -`limit` to -`limit`, in place, and return their number."""
    count = 0
    for node in every_node(model):
        place = operator_of(node).weight
        for value in integers(node, place)[:1] if place is not None else ():
            values = constant(value)
            if value is None or values is None or values.dtype != np.int8:
                continue
            count += int((values < -limit).sum())
            value.const_value = ir.tensor(np.maximum(values, np.int8(-limit)), name=value.name)
    return count


def shift_activations(model: ir.Model, dtype: ir.DataType) -> tuple[int, list[str]]:
    """Change 8-bit activations to `dtype`, in place.

    Returns:
        The number of changed tensors, and the tensors that could not change, each with the reason.
    """
    editor, count, unchanged = Editor(model), 0, []
    for group in _find_groups(model.graph):
        # The group has the type already, or contains int32, which has no opposite.
        if group.dtypes == {dtype} or not group.dtypes <= set(INTEGERS.values()):
            continue
        if group.blocked or len(group.dtypes) > 1:
            changed = _change_over(group, dtype, editor)
            names = ", ".join(sorted(str(v.name) for v in group.values)[:4])
            unchanged.append(
                f"{names} stays {'/'.join(sorted(map(type_name, group.dtypes)))}: {group.blocked or 'its types differ'}"
                + (f"; {changed} QuantizeLinear/DequantizeLinear pairs at its edge convert" if changed else "")
            )
            continue
        for value in group.values:
            _shift_value(value, dtype, editor)
        count += len(group.values)
    return count, unchanged


def shift_integers(values: np.ndarray, dtype: ir.DataType) -> np.ndarray:
    """Convert 8-bit integers to the type `dtype`. If they have the other type, add or subtract 128."""
    numpy_type = dtype.numpy()
    offset = 128 if dtype is ir.DataType.UINT8 else -128
    # The sum does not fit into 8 bits before the type changes.
    return values if values.dtype == numpy_type else (values.astype(np.int16) + offset).astype(numpy_type)


def _shift_constant(value: ir.Value | None, dtype: ir.DataType, editor: Editor) -> ir.Value:
    return editor.constant(f"{name_of(value)}/{type_name(dtype)}", shift_integers(constant_values(value), dtype))


def _find_groups(graph: ir.Graph) -> list[TypeGroup]:
    groups: dict[int, TypeGroup] = {}
    for node in graph:
        if not is_op(node, "QuantizeLinear", "DequantizeLinear"):
            continue
        if node.op_type == "DequantizeLinear" and is_weight(node):
            continue
        value = node.outputs[0] if node.op_type == "QuantizeLinear" else node.inputs[0]
        if value is not None and id(value) not in groups and value.dtype != ir.DataType.INT32:
            group = _find_group(value, graph)
            groups.update((id(member), group) for member in group.values)
    return list({id(group): group for group in groups.values()}.values())


def _find_group(seed: ir.Value, graph: ir.Graph) -> TypeGroup:
    group, waiting, visited = TypeGroup(), [seed], {id(seed)}

    def reach(values: Iterable[ir.Value | None]) -> None:
        """Queue each of `values` that has not been seen yet."""
        for value in values:
            if value is not None and id(value) not in visited:
                visited.add(id(value))
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
            # A bound or fill value must be a constant of its operator, and is then shifted together with the operator's
            # group.
            if node.op_type in _BOUNDS and place >= _BOUNDS[node.op_type]:
                group.blocked = group.blocked or f"{node.op_type} {node.name} reads {value.name} as a bound"
                continue
            _visit(node, value, graph, group, reach)
    return group


def _visit(
    node: ir.Node,
    value: ir.Value,
    graph: ir.Graph,
    group: TypeGroup,
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
    elif moves_data(node) or (node.domain in MAIN_DOMAINS and node.op_type in ("Concat", "Clip")):
        if node.op_type in _BOUNDS and not all(
            v is None or is_constant(v) for v in node.inputs[_BOUNDS[node.op_type] : 3]
        ):
            group.blocked = group.blocked or f"{node.op_type} {node.name} has bounds that are not constant"
        # The second output contains indices, which have no scale.
        if node.op_type == "MaxPool" and len(node.outputs) > 1 and value is node.outputs[1]:
            return
        # Further inputs are shapes, axes and indices.
        reach(node.inputs if node.op_type == "Concat" else node.inputs[:1])
        reach(node.outputs if node.op_type == "Split" else node.outputs[:1])
    else:
        group.blocked = group.blocked or f"{node.op_type} {node.name} computes with it"


def _shift_value(value: ir.Value, dtype: ir.DataType, editor: Editor) -> None:
    if is_constant(value):
        new = _shift_constant(value, dtype, editor)
        for node, place in list(value.uses()):
            node.replace_input_with(place, new)
            if is_op(node, "DequantizeLinear"):
                _shift_zero_point(node, dtype, editor)
        return
    if value.type is not None:
        value.type = ir.TensorType(dtype)
    maker = value.producer()
    for node in [*([maker] if maker is not None else []), *(use.node for use in value.uses())]:
        if is_op(node, "QuantizeLinear", "DequantizeLinear"):
            _shift_zero_point(node, dtype, editor)
    if maker is not None and maker.op_type in _BOUNDS:
        _shift_bounds(maker, dtype, editor)


def _shift_zero_point(node: ir.Node, dtype: ir.DataType, editor: Editor) -> None:
    params = params_of(node)
    if params is not None and params.dtype != dtype:
        node.replace_input_with(2, _shift_constant(node.inputs[2], dtype, editor))


def _shift_bounds(node: ir.Node, dtype: ir.DataType, editor: Editor) -> None:
    first_bound = _BOUNDS[node.op_type]
    # Without a fill value, Pad writes the integer 0, which stands for another number after the shift.
    if node.op_type == "Pad" and node_input(node, first_bound) is None:
        if node.attributes.get_string("mode", "constant") != "constant":
            return
        editor.set_input(
            node, first_bound, shift_integers(np.zeros((), _opposite_sign(dtype).numpy()), dtype), f"{node.name}/fill"
        )
        return
    for place in range(first_bound, min(len(node.inputs), 3)):
        old = node.inputs[place]
        if old is not None and is_constant(old):
            node.replace_input_with(place, _shift_constant(old, dtype, editor))


def _change_over(group: TypeGroup, dtype: ir.DataType, editor: Editor) -> int:
    """Insert a Q/DQ pair of type `dtype` after each DQ and before each Q of a group that keeps its own type. Return the
    number of pairs.

    If only bodies of control flow read the integers of a Q, insert no pair before it. The bodies would gain nothing,
    and ONNX Runtime 1.32 crashes on a Q, a DQ and another Q that only bodies read.
    """
    count = 0
    for value in group.values:
        maker = value.producer()
        is_read = value.is_graph_output() or any(use.node.graph is editor.graph for use in value.uses())
        sources = [maker] if maker is not None and is_op(maker, "QuantizeLinear") and is_read else []
        for node in [*sources, *(use.node for use in value.uses() if is_op(use.node, "DequantizeLinear"))]:
            params = float32_params_of(node)
            if (
                params is None
                or params.per_channel
                or params.dtype != _opposite_sign(dtype)
                or node.graph is not editor.graph
            ):
                continue
            zero = shift_integers(params.zero_point.astype(params.dtype.numpy()), dtype)
            new_params = QuantParams(params.scale, zero, dtype, params.axis)
            if is_op(node, "QuantizeLinear"):
                source = node.inputs[0]
                assert source is not None
                node.replace_input_with(0, _pair(source, new_params, node, editor))
            else:
                pair_behind(node.outputs[0], new_params, editor)
            count += 1
    return count


def pair_behind(output: ir.Value, params: QuantParams, editor: Editor) -> None:
    """Insert a QuantizeLinear and a DequantizeLinear between a tensor and its readers."""
    uses, reading = list(output.uses()), readers(output)
    if uses:
        numbers = _pair(output, params, next(node for node in editor.graph if node in reading), editor)
        for reader, place in uses:
            reader.replace_input_with(place, numbers)


def _pair(source: ir.Value, params: QuantParams, anchor: ir.Node, editor: Editor) -> ir.Value:
    """Insert a QuantizeLinear and a DequantizeLinear after `source`, and return the output of the DequantizeLinear."""
    name = f"{source.name}/{type_name(params.dtype)}"
    integers = editor.quantize(source, params, name, before=anchor)
    return editor.dequantize(integers, params, f"{name}/float", before=anchor)


def _opposite_sign(dtype: ir.DataType) -> ir.DataType:
    return ir.DataType.INT8 if dtype is ir.DataType.UINT8 else ir.DataType.UINT8
