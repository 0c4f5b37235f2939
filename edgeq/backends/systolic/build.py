"""Turn a prepared float model into a network: int8 layers for the array and its core, and float parts. For each node of
a float part, the network records why the node stays in float.

The network is built from a rewritten copy of the model at batch 1. Reshapes bring operators into the form that the
array requires: 2-D windows, and tensors with the batch as first axis. Activations move next to the layers that they can
be fused into.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from edgeq.backends.systolic import program as steps
from edgeq.backends.systolic.program import Layer, Network, Weighted, step_inputs, step_outputs
from edgeq.backends.systolic.recognise import CONSTANT_OPERAND, MOVES, Windows, recognise
from edgeq.errors import ModelError
from edgeq.model.convert import to_bytes
from edgeq.model.edit import Editor, insert_behind
from edgeq.model.fixed_shapes import fold_shapes, infer_shapes
from edgeq.model.graph import (
    GraphIndex,
    attributes,
    clamp_bounds,
    constant,
    constant_tensor,
    constant_values,
    is_constant,
    is_op,
    maker,
    name_of,
    node_input,
    only_reader,
    readers,
    reads,
    sizes,
)
from edgeq.model.int8_prediction import foreign_type_reason, hazardous_nodes
from edgeq.model.parts import part_of


def fixed_batch(model: ir.Model, path: Path) -> ir.Model:
    """Return a clone of a prepared model with batch 1, inferred shapes, and its weights in memory.

    Args:
        path: the model's file, for messages.

    Raises:
        ModelError: an input's batch is fixed and not 1, or another axis of an input has no fixed size.
    """
    fixed = model.clone()
    ir.external_data.load_to_model(fixed)
    for value in fixed.graph.inputs:
        if not value.is_initializer() and value.shape:
            value.shape = _with_batch_one(value, path)
    _make_constant_outputs(fixed)
    infer_shapes(fixed)
    return fixed


def _make_constant_outputs(model: ir.Model) -> None:
    """Add a node, in place, for each output of the model that is a constant, because in a network a layer must compute
    every output.
    """
    editor = Editor(model)
    for place, value in enumerate(model.graph.outputs):
        tensor = constant_tensor(value)
        if tensor is not None:
            copy = editor.constant(f"{value.name}/constant", tensor)
            made = editor.node("Identity", [copy], f"{value.name}/output", like=value)
            name, value.name = value.name, editor.free_value_name(f"{value.name}/replaced")
            made.name = name
            model.graph.outputs[place] = made


def _with_batch_one(value: ir.Value, path: Path) -> ir.Shape:
    assert value.shape is not None
    batch, *others = value.shape
    if isinstance(batch, int) and batch != 1:
        raise ModelError(
            f"{path}: input {value.name!r} has the fixed batch {batch}",
            "Export the model with batch 1 or an open batch: the array runs one sample at a time",
        )
    for axis, size in enumerate(others, 1):
        if not isinstance(size, int):
            raise ModelError(
                f"{path}: input {value.name!r} has no fixed size on axis {axis} ({size.value or 'unknown'})",
                f"Give --fix {size.value or f'{value.name}:{axis}'}=SIZE: the array's tiles and addresses need "
                "fixed sizes, except for the batch",
            )
    return ir.Shape([1, *others])


_WINDOWED = ("AveragePool", "Conv", "GlobalAveragePool", "MaxPool")


def two_dimensional(model: ir.Model) -> bool:
    """Change each convolution or pooling of [1, C, L] to one of [1, C, 1, L], in place. The values stay the same.

    Returns:
        True if anything changed.
    """
    editor = Editor(model)
    changed = False
    for node in list(model.graph):
        source = node_input(node, 0)
        if not is_op(node, *_WINDOWED) or len(node.outputs) > 1 or len(sizes(source) or ()) != 3:
            continue
        if node.op_type == "Conv":
            weights = constant(node.inputs[1])
            if weights is None:
                continue
            editor.set_input(node, 1, weights[:, :, None, :], f"{name_of(node.inputs[1])}/2d")
        for name in ("kernel_shape", "strides", "dilations"):
            if name in node.attributes:
                node.attributes[name] = ir.AttrInt64s(name, [1, *attributes(node)[name]])
        if "pads" in node.attributes:
            begin, end = attributes(node)["pads"]
            node.attributes["pads"] = ir.AttrInt64s("pads", [0, begin, 0, end])
        # Leave the sizes to shape inference: with ceil_mode, ONNX's sizes may be one too large until `explicit_ceil`
        # has run.
        image = editor.constant(f"{node.name}/image", np.array([0, 0, 1, -1]))
        node.replace_input_with(0, editor.node("Reshape", [source, image], f"{node.name}/as_image", before=node))
        output = node.outputs[0]
        line = editor.constant(f"{node.name}/line", np.array([0, 0, -1]))
        last = editor.node("Reshape", [output, line], f"{node.name}/as_line", after=node)
        insert_behind(output, last, last, editor.free_value_name(f"{name_of(output)}/2d"))
        changed = True
    return changed


def batch_in_front(model: ir.Model) -> bool:
    """Change each product of [rows, K] with constant weights to one of [1, rows, K], in place. The values stay the
    same.

    Sums and activations of such products change as well. ONNX Runtime's optimiser makes such products, and so does
    attention whose first axis is the sequence. All their rows belong to one sample, so the first axis is not a batch.

    Returns:
        True if anything changed.
    """
    editor = Editor(model)
    in_front: dict[ir.Value, ir.Value] = {}
    for node in list(model.graph):
        if _is_product_of_rows(node):
            first, made = _product(editor, node, in_front)
        elif _is_of_rows(node, in_front):
            read = [in_front.get(value, value) if value is not None else None for value in node.inputs]
            like = next(in_front[value] for value in node.inputs if value in in_front)
            name, kept = f"{node.name}/in_front", node.attributes
            first = made = editor.node(node.op_type, read, name, before=node, like=like, attributes=kept)
        else:
            continue
        flat = node.outputs[0]
        columns = (sizes(flat) or (0,))[-1]
        for reader in readers(flat):
            shape = sizes(reader.outputs[0])
            if is_op(reader, "Reshape") and shape is not None and shape[:1] == (1,):
                editor.set_input(reader, 1, np.array(shape, np.int64), f"{reader.name}/shape")
                reader.attributes.pop("allowzero", None)
                reader.replace_input_with(0, made)
        known = name_of(flat)
        if readers(flat):
            without = editor.constant(f"{node.name}/rows", np.array([-1, columns]))
            rows = editor.node("Reshape", [made, without], f"{node.name}/flat", before=node, like=flat)
            flat.replace_all_uses_with(rows)
            in_front[rows] = made
        model.graph.remove(node, safe=True)
        # Keep both names: excluded nodes and multiply-accumulates are looked up by the node's name, ranges by the
        # tensor's.
        maker(first).name, made.name = node.name, known
    if in_front:
        RemoveUnusedNodesPass()(model)
    return bool(in_front)


def _product(editor: Editor, node: ir.Node, in_front: dict[ir.Value, ir.Value]) -> tuple[ir.Value, ir.Value]:
    """Return the product with the batch as first axis, and its sum with the bias. Without a bias, both are the same."""
    read, weights, bias, name = node.inputs[0], node.inputs[1], node_input(node, 2), node.name or ""
    matrix = constant_values(weights)
    assert read is not None
    assert weights is not None
    if read not in in_front:
        in_front[read] = _with_batch(editor, node, read)
    if node.attributes.get_int("transB", 0):
        matrix = matrix.T
        weights = editor.constant(f"{weights.name}/transposed", matrix)
    product = editor.node(
        "MatMul", [in_front[read], weights], f"{name}/product", before=node, dtype=node.outputs[0].dtype
    )
    product.shape = ir.Shape([*(sizes(in_front[read]) or ())[:-1], matrix.shape[1]])
    if bias is None:
        return product, product
    return product, editor.node("Add", [product, bias], f"{name}/bias", before=node, like=product)


def _is_product_of_rows(node: ir.Node) -> bool:
    """Return whether a node multiplies [rows, K] by constant weights and adds nothing but a constant bias."""
    matrix = constant(node_input(node, 1)) if is_op(node, "Gemm", "MatMul") else None
    shape = sizes(node.inputs[0])
    if matrix is None or matrix.ndim != 2 or shape is None or len(shape) != 2 or shape[0] == 1:
        return False
    if any(value.is_graph_output() for value in (node.inputs[0], node.outputs[0]) if value is not None):
        return False
    if node.attributes.get_int("transA", 0) or any(node.attributes.get_float(f, 1.0) != 1.0 for f in ("alpha", "beta")):
        return False  # after preparation, only Gemms whose bias is computed still have alpha and beta (`model.gemm`)
    outputs = matrix.shape[0] if node.attributes.get_int("transB", 0) else matrix.shape[1]
    return node_input(node, 2) is None or _for_each_output(constant(node_input(node, 2)), outputs)


def _is_of_rows(node: ir.Node, in_front: Mapping[ir.Value, ir.Value]) -> bool:
    """Return whether a node is an activation or a sum whose inputs are all in `in_front`, so they consist of rows.

    The second operand of a sum may also be a constant bias.
    """
    if not is_op(node, "Add", "Clip", "Relu") or node.outputs[0].is_graph_output():
        return False
    read = [value for value in node.inputs if value is not None and not is_constant(value)]
    if not read or not all(value in in_front for value in read):
        return False
    if any(sizes(in_front[value]) != sizes(in_front[read[0]]) for value in read):
        return False
    shape = sizes(node.outputs[0])
    if not shape or shape != sizes(read[0]):
        return False
    outputs = shape[-1]
    return node.op_type != "Add" or all(_for_each_output(constant(v), outputs) for v in node.inputs if v not in read)


def _for_each_output(values: NDArray[Any] | None, outputs: int) -> bool:
    """Return whether a constant is a single number, or a row with one number for each output."""
    return values is not None and (values.size == 1 or (values.shape[-1:] == (outputs,) and values.size == outputs))


def _with_batch(editor: Editor, node: ir.Node, read: ir.Value) -> ir.Value:
    """Return a product's input as [1, ..., K].

    If a Reshape made the rows from a tensor of that form, return that tensor. Otherwise add a Reshape.
    """
    rows, inner = sizes(read) or (0, 0)
    before, source = read.producer(), read
    given = before.inputs[0] if before is not None and is_op(before, "Reshape") else None
    shape = sizes(given) or ()
    if given is not None and shape[:1] == (1,):
        if shape[-1] == inner:
            return given
        source = given
    whole = editor.constant(f"{node.name}/batch", np.array([1, rows, inner]))
    made = editor.node("Reshape", [source, whole], f"{node.name}/in_front", before=node)
    made.shape, made.type = ir.Shape([1, rows, inner]), read.type
    # The tensor with the batch as first axis may become int8, so it gets the name under which its range is stored.
    made.name, read.name = read.name, editor.free_value_name(f"{read.name}/flat")
    return made


_ACTIVATIONS = ("Relu", "Clip")


def rewrite(model: ir.Model, wanted: Callable[[ir.Node], bool]) -> None:
    """Bring a model into the form that the array requires, in place.

    - Convolutions, pooling and products get the array's shapes (`two_dimensional`, `batch_in_front`).
    - The padding of pooling becomes explicit (`explicit_ceil`), and shape arithmetic is folded.
    - An activation that comes after pooling or data movement moves in front of it (`activations_first`), next to the
      layer that it can be fused into.

    Args:
        wanted: a function that returns whether a node may leave float.

    Raises:
        ModelError: ONNX and ONNX Runtime do not agree on the output size of an average pooling.
    """
    first = partial(activations_first, wanted=wanted)
    for change in (two_dimensional, explicit_ceil, fold_shapes, batch_in_front, first):
        if change(model):
            infer_shapes(model)


def explicit_ceil(model: ir.Model) -> bool:
    """Replace ceil_mode of pooling by padding at the end, in place.

    With ceil_mode, ONNX's shape inference also counts windows that start in that padding, while ONNX Runtime correctly
    leaves them out. Without ceil_mode, both infer the same size.

    Returns:
        Always False: the caller has no shapes to infer, because the function infers them itself.

    Raises:
        ModelError: ONNX and ONNX Runtime do not agree on the output size of an average pooling.
    """
    for node in model.graph:
        if not is_op(node, "MaxPool", "AveragePool") or not node.attributes.get_int("ceil_mode", 0):
            continue
        shape = sizes(node.inputs[0])
        if shape is None or len(shape) != 4:
            continue
        windows = Windows.of(node, shape)
        pooled = windows.rounded_up(shape)
        ends = windows.end_pads(shape, pooled)
        if ends[0] <= windows.pads[2] and ends[1] <= windows.pads[3]:
            node.attributes.pop("ceil_mode")  # every window ends within the existing padding
            infer_shapes(model)
        elif node.op_type == "AveragePool":
            if pooled != (sizes(node.outputs[0]) or ())[2:]:
                raise ModelError(
                    f"the output size of {node.name!r} differs from the one that ONNX infers",
                    "Export it with ceil_mode = 0 and explicit padding",
                )
        elif len(node.outputs) == 1 and all(end < size for end, size in zip(ends, windows.kernel, strict=True)):
            # The padding must be smaller than the window: ONNX Runtime refuses larger padding, although dilated windows
            # can reach further.
            node.attributes["pads"] = ir.AttrInt64s("pads", [*windows.pads[:2], *ends])
            for name in ("ceil_mode", "auto_pad"):
                node.attributes.pop(name, None)
            infer_shapes(model)
    return False  # each change infers the shapes again, because the next pooling may depend on them


def activations_first(model: ir.Model, wanted: Callable[[ir.Node], bool]) -> bool:
    """Swap each activation with the MaxPool or data movement in front of it, in place: X → MaxPool → Relu becomes X →
    Relu → MaxPool. The values stay the same.

    An activation does not move past a node that stays in float. That node may compute new values, and the tensor
    between the two would have no calibrated range.

    Args:
        wanted: a function that returns whether a node may leave float.

    Returns:
        True if anything changed.
    """
    editor = Editor(model)
    changed = False
    while (found := next(filter(None, (_movable(model, node, wanted) for node in model.graph)), None)) is not None:
        through, activation = found
        source, between, last = through.inputs[0], through.outputs[0], activation.outputs[0]
        assert source is not None
        model.graph.remove(activation)
        last.replace_all_uses_with(between, replace_graph_outputs=True)
        model.graph.insert_before(through, activation)
        activation.replace_input_with(0, source)
        through.replace_input_with(0, last)
        # The last tensor keeps its name, under which its range is stored.
        last.name, between.name = editor.free_value_name(f"{source.name}/{activation.op_type.lower()}"), last.name
        changed = True
    return changed


def _movable(model: ir.Model, node: ir.Node, wanted: Callable[[ir.Node], bool]) -> tuple[ir.Node, ir.Node] | None:
    """Return a MaxPool or data movement and the activation after it, if the two can be swapped.

    Return None if they cannot be swapped, or if the first node has no int8 form.
    """
    if (node.op_type != "MaxPool" and node.op_type not in MOVES) or len(node.outputs) != 1:
        return None
    source, activation = node.inputs[0], only_reader(node.outputs[0])
    if source is None or activation is None or activation.op_type not in _ACTIVATIONS or only_reader(source) is None:
        return None
    maker = source.producer()
    if maker is None or maker.op_type in _ACTIVATIONS or not _spans_zero(activation):
        return None
    if not wanted(node) or not wanted(activation) or isinstance(recognise(model, node), str):
        return None
    return node, activation


def _spans_zero(activation: ir.Node) -> bool:
    """Return whether an activation has constant bounds and maps zero, the value of padding, to zero."""
    bounds = clamp_bounds(activation)
    return bounds is not None and bounds[0] <= 0 <= bounds[1]


_ANCHORS = (steps.Conv, steps.Fc)
_SURROUNDED = "its inputs are in float, and quantizing them for this operator alone would gain nothing"

_Item = TypeVar("_Item", bound=Layer | ir.Node)
Found = dict[str, tuple[Layer, ...]]
"""Layers by the name of their node. A node that became part of the layer before it has no layers."""


def build_network(
    model: ir.Model,
    path: Path,
    *,
    exclude: Mapping[str, str] = MappingProxyType({}),
    op_types: Collection[str] | None = None,
    hazards: Mapping[str, str] = MappingProxyType({}),
) -> Network:
    """Return the network of a prepared model. The model itself does not change.

    Args:
        path: the model's file, for messages.
        exclude: the reason for each node that stays in float.
        op_types: operator types that may become int8; None means all.
        hazards: names of tensors that must not be in 8 bits, each with the text that follows the tensor's name in the
            reason why a node stays in float.

    Raises:
        ModelError: an input's size is not fixed.
    """
    fixed = fixed_batch(model, path)
    kept = {**exclude, **hazardous_nodes(model, hazards)}
    rewrite(fixed, lambda node: not _unwanted(node, kept, op_types))
    index = GraphIndex(fixed)
    found: Found = {}
    reasons: dict[str, str] = {}
    for node in fixed.graph:
        made = _unwanted(node, kept, op_types) or recognise(fixed, node)
        if isinstance(made, str):
            reasons[node.name or ""] = made
        else:
            found[node.name or ""] = made
    _fold_biases(index, found, reasons)
    _settle(index, found, reasons)
    layers = [layer for node in fixed.graph if node.name in found for layer in found[node.name]]
    layers = _fold_relus(layers, index.outputs)
    floats = [node for node in fixed.graph if node.name in reasons]
    ordered = alternate(layers, floats)
    read = {name for layer in layers for name in step_inputs(layer)}
    whole = tuple(
        _float_layer(fixed, item, read, reasons, number) if isinstance(item, list) else item
        for number, item in enumerate(ordered)
    )
    shapes = {name: sizes(value) or () for name, value in index.values.items()}
    for layer in layers:
        if isinstance(layer, steps.AveragePool):  # a tensor that the float model does not have
            shapes.setdefault(layer.output, (*shapes[layer.input][:2], 1, 1))
    used = {*index.inputs, *(n for layer in whole for n in (*step_inputs(layer), *step_outputs(layer)))}
    return Network(
        inputs=index.inputs,
        outputs=index.outputs,
        layers=whole,
        shapes={name: shapes[name] for name in sorted(used)},
        dtypes={name: _dtype(index.values.get(name)) for name in sorted(used)},
    )


def _dtype(value: ir.Value | None) -> str:
    return "float32" if value is None or value.dtype is None else str(value.dtype.numpy().name)


def _unwanted(node: ir.Node, kept: Mapping[str, str], op_types: Collection[str] | None) -> str:
    """Return why the caller's choices keep a node in float; "" if they do not."""
    if node.name is not None and node.name in kept:
        return kept[node.name]
    return foreign_type_reason(node.op_type) if op_types is not None and node.op_type not in op_types else ""


