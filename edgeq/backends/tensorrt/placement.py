"""Where Q/DQ pairs go, decided on the float graph, each place with its reason.

- Both operands of a weighted layer are quantized (Conv, ConvTranspose, Gemm, MatMul), its output and its bias are not:
  TensorRT fuses the pair in front into the layer, and what follows (BatchNormalization, an activation) behind it.
- A residual Add is fused into the layer that makes one of its operands, if that layer's result goes nowhere else. The
  other operand, the skip branch, is then quantized, so that the fused layer reads it as int8.
- Tensors that operators only move about (Concat, MaxPool ...) have one scale, so that Q and DQ can be moved past them.
- Nothing else is quantized, nor a tensor whose range cuts off so much that int8 would lose it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import onnx
from onnx import TensorProto

from edgeq.backends.tensorrt.wiring import Wiring, wire
from edgeq.calibrate.groups import scale_groups
from edgeq.calibrate.ranges import Range
from edgeq.graph.convert import from_proto
from edgeq.graph.index import GraphIndex
from edgeq.model.int8_rules import DEFAULT, NodeContext, Rule, explain_float, known_sizes
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
    model: onnx.ModelProto,
    rules: Mapping[str, Rule],
    *,
    exclude: Collection[str] = (),
    op_types: Collection[str] | None = None,
    cut: Mapping[str, float] | None = None,
    most_cut: float = 1.0,
) -> Plan:
    """Decide for a prepared float model.

    Args:
        rules: of the backend.
        exclude: names of nodes to be left alone.
        op_types: quantize these only; None means all that the rules allow.
        cut: tensor → the share of its power that its range cuts off (`edgeq.calibrate.clipping`).
        most_cut: how much of it may be.
    """
    lost = {name: share for name, share in (cut or {}).items() if share > most_cut}
    wiring = wire(model)
    float_model = from_proto(model)
    types = element_types(float_model)
    index = GraphIndex(float_model)
    context = NodeContext(index.computed_constants)
    weighted = weighted_operators(rules)
    edges: list[Edge] = []
    reasons: dict[str, str] = {}
    layers: set[str] = set()
    depth = _depths(model)
    for node in model.graph.node:
        if node.op_type not in weighted:
            continue
        reason = explain_float(index.nodes[node.name], rules, context, excluded=exclude)
        if not reason and op_types is not None and node.op_type not in op_types:
            reason = f"{node.op_type} is not among the operator types that the scheme quantizes"
        if not reason and any(types.get(name, TensorProto.FLOAT) != TensorProto.FLOAT for name in node.input[:2]):
            reason = "its operands are not float32"
        if not reason:
            reason = next((_too_wide(name, lost[name]) for name in node.input[:2] if name in lost), "")
        if reason:
            reasons[node.name] = reason
            continue
        layers.add(node.name)
        why = f"{node.op_type} {node.name} reads it in int8"
        edges.extend(Edge(node.name, place, name, why) for place, name in enumerate(node.input[:2]))
    for node in model.graph.node:
        wanted = node.op_type == ADD and rules.get(ADD, rules[DEFAULT]).int8
        if wanted and (op_types is None or ADD in op_types) and node.name not in exclude:
            edge = _skip_branch(node, wiring, layers, depth, index)
            if edge is not None and edge.tensor not in lost:
                edges.append(edge)
    weights = frozenset(e.tensor for e in edges if e.tensor in wiring.initializers)
    return Plan(tuple(sorted(edges, key=lambda e: (wiring.order[e.node], e.place))), weights, reasons)


def _too_wide(tensor: str, share: float) -> str:
    return f"the range of {tensor!r} cuts off {share:.0%} of its power: its values spread too wide for 8 bits"


def _skip_branch(
    node: onnx.NodeProto,
    wiring: Wiring,
    layers: Collection[str],
    depth: Mapping[str, int],
    index: GraphIndex,
) -> Edge | None:
    """The operand of a residual Add that is quantized, or None where the Add fuses into no int8 layer."""
    names = list(node.input)
    if len(set(names)) != 2 or any(name in index.computed_constants for name in names):
        return None
    shapes = [known_sizes(index.values.get(name)) for name in names]
    if shapes[0] != shapes[1]:
        return None
    makers = [wiring.makers.get(name) for name in names]
    mains = [
        place
        for place, maker in enumerate(makers)
        if maker is not None and maker.name in layers and wiring.only_reader(names[place]) is node
    ]
    if not mains:
        return None
    # Of two branches that end in a layer, the shorter one is the skip.
    main = max(mains, key=lambda place: depth[names[place]])
    layer = makers[main]
    assert layer is not None
    why = f"skip branch of Add {node.name}, which fuses into {layer.op_type} {layer.name}"
    return Edge(node.name, 1 - main, names[1 - main], why)


def shared_ranges(model: onnx.ModelProto, plan: Plan, ranges: Mapping[str, Range]) -> dict[str, Range]:
    """`ranges` with one range for the quantized tensors of each group that operators only move about."""
    shared = dict(ranges)
    quantized = set(plan.activations)
    for group in scale_groups(from_proto(model)):
        members = [name for name in group if name in quantized and name in ranges]
        if len(members) > 1:
            whole = Range(min(ranges[n].low for n in members), max(ranges[n].high for n in members))
            shared.update(dict.fromkeys(members, whole))
    return shared


def _depths(model: onnx.ModelProto) -> dict[str, int]:
    """Tensor → nodes on the longest way to it."""
    depth: dict[str, int] = {}
    for node in model.graph.node:
        below = 1 + max((depth.get(name, 0) for name in node.input), default=0)
        depth.update(dict.fromkeys(node.output, below))
    return depth
