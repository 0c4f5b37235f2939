"""Which nodes of a model will run in int8 on a backend, predicted from the graph alone.

The prediction knows operator types, constants and shapes, not scales. What really runs in int8 is read from the
runtime's optimised graph after quantization.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import onnx_ir as ir

from edgeq.graph.index import GraphIndex
from edgeq.graph.query import name_of
from edgeq.model.int8_conditions import NodeContext
from edgeq.model.int8_rules import DEFAULT, Rule, explain_float
from edgeq.model.macs import node_macs
from edgeq.model.masks import REASON as MASKED
from edgeq.model.masks import find_masks
from edgeq.scheme import Scheme

Verdict = Literal["int8", "float", "other"]

ON_REQUEST = "kept in float on request"
_STACKED = "its constant is no matrix, which cannot have one scale per channel; --no-per-channel quantizes it"


@dataclass(frozen=True)
class NodePrediction:
    """How one node will run.

    Attributes:
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


def predict_int8(
    model: ir.Model,
    rules: Mapping[str, Rule],
    scheme: Scheme | None = None,
    macs: Mapping[str, int] | None = None,
    hazards: Mapping[str, str] | None = None,
) -> tuple[NodePrediction, ...]:
    """Predict each node of a prepared float model, in graph order; nodes inside If, Loop and Scan come last, as float.

    Args:
        model: named, sorted, with shapes, as `prepare_model` gives it; weights may be external.
        rules: of the backend, see `edgeq.model.int8_rules.int8_rules`.
        scheme: what is quantized, and how; None for all that the rules let run in int8, by static quantization.
        macs: by node name, where they are other than `node_macs` gives them.
        hazards: tensors that must not be in 8 bits, each with what follows its name in the reason; a scheme that is not
            static has no ranges, so they are nothing to it.
    """
    macs = node_macs(model) if macs is None else macs
    index = GraphIndex(model)
    judge = _judge
    if scheme is not None:
        judge = partial(_judge_under, scheme, stacked_products(model), index.computed_constants)
    constants = {name for name in index.values if index.is_constant(name)}
    masks = find_masks(model)
    hazardous = hazardous_nodes(model, hazards or {}) if scheme is None or scheme.mode == "static" else {}
    quantized: set[str] = set()
    predictions: list[NodePrediction] = []
    for node in model.graph:
        if node.op_type == "Constant":
            continue
        verdict, reason = judge(node, rules, NodeContext(constants, quantized))
        if verdict == "int8" and node.name in masks:
            verdict, reason = "float", MASKED
        if verdict == "int8" and node.name in hazardous:
            verdict, reason = "float", hazardous[node.name]
        if verdict == "int8":
            quantized.update(name_of(output) for output in node.outputs)
        name = node.name or ""
        predictions.append(NodePrediction(name, node.op_type, macs[name], verdict, reason))
    reason = rules.get("Loop", rules[DEFAULT]).reason
    inside = [(node.name or "", node.op_type) for body in model.graph.subgraphs() for node in body]
    predictions.extend(NodePrediction(name, op_type, macs[name], "float", reason) for name, op_type in inside)
    return tuple(predictions)


def hazardous_nodes(model: ir.Model, hazards: Mapping[str, str]) -> dict[str, str]:
    """Return the nodes that make or read a tensor which must not be in 8 bits, by name, each with the reason."""
    found: dict[str, str] = {}
    for node in model.graph:
        names = (name_of(value) for value in (*node.outputs, *node.inputs))
        name = next((name for name in names if name in hazards), None)
        if name is not None:
            found[node.name or ""] = f"tensor {name!r} {hazards[name]}"
    return found


def stacked_products(model: ir.Model) -> frozenset[str]:
    """Names of MatMul nodes with a constant that is no matrix: they have no integer form with a scale per channel."""
    products = [node for node in model.graph if node.op_type == "MatMul"]
    return frozenset(n.name for n in products if n.name and any(_is_stacked(value) for value in n.inputs))


def _judge(node: ir.Node, rules: Mapping[str, Rule], context: NodeContext) -> tuple[Verdict, str]:
    read = [value for value in node.inputs if value is not None and not context.has_constant(value)]
    written = [value for value in node.outputs if value.name]
    if any(value.dtype == ir.DataType.DOUBLE for value in (*read, *written)):
        return "float", "it computes in float64; quantization starts from float32"
    if not any(value.dtype in (None, ir.DataType.UNDEFINED, ir.DataType.FLOAT) for value in written):
        return "other", "it makes no floats"
    reason = explain_float(node, rules, context)
    if reason:
        return "float", reason
    unknown = next((value.name for value in (*read, *written) if not value.dtype), None)
    if unknown is not None:
        return "float", f"the type and shape of tensor {unknown!r} are not known, so the quantizer passes it over"
    return "int8", rules.get(node.op_type, rules[DEFAULT]).reason


def _judge_under(
    scheme: Scheme,
    stacked: frozenset[str],
    constants: frozenset[str],
    node: ir.Node,
    rules: Mapping[str, Rule],
    context: NodeContext,
) -> tuple[Verdict, str]:
    """`_judge`, with what the scheme leaves in float first.

    Args:
        stacked: `stacked_products` of the model; constants: its `computed_constants`.
    """
    verdict, reason = _judge(node, rules, context)
    types = scheme.quantized_types
    if verdict == "other":
        return verdict, reason
    if node.name in scheme.exclude:
        return "float", ON_REQUEST
    if types is not None and node.op_type not in types:
        return "float", foreign(node.op_type)
    if scheme.mode == "static":
        if verdict == "int8" and scheme.per_channel and node.name in stacked:
            return "float", _STACKED
        return verdict, reason
    if scheme.mode == "dynamic" and scheme.per_channel and node.name in stacked:
        return "float", _STACKED
    if not constants.intersection(map(name_of, node.inputs[:2])):
        return "float", f"it multiplies two activations; {scheme.mode} quantization takes constant matrices"
    return "int8", f"{scheme.mode} quantization takes it"


def foreign(op_type: str) -> str:
    """The reason of a node of a type that the scheme leaves in float."""
    return f"{op_type} is not among the operator types that the scheme quantizes"


def _is_stacked(value: ir.Value | None) -> bool:
    return value is not None and value.is_initializer() and value.shape is not None and len(value.shape) != 2
