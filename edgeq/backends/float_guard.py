"""Layers that were kept in float stay so in every session, with or without session options.

At load, ONNX Runtime's WeightBiasQuantization quantizes the weights of a float Conv or Gemm between integer tensors,
per tensor: what was kept in float for accuracy loses more of it than any other layer. A session option prevents that,
and is lost where the file is used alone. The optimizer looks for one scale on the tensor that the layer reads. So the
layer gets a DequantizeLinear of its own, with the same scale written once per channel: the same numbers, in a form that
the optimizer does not match.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np
import onnx_ir as ir

from edgeq.graph.edit import Editor
from edgeq.graph.query import constant, constant_tensor, is_op

_SUFFIX = "/kept_in_float"


def guard_float_layers(model: ir.Model, names: Collection[str]) -> int:
    """Give each of the named nodes that reads a dequantized tensor its own DequantizeLinear per channel, in place.

    Args:
        names: of Conv, ConvTranspose, Gemm and MatMul nodes with constant weights.

    Returns:
        How many nodes were changed.
    """
    editor = Editor(model)
    changed = 0
    for node, maker in _behind_dequantize(model, names):
        restored, weight = maker.outputs[0], constant_tensor(node.inputs[1])
        if weight is None:
            continue
        parameters = {value.name: constant(value) for value in maker.inputs[1:] if value is not None}
        if not all(number is not None and not number.ndim for number in parameters.values()):
            continue
        axis, channels = _channels(node, tuple(weight.shape.numpy()))
        if channels == 1:  # one number per channel would be one scale again
            axis, channels = next(
                ((axis, n) for axis, n in enumerate(restored.shape or ()) if isinstance(n, int) and n > 1), (axis, 1)
            )
        if channels == 1:
            continue
        repeated = [
            editor.constant(f"{name}/{channels}_times", np.full(channels, number))
            for name, number in parameters.items()
        ]
        own = editor.node(
            "DequantizeLinear",
            [maker.inputs[0], *repeated],
            f"{node.name}{_SUFFIX}",
            before=node,
            attributes={"axis": axis},
        )
        node.replace_input_with(0, own)
        changed += 1
        if not restored.uses() and not restored.is_graph_output():
            model.graph.remove(maker, safe=True)
    return changed


def requantized_at_load(model: ir.Model, names: Collection[str]) -> tuple[str, ...]:
    """Those of the named nodes that the optimizer may match: they read a tensor that is dequantized with one scale."""
    scales = [(node, constant(maker.inputs[1])) for node, maker in _behind_dequantize(model, names)]
    return tuple(str(node.name) for node, scale in scales if scale is None or scale.size == 1)


def _behind_dequantize(model: ir.Model, names: Collection[str]) -> Iterator[tuple[ir.Node, ir.Node]]:
    """The named nodes that read a dequantized tensor, each with the DequantizeLinear."""
    for node in model.graph:
        data = node.inputs[0] if node.name in names else None
        made = data.producer() if data is not None else None
        if made is not None and is_op(made, "DequantizeLinear"):
            yield node, made


def _channels(node: ir.Node, weight: tuple[int, ...]) -> tuple[int, int]:
    """(axis, size) of the channels of the data that a node sums over."""
    if node.op_type == "Conv":
        return 1, weight[1] * node.attributes.get_int("group", 1)
    if node.op_type == "ConvTranspose":
        return 1, weight[0]
    if node.op_type == "Gemm":
        rows = weight[1] if node.attributes.get_int("transB", 0) else weight[0]
        return 0 if node.attributes.get_int("transA", 0) else 1, rows
    return -1, weight[-2] if len(weight) > 1 else weight[0]
