"""What TensorRT makes of the Q/DQ pairs in a file: read off the finished graph, not off what was meant to be written.

For every pair: which fusion it serves. For every node of the float model: whether it runs in int8, in 16 bits or in
fp32. And findings: whatever breaks a rule of placement, so that a file without findings has none of the known traps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from edgeq.backends.tensorrt.explicit import channel_axis
from edgeq.backends.tensorrt.placement import ADD
from edgeq.backends.tensorrt.wiring import Wiring, wire
from edgeq.graph.convert import from_proto
from edgeq.measure.coverage import Coverage, FloatNode, NodeRun
from edgeq.model.macs import node_macs
from edgeq.model.shapes import element_types

_Q, _DQ = "QuantizeLinear", "DequantizeLinear"
_PRECISION: dict[int, str] = {TensorProto.FLOAT16: "fp16", TensorProto.BFLOAT16: "bf16", TensorProto.FLOAT: "fp32"}
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
    fused: str = ""


@dataclass(frozen=True)
class Placement:
    """The checker's answer. `findings` are broken rules, one sentence each, empty in a good file."""

    pairs: tuple[Pair, ...]
    nodes: tuple[NodeType, ...]
    findings: tuple[str, ...]

    def macs(self) -> dict[str, int]:
        """Multiply-accumulates by precision."""
        found: dict[str, int] = {}
        for node in self.nodes:
            found[node.precision] = found.get(node.precision, 0) + node.macs
        return {name: found[name] for name in ("int8", "fp16", "bf16", "fp32") if name in found}

    def coverage(self) -> Coverage:
        """The same as `measure_coverage` tells of a CPU: what is in int8, and each other node with its reason."""
        runs = tuple(
            NodeRun(n.name, n.name, n.op_type, "int8" if n.precision == "int8" else "float", n.macs) for n in self.nodes
        )
        floats = tuple(
            FloatNode(n.name, n.op_type, n.macs, f"{n.precision}: {n.reason}")
            for n in self.nodes
            if n.precision != "int8"
        )
        macs = self.macs()
        whole = sum(macs.values())
        return Coverage(macs.get("int8", 0), whole - macs.get("int8", 0), runs, floats)

    def __record__(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "macs": self.macs(),
            "pairs": [{"tensor": p.tensor, "weight": p.weight, "serves": list(p.serves)} for p in self.pairs],
            "nodes": [
                {"name": n.name, "op_type": n.op_type, "precision": n.precision, "macs": n.macs, "reason": n.reason}
                for n in self.nodes
            ],
            "findings": self.findings,
        }


def check_placement(model: onnx.ModelProto, source: onnx.ModelProto, reasons: Mapping[str, str]) -> Placement:
    """Read `model`, a file with explicit quantization.

    Args:
        source: the float model that it was made from, for MACs; weights need not be loaded.
        reasons: node → why it is not in int8 or not in 16 bits, for the report.
    """
    reader = _Reader(model, source, reasons)
    nodes = reader.node_types()
    return Placement(reader.pairs(), nodes, tuple(reader.findings))


