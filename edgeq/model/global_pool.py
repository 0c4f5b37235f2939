"""Means over whole images, written as the pooling that they are.

Exporters write the average of each channel (squeeze and excitation, the head of a classifier) as a ReduceMean over the
spatial axes. GlobalAveragePool computes the same, and has int8 kernels where ReduceMean has none, which takes the whole
tensor to float.
"""

from __future__ import annotations

import onnx_ir as ir

from edgeq.graph.edit import Editor, replace_node, rewrite_nodes
from edgeq.graph.query import constant, is_op, maker, node_input

# Layers whose input is quantized anyway; before a normalisation means are wanted in float.
_LAYERS = ("Conv", "Gemm", "MatMul")
_CARRIERS = ("Flatten", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
# Of images: over one axis it may be a normalisation over channels, which come last in transformers.
_LEAST_AXES = 2


def write_global_pools(model: ir.Model) -> int:
    """Write every ReduceMean over all axes but the first two, of four or more, whose result goes to a layer, as a
    GlobalAveragePool, and a Flatten behind it where the axes are not kept, in place.

    Returns:
        How many were rewritten.
    """
    return rewrite_nodes(model, _write, "ReduceMean")


def _write(mean: ir.Node, editor: Editor) -> bool:
    source, result = mean.inputs[0], mean.outputs[0]
    if source is None or source.shape is None or source.dtype != ir.DataType.FLOAT:
        return False
    rank = len(source.shape)
    if rank < 2 + _LEAST_AXES or _axes(mean, rank) != list(range(2, rank)):
        return False
    if not _goes_to_layers(result):
        return False
    keeps = mean.attributes.get_int("keepdims", 1)
    pooled = editor.node("GlobalAveragePool", [source], f"{mean.name}/pool", before=mean)
    pool = maker(pooled)
    if keeps:
        pooled.shape, pooled.type = result.shape, result.type
    else:
        sizes = [*source.shape[:2], *[1] * (rank - 2)]
        pooled.shape, pooled.type = ir.Shape(sizes), source.type
        pooled = editor.node("Flatten", [pooled], f"{mean.name}/flatten", before=mean, like=result)
    replace_node(mean, pooled)
    pool.name = mean.name  # which --exclude and others go by
    return True


def _goes_to_layers(value: ir.Value) -> bool:
    """Whether nothing but layers reads a value, straight or in another shape."""
    if value.is_graph_output() or not value.uses():
        return False
    nodes = [use.node for use in value.uses()]
    return all(is_op(n, *_LAYERS) or (is_op(n, *_CARRIERS) and _goes_to_layers(n.outputs[0])) for n in nodes)


def _axes(mean: ir.Node, rank: int) -> list[int]:
    """The axes that are reduced, in order; none where they are computed, or all by being left out."""
    given = node_input(mean, 1)
    values = constant(given) if given is not None else None
    axes = mean.attributes.get_ints("axes", []) if given is None else [] if values is None else values.ravel().tolist()
    return sorted(axis % rank for axis in axes)
