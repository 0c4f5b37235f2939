"""A prepared float model at batch 1, with what recognising layers needs at hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from edgeq.errors import ModelError

_FLOAT = int(onnx.TensorProto.FLOAT)


@dataclass(frozen=True)
class Graph:
    """Attributes:
    model: weights in memory, batch 1, every shape fixed as far as inference can tell.
    nodes: in topological order.
    constants: initializers by name.
    shapes: by tensor name, of tensors whose shape is fully known.
    types: ONNX element types by tensor name.
    readers: by tensor name, the nodes that read it.
    outputs: names of graph outputs.
    """

    model: onnx.ModelProto
    nodes: tuple[onnx.NodeProto, ...]
    constants: Mapping[str, NDArray[Any]]
    shapes: Mapping[str, tuple[int, ...]]
    types: Mapping[str, int]
    outputs: tuple[str, ...]
    readers: Mapping[str, list[onnx.NodeProto]] = field(default_factory=dict)

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(i.name for i in self.model.graph.input if i.name not in self.constants)

    def is_float(self, name: str) -> bool:
        return self.types.get(name) == _FLOAT

    def only_reader(self, name: str) -> onnx.NodeProto | None:
        """The one node that reads a tensor which is no graph output; None where there are others."""
        found = self.readers.get(name, [])
        return found[0] if len(found) == 1 and name not in self.outputs else None

    def constant(self, node: onnx.NodeProto, place: int) -> NDArray[Any] | None:
        """The constant at an input; None where it is absent or computed."""
        return self.constants.get(node.input[place]) if len(node.input) > place else None


def open_graph(model: onnx.ModelProto, path: Path) -> Graph:
    """`model` with its batch set to 1.

    Raises:
        ModelError: an input's shape is not fixed apart from its batch, or the batch is fixed to more than one.
    """
    fixed = onnx.ModelProto()
    fixed.CopyFrom(model)
    constants = {t.name: numpy_helper.to_array(t) for t in fixed.graph.initializer}
    for value in fixed.graph.input:
        if value.name not in constants:
            _fix_batch(value, path)
    known_types = {v.name: v.type.tensor_type.elem_type for v in [*fixed.graph.value_info, *fixed.graph.output]}
    del fixed.graph.value_info[:]
    for value in fixed.graph.output:
        value.type.tensor_type.ClearField("shape")
    inferred = onnx.shape_inference.infer_shapes(fixed, data_prop=True)
    shapes: dict[str, tuple[int, ...]] = {name: array.shape for name, array in constants.items()}
    types = {name: kind for name, kind in known_types.items() if kind}
    types.update({t.name: t.data_type for t in fixed.graph.initializer})
    for value in [*inferred.graph.input, *inferred.graph.value_info, *inferred.graph.output]:
        tensor = value.type.tensor_type
        if tensor.elem_type:
            types[value.name] = tensor.elem_type
        if tensor.HasField("shape") and all(d.HasField("dim_value") for d in tensor.shape.dim):
            shapes[value.name] = tuple(d.dim_value for d in tensor.shape.dim)
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in inferred.graph.node:
        for name in dict.fromkeys(node.input):
            readers.setdefault(name, []).append(node)
        for name in captured(node):
            readers.setdefault(name, []).append(node)
    outputs = tuple(o.name for o in inferred.graph.output)
    return Graph(inferred, tuple(inferred.graph.node), constants, shapes, types, outputs, readers)


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}


def text(value: Any, default: str) -> str:
    return value.decode() if isinstance(value, bytes) else default


def with_nodes(graph: Graph, nodes: list[onnx.NodeProto]) -> Graph:
    """`graph` with other nodes, shapes and types inferred anew where names are new."""
    model = onnx.ModelProto()
    model.CopyFrom(graph.model)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return open_graph(model, Path("model"))


def submodel(
    graph: Graph, nodes: list[onnx.NodeProto], inputs: tuple[str, ...], outputs: tuple[str, ...]
) -> onnx.ModelProto:
    """`nodes` as a model of their own, with the constants that they read; shapes are left open."""
    used = {name for node in nodes for name in (*node.input, *captured(node))}
    values = [
        onnx.helper.make_tensor_value_info(name, graph.types.get(name, _FLOAT), None) for name in (*inputs, *outputs)
    ]
    body = onnx.helper.make_graph(
        [_copy(node) for node in nodes],
        "part",
        values[: len(inputs)],
        values[len(inputs) :],
        [t for t in graph.model.graph.initializer if t.name in used],
    )
    return onnx.helper.make_model(
        body, opset_imports=list(graph.model.opset_import), ir_version=min(graph.model.ir_version, 10)
    )


def _copy(node: onnx.NodeProto) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    return copy


def captured(node: onnx.NodeProto) -> tuple[str, ...]:
    """Names that the graphs inside a node take from outside."""
    names: dict[str, None] = {}
    for attribute in node.attribute:
        for graph in [attribute.g, *attribute.graphs] if attribute.HasField("g") else list(attribute.graphs):
            inside = {i.name for i in graph.input} | {t.name for t in graph.initializer}
            inside |= {o for n in graph.node for o in n.output}
            for inner in graph.node:
                names.update(dict.fromkeys(n for n in (*inner.input, *captured(inner)) if n and n not in inside))
    return tuple(names)


def _fix_batch(value: onnx.ValueInfoProto, path: Path) -> None:
    dims = value.type.tensor_type.shape.dim
    if not dims:
        return
    if not dims[0].HasField("dim_value"):
        dims[0].dim_value = 1
    if dims[0].dim_value != 1:
        raise ModelError(
            f"{path}: input {value.name!r} has the fixed batch {dims[0].dim_value}",
            "Export the model with batch 1 or an open batch: the array runs one sample at a time",
        )
    for axis, dim in enumerate(dims):
        if not dim.HasField("dim_value"):
            raise ModelError(
                f"{path}: input {value.name!r} has no fixed size on axis {axis} ({dim.dim_param or 'unknown'})",
                "Fix every size but the batch's: the array's tiles and addresses are laid out beforehand",
            )
