"""Replace means over whole images by GlobalAveragePool.

Exporters write the average of each channel (squeeze and excitation, the head of a classifier) as a ReduceMean over the
spatial axes. GlobalAveragePool computes the same result and has int8 kernels. ReduceMean has none, so the whole tensor
would be converted to float.

In some formats, an AveragePool whose window is the whole image keeps the scale of its input, and only the result of a
GlobalAveragePool has a scale of its own. `write_whole_pools` replaces these.
"""

from __future__ import annotations

import onnx_ir as ir

from edgeq.model.edit import Editor, replace_node, rewrite_nodes
from edgeq.model.graph import (
    constant,
    geometry,
    is_op,
    maker,
    node_input,
)

# Types of layers. Their input is quantized anyway, whereas a mean before a normalization should stay in float.
_READERS = ("Conv", "Gemm", "MatMul")
_CARRIERS = ("Flatten", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
# Smallest number of axes of a mean. Only images qualify, because a mean over one axis may be a normalization over
# channels, which are the last axis in transformers.
_MIN_AXES = 2


def write_global_pools(model: ir.Model) -> int:
    """Replace every ReduceMean over all axes except the first two by GlobalAveragePool, in place. The input must have
    at least four axes, and only layers may read the result. If the ReduceMean does not keep the axes, a Flatten
    follows.

    Returns:
        The number of nodes that were replaced.
    """
    return rewrite_nodes(model, _write_pool, "ReduceMean")


def _write_pool(mean: ir.Node, editor: Editor) -> bool:
    source, result = mean.inputs[0], mean.outputs[0]
    if source is None or source.shape is None or source.dtype != ir.DataType.FLOAT:
        return False
    rank = len(source.shape)
    if rank < 2 + _MIN_AXES or _axes(mean, rank) != list(range(2, rank)):
        return False
    if not _leads_to_layers(result):
        return False
    keeps = mean.attributes.get_int("keepdims", 1)
    pooled = editor.node("GlobalAveragePool", [source], f"{mean.name}/pool", before=mean)
    pool = maker(pooled)
    if keeps:
        pooled.shape, pooled.type = result.shape, result.type
    else:
        pooled.shape, pooled.type = ir.Shape([*source.shape[:2], *[1] * (rank - 2)]), source.type
        pooled = editor.node("Flatten", [pooled], f"{mean.name}/flatten", before=mean, like=result)
    replace_node(mean, pooled)
    pool.name = mean.name  # Arguments such as `exclude` use this name.
    return True


def write_whole_pools(model: ir.Model) -> int:
    """Replace every AveragePool with one window, which covers its whole input, by GlobalAveragePool, in place. Results
    do not change.

    Returns:
        The number of nodes that were replaced.
    """
    return rewrite_nodes(model, _write_whole_pool, "AveragePool")


def _write_whole_pool(pool: ir.Node, editor: Editor) -> bool:
    source, kernel = pool.inputs[0], tuple(pool.attributes.get_ints("kernel_shape", ()))
    if source is None or source.shape is None or tuple(source.shape[2:]) != kernel:
        return False
    window = geometry(pool, kernel, kernel)
    if any(map(any, window.pads)) or set(window.dilations) != {1}:
        return False
    pooled = editor.node("GlobalAveragePool", [source], f"{pool.name}/whole", before=pool, like=pool.outputs[0])
    replace_node(pool, pooled)
    maker(pooled).name = pool.name  # Arguments such as `exclude` use this name.
    return True


def _leads_to_layers(value: ir.Value) -> bool:
    """Return whether only layers read a value, directly or after nodes that reshape it."""
    if value.is_graph_output() or not value.uses():
        return False
    nodes = [use.node for use in value.uses()]
    return all(is_op(n, *_READERS) or (is_op(n, *_CARRIERS) and _leads_to_layers(n.outputs[0])) for n in nodes)


def _axes(mean: ir.Node, rank: int) -> list[int]:
    """Return the axes that a ReduceMean reduces, sorted. Return [] if they are computed or left out. (If they are left
    out, all axes are reduced.)
    """
    axes_input = node_input(mean, 1)
    values = constant(axes_input) if axes_input is not None else None
    axes = (
        mean.attributes.get_ints("axes", [])
        if axes_input is None
        else []
        if values is None
        else values.ravel().tolist()
    )
    return sorted(axis % rank for axis in axes)
