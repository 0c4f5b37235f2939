"""Data-movement operators as index tables: where each output value comes from."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from edgeq.backends.systolic.fixed_batch import part_of
from edgeq.backends.systolic.network import MoveLayer
from edgeq.graph.operators import DATA_MOVEMENT
from edgeq.graph.query import constant, is_constant, name_of, node_input, sizes
from edgeq.model.session import open_in_memory
from edgeq.session import SessionSettings

# What MaxPool selects depends on the values; the array has steps of its own for it.
MOVES = DATA_MOVEMENT - {"MaxPool"}
_EXACT = 2**24
_RESHAPE_OPSET = 13
_RESHAPE_IR = 7


def recognise_move(model: ir.Model, node: ir.Node) -> tuple[MoveLayer, ...] | str:
    """The layers of a node of `MOVES`, one for each output, or why it stays in float."""
    source = node.inputs[0]
    if source is None or is_constant(source) or source.dtype != ir.DataType.FLOAT:
        return "it moves no activations"
    if any(value is not None and not is_constant(value) for value in node.inputs[1:]):
        return "where it moves values to is computed, not constant"
    problem = _rescales(node)
    if problem:
        return problem
    shape = sizes(source)
    assert shape is not None
    outputs = tuple(value for value in node.outputs if value.name)
    if math.prod(shape) >= _EXACT:
        return "it moves too many values to follow"
    # Moving the position of each value shows where it goes.
    places = np.arange(1, math.prod(shape) + 1, dtype=np.float32).reshape(shape)
    session = open_in_memory(part_of(model, [node], [source], outputs), SessionSettings(optimization="none"))
    moved = session.run([name_of(value) for value in outputs], {name_of(source): places})
    layers = []
    for number, (output, values) in enumerate(zip(outputs, moved, strict=True)):
        name = node.name or "" if len(outputs) == 1 else f"{node.name}/{number}"
        index = values.astype(np.int32).ravel() - 1
        if index.size == places.size and np.array_equal(index, np.arange(index.size)):
            layers.append(reshape_move(name, name_of(source), name_of(output), values.shape))
            continue
        part = part_of(model, [node], [source], [output])
        layers.append(MoveLayer(name, name_of(source), name_of(output), index, part))
    return tuple(layers)


def reshape_move(name: str, source: str, output: str, shape: tuple[int, ...]) -> MoveLayer:
    """The layer that reshapes each sample to `shape` (batch 1 in front)."""
    target = ir.tensor(np.array([0, *shape[1:]], np.int64), name=f"{name}/shape")
    before, after = (ir.Value(name=n, type=ir.TensorType(ir.DataType.FLOAT)) for n in (source, output))
    constant = ir.Value(name=target.name, const_value=target)
    reshape = ir.Node("", "Reshape", [before, constant], outputs=[after], name=name)
    graph = ir.Graph(
        [before],
        [after],
        nodes=[reshape],
        initializers=[constant],
        opset_imports={"": _RESHAPE_OPSET},
        name="part",
    )
    return MoveLayer(name, source, output, None, ir.Model(graph, ir_version=_RESHAPE_IR))


def _rescales(node: ir.Node) -> str:
    """Why a node does more than move values; "" where it does not."""
    if node.op_type == "Pad" and node.attributes.get_string("mode", "constant") == "constant":
        value = constant(node_input(node, 2))
        if value is not None and value.size and float(value.reshape(-1)[0]) != 0:
            return "it pads with a value other than zero"
    if node.op_type == "Resize" and (mode := node.attributes.get_string("mode", "nearest")) != "nearest":
        return f"its mode is {mode}; only nearest works on integers"
    crops = node.attributes.get_string("coordinate_transformation_mode", "") == "tf_crop_and_resize"
    if crops and node.attributes.get_float("extrapolation_value", 0.0) != 0:
        return "outside of the image it has a value other than zero"
    return ""