def _settle(index: GraphIndex, found: Found, reasons: dict[str, str]) -> None:
    """Move layers from `found` to `reasons`, in place, if in int8 they would only add conversions.

    Convolutions and products are worth a conversion. Any other layer becomes int8 if it reads an int8 tensor. Two other
    kinds of layers also become int8 if all readers of their results are int8: layers that read nothing but graph
    inputs, and plain reshapes. The conversion then comes before the layer instead of after it.
    """
    integers: set[ir.Value] = set()
    for node in index.graph:
        name = node.name or ""
        if name not in found:
            continue
        if not found[name]:
            integers.update(node.outputs)
            continue
        first = found[name][0]
        sources = [value for value in node.inputs if value is not None and not is_constant(value)]
        worth = isinstance(first, _ANCHORS) or not integers.isdisjoint(sources)
        reshapes = isinstance(first, steps.Rearrange) and first.index is None
        if not worth and (reshapes or all(value.is_graph_input() for value in sources)):
            worth = all(_wants_integers(found, value) for value in node.outputs if value.name)
        if worth:
            integers.update(value for value in node.outputs if value.name)
        else:
            del found[name]
            reasons[name] = _SURROUNDED


def _wants_integers(found: Found, tensor: ir.Value) -> bool:
    nodes = readers(tensor)
    if not nodes or tensor.is_graph_output():
        return False
    for node in nodes:
        layers = found.get(node.name or "")
        if layers is None:
            return False
        if not isinstance(layers[0], _ANCHORS) and not all(_wants_integers(found, v) for v in node.outputs if v.name):
            return False
    return True


