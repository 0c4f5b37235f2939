"""The prepared model at batch 1, and parts of it as models of their own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from edgeq.errors import ModelError
from edgeq.model.edit import Editor
from edgeq.model.graph import constant_tensor, reads

_LATEST_IR = 10


def fixed_batch(model: ir.Model, path: Path) -> ir.Model:
    """A clone of a prepared model with batch 1, every shape fixed as far as inference can tell, weights in memory.

    Args:
        path: the model's file, for messages.

    Raises:
        ModelError: an input's shape is not fixed apart from its batch, or the batch is fixed to more than one.
    """
    fixed = model.clone()
    ir.external_data.load_to_model(fixed)
    for value in fixed.graph.inputs:
        if not value.is_initializer() and value.shape:
            value.shape = _with_batch_one(value, path)
    _make_constant_outputs(fixed)
    infer_shapes(fixed)
    return fixed


def infer_shapes(model: ir.Model) -> None:
    """Infer the shapes of all tensors of the main graph from those of its inputs, in place. Values of shape arithmetic
    are propagated; what cannot be inferred has no shape afterwards."""
    for node in model.graph:
        for output in node.outputs:
            output.shape = None
    ShapeInferencePass(check_type=False, strict_mode=False)(model)


def part_of(
    model: ir.Model, nodes: Sequence[ir.Node], inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]
) -> ir.Model:
    """Nodes of the main graph as a model of their own, with the constants that they read. Shapes are left open."""
    used = {value for node in nodes for value in reads(node)}
    view = ir.GraphView(
        inputs,
        outputs,
        nodes=nodes,
        initializers=[value for value in model.graph.initializers.values() if value in used],
        opset_imports=model.graph.opset_imports,
        name="part",
    )
    part = view.clone()
    forget_types(part)
    for value in (*part.inputs, *part.outputs):
        value.shape = None
    return ir.Model(part, ir_version=min(model.ir_version, _LATEST_IR))


def forget_types(graph: ir.Graph) -> None:
    """Drop types and shapes of everything but inputs and outputs, in place: files do not list them."""
    inside = (value for node in graph for value in node.outputs if not value.is_graph_output())
    for value in (*graph.initializers.values(), *inside):
        value.shape, value.type = None, None


def _make_constant_outputs(model: ir.Model) -> None:
    """Let a node make each output that is a constant, in place: every output of the network is what a layer makes."""
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
                f"Give --fix {size.value or f'{value.name}:{axis}'}=SIZE: the array's tiles and addresses are laid out "
                "beforehand, for every size but the batch's",
            )
    return ir.Shape([1, *others])
