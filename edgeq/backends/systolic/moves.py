"""Nodes that only move numbers, as a table of where each number comes from."""

from __future__ import annotations

import math

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgeq.backends.systolic.graph import Graph, attributes, submodel, text
from edgeq.backends.systolic.network import MoveLayer
from edgeq.graph.operators import DATA_MOVEMENT
from edgeq.session import SessionSettings, open_session

# MaxPool moves numbers too, but which ones depends on the numbers; the array has steps of its own for it.
MOVES = DATA_MOVEMENT - {"MaxPool"} | {"Upsample"}
_EXACT = 2**24
RESHAPE_OPSET = 13


def recognise_move(graph: Graph, node: onnx.NodeProto) -> tuple[MoveLayer, ...] | str:
    """The layers of a node whose type is in `MOVES` (one for each output), or why it stays in float."""
    source = node.input[0]
    if source in graph.constants or not graph.is_float(source):
        return "it moves no activations"
    if any(name and name not in graph.constants for name in node.input[1:]):
        return "where it moves values to is computed, not constant"
    problem = _rescales(graph, node)
    if problem:
        return problem
    outputs = tuple(name for name in node.output if name)
    if math.prod(graph.shapes[source]) >= _EXACT:
        return "it moves too many values to follow"
    part = submodel(graph, [node], (source,), outputs)
    places = np.arange(1, math.prod(graph.shapes[source]) + 1, dtype=np.float32).reshape(graph.shapes[source])
    session = open_session(part.SerializeToString(), SessionSettings(optimization="none"))
    moved = session.run(list(outputs), {source: places})
    layers = []
    for number, (output, values) in enumerate(zip(outputs, moved, strict=True)):
        name = node.name if len(outputs) == 1 else f"{node.name}/{number}"
        index = values.astype(np.int32).ravel() - 1
        if index.size == places.size and np.array_equal(index, np.arange(index.size)):
            layers.append(reshape_move(name, source, output, values.shape, node.name))
            continue
        own = submodel(graph, [node], (source,), (output,)).SerializeToString()
        layers.append(MoveLayer(name, source, output, index, own, (node.name,)))
    return tuple(layers)


def reshape_move(name: str, source: str, output: str, shape: tuple[int, ...], node: str) -> MoveLayer:
    """A plain reshape of each sample to `shape` (batch 1 in front)."""
    target = numpy_helper.from_array(np.array([0, *shape[1:]], np.int64), f"{name}/shape")
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in (source, output)]
    body = helper.make_graph(
        [helper.make_node("Reshape", [source, target.name], [output], name=name)],
        "part",
        values[:1],
        values[1:],
        [target],
    )
    opset = [helper.make_opsetid("", RESHAPE_OPSET)]
    model = helper.make_model(body, opset_imports=opset, ir_version=7)
    return MoveLayer(name, source, output, None, model.SerializeToString(), (node,))


def _rescales(graph: Graph, node: onnx.NodeProto) -> str:
    """Why a node does more than move values; "" where it does not."""
    a = attributes(node)
    if node.op_type == "Pad":
        if text(a.get("mode"), "constant") != "constant":
            return ""
        value = graph.constant(node, 2)
        if value is not None and value.size and float(value.reshape(-1)[0]) != 0:
            return "it pads with something else than zero"
    if node.op_type in ("Resize", "Upsample") and text(a.get("mode"), "nearest") != "nearest":
        return f"its mode is {text(a.get('mode'), '')}; only nearest works on integers"
    return ""