def _fold_biases(index: GraphIndex, found: Found, reasons: dict[str, str]) -> None:
    """Fold each Add of one constant per channel into the bias of the MatMul or Conv before it, in place."""
    for node in index.graph:
        layers = found.get(node.name or "")
        layer = layers[0] if layers else None
        following = only_reader(index.values[layer.output]) if isinstance(layer, steps.Fc | steps.Conv) else None
        name = following.name or "" if following is not None else ""
        if following is None or following.op_type != "Add" or reasons.get(name) != CONSTANT_OPERAND:
            continue
        assert isinstance(layer, steps.Fc | steps.Conv)
        other = next(values for value in following.inputs if (values := constant(value)) is not None)
        if _per_channel(other, layer) and sizes(following.outputs[0]) == sizes(node.outputs[0]):
            del reasons[name]
            bias = layer.bias + np.broadcast_to(other.astype(np.float64).ravel(), layer.bias.shape)
            sources, output = (*layer.sources, name), name_of(following.outputs[0])
            found[node.name or ""] = (dataclasses.replace(layer, bias=bias, output=output, sources=sources),)
            found[name] = ()


def _per_channel(values: np.ndarray, layer: Weighted) -> bool:
    """Return whether a constant broadcasts to one value per output channel."""
    if values.size == 1:
        return True
    if values.size != len(layer.bias):
        return False
    if isinstance(layer, steps.Conv):
        return values.ndim >= 3 and int(values.shape[-3]) == values.size
    return int(values.shape[-1]) == values.size


