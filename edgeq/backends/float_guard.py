"""What was kept in float stays so, whoever loads the file.

At load, ONNX Runtime's WeightBiasQuantization quantizes the weights of a float Conv or Gemm between integer tensors,
per tensor and without being asked: what was kept in float for accuracy becomes the worst layer of all. A session option
prevents it, and gets lost as soon as somebody takes the file by itself. The optimizer wants one scale on the tensor
that the layer reads. So the layer gets a DequantizeLinear of its own, with the same scale written once per channel: the
same numbers, and nothing that the optimizer knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from edgeq.model.tensors import iter_graphs

_SUFFIX = "/kept_in_float"


def guard_float_layers(model: onnx.ModelProto, names: Sequence[str]) -> int:
    """Give each of the named nodes that reads a dequantized tensor its own DequantizeLinear per channel, in place.

    Args:
        model: with its weights, or with external ones left out.
        names: of Conv, ConvTranspose, Gemm and MatMul nodes with constant weights.

    Returns:
        How many nodes were changed.
    """
    graph = model.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    makers = {node.output[0]: node for node in graph.node if node.op_type == "DequantizeLinear"}
    changed = 0
    nodes = []
    for node in graph.node:
        maker = makers.get(node.input[0]) if node.name in names else None
        scales = [constants.get(name) for name in maker.input[1:]] if maker is not None else []
        if maker is not None and scales and all(s is not None and not s.dims for s in scales):
            axis, channels = _channels(node, constants[node.input[1]])
            own = helper.make_node(
                "DequantizeLinear", [maker.input[0]], [f"{node.name}{_SUFFIX}"], f"{node.name}{_SUFFIX}", axis=axis
            )
            for scale in scales:
                assert scale is not None
                name = f"{scale.name}/{channels}_times"
                if name not in constants:
                    graph.initializer.append(numpy_helper.from_array(_repeated(scale, channels), name))
                    constants[name] = graph.initializer[-1]
                own.input.append(name)
            nodes.append(own)
            node.input[0] = own.output[0]
            changed += 1
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    read = {output.name for scope in iter_graphs(graph) for output in scope.output}
    read.update(name for scope in iter_graphs(graph) for node in scope.node for name in node.input)
    del graph.node[:]
    graph.node.extend(node for node in nodes if node.output[0] not in makers or node.output[0] in read)
    return changed


def _channels(node: onnx.NodeProto, weight: onnx.TensorProto) -> tuple[int, int]:
    """(axis, size) of the channels that a node sums over."""
    attributes = {a.name: a.i for a in node.attribute}
    if node.op_type == "Conv":
        return 1, weight.dims[1] * attributes.get("group", 1)
    if node.op_type == "ConvTranspose":
        return 1, weight.dims[0]
    if node.op_type == "Gemm":
        return 0 if attributes.get("transA") else 1, weight.dims[1 if attributes.get("transB") else 0]
    return -1, weight.dims[-2] if len(weight.dims) > 1 else weight.dims[0]


def _repeated(scale: onnx.TensorProto, channels: int) -> NDArray[Any]:
    return np.full(channels, numpy_helper.to_array(scale))
