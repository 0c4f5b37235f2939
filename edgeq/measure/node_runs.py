"""Kernels and layers that ran: the source node of each, its MACs, and whether it computed on integers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from edgeq.graph.query import consumers, name_of
from edgeq.measure.engine_profile import EngineLayer
from edgeq.measure.profile import KernelRun, TypedShape
from edgeq.model.macs import node_macs, sized
from edgeq.records import Count

Kind = Literal["int8", "float", "conversion", "other"]

# Kernels that take float and convert to integers inside.
_DYNAMIC_INTEGER = re.compile(r"^(DynamicQuantize(MatMul|LSTM)|MatMulNBits)$")
# Control flow multiplies nothing itself: the kernels of its body count one by one.
_CONTROL = frozenset({"If", "Loop", "Scan"})
_CONVERSIONS = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"})
_MOVES_DATA = frozenset({"Shape", "ReorderInput", "ReorderOutput", "MemcpyToHost", "MemcpyFromHost"})
_ELEMENT_WISE = frozenset({"Add", "Cast", "Mul"})
# What ONNX Runtime appends to a node's name when a fusion, the layout optimiser or the quantizer replaces it.
_RENAMED = re.compile(
    r"(_token_\d+|_nchwc|_Q[48]|_quant|_quant_scales_mul|/duplicated|_matmul|_MatMul|/MatMulAddFusion|/MatMulScaleFusion/)$"
)


@dataclass(frozen=True)
class NodeRun:
    """One kernel that ran: its name in the optimised graph, the source node it stands for, its MACs and input dtype;
    of a plug-in engine also the precision."""

    name: str
    source: str
    op_type: str
    kind: Kind
    macs: Count
    precision: str = ""


def aliases(source: ir.Model, macs: Mapping[str, int]) -> dict[str, str]:
    """Names under which ONNX Runtime may run a source node → that node's name.

    Fusions name the fused kernel after the node, its output tensor, or the activation that it swallowed.
    """
    known: dict[str, str] = {}
    for node in source.graph:
        name = node.name or ""
        if name in macs:
            known[name_of(node.outputs[0])] = name
            following = [reader for reader, _ in consumers(node.outputs[0])]
            if len(following) == 1 and following[0].name not in macs:
                known[following[0].name or ""] = known[name_of(following[0].outputs[0])] = name
    return known | {node.name: node.name for node in source.graph if node.name and node.name in macs}


def source_names(source: ir.Model) -> Callable[[str], str]:
    """Name of a kernel or layer that multiplies → that of the source node; itself where none is recognised."""
    known = aliases(source, {name: macs for name, macs in node_macs(source).items() if macs})
    return lambda name: known.get(source_name(name, known), name)


def classify(
    kernels: Sequence[KernelRun],
    weights: Mapping[str, tuple[int, ...]],
    macs: Mapping[str, int],
    known: Mapping[str, str],
    expanded: Collection[str] = (),
) -> tuple[NodeRun, ...]:
    """Turn runs of kernels into `NodeRun`s.

    MACs come from the source node where its name is still recognisable, else from the shapes that ran. A kernel of a
    loop's body, which runs many times, becomes one `NodeRun` with the MACs of all its runs.

    Args:
        kernels: of ONNX Runtime's profile.
        weights: `Profile.weights`.
        macs: MACs by source node name, of those that have any.
        known: names that stand for a source node (`aliases`).
        expanded: `Profile.expanded`.
    """
    runs: dict[tuple[str, str, Kind], NodeRun] = {}
    for kernel in kernels:
        name, op_type = kernel.name, kernel.op_type
        stem = source_name(name, known)
        computed = _macs_from_shapes(op_type, kernel.inputs, kernel.outputs, weights.get(name, ()))
        # A name stands for the node it was made from only if what ran under it multiplies: not an activation that was
        # not fused, not the scaling behind a dynamically quantized node.
        multiplies = computed or (stem in macs and op_type not in _ELEMENT_WISE)
        standing = name if stem in macs else stem
        source = known[stem] if stem in known and multiplies else standing
        count = macs.get(source, computed)
        kind = "float" if name in expanded else _kind(op_type, kernel.inputs, kernel.outputs)
        before = runs.get((name, op_type, kind))
        runs[name, op_type, kind] = NodeRun(name, source, op_type, kind, count + (before.macs if before else 0))
    return tuple(runs.values())


def layer_runs(
    layers: Sequence[EngineLayer],
    conversions: Sequence[str],
    source: ir.Model,
    macs: Mapping[str, int],
    known: Mapping[str, str],
) -> tuple[NodeRun, ...]:
    """An engine's layers as `NodeRun`s, the first that stands for a source node with its MACs. What stands for none
    only converts; a node with MACs that no layer stands for counts as float: nothing is known of it."""
    types = {str(node.name): node.op_type for node in source.graph}
    made = {name_of(output): str(node.name) for node in source.graph for output in node.outputs}
    found = []
    left = dict(macs)
    for layer in layers:
        name = layer.name if layer.name in types else made.get(layer.name, source_name(layer.name, known))
        node = name if name in types else known.get(name, name)
        kind: Kind = "int8" if layer.precision == "int8" else "float" if layer.precision else "other"
        if layer.op_type in conversions or node not in types:
            kind, node = "conversion", layer.name
        op_type = types.get(node, layer.op_type)
        found.append(NodeRun(layer.name, node, op_type, kind, left.pop(node, 0), layer.precision))
    found += [NodeRun(name, name, types[name], "float", count) for name, count in left.items() if name in types]
    return tuple(found)


def source_name(name: str, known: Collection[str]) -> str:
    """`name` without what was appended to it, as far as that leads to a known one."""
    while name not in known and (shorter := _RENAMED.sub("", name)) != name:
        name = shorter
    return name


def _kind(op_type: str, inputs: list[TypedShape], outputs: list[TypedShape]) -> Kind:
    if op_type in _CONVERSIONS:
        return "conversion"
    if op_type in _MOVES_DATA | _CONTROL or not inputs:
        return "other"
    # QLinearConcat takes its scales first; there the output decides.
    if _DYNAMIC_INTEGER.match(op_type) or {d for d, _ in (inputs[0], *outputs[:1])} & {"int8", "uint8"}:
        return "int8"
    computed_in_float = inputs[0][0] in ("float", "float16", "double") or any(d == "float" for d, _ in outputs)
    return "float" if computed_in_float else "other"


def _macs_from_shapes(
    op_type: str,
    inputs: list[TypedShape],
    outputs: list[TypedShape],
    weight: tuple[int, ...],
) -> int:
    if not inputs or not outputs:
        return 0
    produced = math.prod(outputs[0][1])
    if "Conv" in op_type and len(weight) > 2:
        return produced * math.prod(weight[1:])
    if op_type in ("Attention", "QAttention") and len(inputs[0][1]) == 3 and len(weight) == 2:
        batch, length, width = inputs[0][1]
        return batch * length * (width * weight[1] + 2 * length * (weight[1] // 3))
    if ("MatMul" in op_type or "Gemm" in op_type) and inputs[0][1]:
        return produced * inputs[0][1][-1]
    return 0


def sized_macs(source: ir.Model, feed: Mapping[str, np.ndarray]) -> dict[str, int]:
    """`node_macs` of an inference on `feed`."""
    return node_macs(sized(source, {name: array.shape for name, array in feed.items()}))
