"""What a graph with explicit quantization computes, as a float32 graph that ONNX Runtime's CPU kernels run exactly.

The graph itself cannot be run for that: ONNX Runtime's CPU provider has hardly any 16-bit kernels, computes such nodes
in float32 and drops the roundings between them (seen in 1.31.1: 200 times 1000 times 0.001 is infinite in float16, and
it says 200). So every tensor of a 16-bit type becomes a float32 tensor that is rounded to that type where it is made:
by a pair of Cast nodes, which no optimisation level removes. Q/DQ pairs stay what they are: integers times their scale,
multiplied and summed in float32.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgeq.graph.convert import from_proto
from edgeq.graph.operators import DATA_MOVEMENT
from edgeq.model.shapes import element_types
from edgeq.session import SessionSettings

SETTINGS = SessionSettings(optimization="none")
"""As written: the optimiser would quantize weights that were left in float and fuse Q/DQ in its own way."""
_HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
# Their results are among what they read, so there is nothing to round.
_EXACT = DATA_MOVEMENT | {
    "Concat",
    "Relu",
    "Clip",
    "Where",
    "Max",
    "Min",
    "Neg",
    "Abs",
    "GlobalMaxPool",
    "DequantizeLinear",
}


def simulation(model: onnx.ModelProto) -> onnx.ModelProto:
    """The simulation of `model`, whose weights must be loaded. Signature and tensor names are the same."""
    simulated = onnx.ModelProto()
    simulated.CopyFrom(model)
    graph = simulated.graph
    types = element_types(from_proto(model))
    for tensor in graph.initializer:
        if tensor.data_type in _HALVES:
            values = numpy_helper.to_array(tensor).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        kinds = [int(types.get(name, 0)) for name in node.output]
        if node.op_type == "Cast" and kinds[0] in _HALVES:
            nodes.extend(_rounding(node.input[0], node.output[0], kinds[0]))
        elif node.op_type == "Cast" and kinds[0] == TensorProto.FLOAT and int(types.get(node.input[0], 0)) in _HALVES:
            nodes.append(helper.make_node("Identity", list(node.input), list(node.output), node.name))
        else:
            nodes.append(node)
            for place, kind in enumerate(kinds):
                if kind in _HALVES and node.op_type not in _EXACT:
                    name = node.output[place]
                    node.output[place] = f"{name}_unrounded"
                    nodes.extend(_rounding(node.output[place], name, kind))
    copied = [onnx.NodeProto() for _ in nodes]
    for copy, node in zip(copied, nodes, strict=True):
        copy.CopyFrom(node)
    del graph.node[:]
    graph.node.extend(copied)
    for value in graph.value_info:
        if value.type.tensor_type.elem_type in _HALVES:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    return simulated


def _rounding(read: str, made: str, kind: int) -> list[onnx.NodeProto]:
    between = f"{made}_16_bits"
    return [
        helper.make_node("Cast", [read], [between], f"{made}_to_16_bits", to=kind),
        helper.make_node("Cast", [between], [made], f"{made}_from_16_bits", to=TensorProto.FLOAT),
    ]