class _Reader:
    def __init__(self, model: onnx.ModelProto, source: onnx.ModelProto, reasons: Mapping[str, str]) -> None:
        self.findings: list[str] = []
        self._model, self._reasons = model, reasons
        self._wiring: Wiring = wire(model)
        self._types = element_types(from_proto(model))
        self._macs = node_macs(from_proto(source))
        self._own = {node.name for node in source.graph.node}
        self._restored = {n.output[0]: n for n in model.graph.node if n.op_type == _DQ}
        self._layers = {n.name: n for n in model.graph.node if self._is_int8_layer(n)}
        self._fused = self._fusions()

    def _is_int8_layer(self, node: onnx.NodeProto) -> bool:
        multiplies = self._macs.get(node.name, 0) > 0 or node.op_type in ("Conv", "ConvTranspose", "Gemm", "MatMul")
        return multiplies and len(node.input) > 1 and all(name in self._restored for name in node.input[:2])

    def _fusions(self) -> dict[str, str]:
        """Node → the int8 layer that it is fused into: a residual Add, then an activation, each the only reader."""
        fused: dict[str, str] = {}
        for layer in self._layers.values():
            behind = self._wiring.only_reader(layer.output[0])
            if behind is not None and behind.op_type == ADD and self._skips(behind, layer.output[0]):
                fused[behind.name] = layer.name
                behind = self._wiring.only_reader(behind.output[0])
            if behind is not None and behind.op_type in ("Relu", "Clip", "LeakyRelu", "Sigmoid", "BatchNormalization"):
                fused[behind.name] = layer.name
        return fused

    def _skips(self, add: onnx.NodeProto, main: str) -> bool:
        return any(name in self._restored for name in add.input if name != main)

    # Pairs.

    def pairs(self) -> tuple[Pair, ...]:
        found: dict[tuple[str, bool], list[str]] = {}
        for output, node in self._restored.items():
            maker = self._wiring.makers.get(node.input[0])
            weight = maker is None
            tensor = node.input[0] if maker is None else maker.input[0]
            self._check_scale(node, weight)
            serves = found.setdefault((tensor, weight), [])
            for place in self._wiring.readers.get(output, ()):
                serves.append(self._serves(place.node, place.place, tensor))
            if not self._wiring.readers.get(output):
                self.findings.append(f"the pair on {tensor!r} has no reader")
        return tuple(Pair(tensor, weight, tuple(serves)) for (tensor, weight), serves in found.items())

    def _serves(self, node: onnx.NodeProto, place: int, tensor: str) -> str:
        if node.name in self._layers and place < _BIAS:
            return f"{node.op_type} {node.name}: int8 operand {place}"
        if node.name in self._layers:
            self.findings.append(f"{node.op_type} {node.name}: its bias {tensor!r} is quantized")
            return f"{node.op_type} {node.name}: bias, which should be float"
        if node.op_type == ADD and node.name in self._fused:
            return f"{ADD} {node.name}: skip branch, fused into {self._fused[node.name]}"
        if node.op_type == ADD:
            self.findings.append(f"Add {node.name} reads the pair on {tensor!r} and fuses into no int8 layer")
        else:
            self.findings.append(f"{node.op_type} {node.name} reads the pair on {tensor!r}, which serves no fusion")
        return f"{node.op_type} {node.name}: nothing"

    def _check_scale(self, node: onnx.NodeProto, weight: bool) -> None:
        held = self._wiring.initializers
        scale, zero = (held.get(name) for name in node.input[1:3])
        if scale is None or zero is None:
            self.findings.append(f"{node.name}: its scale or zero point is not constant")
            return
        if np.any(numpy_helper.to_array(zero)):
            self.findings.append(f"{node.name}: its zero point is not 0")
        if zero.data_type != TensorProto.INT8:
            self.findings.append(f"{node.name}: its integers are not int8")
        if not weight and len(scale.dims):
            self.findings.append(f"{node.name}: an activation has a scale a channel")
        if not np.all(numpy_helper.to_array(scale).astype(np.float64) > 0):
            self.findings.append(f"{node.name}: its scale is not above 0")
        if weight and len(scale.dims):
            axis = next((int(a.i) for a in node.attribute if a.name == "axis"), 1)
            rank = len(held[node.input[0]].dims)
            for place in self._wiring.readers.get(node.output[0], ()):
                if channel_axis(place.node, rank) != axis:
                    self.findings.append(f"{node.name}: its scales lie along axis {axis}, not along the outputs")

    # Nodes.

    def node_types(self) -> tuple[NodeType, ...]:
        found = []
        for node in self._model.graph.node:
            if node.name not in self._own:
                continue
            precision = self._precision(node)
            if precision:
                reason = self._reason(node, precision)
                fused = self._fused.get(node.name, "")
                found.append(NodeType(node.name, node.op_type, precision, self._macs.get(node.name, 0), reason, fused))
            if node.op_type == ADD and all(name in self._restored for name in node.input):
                self.findings.append(f"Add {node.name}: both branches are quantized")
        return tuple(found)

    def _precision(self, node: onnx.NodeProto) -> str:
        if node.name in self._layers or node.name in self._fused:
            return "int8"
        made = next((self._types[name] for name in node.output if self._types.get(name) in _PRECISION), 0)
        read = next((self._types[name] for name in node.input if self._types.get(name) in _PRECISION), 0)
        return _PRECISION.get(made or read, "") if made else ""

    def _reason(self, node: onnx.NodeProto, precision: str) -> str:
        if node.name in self._layers:
            return "both operands are int8"
        if node.name in self._fused:
            return f"fused into {self._fused[node.name]}"
        return self._reasons.get(node.name, f"computes in {precision} beside the int8 layers")