def _fold_relus(layers: list[Layer], outputs: Collection[str]) -> list[Layer]:
    """Return the layers with each Relu folded into a convolution, product or sum, if nothing else reads the result of
    that layer.
    """
    read = steps.readers(layers)
    folded: list[Layer] = []
    gone: set[str] = set()
    for layer in layers:
        if layer.name in gone:
            continue
        if isinstance(layer, steps.Conv | steps.Fc | steps.ResidualAdd) and layer.output not in outputs:
            following = read[layer.output]
            clamp = following[0] if len(following) == 1 else None
            if isinstance(clamp, steps.Clamp) and clamp.low == 0 and math.isinf(clamp.high):
                sources = (*layer.sources, *clamp.sources)
                gone.add(clamp.name)
                layer = dataclasses.replace(layer, relu=True, output=clamp.output, sources=sources)
        folded.append(layer)
    return [layer for layer in folded if layer.name not in gone]


def _float_layer(
    model: ir.Model, nodes: list[ir.Node], read: Collection[str], reasons: Mapping[str, str], number: int
) -> steps.Float:
    """Return one layer that contains these nodes, which stay in float.

    Args:
        read: names of the tensors that int8 layers read.
    """
    inside = {value for node in nodes for value in node.outputs}
    needs = dict.fromkeys(value for node in nodes for value in reads(node))
    inputs = [value for value in needs if value not in inside and not is_constant(value)]
    outputs = [
        value
        for node in nodes
        for value in node.outputs
        if value.name and (value.name in read or value.is_graph_output() or not set(readers(value)).issubset(nodes))
    ]
    kept = {node.name or "": reasons[node.name or ""] for node in nodes}
    content = to_bytes(part_of(model, nodes, inputs, outputs))
    names = tuple(map(name_of, inputs)), tuple(map(name_of, outputs))
    return steps.Float(f"float/{number}", *names, content, kept, tuple(kept))


