"""Bring a float model into the form that the array requires.

Reshapes bring operators into the form: 2-D windows, and tensors with the batch as first axis. Activations move next to
the layers that they can be fused into.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from edgeq.backends.systolic.recognise import MOVES, Windows, recognise
from edgeq.errors import ModelError
from edgeq.model.edit import Editor, insert_behind
from edgeq.model.fixed_shapes import fold_shapes, infer_shapes
from edgeq.model.graph import (
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
    sizes,
)


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
            output = editor.node("Identity", [copy], f"{value.name}/output", like=value)
            # The output of the model keeps its name; the constant gets another.
            name, value.name = value.name, editor.free_value_name(f"{value.name}/replaced")
            output.name = name
            model.graph.outputs[place] = output


def _with_batch_one(value: ir.Value, path: Path) -> ir.Shape:
    assert value.shape is not None
    batch, *inner_sizes = value.shape
    if isinstance(batch, int) and batch != 1:
        raise ModelError(
            f"{path}: input {value.name!r} has the fixed batch {batch}",
            "Export the model with batch 1 or an open batch: the array runs one sample at a time",
        )
    for axis, size in enumerate(inner_sizes, 1):
        if not isinstance(size, int):
            raise ModelError(
                f"{path}: input {value.name!r} has no fixed size on axis {axis} ({size.value or 'unknown'})",
                f"Give ⟨fix⟩ {size.value or f'{value.name}:{axis}'}=SIZE: the array's tiles and addresses need "
                "fixed sizes, except for the batch",
            )
    return ir.Shape([1, *inner_sizes])


# Operators whose windows may be one-dimensional.
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
                # The added axis comes first: a line is an image of one row.
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
        as_line = editor.node("Reshape", [output, line], f"{node.name}/as_line", after=node)
        insert_behind(output, as_line, as_line, editor.free_value_name(f"{name_of(output)}/2d"))
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
    # Flat tensor → the same tensor with the batch in front.
    in_front: dict[ir.Value, ir.Value] = {}
    for node in list(model.graph):
        if _is_product_of_rows(node):
            product, total = _product(editor, node, in_front)
        elif _is_of_rows(node, in_front):
            inputs = [in_front.get(value, value) if value is not None else None for value in node.inputs]
            like = next(in_front[value] for value in node.inputs if value in in_front)
            name, node_attributes = f"{node.name}/in_front", node.attributes
            product = total = editor.node(
                node.op_type, inputs, name, before=node, like=like, attributes=node_attributes
            )
        else:
            continue
        flat = node.outputs[0]
        columns = (sizes(flat) or (0,))[-1]
        # A Reshape that restores the batch can read the new tensor directly.
        for reader in readers(flat):
            shape = sizes(reader.outputs[0])
            if is_op(reader, "Reshape") and shape is not None and shape[:1] == (1,):
                editor.set_input(reader, 1, np.array(shape, np.int64), f"{reader.name}/shape")
                # The shape is fixed, so 0 no longer means anything in it.
                reader.attributes.pop("allowzero", None)
                reader.replace_input_with(0, total)
        flat_name = name_of(flat)
        if readers(flat):
            without = editor.constant(f"{node.name}/rows", np.array([-1, columns]))
            rows = editor.node("Reshape", [total, without], f"{node.name}/flat", before=node, like=flat)
            flat.replace_all_uses_with(rows)
            in_front[rows] = total
        model.graph.remove(node, safe=True)
        # Keep both names: excluded nodes and multiply-accumulates are looked up by the node's name, ranges by the
        # tensor's.
        maker(product).name, total.name = node.name, flat_name
    if in_front:
        RemoveUnusedNodesPass()(model)
    return bool(in_front)


def _product(editor: Editor, node: ir.Node, in_front: dict[ir.Value, ir.Value]) -> tuple[ir.Value, ir.Value]:
    """Return the product with the batch as first axis, and its sum with the bias. Without a bias, both are the same."""
    source, weights, bias, name = node.inputs[0], node.inputs[1], node_input(node, 2), node.name or ""
    matrix = constant_values(weights)
    assert source is not None
    assert weights is not None
    if source not in in_front:
        in_front[source] = _with_batch(editor, node, source)
    if node.attributes.get_int("transB", 0):
        matrix = matrix.T
        weights = editor.constant(f"{weights.name}/transposed", matrix)
    product = editor.node(
        "MatMul", [in_front[source], weights], f"{name}/product", before=node, dtype=node.outputs[0].dtype
    )
    product.shape = ir.Shape([*(sizes(in_front[source]) or ())[:-1], matrix.shape[1]])
    if bias is None:
        return product, product
    return product, editor.node("Add", [product, bias], f"{name}/bias", before=node, like=product)


def _is_product_of_rows(node: ir.Node) -> bool:
    """Return whether a node multiplies [rows, K] by constant weights and adds nothing but a constant bias."""
    matrix = constant(node_input(node, 1)) if is_op(node, "Gemm", "MatMul") else None
    shape = sizes(node.inputs[0])
    # One row is one sample, and needs no change.
    if matrix is None or matrix.ndim != 2 or shape is None or len(shape) != 2 or shape[0] == 1:
        return False
    # The model's outputs keep their shapes.
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
    activations = [value for value in node.inputs if value is not None and not is_constant(value)]
    if not activations or not all(value in in_front for value in activations):
        return False
    if any(sizes(in_front[value]) != sizes(in_front[activations[0]]) for value in activations):
        return False
    shape = sizes(node.outputs[0])
    if not shape or shape != sizes(activations[0]):
        return False
    outputs = shape[-1]
    return node.op_type != "Add" or all(
        _for_each_output(constant(v), outputs) for v in node.inputs if v not in activations
    )


def _for_each_output(values: NDArray[Any] | None, outputs: int) -> bool:
    """Return whether a constant is a single number, or a row with one number for each output."""
    return values is not None and (values.size == 1 or (values.shape[-1:] == (outputs,) and values.size == outputs))


def _with_batch(editor: Editor, node: ir.Node, flat: ir.Value) -> ir.Value:
    """Return a product's input as [1, ..., K].

    If a Reshape made the rows from a tensor of that form, return that tensor. Otherwise add a Reshape.
    """
    rows, inner = sizes(flat) or (0, 0)
    reshape, source = flat.producer(), flat
    original = reshape.inputs[0] if reshape is not None and is_op(reshape, "Reshape") else None
    shape = sizes(original) or ()
    if original is not None and shape[:1] == (1,):
        if shape[-1] == inner:
            return original
        source = original
    target_shape = editor.constant(f"{node.name}/batch", np.array([1, rows, inner]))
    batched = editor.node("Reshape", [source, target_shape], f"{node.name}/in_front", before=node)
    batched.shape, batched.type = ir.Shape([1, rows, inner]), flat.type
    # The tensor with the batch as first axis may become int8, so it gets the name under which its range is stored.
    batched.name, flat.name = flat.name, editor.free_value_name(f"{flat.name}/flat")
    return batched


_ACTIVATIONS = ("Relu", "Clip")


def rewrite(model: ir.Model, may_leave_float: Callable[[ir.Node], bool]) -> None:
    """Bring a model into the form that the array requires, in place.

    - Convolutions, pooling and products get the array's shapes (`two_dimensional`, `batch_in_front`).
    - The padding of pooling becomes explicit (`explicit_ceil`), and shape arithmetic is folded.
    - An activation that comes after pooling or data movement moves in front of it (`activations_first`), next to the
      layer that it can be fused into.

    Args:
        may_leave_float: a function that returns whether a node may leave float.

    Raises:
        ModelError: ONNX and ONNX Runtime do not agree on the output size of an average pooling.
    """
    move_activations = partial(activations_first, may_leave_float=may_leave_float)
    # Each step needs the one before it: padding becomes explicit only for images, and moved activations need known
    # shapes.
    for change in (two_dimensional, explicit_ceil, fold_shapes, batch_in_front, move_activations):
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


def activations_first(model: ir.Model, may_leave_float: Callable[[ir.Node], bool]) -> bool:
    """Swap each activation with the MaxPool or data movement in front of it, in place: X → MaxPool → Relu becomes X →
    Relu → MaxPool. The values stay the same.

    An activation does not move past a node that stays in float. That node may compute new values, and the tensor
    between the two would have no calibrated range.

    Args:
        may_leave_float: a function that returns whether a node may leave float.

    Returns:
        True if anything changed.
    """
    editor = Editor(model)
    changed = False
    while (
        swap := next(filter(None, (_movable(model, node, may_leave_float) for node in model.graph)), None)
    ) is not None:
        through, activation = swap
        source, between, activated = through.inputs[0], through.outputs[0], activation.outputs[0]
        assert source is not None
        model.graph.remove(activation)
        activated.replace_all_uses_with(between, replace_graph_outputs=True)
        model.graph.insert_before(through, activation)
        activation.replace_input_with(0, source)
        through.replace_input_with(0, activated)
        # The last tensor keeps its name, under which its range is stored.
        activated.name, between.name = (
            editor.free_value_name(f"{source.name}/{activation.op_type.lower()}"),
            activated.name,
        )
        changed = True
    return changed


def _movable(
    model: ir.Model, node: ir.Node, may_leave_float: Callable[[ir.Node], bool]
) -> tuple[ir.Node, ir.Node] | None:
    """Return a MaxPool or data movement and the activation after it, if the two can be swapped.

    Return None if they cannot be swapped, or if the first node has no int8 form.
    """
    if (node.op_type != "MaxPool" and node.op_type not in MOVES) or len(node.outputs) != 1:
        return None
    source, activation = node.inputs[0], only_reader(node.outputs[0])
    if source is None or activation is None or activation.op_type not in _ACTIVATIONS or only_reader(source) is None:
        return None
    maker = source.producer()
    # Behind another activation it could not become part of a layer.
    if maker is None or maker.op_type in _ACTIVATIONS or not _spans_zero(activation):
        return None
    if not may_leave_float(node) or not may_leave_float(activation) or isinstance(recognise(model, node), str):
        return None
    return node, activation


def _spans_zero(activation: ir.Node) -> bool:
    """Return whether an activation has constant bounds and maps zero, the value of padding, to zero."""
    bounds = clamp_bounds(activation)
    return bounds is not None and bounds[0] <= 0 <= bounds[1]
