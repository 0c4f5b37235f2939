"""Changes to the float model at batch 1 that keep its results and leave fewer nodes in float. They work in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator
from onnx_ir.passes.common import RemoveUnusedNodesPass

from edgeq.backends.systolic.array_shapes import batch_in_front, two_dimensional
from edgeq.backends.systolic.fixed_batch import infer_shapes, part_of
from edgeq.backends.systolic.moves import MOVES
from edgeq.backends.systolic.recognise import recognise
from edgeq.backends.systolic.windows import Windows
from edgeq.errors import ModelError
from edgeq.graph.convert import to_proto
from edgeq.graph.edit import Editor
from edgeq.graph.query import (
    attributes,
    bodies,
    clamp_bounds,
    constant_tensor,
    is_op,
    name_of,
    only_reader,
    sizes,
)

_SMALL = 4096
_ACTIVATIONS = ("Relu", "Clip")


def rewrite(model: ir.Model, wanted: Callable[[ir.Node], bool] = lambda node: True) -> None:
    """Make the padding of pooling explicit, fold shape arithmetic, bring operators into the shapes that the array takes
    (`array_shapes`), and move activations before the pooling or data movement that separates them from the layer that
    they could be fused into.

    Args:
        wanted: which nodes may leave float.

    Raises:
        ModelError: an average pooling whose size ONNX and ONNX Runtime do not agree on.
    """
    two_dimensional(model)
    explicit_ceil(model)
    fold_shapes(model)
    batch_in_front(model)
    activations_first(model, wanted)


def explicit_ceil(model: ir.Model) -> None:
    """Replace ceil_mode of pooling by padding at the end.

    ONNX's shape inference counts windows that start in that padding, ONNX Runtime, correctly, leaves them out: without
    ceil_mode, there is nothing to disagree on.

    Raises:
        ModelError: an average pooling of which they do not agree.
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
            node.attributes.pop("ceil_mode")  # every window ends within the padding that is there
            infer_shapes(model)
        elif node.op_type == "AveragePool":
            if pooled != (sizes(node.outputs[0]) or ())[2:]:
                raise ModelError(
                    f"the size that {node.name!r} pools to is not the one that its shapes say",
                    "Export it with ceil_mode = 0 and padding in its place",
                )
        elif len(node.outputs) == 1 and all(end < size for end, size in zip(ends, windows.kernel, strict=True)):
            # Dilated windows can reach further; ONNX Runtime takes no padding as large as the window.
            node.attributes["pads"] = ir.AttrInt64s("pads", [*windows.pads[:2], *ends])
            for name in ("ceil_mode", "auto_pad"):
                node.attributes.pop(name, None)
            infer_shapes(model)


def fold_shapes(model: ir.Model) -> None:
    """Replace integers that follow from shapes alone by constants: with the batch fixed, every shape is known."""
    editor = Editor(model)
    folded = False
    for node in list(model.graph):
        values = _integers(model, node)
        if values is None or values.size > _SMALL or values.dtype.kind not in "iub":
            continue
        node.outputs[0].replace_all_uses_with(editor.constant(name_of(node.outputs[0]), values))
        model.graph.remove(node, safe=True)
        folded = True
    if folded:
        RemoveUnusedNodesPass()(model)
        infer_shapes(model)


def _integers(model: ir.Model, node: ir.Node) -> NDArray[Any] | None:
    """What a node computes from shapes and small integer constants; None where it reads anything else."""
    if node.domain or len(node.outputs) != 1 or node.outputs[0].is_graph_output():
        return None
    if node.op_type == "Shape" and (shape := sizes(node.inputs[0])) is not None:
        a = attributes(node)
        return np.array(shape, np.int64)[a.get("start", 0) : a.get("end")]
    tensors = [constant_tensor(value) for value in node.inputs if value is not None]
    if not tensors or node.op_type.startswith("Random") or any(bodies(node)):
        return None
    if not all(t is not None and t.size <= _SMALL and t.dtype.numpy().kind in "iub" for t in tensors):
        return None
    part = part_of(model, [node], (), node.outputs)
    return np.asarray(next(iter(ReferenceEvaluator(to_proto(part)).run(None, {}))))


def activations_first(model: ir.Model, wanted: Callable[[ir.Node], bool] = lambda node: True) -> None:
    """X → MaxPool or data movement → Relu becomes X → Relu → MaxPool or data movement, with the same values.

    Past what stays in float nothing is moved: it may compute new values, and no range is known for what would be
    between the two.

    Args:
        wanted: which nodes may leave float.
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
        # The last tensor keeps its name, by which its range is known.
        last.name, between.name = editor.free_value_name(f"{source.name}/{activation.op_type.lower()}"), last.name
        changed = True
    if changed:
        infer_shapes(model)


def _movable(model: ir.Model, node: ir.Node, wanted: Callable[[ir.Node], bool]) -> tuple[ir.Node, ir.Node] | None:
    """A data-movement or MaxPool node that has an int8 form and the activation behind it, where their order can be
    swapped."""
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
    """Whether an activation leaves zero (padding) as it is and its bounds are constant."""
    bounds = clamp_bounds(activation)
    return bounds is not None and bounds[0] <= 0 <= bounds[1]
