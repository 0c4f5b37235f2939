"""Where Q/DQ pairs go, decided on the float graph, each place with its reason.

- Both operands of a weighted layer are quantized (Conv, ConvTranspose, Gemm, MatMul), its output and its bias are not:
  TensorRT fuses the pair in front into the layer, and what follows (BatchNormalization, an activation) behind it.
- A residual Add is fused into the layer that makes one of its operands, if that layer's result goes nowhere else. The
  other operand, the skip branch, is then quantized, so that the fused layer reads it as int8.
- Tensors that data-movement operators connect (Concat, MaxPool ...) have one scale, so that Q and DQ can be moved past
  those.
- Nothing else is quantized, nor a tensor whose range cuts off so much that int8 would lose it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from edgeq.graph.index import GraphIndex
from edgeq.graph.query import is_op, name_of, only_reader
from edgeq.model.int8_conditions import NodeContext, known_sizes
from edgeq.model.int8_prediction import foreign
from edgeq.model.int8_rules import DEFAULT, Rule, explain_float
from edgeq.model.shapes import element_types

ADD = "Add"
_AFTER = "after-quantized"


@dataclass(frozen=True)
class Edge:
    """One operand that is quantized: input `place` of `node` reads `tensor`; `why` says what that is good for."""

    node: str
    place: int
    tensor: str
    why: str


@dataclass(frozen=True)
class Plan:
    """Attributes:
    edges: operands to quantize, activations and constant weights, in the order of the graph.
    weights: among their tensors, those that are constant.
    reasons: node → why it is not in int8, for all that could be by their operator type.
    """

    edges: tuple[Edge, ...]
    weights: frozenset[str]
    reasons: Mapping[str, str]

    @property
    def activations(self) -> tuple[str, ...]:
        """Tensors that get a pair, once each."""
        return tuple(dict.fromkeys(e.tensor for e in self.edges if e.tensor not in self.weights))


def weighted_operators(rules: Mapping[str, Rule]) -> frozenset[str]:
    """Operator types that are int8 on their own account, not only between others that are."""
    conditions = {op: rule.condition.split(", ") for op, rule in rules.items() if rule.int8}
    return frozenset(op for op, names in conditions.items() if _AFTER not in names)


def plan_placement(
    model: ir.Model,
    rules: Mapping[str, Rule],
    *,
    exclude: Collection[str] = (),
    op_types: Collection[str] | None = None,
    cut: Mapping[str, float] | None = None,
    most_cut: float = 1.0,
    gains: bool = True,
    hazards: Mapping[str, str] | None = None,
) -> Plan:
    """Decide for a prepared float model.

    Args:
        rules: of the backend.
        exclude: names of nodes to be left alone.
        op_types: quantize these only; None means all that the rules allow.
        cut: tensor → the share of its power that its range cuts off (`edgeq.calibrate.clipping`).
        most_cut: how much of it may be.
        gains: False quantizes layers too that int8 is not expected to make faster.
        hazards: tensors that must not be in 8 bits, each with what follows its name in the reason.
    """
    lost = {name: _too_wide(share) for name, share in (cut or {}).items() if share > most_cut} | dict(hazards or {})
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
        reason = explain_float(node, rules, context, excluded=exclude, gains=gains)
        if not reason and op_types is not None and node.op_type not in op_types:
            reason = foreign(node.op_type)
        if not reason and any(types.get(tensor, ir.DataType.FLOAT) != ir.DataType.FLOAT for tensor in operands):
            reason = "its operands are not float32"
        if not reason:
            reason = next((f"tensor {tensor!r} {lost[tensor]}" for tensor in operands if tensor in lost), "")
        if reason:
            reasons[name] = reason
            continue
        layers.add(node)
        why = f"{node.op_type} {name} reads it in int8"
        edges.extend(Edge(name, place, tensor, why) for place, tensor in enumerate(operands))
    depth = _depths(model)
    if rules.get(ADD, rules[DEFAULT]).int8 and (op_types is None or ADD in op_types):
        for node in model.graph:
            edge = _skip_branch(node, layers, depth, index) if node.name not in exclude else None
            if edge is not None and edge.tensor not in lost:
                edges.append(edge)
    weights = frozenset(e.tensor for e in edges if e.tensor in model.graph.initializers)
    return Plan(tuple(sorted(edges, key=lambda e: (index.order[e.node], e.place))), weights, reasons)


def _too_wide(share: float) -> str:
    return f"has a range that cuts off {share:.0%} of its power: its values spread too wide for 8 bits"


def _skip_branch(
    node: ir.Node, layers: Collection[ir.Node], depth: Mapping[ir.Value, int], index: GraphIndex
) -> Edge | None:
    """The operand of a residual Add that is quantized, or None where the Add fuses into no int8 layer."""
    values = [value for value in node.inputs if value is not None]
    if not is_op(node, ADD) or len(set(values)) != 2:
        return None
    if any(name_of(value) in index.computed_constants for value in values):
        return None
    if known_sizes(values[0]) != known_sizes(values[1]):
        return None
    makers = [value.producer() for value in values]
    mains = [place for place in (0, 1) if makers[place] in layers and only_reader(values[place]) is node]
    if not mains:
        return None
    # Of two branches that end in a layer, the shorter one is the skip.
    main = max(mains, key=lambda place: depth[values[place]])
    layer = makers[main]
    assert layer is not None
    why = f"skip branch of Add {node.name}, which fuses into {layer.op_type} {layer.name}"
    return Edge(str(node.name), 1 - main, name_of(values[1 - main]), why)


def _depths(model: ir.Model) -> dict[ir.Value, int]:
    """Tensor → nodes on the longest way to it."""
    depth: dict[ir.Value, int] = {}
    for node in model.graph:
        below = 1 + max((depth.get(value, 0) for value in node.inputs if value is not None), default=0)
        depth.update(dict.fromkeys(node.outputs, below))
    return depth
