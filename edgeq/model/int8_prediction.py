"""What of a model will run in int8 on a backend, foretold from the graph alone.

A forecast: it knows operator types, constants and shapes, not scales. What really happened is read from the runtime's
optimised graph after quantization.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import onnx

from edgeq.model.int8_rules import DEFAULT, NodeContext, Rule, explain_float
from edgeq.model.macs import node_macs
from edgeq.model.tensors import iter_graphs

Verdict = Literal["int8", "float", "other"]


@dataclass(frozen=True)
class NodePrediction:
    """Attributes:
    name, op_type: of the node.
    macs: multiply-accumulates of one inference.
    verdict: "int8", "float", or "other" for a node without float data (shapes, indices, masks).
    reason: how it runs in int8, or why not.
    """

    name: str
    op_type: str
    macs: int
    verdict: Verdict
    reason: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "op_type": self.op_type,
            "macs": self.macs,
            "verdict": self.verdict,
            "reason": self.reason,
        }


def predict_int8(model: onnx.ModelProto, rules: Mapping[str, Rule]) -> tuple[NodePrediction, ...]:
    """Foretell each node of a prepared float model, in graph order; nodes inside If, Loop and Scan come last, as float.

    Args:
        model: named, sorted, with shapes, as `prepare_model` writes it; weights may be external.
    """
    macs = node_macs(model)
    types = _element_types(model)
    constants = {t.name for t in model.graph.initializer}
    constants |= {o for n in model.graph.node if n.op_type == "Constant" for o in n.output}
    makers = {o: n.op_type for n in model.graph.node for o in n.output if o}
    shapes = known_shapes(model)
    quantized: set[str] = set()
    forecast: list[NodePrediction] = []
    for node in model.graph.node:
        if node.op_type == "Constant":
            continue
        verdict, reason = _judge(node, rules, types, NodeContext(constants, quantized, shapes, makers))
        if verdict == "int8":
            quantized.update(node.output)
        forecast.append(NodePrediction(node.name, node.op_type, macs[node.name], verdict, reason))
    for graph in iter_graphs(model.graph):
        if graph is not model.graph:
            reason = rules.get("Loop", rules[DEFAULT]).reason
            forecast.extend(NodePrediction(n.name, n.op_type, macs[n.name], "float", reason) for n in graph.node)
    return tuple(forecast)


def _judge(
    node: onnx.NodeProto, rules: Mapping[str, Rule], types: Mapping[str, int], context: NodeContext
) -> tuple[Verdict, str]:
    read = [types.get(name, 0) for name in node.input if name and name not in context.constants]
    written = [types.get(name, 0) for name in node.output if name]
    if onnx.TensorProto.DOUBLE in (*read, *written):
        return "float", "it computes in float64; quantization starts from float32"
    if not any(t in (0, onnx.TensorProto.FLOAT) for t in written):
        return "other", "it makes no floats"
    reason = explain_float(node, rules, context)
    if reason:
        return "float", reason
    unknown = next(
        (n for n in (*node.input, *node.output) if n and n not in types and n not in context.constants), None
    )
    if unknown is not None:
        return "float", f"the type and shape of tensor {unknown!r} are not known, so the quantizer passes it over"
    return "int8", rules.get(node.op_type, rules[DEFAULT]).reason


def _element_types(model: onnx.ModelProto) -> dict[str, int]:
    values = [*model.graph.input, *model.graph.value_info, *model.graph.output]
    return {v.name: v.type.tensor_type.elem_type for v in values if v.type.tensor_type.elem_type}


def known_shapes(model: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
    """Sizes of the tensors whose rank the model tells, weights included; 0 for a size that is symbolic."""
    values = [*model.graph.input, *model.graph.value_info, *model.graph.output]
    shapes = {
        v.name: tuple(d.dim_value for d in v.type.tensor_type.shape.dim)
        for v in values
        if v.type.tensor_type.HasField("shape")
    }
    shapes.update((t.name, tuple(t.dims)) for t in model.graph.initializer)
    return shapes


def stacked_products(model: onnx.ModelProto) -> frozenset[str]:
    """Names of MatMul nodes with a constant that is no matrix: they have no integer form with a scale per channel."""
    stacked = {tensor.name for tensor in model.graph.initializer if len(tensor.dims) != 2}
    return frozenset(n.name for n in model.graph.node if n.op_type == "MatMul" and stacked.intersection(n.input))
