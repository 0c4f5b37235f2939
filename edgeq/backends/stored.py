"""Weights that are 8-bit integers in the file and float32 at run time.

For operators whose kernels compute in float: the file shrinks to a quarter, and the runtime folds the conversion away
when it loads the model, so it costs no time afterwards. A Cast and a Mul say it, and not a DequantizeLinear, because
ONNX Runtime does not fold that one.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edgeq.model.tensors import iter_graphs

LEAST_ELEMENTS = 1024
"""Smaller tensors gain less than the two nodes that they would need."""


def store_weights(model: onnx.ModelProto, op_types: Collection[str], exclude: Collection[str] = ()) -> tuple[str, ...]:
    """Turn, in place, the float32 weights that only operators of these types read into integers.

    One scale per output, symmetric. Weights must be in memory.

    Args:
        exclude: names of nodes whose weights stay as they are.

    Returns:
        Names of the tensors.
    """
    graph = model.graph
    readers: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
    for part in iter_graphs(graph):
        for node in part.node:
            for position, name in enumerate(node.input):
                readers.setdefault(name, []).append((node, position))
    taken = {i.name for i in graph.input} | {o.name for o in graph.output}
    stored: list[str] = []
    nodes: list[onnx.NodeProto] = []
    tensors: list[TensorProto] = []
    for tensor in graph.initializer:
        users = readers.get(tensor.name, [])
        fits = tensor.data_type == TensorProto.FLOAT and len(tensor.dims) > 1 and tensor.name not in taken
        wanted = users and all(node.op_type in op_types and node.name not in exclude for node, _ in users)
        if not fits or not wanted or np.prod(tensor.dims) < LEAST_ELEMENTS:
            tensors.append(tensor)
            continue
        integers, scale = _quantize(numpy_helper.to_array(tensor), *users[0])
        names = [f"{tensor.name}/{part}" for part in ("integers", "scale", "float")]
        tensors += [numpy_helper.from_array(integers, names[0]), numpy_helper.from_array(scale, names[1])]
        nodes.append(helper.make_node("Cast", [names[0]], [names[2]], name=names[2], to=TensorProto.FLOAT))
        nodes.append(helper.make_node("Mul", [names[2], names[1]], [tensor.name], name=f"{tensor.name}/scaled"))
        stored.append(tensor.name)
    if stored:
        kept = list(graph.node)
        del graph.node[:], graph.initializer[:]
        graph.node.extend([*nodes, *kept])
        graph.initializer.extend(tensors)
    return tuple(stored)


def _quantize(
    values: NDArray[np.float32], node: onnx.NodeProto, position: int
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    largest = np.abs(values).max(axis=_summed_axes(node, position, values.ndim), keepdims=True)
    scale = (np.where(largest > 0, largest, 1) / 127).astype(np.float32)
    return np.rint(values / scale).astype(np.int8), scale


def _summed_axes(node: onnx.NodeProto, position: int, rank: int) -> tuple[int, ...]:
    """The axes of a weight that a product sums over: all of one output share a scale."""
    if node.op_type == "Conv":
        return tuple(range(1, rank))
    if node.op_type == "ConvTranspose":
        return (0, *range(2, rank))
    if node.op_type == "MatMul":
        return (rank - 2,) if position == 1 else (rank - 1,)
    if node.op_type == "Gemm":
        transposed = next((a.i for a in node.attribute if a.name == ("transB" if position == 1 else "transA")), 0)
        return (1,) if bool(transposed) == (position == 1) else (0,)
    # Recurrent layers [direction, gates, inputs] and tables of rows.
    return (rank - 1,)
