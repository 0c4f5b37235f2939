"""Predict from a float graph which nodes a backend will run in int8, and explain why the others stay in float.

The rules are in `targets/backends/*.toml`. They depend on operator types, constants and shapes, but not on scales.
After quantization, the runtime's optimised graph shows which nodes really run in int8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Literal

import onnx_ir as ir

from edgeq.model.conditions import GAINS, NodeContext, condition, float_inputs
from edgeq.model.graph import (
    GraphIndex,
    before_layers,
    computed_constants,
    indexed,
    is_op,
    moves_data,
    name_of,
    operator_of,
    readers,
)
from edgeq.model.int8_rules import DEFAULT, Int8Rule
from edgeq.model.macs import node_macs
from edgeq.model.masks import MASK_REASON as MASKED
from edgeq.model.masks import find_masks
from edgeq.scheme import Scheme

NORMALIZATIONS = frozenset(
    {"GroupNormalization", "InstanceNormalization", "LayerNormalization", "LpNormalization", "RMSNormalization"}
)
_SUMS = frozenset({"Add", "Concat", "GlobalAveragePool", "ReduceMean", "Sum"})


def find_convolved(model: ir.Model) -> frozenset[str]:
    """Return the names of tensors that are computed from a convolution or a float input of the model. Paths that lead
    through matrix products or normalizations do not count.
    """
    names = {name_of(value) for value in model.graph.inputs if value.dtype == ir.DataType.FLOAT}
    for node in model.graph:
        rule = operator_of(node).mac_rule
        # The result of a product or a normalization is a float at no cost, whatever the node reads.
        if rule or node.op_type in NORMALIZATIONS:
            convolved = rule.startswith("conv")
        else:
            convolved = any(name_of(value) in names for value in float_inputs(node))
        if convolved:
            names.update(name_of(output) for output in node.outputs)
    return frozenset(names)


def find_normalized(model: ir.Model) -> frozenset[str]:
    """Return the names of tensors that normalizations read, directly or after sums, means and data movement. A residual
    stream is an example. A normalization that is built from simple operators is recognised by its mean.
    """
    names: set[str] = set()
    # In reverse order, all readers of a tensor are known before the tensor itself.
    for node in reversed(list(model.graph)):
        for value in node.outputs:
            if any(_normalizes(reader, value) for reader in readers(value)) or any(
                (reader.op_type in _SUMS or moves_data(reader)) and name_of(reader.outputs[0]) in names
                for reader in readers(value)
            ):
                names.add(name_of(value))
    return frozenset(names)


def _normalizes(node: ir.Node, value: ir.Value) -> bool:
    """Return whether a node is part of a normalization of `value`. This is true if the node is a normalization,
    computes the mean that is subtracted from `value`, or squares `value` for a mean of squares.
    """
    if node.op_type in NORMALIZATIONS:
        return node.inputs[0] is value
    result_readers = readers(node.outputs[0])
    if is_op(node, "ReduceMean"):
        return any(is_op(reader, "Sub") and value in reader.inputs for reader in result_readers)
    # An RMS normalization subtracts no mean, so its mean of squares is the only sign of it.
    squares = is_op(node, "Pow") or (is_op(node, "Mul") and node.inputs[0] is node.inputs[1])
    return squares and any(is_op(reader, "ReduceMean") for reader in result_readers)


def explain_float(
    node: ir.Node,
    rules: Mapping[str, Int8Rule],
    context: NodeContext | None = None,
    *,
    excluded: Mapping[str, str] = MappingProxyType({}),
    gains: bool = True,
) -> str:
    """Return why a node runs in float: the scheme excludes it, it has no int8 form, or a condition is not met.

    Args:
        excluded: the reason for each node that must stay in float.
        gains: whether to apply the conditions in `GAINS` too. They check whether int8 is faster, not whether it is
            possible.

    Returns:
        The reason; "" if no reason against int8 is known.
    """
    # The exclusion of a user explains a node better than any rule of the backend does.
    if node.name is not None and node.name in excluded:
        return excluded[node.name]
    if node.domain not in ("", "ai.onnx"):
        return f"{node.domain}.{node.op_type} is not a standard operator, so the quantizer leaves it alone"
    rule = rules.get(node.op_type, rules[DEFAULT])
    if not rule.int8:
        return rule.reason
    context = context or NodeContext()
    # Hazards and masks come before the conditions: 8 bits would be wrong here, not only slow.
    if node.name in context.float_reasons:
        return context.float_reasons[node.name or ""]
    for name in rule.condition.split(", ") if rule.condition else ():
        if not gains and name.partition(":")[0] in GAINS:
            continue
        failure = condition(name)(node, context)
        if failure:
            return failure
    return ""


Verdict = Literal["int8", "float", "other"]
_FOLDED = "one of its operands becomes constant once all sizes are fixed, and some engines fail if it is quantized"
_STACKED = "its constant is not a matrix, which cannot have one scale per channel; ⟨per_channel=False⟩ quantizes it"


@dataclass(frozen=True)
class NodePrediction:
    """Predict how one node will run.

    Attributes:
        name, op_type: name and type of the node.
        macs: multiply-accumulates of one inference.
        verdict: "int8", "float", or "other" for a node without float data (shapes, indices, masks).
        reason: how the node runs in int8, or why it does not.
    """

    name: str
    op_type: str
    macs: int
    verdict: Verdict
    reason: str


def predict_int8(
    model: ir.Model | GraphIndex,
    rules: Mapping[str, Int8Rule],
    scheme: Scheme | None = None,
    macs: Mapping[str, int] | None = None,
    hazards: Mapping[str, str] | None = None,
) -> tuple[NodePrediction, ...]:
    """Predict each node of a prepared float model, in graph order. Nodes inside If, Loop and Scan come last, as float.

    Args:
        model: a model from `prepare_model`: its nodes are sorted and have names, and its shapes are known. Weights may
            be external.
        rules: rules of the backend, from `int8_rules`.
        scheme: scheme that sets what is quantized, and how; None for static quantization of everything that the rules
            allow.
        macs: multiply-accumulates by node name; None for those of `node_macs`.
        hazards: for each tensor that must not be in 8 bits, the part of the reason after the tensor's name. Only static
            schemes use the hazards, because other schemes have no ranges.
    """
    index = indexed(model)
    model = index.model
    macs = node_macs(model) if macs is None else macs
    judge = _judge
    if scheme is not None:
        judge = partial(_judge_under, scheme, stacked_products(model), index.computed_constants)
    constants = {name for name in index.values if index.is_constant(name)}
    hazardous = hazardous_nodes(model, hazards or {}) if scheme is None or scheme.mode == "static" else {}
    quantized: set[str] = set()
    # `quantized` grows while the nodes are judged: a condition asks what became of the nodes before.
    context = NodeContext(
        constants,
        quantized,
        find_convolved(model),
        find_normalized(model),
        before_layers(model),
        {
            **hazardous,
            **dict.fromkeys(nodes_with_folded_operands(index), _FOLDED),
            **dict.fromkeys(find_masks(model), MASKED),
        },
    )
    predictions: list[NodePrediction] = []
    for node in model.graph:
        # A Constant computes nothing, and the number of these nodes depends only on the exporter.
        if node.op_type == "Constant":
            continue
        verdict, reason = judge(node, rules, context)
        if verdict == "int8":
            quantized.update(name_of(output) for output in node.outputs)
        name = node.name or ""
        predictions.append(NodePrediction(name, node.op_type, macs[name], verdict, reason))
    # Nodes in bodies stay in float whichever operator holds the body, so the rule for Loop explains them all.
    reason = rules.get("Loop", rules[DEFAULT]).reason
    inside = [(node.name or "", node.op_type) for body in model.graph.subgraphs() for node in body]
    predictions.extend(NodePrediction(name, op_type, macs[name], "float", reason) for name, op_type in inside)
    return tuple(predictions)


def hazardous_nodes(model: ir.Model, hazards: Mapping[str, str]) -> dict[str, str]:
    """Return node name → reason, for nodes that read or write a tensor that must not be in 8 bits."""
    reasons: dict[str, str] = {}
    for node in model.graph:
        names = (name_of(value) for value in (*node.outputs, *node.inputs))
        name = next((name for name in names if name in hazards), None)
        if name is not None:
            reasons[node.name or ""] = f"tensor {name!r} {hazards[name]}"
    return reasons


def nodes_with_folded_operands(index: GraphIndex) -> frozenset[str]:
    """Return the names of the sums and products with an operand that becomes constant once all sizes are fixed, but is
    computed in the file. Position embeddings and grids are examples. OpenVINO 2026.4.1 fails on such a node between
    Q/DQ pairs.
    """
    computed = computed_constants(index.graph, sizes=True) - {name for name in index.values if index.is_constant(name)}
    sums = [node for node in index.graph if is_op(node, "Add", "Mul", "Sub")]
    return frozenset(node.name for node in sums if node.name and computed.intersection(map(name_of, node.inputs)))


def stacked_products(model: ir.Model) -> frozenset[str]:
    """Return the names of MatMul nodes whose constant has more than two axes. They have no integer form with
    per-channel scales.
    """
    products = [node for node in model.graph if node.op_type == "MatMul"]
    return frozenset(n.name for n in products if n.name and any(_is_stacked(value) for value in n.inputs))


def _judge(node: ir.Node, rules: Mapping[str, Int8Rule], context: NodeContext) -> tuple[Verdict, str]:
    inputs = [value for value in node.inputs if value is not None and not context.has_constant(value)]
    outputs = [value for value in node.outputs if value.name]
    if any(value.dtype == ir.DataType.DOUBLE for value in (*inputs, *outputs)):
        return "float", "it computes in float64; quantization starts from float32"
    if not any(value.dtype in (None, ir.DataType.UNDEFINED, ir.DataType.FLOAT) for value in outputs):
        # A pair in front of a Cast or a comparison would round the tensor that it reads.
        float_reason = context.float_reasons.get(node.name or "")
        return ("float", float_reason) if float_reason else ("other", "it makes no floats")
    reason = explain_float(node, rules, context)
    if reason:
        return "float", reason
    unknown = next((value.name for value in (*inputs, *outputs) if not value.dtype), None)
    if unknown is not None:
        return "float", f"the type and shape of tensor {unknown!r} are not known, so the quantizer skips it"
    return "int8", rules.get(node.op_type, rules[DEFAULT]).reason


def _judge_under(
    scheme: Scheme,
    stacked: frozenset[str],
    constants: frozenset[str],
    node: ir.Node,
    rules: Mapping[str, Int8Rule],
    context: NodeContext,
) -> tuple[Verdict, str]:
    """Apply the exclusions of a scheme to a node. If the node is not excluded, return the verdict of `_judge`.

    Args:
        stacked: `stacked_products` of the model.
        constants: `computed_constants` of the model.
    """
    verdict, reason = _judge(node, rules, context)
    types = scheme.quantized_types
    # A node without floats can be neither quantized nor excluded.
    if verdict == "other":
        return verdict, reason
    if node.name in scheme.exclude:
        return "float", scheme.excluded[node.name]
    if types is not None and node.op_type not in types:
        return "float", foreign_type_reason(node.op_type)
    # The rules of a backend describe static quantization. The other modes quantize every constant matrix.
    if scheme.mode == "static":
        if verdict == "int8" and scheme.per_channel and node.name in stacked:
            return "float", _STACKED
        return verdict, reason
    if scheme.mode == "dynamic" and scheme.per_channel and node.name in stacked:
        return "float", _STACKED
    if not constants.intersection(map(name_of, node.inputs[:2])):
        return "float", f"it multiplies two activations; {scheme.mode} quantization needs a constant matrix"
    return "int8", f"{scheme.mode} quantization covers it"


def foreign_type_reason(op_type: str) -> str:
    """Return the reason for a node whose operator type the scheme leaves in float."""
    return f"{op_type} is not among the operator types that the scheme quantizes"


def _is_stacked(value: ir.Value | None) -> bool:
    return value is not None and value.is_initializer() and value.shape is not None and len(value.shape) != 2
