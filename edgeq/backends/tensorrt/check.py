"""What TensorRT makes of the Q/DQ pairs in a file: read off the finished graph, not off what was meant to be written.

For every pair: which fusion it serves. For every node of the float model: whether it runs in int8, in 16 bits or in
fp32. And findings: whatever breaks a rule of placement, so that a file without findings has none of the known traps.

What a graph with explicit quantization computes, as a float32 graph that ONNX Runtime's CPU kernels run exactly.

The graph itself cannot be run for that: ONNX Runtime's CPU provider has hardly any 16-bit kernels, computes such nodes
in float32 and drops the roundings between them (seen in 1.31.1: 200 times 1000 times 0.001 is infinite in float16, and
its result is 200). So every tensor of a 16-bit type becomes a float32 tensor that is rounded to that type where it is
made: by a pair of Cast nodes, which no optimisation level removes. Q/DQ pairs stay what they are: integers times their
scale, multiplied and summed in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from edgeq.backends.tensorrt.explicit import ADD, weight_axis
from edgeq.measure.coverage import Coverage, NodeRun, coverage_of
from edgeq.model.edit import Editor, insert_behind, replace_node
from edgeq.model.graph import DATA_MOVEMENT, constant, is_op, name_of, node_input, only_reader
from edgeq.model.macs import node_macs
from edgeq.model.shapes import element_types
from edgeq.run.session import SessionSettings
from edgeq.util.records import NOT_WRITTEN, computed

_DQ = "DequantizeLinear"
_PRECISION = {ir.DataType.FLOAT16: "fp16", ir.DataType.BFLOAT16: "bf16", ir.DataType.FLOAT: "fp32"}
_PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_SHIFT = "BatchNormalization"
_ACTIVATIONS = ("Relu", "Clip", "LeakyRelu", "Sigmoid", _SHIFT)
_BIAS = 2


@dataclass(frozen=True)
class Pair:
    """A tensor between Q and DQ (a weight has its integers in the file and only DQ), and the fusions that it serves."""

    tensor: str
    weight: bool
    serves: tuple[str, ...]


@dataclass(frozen=True)
class NodeType:
    """A node with float data: "int8", "fp16", "bf16" or "fp32", and why. `fused` names the layer it goes into."""

    name: str
    op_type: str
    precision: str
    macs: int
    reason: str
    fused: str = field(default="", metadata=NOT_WRITTEN)


@dataclass(frozen=True)
class Placement:
    """The checker's answer. `findings` are broken rules, one sentence each, empty in a good file."""

    pairs: tuple[Pair, ...]
    nodes: tuple[NodeType, ...]
    findings: tuple[str, ...]

    @computed
    def macs(self) -> dict[str, int]:
        """Multiply-accumulates by precision."""
        found: dict[str, int] = {}
        for node in self.nodes:
            found[node.precision] = found.get(node.precision, 0) + node.macs
        return {name: found[name] for name in ("int8", "fp16", "bf16", "fp32") if name in found}

    def coverage(self) -> Coverage:
        """What is in int8, and each other node with its reason, as `measure_coverage` has it for a CPU."""
        runs = [
            NodeRun(n.name, n.name, n.op_type, "int8" if n.precision == "int8" else "float", n.macs) for n in self.nodes
        ]
        reasons = {n.name: f"{n.precision}: {n.reason}" for n in self.nodes}
        return coverage_of(
            runs,
            lambda run: reasons[run.name],
            basis="forecast",
            how="the placement checker, by TensorRT's rules for explicit quantization",
            reason="what TensorRT runs in int8 is seen where it builds the engine",
        )


def check_placement(model: ir.Model, source: ir.Model, reasons: Mapping[str, str]) -> Placement:
    """Read `model`, with explicit quantization.

    Args:
        source: the float model that it was made from, for MACs.
        reasons: node → why it is not in int8 or not in 16 bits, for the report.
    """
    reader = _Reader(model, source, reasons)
    nodes = reader.node_types()
    return Placement(reader.pairs(), nodes, tuple(reader.findings))


