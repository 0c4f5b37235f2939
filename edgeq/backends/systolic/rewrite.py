"""Changes to the float graph that keep its answer and leave less of it in float."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from edgeq.backends.systolic.graph import Graph, attributes, submodel, with_nodes
from edgeq.backends.systolic.moves import MOVES
from edgeq.errors import ModelError

_SMALL = 4096
_ACTIVATIONS = ("Relu", "Clip")


def rewritten(graph: Graph) -> Graph:
    """Pooling with its padding spelled out; shape arithmetic folded at batch 1; activations moved before the pooling or
    moving that separates them from the layer that they could be part of.

    Raises:
        ModelError: an average pooling whose size ONNX and ONNX Runtime do not agree on.
    """
    return activations_first(fold_shapes(explicit_ceil(graph)))


def explicit_ceil(graph: Graph) -> Graph:
    """Replace ceil_mode of pooling by padding at the end.

    ONNX's shape inference counts windows that start in that padding, ONNX Runtime (rightly) leaves them out: without
    ceil_mode, there is nothing to disagree on.
    """
    while (found := next((i for i, node in enumerate(graph.nodes) if _rounds_up(graph, node)), None)) is not None:
        nodes = list(graph.nodes)
        nodes[found] = _without_ceil(graph, nodes[found])
        graph = with_nodes(graph, nodes)
    return graph


def _rounds_up(graph: Graph, node: onnx.NodeProto) -> bool:
    if node.op_type not in ("MaxPool", "AveragePool") or not attributes(node).get("ceil_mode", 0):
        return False
    shape = graph.shapes.get(node.input[0], ())
    if node.op_type == "MaxPool":
        return len(shape) == 4 and len(node.output) == 1
    if len(shape) == 4 and _pooled(shape, node) != graph.shapes.get(node.output[0], ())[2:]:
        raise ModelError(
            f"the size that {node.name!r} pools to is not the one that its shapes say",
            "Export it with ceil_mode = 0 and padding in its place",
        )
    return False


def _pooled(shape: tuple[int, ...], node: onnx.NodeProto) -> tuple[int, ...]:
    """Rows and columns behind a pooling with ceil_mode; no window starts beyond the input and the padding before it."""
    a = attributes(node)
    sizes = []
    for axis, kernel in enumerate(a["kernel_shape"]):
        stride, dilation = a.get("strides", (1, 1))[axis], a.get("dilations", (1, 1))[axis]
        pads = a.get("pads", (0, 0, 0, 0))
        extent = shape[2 + axis] + pads[axis] + pads[2 + axis] - (kernel - 1) * dilation - 1
        steps = -(-extent // stride)
        sizes.append((steps if steps * stride < shape[2 + axis] + pads[axis] else steps - 1) + 1)
    return tuple(sizes)


def _without_ceil(graph: Graph, node: onnx.NodeProto) -> onnx.NodeProto:
    shape = graph.shapes[node.input[0]]
    a = attributes(node)
    front = list(a.get("pads", (0, 0, 0, 0)))[:2]
    ends = []
    for axis, size in enumerate(_pooled(shape, node)):
        stride, dilation = a.get("strides", (1, 1))[axis], a.get("dilations", (1, 1))[axis]
        last = (size - 1) * stride + (a["kernel_shape"][axis] - 1) * dilation + 1
        ends.append(max(last - shape[2 + axis] - front[axis], 0))
    kept = {name: value for name, value in a.items() if name not in ("ceil_mode", "pads", "auto_pad")}
    return helper.make_node(node.op_type, list(node.input), list(node.output), node.name, pads=front + ends, **kept)


def fold_shapes(graph: Graph) -> Graph:
    """Replace integers that follow from shapes alone by constants: with the batch fixed, every shape is known."""
    known = {name: array for name, array in graph.constants.items() if array.dtype.kind in "iub"}
    added: list[onnx.TensorProto] = []
    kept: list[onnx.NodeProto] = []
    for node in graph.nodes:
        value = None
        if node.op_type == "Shape" and node.domain == "" and node.input[0] in graph.shapes:
            a = attributes(node)
            value = np.array(graph.shapes[node.input[0]], np.int64)[a.get("start", 0) : a.get("end")]
        elif node.domain == "" and node.input and len(node.output) == 1 and all(n in known for n in node.input if n):
            value = _evaluate(graph, node, known)
        if value is None or value.size > _SMALL or value.dtype.kind not in "iub":
            kept.append(node)
            continue
        known[node.output[0]] = value
        added.append(numpy_helper.from_array(np.ascontiguousarray(value), node.output[0]))
    if not added:
        return graph
    model = onnx.ModelProto()
    model.CopyFrom(graph.model)
    model.graph.initializer.extend(added)
    folded = Graph(model, tuple(kept), graph.constants, graph.shapes, graph.types, graph.outputs)
    return with_nodes(folded, _alive(kept, graph.outputs))


def activations_first(graph: Graph) -> Graph:
    """X → MaxPool or move → Relu becomes X → Relu → MaxPool or move, which gives the same values."""
    nodes = list(graph.nodes)
    changed = False
    while (found := _behind(graph, nodes)) is not None:
        place, activation = found
        through, act = nodes[place], nodes[activation]
        between, source = f"{through.input[0]}/{act.op_type.lower()}", through.input[0]
        taken = {name for node in nodes for name in node.output}
        while between in taken:
            between += "_"
        first = helper.make_node(act.op_type, [source, *act.input[1:]], [between], name=act.name, domain=act.domain)
        first.attribute.extend(act.attribute)
        second = onnx.NodeProto()
        second.CopyFrom(through)
        second.input[0], second.output[0] = between, act.output[0]
        nodes[place : place + 1] = [first, second]
        del nodes[activation + 1]
        changed = True
    return with_nodes(graph, nodes) if changed else graph


def _behind(graph: Graph, nodes: Sequence[onnx.NodeProto]) -> tuple[int, int] | None:
    """Places of a (mover, activation behind it) that can change places."""
    readers: dict[str, list[int]] = {}
    makers = {name: node for node in nodes for name in node.output}
    for number, node in enumerate(nodes):
        for name in node.input:
            readers.setdefault(name, []).append(number)
    for number, node in enumerate(nodes):
        if (node.op_type != "MaxPool" and node.op_type not in MOVES) or len(node.output) != 1:
            continue
        following = readers.get(node.output[0], [])
        maker = makers.get(node.input[0])
        if (
            len(following) == 1
            and nodes[following[0]].op_type in _ACTIVATIONS
            and node.output[0] not in graph.outputs
            and len(readers[node.input[0]]) == 1
            and node.input[0] not in graph.outputs
            and maker is not None
            and maker.op_type not in _ACTIVATIONS
            and _spans_zero(graph, nodes[following[0]])
        ):
            return number, following[0]
    return None


def _spans_zero(graph: Graph, node: onnx.NodeProto) -> bool:
    """Whether an activation leaves zero (padding) as it is and its bounds are constant."""
    if node.op_type == "Relu":
        return True
    if any(name and name not in graph.constants for name in node.input[1:]):
        return False
    low, high = (graph.constant(node, place) if len(node.input) > place else None for place in (1, 2))
    return (low is None or float(low.reshape(())) <= 0) and (high is None or float(high.reshape(())) >= 0)


def _evaluate(graph: Graph, node: onnx.NodeProto, known: Mapping[str, NDArray[Any]]) -> NDArray[Any] | None:
    if any(known[name].size > _SMALL for name in node.input if name) or node.op_type.startswith("Random"):
        return None
    if any(a.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS) for a in node.attribute):
        return None
    inputs = tuple(dict.fromkeys(name for name in node.input if name))
    part = submodel(graph, [node], inputs, (node.output[0],))
    del part.graph.initializer[:]
    for value in part.graph.input:
        value.type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(known[value.name].dtype)
    results: Sequence[Any] = list(ReferenceEvaluator(part).run(None, {name: known[name] for name in inputs}))
    return np.asarray(results[0])


def _alive(nodes: list[onnx.NodeProto], outputs: Sequence[str]) -> list[onnx.NodeProto]:
    needed = set(outputs)
    kept = []
    for node in reversed(nodes):
        if needed.intersection(node.output):
            needed.update(node.input)
            for attribute in node.attribute:
                for inner in [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]:
                    needed.update(name for n in inner.node for name in n.input)
            kept.append(node)
    return kept[::-1]
