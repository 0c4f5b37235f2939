"""Choose which operands of a float graph to quantize for TensorRT.

These rules decide which tensors get Q/DQ pairs:

- Both operands of a weighted layer (Conv, ConvTranspose, Gemm, MatMul) are quantized. Its output and its bias are not.
  TensorRT fuses the pairs before the layer and the nodes after it (BatchNormalization, an activation) into the layer.
- A residual Add is fused into the layer that makes one of its operands, if only the Add reads that layer's result. The
  other operand, the skip branch, is then quantized, so that the fused layer reads it as int8.
- Tensors that are connected by data-movement operators (Concat, MaxPool ...) share one scale, so that Q and DQ can move
  past these operators.
- Nothing else is quantized. A tensor is also not quantized if its int8 range cuts off too much of its power.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import onnx_ir as ir

from edgeq.model.conditions import NodeContext, known_sizes
from edgeq.model.graph import GraphIndex, is_op, name_of, only_reader
from edgeq.model.int8_prediction import explain_float, foreign_type_reason
from edgeq.model.int8_rules import DEFAULT, Int8Rule
from edgeq.model.shapes import element_types

ADD = "Add"
# The condition in the rules of operators that are int8 only next to a layer that is, such as pooling.
_AFTER = "after-quantized"


class Edge(NamedTuple):
    """Describe one operand to quantize: the tensor `tensor`, which `node` reads as its input number `place`."""

    node: str
    place: int
    tensor: str


@dataclass(frozen=True)
class OperandPlan:
    """List the operands to quantize.

    Attributes:
        edges: activations and constant weights to quantize, in graph order.
        weights: names of the constant tensors in `edges`.
        reasons: the reason why a node is not in int8, by node name, for all nodes whose operator type could be in int8.
    """

    edges: tuple[Edge, ...]
    weights: frozenset[str]
    reasons: Mapping[str, str]

    @property
    def activations(self) -> tuple[str, ...]:
        """Return the names of the activations that get a pair, without duplicates."""
        return tuple(dict.fromkeys(e.tensor for e in self.edges if e.tensor not in self.weights))


def weighted_operators(rules: Mapping[str, Int8Rule]) -> frozenset[str]:
    """Return the operator types that can run in int8 even if no neighbouring operator does."""
    conditions = {op: rule.condition.split(", ") for op, rule in rules.items() if rule.int8}
    return frozenset(op for op, names in conditions.items() if _AFTER not in names)


def plan_placement(
    model: ir.Model,
    rules: Mapping[str, Int8Rule],
    *,
    exclude: Mapping[str, str] = MappingProxyType({}),
    op_types: Collection[str] | None = None,
    cut: Mapping[str, float] | None = None,
    most_cut: float = 1.0,
    gains: bool = True,
    hazards: Mapping[str, str] | None = None,
) -> OperandPlan:
    """Choose which operands of a prepared float model to quantize.

    Args:
        rules: int8 rules of the backend.
        exclude: the reason for each node to leave in float.
        op_types: the only operator types to quantize; None means every type that the rules allow.
        cut: share of each tensor's power that its range cuts off (`edgeq.calibration.ranges`).
        most_cut: the largest share that may be cut off.
        gains: whether to quantize only layers that int8 is expected to make faster.
        hazards: tensors that must not be in 8 bits, each with a reason. Messages print the reason directly after the
            tensor's name.
    """
    # Hazards replace the note on the range: they say that any 8-bit form of the tensor is wrong.
    lost = {name: _wide_range_note(share) for name, share in (cut or {}).items() if share > most_cut} | dict(
        hazards or {}
    )
    types = element_types(model)
    index = GraphIndex(model)
    context = NodeContext(index.computed_constants)
    weighted = weighted_operators(rules)
    edges: list[Edge] = []
    reasons: dict[str, str] = {}
    layers: set[ir.Node] = set()
    for node in model.graph:
        if node.op_type not in weighted:
            continue
        name, operands = str(node.name), [name_of(value) for value in node.inputs[:2]]
        # The reasons are tried from the general to the particular, so a user first hears what no other range would
        # change.
        reason = explain_float(node, rules, context, excluded=exclude, gains=gains)
        if not reason and op_types is not None and node.op_type not in op_types:
            reason = foreign_type_reason(node.op_type)
        # Products of integers or of 16-bit tensors exist in some models. The pairs are written for float32 tensors.
        if not reason and any(types.get(tensor, ir.DataType.FLOAT) != ir.DataType.FLOAT for tensor in operands):
            reason = "its operands are not float32"
        if not reason:
            reason = next((f"tensor {tensor!r} {lost[tensor]}" for tensor in operands if tensor in lost), "")
        if reason:
            reasons[name] = reason
            continue
        layers.add(node)
        edges.extend(Edge(name, place, tensor) for place, tensor in enumerate(operands))
    depth = _depths(model)
    # Adds come after all layers, because an Add needs to know whether its operand is the output of an int8 layer.
    if rules.get(ADD, rules[DEFAULT]).int8 and (op_types is None or ADD in op_types):
        for node in model.graph:
            edge = _skip_branch(node, layers, depth, index) if node.name not in exclude else None
            if edge is not None and edge.tensor not in lost:
                edges.append(edge)
    weights = frozenset(e.tensor for e in edges if e.tensor in model.graph.initializers)
    return OperandPlan(tuple(sorted(edges, key=lambda e: (index.order[e.node], e.place))), weights, reasons)


def _wide_range_note(share: float) -> str:
    return f"has a range that cuts off {share:.0%} of its power: its values spread too wide for 8 bits"


def _skip_branch(
    node: ir.Node, layers: Collection[ir.Node], depth: Mapping[ir.Value, int], index: GraphIndex
) -> Edge | None:
    """Return the operand of a residual Add to quantize, or None if the Add does not fuse into an int8 layer."""
    values = [value for value in node.inputs if value is not None]
    # x + x has no skip branch: both operands are the layer's output.
    if not is_op(node, ADD) or len(set(values)) != 2:
        return None
    # An Add of a constant is a bias, which the layer takes in float.
    if any(name_of(value) in index.computed_constants for value in values):
        return None
    # An Add that broadcasts is no residual Add.
    if known_sizes(values[0]) != known_sizes(values[1]):
        return None
    makers = [value.producer() for value in values]
    mains = [place for place in (0, 1) if makers[place] in layers and only_reader(values[place]) is node]
    if not mains:
        return None
    # If both branches end in an int8 layer that only the Add reads, the shorter branch is the skip branch.
    main = max(mains, key=lambda place: depth[values[place]])
    return Edge(str(node.name), 1 - main, name_of(values[1 - main]))


def _depths(model: ir.Model) -> dict[ir.Value, int]:
    """Return the number of nodes on the longest path to each tensor."""
    depth: dict[ir.Value, int] = {}
    for node in model.graph:
        below = 1 + max((depth.get(value, 0) for value in node.inputs if value is not None), default=0)
        depth.update(dict.fromkeys(node.outputs, below))
    return depth