class _Reader:
    def __init__(self, model: ir.Model, source: ir.Model, reasons: Mapping[str, str]) -> None:
        self.findings: list[str] = []
        self._model, self._reasons = model, reasons
        self._types = element_types(model)
        self._macs = node_macs(source)
        self._own = {node.name for node in source.graph}
        self._order = {node: position for position, node in enumerate(model.graph)}
        self._layers = {node for node in model.graph if self._is_int8_layer(node)}
        self._fused = self._fusions()

    def _is_int8_layer(self, node: ir.Node) -> bool:
        multiplies = self._macs.get(str(node.name), 0) > 0 or node.op_type in _PRODUCTS
        return multiplies and len(node.inputs) > 1 and all(_is_restored(value) for value in node.inputs[:2])

    def _fusions(self) -> dict[ir.Node, ir.Node]:
        """Return node → the int8 layer that it is fused into: a BatchNormalization, a residual Add, then an activation,
        each the only reader."""
        fused: dict[ir.Node, ir.Node] = {}
        for layer in sorted(self._layers, key=lambda node: self._order[node]):
            made = layer.outputs[0]
            behind = only_reader(made)
            if behind is not None and behind.op_type == _SHIFT:
                fused[behind] = layer
                made = behind.outputs[0]
                behind = only_reader(made)
            if behind is not None and behind.op_type == ADD and self._skips(behind, made):
                fused[behind] = layer
                behind = only_reader(behind.outputs[0])
            if behind is not None and behind.op_type in _ACTIVATIONS:
                fused[behind] = layer
        return fused

    def _skips(self, add: ir.Node, main: ir.Value) -> bool:
        return any(_is_restored(value) for value in add.inputs if value is not main)

    # Pairs.

    def pairs(self) -> tuple[Pair, ...]:
        """The pairs in the order of the graph, each with what it serves; broken rules go to `findings`."""
        found: dict[tuple[str, bool], list[str]] = {}
        for node in self._model.graph:
            if node.op_type != _DQ:
                continue
            integers = node.inputs[0]
            maker = integers.producer() if integers is not None else None
            tensor = name_of(integers if maker is None else maker.inputs[0])
            self._check_scale(node, maker is None)
            serves = found.setdefault((tensor, maker is None), [])
            readers = self._readers(node.outputs[0])
            serves.extend(self._serves(reader, place, tensor) for reader, place in readers)
            if not readers:
                self.findings.append(f"the pair on {tensor!r} has no reader")
        return tuple(Pair(tensor, weight, tuple(serves)) for (tensor, weight), serves in found.items())

    def _readers(self, value: ir.Value) -> list[tuple[ir.Node, int]]:
        """The nodes of the main graph that read a value, and at which input, in order."""
        uses = [use for use in value.uses() if use.node in self._order]
        return [(use.node, use.idx) for use in sorted(uses, key=lambda use: (self._order[use.node], use.idx))]

    def _serves(self, node: ir.Node, place: int, tensor: str) -> str:
        if node in self._layers and place < _BIAS:
            return f"{node.op_type} {node.name}: int8 operand {place}"
        if node in self._layers:
            self.findings.append(f"{node.op_type} {node.name}: its bias {tensor!r} is quantized")
            return f"{node.op_type} {node.name}: bias, which should be float"
        if node.op_type == ADD and node in self._fused:
            return f"{ADD} {node.name}: skip branch, fused into {self._fused[node].name}"
        if node.op_type == ADD:
            self.findings.append(f"Add {node.name} reads the pair on {tensor!r} and fuses into no int8 layer")
        else:
            self.findings.append(f"{node.op_type} {node.name} reads the pair on {tensor!r}, which serves no fusion")
        return f"{node.op_type} {node.name}: nothing"

    def _check_scale(self, node: ir.Node, weight: bool) -> None:
        scale, zero = (constant(node_input(node, place)) for place in (1, 2))
        if scale is None or zero is None:
            self.findings.append(f"{node.name}: its scale or zero point is not constant")
            return
        if np.any(zero):
            self.findings.append(f"{node.name}: its zero point is not 0")
        if zero.dtype != np.int8:
            self.findings.append(f"{node.name}: its integers are not int8")
        if not weight and scale.ndim:
            self.findings.append(f"{node.name}: an activation has a scale a channel")
        if not np.all(scale.astype(np.float64) > 0):
            self.findings.append(f"{node.name}: its scale is not above 0")
        integers = constant(node.inputs[0])
        if weight and scale.ndim and integers is not None:
            axis = node.attributes.get_int("axis", 1)
            for reader, _ in self._readers(node.outputs[0]):
                if weight_axis(reader, integers.ndim) != axis:
                    self.findings.append(f"{node.name}: its scales lie along axis {axis}, not along the outputs")

    # Nodes.

    def node_types(self) -> tuple[NodeType, ...]:
        """The nodes of the float model with float data; broken rules go to `findings`."""
        found = []
        for node in self._model.graph:
            if node.name not in self._own:
                continue
            precision = self._precision(node)
            if precision:
                name, layer = str(node.name), self._fused.get(node)
                reason, into = self._reason(node, precision), str(layer.name) if layer is not None else ""
                found.append(NodeType(name, node.op_type, precision, self._macs.get(name, 0), reason, into))
            bias = constant(node_input(node, _BIAS)) if node in self._layers else None
            if bias is not None and bias.ndim == 1:
                self.findings.append(f"{node.op_type} {node.name}: ONNX Runtime makes its bias int32 at load")
            if node.op_type == ADD and all(_is_restored(value) for value in node.inputs):
                self.findings.append(f"Add {node.name}: both branches are quantized")
        return tuple(found)

    def _precision(self, node: ir.Node) -> str:
        if node in self._layers or node in self._fused:
            return "int8"
        kinds = (self._types.get(name_of(value), ir.DataType.UNDEFINED) for value in node.outputs)
        return next((_PRECISION[kind] for kind in kinds if kind in _PRECISION), "")

    def _reason(self, node: ir.Node, precision: str) -> str:
        if node in self._layers:
            return "both operands are int8"
        if node in self._fused:
            return f"fused into {self._fused[node].name}"
        return self._reasons.get(str(node.name), f"computes in {precision} beside the int8 layers")


