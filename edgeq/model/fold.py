"""Simplify a graph: fold BatchNormalization, inline functions, make sparse tensors dense, raise the opset.

At inference, BatchNormalization computes y = x * factor + shift for each channel, with factor = scale / sqrt(var +
epsilon) and shift = bias - mean * factor (the definition of the ONNX operator). BatchNormalization can be folded into a
preceding layer that is linear in its weights. The weights and the bias of the layer are multiplied by factor, and shift
is added to the bias.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnx import numpy_helper

from edgeq.errors import ModelError, one_line
from edgeq.model.edit import Editor, inner_graphs, replace_node, rewrite_nodes
from edgeq.model.graph import constant, every_node, is_op, name_of, node_input, only_reader, opset_of
from edgeq.model.tensors import (
    DAMAGED,
    Array,
    all_graphs,
    float_constant,
    iter_graphs,
    output_channels,
    reattach,
    set_parameter,
    shaped_skeleton,
    skeleton,
)

_LISTED = 4
_NO_LAYER = "no Conv, ConvTranspose, Gemm or MatMul comes right before it"
_LINEAR = ("Conv", "ConvTranspose", "Gemm", "MatMul")


def fold_batch_norms(model: ir.Model, notes: list[str] | None = None) -> int:
    """Fold every BatchNormalization into the layer that it follows, in place, if possible.

    The layer must be a Conv, ConvTranspose, Gemm or 2-D MatMul with constant weights, and its result must have no other
    use. A Reshape of a MatMul's rows may be in between. The layer keeps its name, and its result takes over the name of
    the BatchNormalization's result. New weights are computed in float64 and stored in their old type.

    Args:
        notes: a list to which the function adds one line for each reason why nodes were not folded. The line contains
            the names of the nodes.

    Returns:
        The number of nodes that were folded.
    """
    reasons: dict[str, list[str]] = {}

    def fold(norm: ir.Node, editor: Editor) -> bool:
        """Fold `norm` and return True. If this is not possible, record the reason and return False."""
        reason = _fold(norm, editor)
        if reason:
            reasons.setdefault(reason, []).append(repr(norm.name))
        return not reason

    folded = rewrite_nodes(model, fold, "BatchNormalization")
    if notes is not None:
        notes.extend(f"BatchNormalization {_listing(names)}: {reason}" for reason, names in reasons.items())
    return folded


def _listing(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{', '.join(names[:_LISTED])}{more} {'stays' if len(names) == 1 else 'stay'}"


def _fold(norm: ir.Node, editor: Editor) -> str:
    """Fold one BatchNormalization and return "". If this is not possible, return the reason."""
    source = norm.inputs[0]
    layer = source.producer() if source is not None else None
    if source is not None and layer is not None and is_op(layer, "Reshape"):
        return _fold_through(norm, layer, editor)
    if source is None or layer is None or not is_op(layer, *_LINEAR):
        return _NO_LAYER
    if only_reader(source) is not norm:
        return f"the result of {layer.name!r} is used elsewhere too"
    factors = norm_factors(norm)
    if isinstance(factors, str):
        return factors
    reason = fold_into(editor, layer, *factors)
    if reason:
        return reason
    replace_node(norm, source)
    return ""


def _fold_through(norm: ir.Node, reshape: ir.Node, editor: Editor) -> str:
    """Fold one BatchNormalization that follows a MatMul and a Reshape from [batch, rows, channels] to [batch x rows,
    channels], as in LeViT. The factor is multiplied into the weights, and an Add before the Reshape adds the shift.
    Return "", or the reason why this is not possible.
    """
    product = reshape.inputs[0]
    layer = product.producer() if product is not None else None
    if product is None or layer is None or not is_op(layer, "MatMul"):
        return _NO_LAYER
    weight, shape = float_constant(layer.inputs[1]), reshape.outputs[0].shape
    if only_reader(product) is not reshape or only_reader(reshape.outputs[0]) is not norm:
        return f"the result of {layer.name!r} is used elsewhere too"
    factors = norm_factors(norm)
    if isinstance(factors, str):
        return factors
    if weight is None or weight.ndim != 2 or shape is None or len(shape) != 2 or shape[1] != weight.shape[1]:
        return f"its channels are not known to be those of {layer.name!r}"
    dtype = layer.inputs[1].dtype  # type: ignore[union-attr]
    assert dtype is not None
    set_parameter(editor, layer, 1, weight * factors[0])
    shift = editor.constant(f"{layer.name}.bias", factors[1].astype(dtype.numpy()))
    moved = editor.node("Add", [product, shift], f"{layer.name}/bias", before=reshape, like=product)
    reshape.replace_input_with(0, moved)
    replace_node(norm, reshape.outputs[0])
    return ""


def norm_factors(norm: ir.Node) -> tuple[Array, Array] | str:
    """Return the factor and the shift of a BatchNormalization, each float64[channels]. If they cannot be computed,
    return the reason.
    """
    training = norm.attributes.get_int("training_mode", 0)
    if training or any(o.uses() or o.is_graph_output() for o in norm.outputs[1:]):
        return "it is in training mode"
    parameters = [float_constant(v) for v in norm.inputs[1:5]]
    if len(parameters) < 4 or any(p is None for p in parameters):
        return "its parameters are not constant"
    scale, bias, mean, variance = (p.ravel() for p in parameters if p is not None)
    spread = variance + norm.attributes.get_float("epsilon", 1e-5)
    if not np.all(spread > 0):
        return "its variance is not positive"
    factor = scale / np.sqrt(spread)
    return factor, bias - mean * factor


def fold_into(editor: Editor, layer: ir.Node, factor: Array, shift: Array) -> str:
    """Multiply the result of a layer by `factor` and add `shift`, by changing the layer's weights and bias.

    Args:
        layer: a Conv, ConvTranspose, Gemm or MatMul.
        factor, shift: float64[channels].

    Returns:
        "" if the layer was changed. Otherwise the reason why it was not.
    """
    data = layer.inputs[0]
    if layer.op_type == "MatMul" and (data is None or data.shape is None or len(data.shape) != 2):
        return f"{layer.name!r} is a MatMul whose result is not known to be two-dimensional"
    weight = float_constant(layer.inputs[1])
    if weight is None:
        return f"the weights of {layer.name!r} are not constant"
    bias = _read_bias(layer, len(factor))
    if bias is None:
        return f"the bias of {layer.name!r} is not one constant per channel"
    scaled = _scale_weight(layer, weight, factor)
    if scaled is None:
        return "its channels do not match the layer's"
    beta = layer.attributes.get_float("beta", 1.0)  # Gemm: Y = alpha A B + beta C
    if layer.op_type == "MatMul":
        layer.op_type = "Gemm"
    set_parameter(editor, layer, 1, scaled)
    set_parameter(editor, layer, 2, beta * bias * factor + shift)
    layer.attributes.pop("beta", None)
    return ""


def _scale_weight(layer: ir.Node, weight: Array, factor: Array) -> Array | None:
    """Return the weights times the factors of their output channels; None if the numbers of channels differ."""
    convolves = layer.op_type in ("Conv", "ConvTranspose")
    if (not convolves and weight.ndim != 2) or output_channels(layer, weight.shape) != len(factor):
        return None
    if layer.op_type == "Conv":
        return weight * factor.reshape(-1, *(1,) * (weight.ndim - 1))
    if layer.op_type == "ConvTranspose":
        groups = layer.attributes.get_int("group", 1)
        # [C_in, C_out / groups, ...]: the output channels of group g are computed from the input channels of group g.
        grouped = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
        return (grouped * factor.reshape(groups, 1, -1, *(1,) * (weight.ndim - 2))).reshape(weight.shape)
    return weight * (factor[:, None] if layer.attributes.get_int("transB", 0) else factor)


def _read_bias(layer: ir.Node, channels: int) -> Array | None:
    """Return the bias of a layer as [channels], or zeros if it has none. Return None if the bias is not one constant
    per channel.
    """
    bias_input = node_input(layer, 2)
    if bias_input is None:
        return np.zeros(channels)
    bias = float_constant(bias_input)
    if bias is None or bias.size not in (1, channels) or bias.shape[-1:] not in ((), (1,), (channels,)):
        return None
    return np.broadcast_to(bias.ravel(), (channels,))


MAX_NODES = 1_000_000
"""Largest number of nodes after functions are inlined. Functions that call other functions can expand exponentially."""


def check_functions(model: onnx.ModelProto, path: Path) -> None:
    """Refuse functions that call each other in a cycle or expand to more than `MAX_NODES` nodes.

    This check must come before onnx's shape inference and before onnxruntime, because both expand every call.

    Raises:
        ModelError: the functions have a cycle or are too large.
    """
    functions = {(f.domain, f.name): f for f in model.functions}
    sizes: dict[tuple[str, str], int] = {}
    # The depth-first search has its own stack, because a chain of calls may exceed Python's recursion limit.
    for root in functions:
        stack = [root]
        open_calls: set[tuple[str, str]] = set()
        while stack:
            key = stack[-1]
            if key in sizes:
                stack.pop()
                continue
            calls = [c for c in _list_calls(functions[key].node) if c in functions]
            pending = [c for c in calls if c not in sizes]
            if pending and key not in open_calls:
                open_calls.add(key)
                stack.extend(pending)
                continue
            if pending:
                raise ModelError(
                    f"{path}: function {key[1]!r} calls itself, directly or through others", "Export the model again"
                )
            sizes[key] = min(len(functions[key].node) + sum(sizes[c] for c in calls), MAX_NODES + 1)
            stack.pop()
    nodes = [node for graph in iter_graphs(model.graph) for node in graph.node]
    total = sum(sizes.get((n.domain, n.op_type), 1) for n in nodes)
    if total > MAX_NODES:
        raise ModelError(f"{path}: its functions expand to more than {MAX_NODES} nodes", "Do not trust this model")


def inline_functions(model: ir.Model, path: Path) -> None:
    """Replace each node that calls a function of the model by the nodes of the function, in place.

    Raises:
        ModelError: a call does not fit its function, for example because it has too many inputs.
    """
    from onnx_ir.passes.common import InlinePass

    try:
        InlinePass()(model)
    except Exception as error:  # ValueError, and the pass's own errors, which wrap other errors
        text = one_line(error.__cause__ or error, most=300)
        raise ModelError(f"{path}: a function cannot be inlined: {text}", "Export the model again") from error


def _list_calls(nodes: Collection[onnx.NodeProto]) -> list[tuple[str, str]]:
    inside = [node for graph in inner_graphs(nodes) for node in graph.node]
    return [(node.domain, node.op_type) for node in (*nodes, *inside)]


LOWEST = 13
"""First opset whose QuantizeLinear and DequantizeLinear have an axis for per-channel scales."""
RAISED_TO = 17
"""Opset to which older models are raised. Most exporters write this opset, and every runtime that edgeq uses supports
it."""
OLDEST = 7
"""Oldest opset that edgeq accepts. ONNX Runtime does not run older models, so edgeq could not check them. onnx's
converter also converts some of them wrongly: it loses the axis of an Add or Mul that broadcasts by the rules of opset
6."""
_IR_VERSION = 8
"""IR version of opsets 15 to 18. Since version 4, weights need not be listed as inputs."""
_PLACES = "coordinate_transformation_mode"


def raise_opset(
    model: ir.Model, path: Path, *, lowest: int = LOWEST, to: int = RAISED_TO, ir_version: int = _IR_VERSION
) -> ir.Model:
    """Return `model` if its opset is at least `lowest`. Otherwise convert it to opset `to` with onnx's version
    converter.

    Args:
        path: the model's file, for messages.
        ir_version: the lowest IR version of the converted model.

    Raises:
        ModelError: the opset is older than `OLDEST`, the converter failed, or its result is invalid.
    """
    opset = opset_of(model)
    if opset >= lowest:
        return model
    fix = f"Export the model again with opset {lowest} or later"
    if opset < OLDEST:
        raise ModelError(f"{path} uses opset {opset}, which ONNX Runtime does not run", fix)
    from onnx import version_converter

    bare = skeleton(model)
    bare.ir_version = max(bare.ir_version, ir_version)
    outputs = {o.name: _copied(o) for o in bare.graph.output}
    try:
        converted: onnx.ModelProto = version_converter.convert_version(bare, to)
        # Shapes inferred by the rules of the old opset may be wrong for nodes that the converter inserted.
        del converted.graph.value_info[:]
        onnx.checker.check_model(shaped_skeleton(converted))
        changed = [a.name for a, b in zip(bare.graph.input, converted.graph.input, strict=True) if a != b]
        if changed:
            raise ValueError(f"it changes the input {changed[0]!r}")
    # The C++ code raises ConvertError, ValidationError, RuntimeError, IndexError and others.
    except Exception as error:
        text = one_line(error).rpartition("failed: ")[2]  # without the position in onnx's own source code
        raise ModelError(
            f"{path} uses opset {opset}, and onnx's converter cannot raise it to {to}: {one_line(text, most=200)}",
            fix,
        ) from error
    for output in converted.graph.output:
        output.CopyFrom(outputs[output.name])
    raised = reattach(converted, model)
    _write_old_defaults(raised, opset, path)
    return raised


def _write_old_defaults(model: ir.Model, opset: int, path: Path) -> None:
    """Set attributes explicitly, in place, if their default changed after `opset`. onnx's converter does not do this,
    so the new defaults would apply.
    """
    for node in every_node(model):
        if is_op(node, "Resize") and opset < 11:
            node.attributes[_PLACES] = ir.AttrString(_PLACES, "asymmetric")
            if node.attributes.get_string("mode", "nearest") == "nearest":
                node.attributes["nearest_mode"] = ir.AttrString("nearest_mode", _old_rounding(node, path))
        elif is_op(node, "RoiAlign") and opset < 16:
            node.attributes.setdefault(_PLACES, ir.AttrString(_PLACES, "output_half_pixel"))
        elif is_op(node, "Hardmax") and opset < 13:
            raise ModelError(
                f"{path} uses Hardmax of opset {opset} ({name_of(node.outputs[0])}), which no later opset has",
                f"Export the model again with opset {LOWEST} or later",
            )


def _old_rounding(node: ir.Node, path: Path) -> str:
    """Return how ONNX Runtime rounds positions for Resize 10 and for Upsample in nearest mode: "ceil" if an axis
    shrinks, else "floor".
    """
    scales = constant(node_input(node, 2))
    if scales is None or not (scales < 1).any():
        return "floor"
    if (scales > 1).any():
        raise ModelError(
            f"{path}: the nearest mode of Resize in opset 10 enlarges one axis and shrinks another at "
            f"{name_of(node.outputs[0])!r}",
            f"Export the model again with opset {LOWEST} or later",
        )
    return "ceil"


def _copied(value: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
    copy = onnx.ValueInfoProto()
    copy.CopyFrom(value)
    return copy


def make_dense(model: onnx.ModelProto, path: Path) -> None:
    """Replace the sparse weights of all graphs by dense weights, in place.

    Args:
        model: a checked model, whose sparse tensors have a limited size and indices in range.
        path: the model's file, whose folder contains external values.

    Raises:
        ModelError: the values and the indices of a tensor do not match.
    """
    for graph in all_graphs(model):
        graph.initializer.extend([_to_dense(sparse, path) for sparse in graph.sparse_initializer])
        del graph.sparse_initializer[:]


def _to_dense(sparse: onnx.SparseTensorProto, path: Path) -> onnx.TensorProto:
    try:
        values, places = (numpy_helper.to_array(part, str(path.parent)) for part in (sparse.values, sparse.indices))
        dense = np.zeros(tuple(sparse.dims), values.dtype)
        # Indices of shape [values] are positions in the flattened tensor. In [values, rank], each row is one position.
        dense[np.unravel_index(places, dense.shape) if places.ndim == 1 else tuple(places.T)] = values
        return numpy_helper.from_array(dense, sparse.values.name)
    except (IndexError, TypeError, ValueError) as error:
        subject = f"{path}: sparse tensor {sparse.values.name!r}"
        raise ModelError(f"{subject} is damaged: {one_line(error)}", DAMAGED) from error
