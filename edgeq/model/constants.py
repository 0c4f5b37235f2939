"""Constant inputs of nodes: read, and replaced."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def constant_values(value: ir.Value | None) -> Array | None:
    """The float64 values of an initializer of floats that nothing can override."""
    if value is None or value.is_graph_input():
        return None
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is None or not tensor.dtype.is_floating_point():
        return None
    with np.errstate(invalid="ignore"):  # a weight may be a signalling NaN
        return np.asarray(tensor.numpy()).astype(np.float64)


def store_constant(layer: ir.Node, index: int, values: Array) -> None:
    """Make `values` the constant input `index` of `layer`: in place where it is the only user, else a new weight."""
    old = layer.inputs[index] if index < len(layer.inputs) else None
    weight = layer.inputs[1]
    assert weight is not None
    assert weight.dtype is not None
    array = np.ascontiguousarray(values).astype(weight.dtype.numpy())
    if old is not None and old.is_initializer() and len(old.uses()) == 1 and not old.is_graph_output():
        old.const_value = ir.tensor(array, dtype=weight.dtype, name=old.name)
        old.shape = ir.Shape(array.shape)
        return
    graph = layer.graph
    assert isinstance(graph, ir.Graph)
    name = free_name(f"{old.name}.folded" if old is not None else f"{layer.name}.bias", graph)
    value = ir.Value(
        name=name,
        shape=ir.Shape(array.shape),
        type=ir.TensorType(weight.dtype),
        const_value=ir.tensor(array, dtype=weight.dtype, name=name),
    )
    graph.register_initializer(value)
    if index >= len(layer.inputs):
        layer.resize_inputs(index + 1)
    layer.replace_input_with(index, value)


def free_name(name: str, graph: ir.Graph) -> str:
    """`name`, or with underscores behind until nothing in the graph is called so."""
    taken = {v.name for node in graph for v in (*node.inputs, *node.outputs) if v is not None}
    taken |= set(graph.initializers) | {i.name for i in graph.inputs}
    while name in taken:
        name += "_"
    return name
