"""Predict how TensorRT will run a file, and check the placement of its Q/DQ pairs.

The checker reads the written file, not the plan for it. For every Q/DQ pair, it names the fusions that the pair
enables. For every node of the float model, it names the type: int8, 16 bits or fp32. Its findings are placement rules
that the file breaks. A file without findings has none of the known problems.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgeq.backends.tensorrt.pairs import weight_axis
from edgeq.backends.tensorrt.placement import ADD
from edgeq.measure.coverage import Coverage, coverage_of
from edgeq.measure.node_runs import NodeRun
from edgeq.model.graph import constant, is_op, name_of, node_input, only_reader
from edgeq.model.macs import node_macs
from edgeq.model.shapes import element_types
from edgeq.util.records import computed

_DQ = "DequantizeLinear"
_PRECISION = {ir.DataType.FLOAT16: "fp16", ir.DataType.BFLOAT16: "bf16", ir.DataType.FLOAT: "fp32"}

_PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")

_SHIFT = "BatchNormalization"
# TensorRT fuses one of these into the layer before it. A BatchNormalization may also follow the residual Add.
_ACTIVATIONS = ("Relu", "Clip", "LeakyRelu", "Sigmoid", _SHIFT)

# Index of the bias among the inputs of Conv, ConvTranspose and Gemm.
_BIAS = 2


@dataclass(frozen=True)
class QdqPair:
    """Describe a Q/DQ pair by its tensor and the fusions that it enables. A weight has only a DQ, because the file
    contains its integers.
    """

    tensor: str
    weight: bool
    serves: tuple[str, ...]


@dataclass(frozen=True)
class NodeType:
    """Record the type of a node with float data ("int8", "fp16", "bf16" or "fp32") and the reason for it."""

    name: str
    op_type: str
    precision: str
    macs: int
    reason: str


@dataclass(frozen=True)
class PlacementReport:
    """Hold the checker's result. `findings` has one sentence for each rule that the file breaks, and is empty for a
    good file.
    """

    pairs: tuple[QdqPair, ...]
    nodes: tuple[NodeType, ...]
    findings: tuple[str, ...]

    @computed
    def macs(self) -> dict[str, int]:
        """Return the number of multiply-accumulates in each precision."""
        macs_by_precision: dict[str, int] = {}
        for node in self.nodes:
            macs_by_precision[node.precision] = macs_by_precision.get(node.precision, 0) + node.macs
        return {name: macs_by_precision[name] for name in ("int8", "fp16", "bf16", "fp32") if name in macs_by_precision}

    def coverage(self) -> Coverage:
        """Return which nodes run in int8, and why others do not, in the form that `measure_coverage` uses for a CPU."""
        runs = [
            NodeRun(n.name, n.name, n.op_type, "int8" if n.precision == "int8" else "float", n.macs) for n in self.nodes
        ]
        reasons = {n.name: f"{n.precision}: {n.reason}" for n in self.nodes}
        return coverage_of(
            runs,
            lambda run: reasons[run.name],
            basis="forecast",
            how="the placement checker, by TensorRT's rules for explicit quantization",
            reason="what TensorRT runs in int8 is only known when it builds the engine",
        )


def check_placement(model: ir.Model, source: ir.Model, reasons: Mapping[str, str]) -> PlacementReport:
    """Check `model`, which has explicit quantization, and return the placement.

    Args:
        source: the float model from which `model` was made. The MACs of this float model are counted.
        reasons: the reason why a node is not in int8 or not in 16 bits, by node name, for the report.
    """
    reader = _Reader(model, source, reasons)
    nodes = reader.node_types()
    return PlacementReport(reader.pairs(), nodes, tuple(reader.findings))


class _Reader:
    def __init__(self, model: ir.Model, source: ir.Model, reasons: Mapping[str, str]) -> None:
        self.findings: list[str] = []
        self._model, self._reasons = model, reasons
        self._types = element_types(model)
        # The float model is counted: the written file has further nodes, and its types do not change the work.
        self._macs = node_macs(source)
        self._own = {node.name for node in source.graph}
        self._order = {node: position for position, node in enumerate(model.graph)}
        self._layers = {node for node in model.graph if self._is_int8_layer(node)}
        self._fused = self._fusions()

    def _is_int8_layer(self, node: ir.Node) -> bool:
        # A MatMul of two activations with unknown sizes has no count, so products are recognised by their type as well.
        multiplies = self._macs.get(str(node.name), 0) > 0 or node.op_type in _PRODUCTS
        return multiplies and len(node.inputs) > 1 and all(_is_restored(value) for value in node.inputs[:2])

    def _fusions(self) -> dict[ir.Node, ir.Node]:
        """Return a map from each fused node to the int8 layer into which it is fused.

        A BatchNormalization, a residual Add and an activation fuse in this order. Each must be the only reader of the
        result before it.
        """
        fused: dict[ir.Node, ir.Node] = {}
        # In graph order, so that a node which two layers could claim always belongs to the same one.
        for layer in sorted(self._layers, key=lambda node: self._order[node]):
            tail = layer.outputs[0]
            behind = only_reader(tail)
            if behind is not None and behind.op_type == _SHIFT:
                fused[behind] = layer
                tail = behind.outputs[0]
                behind = only_reader(tail)
            if behind is not None and behind.op_type == ADD and self._skips(behind, tail):
                fused[behind] = layer
                behind = only_reader(behind.outputs[0])
            if behind is not None and behind.op_type in _ACTIVATIONS:
                fused[behind] = layer
        return fused

    def _skips(self, add: ir.Node, main: ir.Value) -> bool:
        return any(_is_restored(value) for value in add.inputs if value is not main)

    # Pairs.

    def pairs(self) -> tuple[QdqPair, ...]:
        """Return the pairs in graph order, each with its fusions. Add rules that the file breaks to `findings`."""
        fusions: dict[tuple[str, bool], list[str]] = {}
        for node in self._model.graph:
            if node.op_type != _DQ:
                continue
            integers = node.inputs[0]
            maker = integers.producer() if integers is not None else None
            tensor = name_of(integers if maker is None else maker.inputs[0])
            self._check_scale(node, maker is None)
            serves = fusions.setdefault((tensor, maker is None), [])
            readers = self._readers(node.outputs[0])
            serves.extend(self._serves(reader, place, tensor) for reader, place in readers)
            if not readers:
                self.findings.append(f"the pair on {tensor!r} has no reader")
        return tuple(QdqPair(tensor, weight, tuple(serves)) for (tensor, weight), serves in fusions.items())

    def _readers(self, value: ir.Value) -> list[tuple[ir.Node, int]]:
        """Return the main graph's nodes that read a value, in graph order, each with the index of the input that reads
        it.
        """
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
            self.findings.append(f"Add {node.name} reads the pair on {tensor!r} but does not fuse into an int8 layer")
        else:
            self.findings.append(f"{node.op_type} {node.name} reads the pair on {tensor!r}, which serves no fusion")
        return f"{node.op_type} {node.name}: nothing"

    def _check_scale(self, node: ir.Node, weight: bool) -> None:
        scale, zero = (constant(node_input(node, place)) for place in (1, 2))
        if scale is None or zero is None:
            self.findings.append(f"{node.name}: its scale or zero point is not constant")
            return
        # TensorRT's int8 is symmetric. It would refuse the file only when it builds the engine on the device.
        if np.any(zero):
            self.findings.append(f"{node.name}: its zero point is not 0")
        if zero.dtype != np.int8:
            self.findings.append(f"{node.name}: its integers are not int8")
        if not weight and scale.ndim:
            self.findings.append(f"{node.name}: an activation has a scale per channel")
        if not np.all(scale.astype(np.float64) > 0):
            self.findings.append(f"{node.name}: its scale is not above 0")
        integers = constant(node.inputs[0])
        # TensorRT takes the scales of a weight only along the layer's outputs.
        if weight and scale.ndim and integers is not None:
            axis = node.attributes.get_int("axis", 1)
            for reader, _ in self._readers(node.outputs[0]):
                if weight_axis(reader, integers.ndim) != axis:
                    self.findings.append(f"{node.name}: its scales are along axis {axis}, not along the outputs")

    # Nodes.

    def node_types(self) -> tuple[NodeType, ...]:
        """Return the nodes of the float model that have float data. Add rules that the file breaks to `findings`."""
        node_types = []
        for node in self._model.graph:
            # The pairs, casts and shielded biases are not nodes of the user's model, so no one asks for their type.
            if node.name not in self._own:
                continue
            precision = self._precision(node)
            if precision:
                macs, reason = self._macs.get(str(node.name), 0), self._reason(node, precision)
                node_types.append(NodeType(str(node.name), node.op_type, precision, macs, reason))
            # See `biases`: only a constant bias with one axis is converted.
            bias = constant(node_input(node, _BIAS)) if node in self._layers else None
            if bias is not None and bias.ndim == 1:
                self.findings.append(f"{node.op_type} {node.name}: ONNX Runtime makes its bias int32 at load")
            # With pairs on both branches, neither is the output of a layer, so the Add fuses into none.
            if node.op_type == ADD and all(_is_restored(value) for value in node.inputs):
                self.findings.append(f"Add {node.name}: both branches are quantized")
        return tuple(node_types)

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
        return self._reasons.get(str(node.name), f"computes in {precision} next to the int8 layers")


def _is_restored(value: ir.Value | None) -> bool:
    return value is not None and is_op(value.producer(), _DQ)
