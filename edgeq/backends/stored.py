"""Weights that are 8-bit integers in the file and float32 at run time.

For operators whose kernels compute in float: the file shrinks to a quarter, and the runtime folds the conversion when
it loads the model, so it costs no time afterwards. It is written as a Cast and a Mul, because ONNX Runtime does not
fold a DequantizeLinear.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.graph.edit import Editor
from edgeq.graph.operators import channel_axis
from edgeq.graph.query import constant

LEAST_ELEMENTS = 1024
"""Smaller tensors gain less than the two nodes that they would need."""


def store_weights(model: ir.Model, op_types: Collection[str], exclude: Collection[str] = ()) -> tuple[str, ...]:
    """Turn, in place, the float32 weights that only operators of these types read into integers.

    One scale per output, symmetric: scale = largest magnitude / 127.

    Args:
        exclude: names of nodes whose weights stay as they are.

    Returns:
        Names of the tensors.
    """
    graph = model.graph
    editor, first = Editor(model), next(iter(graph), None)
    stored: list[str] = []
    for name, weight in tuple(graph.initializers.items()):
        values = constant(weight) if _is_wanted(weight, op_types, exclude) else None
        if values is None:
            continue
        use = next(iter(weight.uses()))
        integers, scale = _quantize(values, use.node, use.idx)
        held = [editor.constant(f"{name}/integers", integers), editor.constant(f"{name}/scale", scale)]
        wide = editor.node("Cast", held[:1], f"{name}/float", before=first, attributes={"to": ir.DataType.FLOAT})
        scaled = editor.node("Mul", [wide, held[1]], f"{name}/scaled", before=first)
        del graph.initializers[name]
        weight.replace_all_uses_with(scaled)
        scaled.name = name
        stored.append(name)
    return tuple(stored)


def _is_wanted(weight: ir.Value, op_types: Collection[str], exclude: Collection[str]) -> bool:
    tensor, uses = weight.const_value, weight.uses()
    if tensor is None or tensor.dtype != ir.DataType.FLOAT or len(tensor.shape) < 2 or tensor.size < LEAST_ELEMENTS:
        return False
    if weight.is_graph_input() or weight.is_graph_output() or not uses:
        return False
    return all(use.node.op_type in op_types and use.node.name not in exclude for use in uses)


def _quantize(values: NDArray[np.float32], node: ir.Node, place: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    largest = np.abs(values).max(axis=_summed_axes(node, place, values.ndim), keepdims=True)
    scale = (np.where(largest > 0, largest, 1) / 127).astype(np.float32)
    return np.rint(values / scale).astype(np.int8), scale


def _summed_axes(node: ir.Node, place: int, rank: int) -> tuple[int, ...]:
    """The axes of a weight that a product sums over: all of one output share a scale."""
    if place == 1 and node.op_type in ("Conv", "ConvTranspose", "Gemm"):
        return tuple(axis for axis in range(rank) if axis != channel_axis(node) % rank)
    if node.op_type == "MatMul" and place == 1:
        return (rank - 2,)
    if node.op_type == "Gemm":
        return (0,) if node.attributes.get_int("transA", 0) else (1,)
    # The left matrix of a MatMul, recurrent layers [direction, gates, inputs] and tables of rows.
    return (rank - 1,)