def _is_restored(value: ir.Value | None) -> bool:
    return value is not None and is_op(value.producer(), _DQ)


SETTINGS = SessionSettings(optimization="none")
"""As written: the optimiser would quantize weights that were left in float and fuse Q/DQ in its own way."""
_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
# Their results are among the values that they read, so there is nothing to round.
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


def simulation(model: ir.Model) -> ir.Model:
    """A model with the signature and tensor names of `model`, which computes in float32 what that computes."""
    simulated = model.clone()
    graph, editor = simulated.graph, Editor(simulated)
    types = element_types(model)
    for value in graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and tensor.dtype in _HALVES:
            value.const_value = ir.tensor(tensor.numpy().astype(np.float32), name=value.name)
            value.type = ir.TensorType(ir.DataType.FLOAT)
    nodes = tuple(graph)
    for node, following in zip(nodes, [*nodes[1:], None], strict=True):
        kinds = [types.get(value.name or "", ir.DataType.UNDEFINED) for value in node.outputs]
        if node.op_type == "Cast" and _at_border(node):
            continue
        if node.op_type == "Cast" and kinds[0] in _HALVES:
            _, rounded = _rounding(editor, node.inputs[0], str(node.outputs[0].name), kinds[0], node)
            replace_node(node, rounded)
        elif node.op_type == "Cast" and kinds[0] == ir.DataType.FLOAT and types.get(name_of(node.inputs[0])) in _HALVES:
            node.op_type = "Identity"
            node.attributes.clear()
        elif node.op_type not in _EXACT and not _takes_in_its_reader(node):
            for value, kind in zip(node.outputs, kinds, strict=True):
                if kind in _HALVES:
                    name = str(value.name)
                    insert_behind(value, *_rounding(editor, value, name, kind, following), f"{name}_unrounded")
    for node in graph:
        for value in node.outputs:
            if value.dtype in _HALVES and not value.is_graph_output():
                value.type = ir.TensorType(ir.DataType.FLOAT)
    return simulated


def _takes_in_its_reader(node: ir.Node) -> bool:
    """Return whether TensorRT folds the node behind into this one, so that nothing is rounded between the two."""
    return is_op(node, "Conv", "ConvTranspose") and is_op(only_reader(node.outputs[0]), "BatchNormalization")


def _at_border(cast: ir.Node) -> bool:
    """Whether it widens an input of the model that is in 16 bits, or makes such an output: those keep their types."""
    source, made = cast.inputs[0], cast.outputs[0]
    of_input = source is not None and source.is_graph_input() and source.dtype in _HALVES
    return of_input or (made.is_graph_output() and made.dtype in _HALVES)


def _rounding(
    editor: Editor, source: ir.Value | None, name: str, kind: ir.DataType, before: ir.Node | None
) -> tuple[ir.Value, ir.Value]:
    """A Cast to the 16-bit type and one back, of tensor `name`: their outputs."""
    down = editor.node(
        "Cast", [source], f"{name}_to_16_bits", output=f"{name}_16_bits", before=before, attributes={"to": kind}
    )
    to = {"to": ir.DataType.FLOAT}
    return down, editor.node("Cast", [down], f"{name}_from_16_bits", before=before, attributes=to)