def alternate(layers: Sequence[Layer], floats: Sequence[ir.Node]) -> list[Layer | list[ir.Node]]:
    """Return the int8 layers in an order in which they can run, with the float nodes between them in groups.

    The groups are as large as the dependences between the nodes allow. The search is greedy: it takes every item of one
    kind that can run before it switches to the other kind. It runs twice, once starting with each kind, and the order
    with fewer groups is returned.
    """
    made = {name for item in (*layers, *floats) for name in _writes(item)}
    orders = [_greedy(layers, floats, made, floats_first) for floats_first in (False, True)]
    return min(orders, key=lambda order: sum(isinstance(item, list) for item in order))


def _greedy(
    layers: Sequence[Layer], floats: Sequence[ir.Node], made: set[str], floats_first: bool
) -> list[Layer | list[ir.Node]]:
    known: set[str] = set()
    remaining_layers, remaining_floats = list(layers), list(floats)
    order: list[Layer | list[ir.Node]] = []
    in_float = floats_first
    while remaining_layers or remaining_floats:
        if in_float:
            group = _run(remaining_floats, known, made)
            order += [group] if group else []
        else:
            order += _run(remaining_layers, known, made)
        in_float = not in_float
    return order


def _run(waiting: list[_Item], known: set[str], made: set[str]) -> list[_Item]:
    """Remove from `waiting` the items that can run, and return these items in order. Add their outputs to `known`.

    Args:
        waiting: items in topological order.
    """
    done, remaining = [], []
    for item in waiting:
        if all(name in known or name not in made for name in _reads(item)):
            known.update(_writes(item))
            done.append(item)
        else:
            remaining.append(item)
    waiting[:] = remaining
    return done


def _reads(item: Layer | ir.Node) -> Sequence[str]:
    return [name_of(value) for value in reads(item)] if isinstance(item, ir.Node) else step_inputs(item)


def _writes(item: Layer | ir.Node) -> Sequence[str]:
    if isinstance(item, ir.Node):
        return [value.name for value in item.outputs if value.name]
    return step_outputs(item)
