"""Trace each kernel or layer that ran to its source node, and decide whether it computed on integers.

Kernels are known only by their names, operators and the dtypes of their inputs. Fusions, the layout optimiser and the
quantizer rename nodes, so edgeq removes their suffixes until a name of the source model remains.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from edgeq.measure.engine_layers import EngineLayer
from edgeq.measure.kernels import KernelRun, TypedShape
from edgeq.model.graph import consumers, name_of
from edgeq.model.macs import node_macs, with_sizes
from edgeq.util.records import Count

Kind = Literal["int8", "float", "conversion", "other"]
# Kernels that read floats and convert them to integers themselves.
_DYNAMIC_INTEGER = re.compile(r"^(DynamicQuantize(MatMul|LSTM)|MatMulNBits)$")
# Control flow does not multiply. The kernels of its bodies are counted separately.
_CONTROL = frozenset({"If", "Loop", "Scan"})
_CONVERSIONS = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"})
_MOVES_DATA = frozenset({"Shape", "ReorderInput", "ReorderOutput", "MemcpyToHost", "MemcpyFromHost"})
_ELEMENT_WISE = frozenset({"Add", "Cast", "Mul"})
# Suffixes that ONNX Runtime appends to a node's name when a fusion, the layout optimiser or the quantizer replaces the
# node.
_RENAMED = re.compile(
    r"(_token_\d+|_nchwc|_Q[48]|_quant|_quant_scales_mul|/duplicated|_matmul|_MatMul|/MatMulAddFusion|/MatMulScaleFusion/)$"
)
HALF = "f16"
"""The precision of a kernel that computes in 16-bit floats."""


@dataclass(frozen=True)
class NodeRun:
    """Describe one kernel that ran.

    Attributes:
        name: name in the optimised graph.
        source: name of the source node that the kernel computes.
        kind: the kind of computation, by the dtype of the kernel's inputs.
        macs: multiply-accumulates.
        precision: precision of a plug-in engine's kernel; "" for onnxruntime's kernels.
    """

    name: str
    source: str
    op_type: str
    kind: Kind
    macs: Count
    precision: str = ""


def map_kernel_names(source: ir.Model, macs: Mapping[str, int]) -> dict[str, str]:
    """Return kernel name → name of the source node, for all names under which ONNX Runtime may run a source node.

    A fusion names the fused kernel after the node, its output tensor, or the activation that was fused into it.
    """
    source_by_kernel: dict[str, str] = {}
    for node in source.graph:
        name = node.name or ""
        if name in macs:
            source_by_kernel[name_of(node.outputs[0])] = name
            following = [reader for reader, _ in consumers(node.outputs[0])]
            if len(following) == 1 and following[0].name not in macs:
                source_by_kernel[following[0].name or ""] = source_by_kernel[name_of(following[0].outputs[0])] = name
    return source_by_kernel | {node.name: node.name for node in source.graph if node.name and node.name in macs}


def make_source_finder(source: ir.Model) -> Callable[[str], str]:
    """Return a function that finds the source node of a kernel or layer that multiplies. It maps the name of the kernel
    to the name of the node.

    The function returns an unknown name unchanged.
    """
    source_by_kernel = map_kernel_names(source, {name: macs for name, macs in node_macs(source).items() if macs})
    return lambda name: source_by_kernel.get(find_source_name(name, source_by_kernel), name)


def classify(
    kernels: Sequence[KernelRun],
    weights: Mapping[str, tuple[int, ...]],
    macs: Mapping[str, int],
    source_by_kernel: Mapping[str, str],
    expanded: Collection[str] = (),
) -> tuple[NodeRun, ...]:
    """Convert runs of kernels to `NodeRun`s.

    The MACs are those of the source node if its name can still be recognised. Otherwise they follow from the shapes
    that ran. A kernel in a loop's body runs many times. It becomes one `NodeRun` with the MACs of all its runs.

    Args:
        kernels: kernels of ONNX Runtime's profile.
        weights: `KernelProfile.weights`.
        macs: MACs by source node name, for nodes that have any.
        source_by_kernel: kernel name → name of the source node (`map_kernel_names`).
        expanded: `KernelProfile.expanded`.
    """
    runs: dict[tuple[str, str, Kind], NodeRun] = {}
    for kernel in kernels:
        name, op_type = kernel.name, kernel.op_type
        stem = find_source_name(name, source_by_kernel)
        computed = _count_macs(op_type, kernel.inputs, kernel.outputs, weights.get(name, ()))
        # A kernel's name refers to its source node only if the kernel multiplies. Activations that were not fused do
        # not multiply, and the scaling after a dynamically quantized node does not either.
        multiplies = computed or (stem in macs and op_type not in _ELEMENT_WISE)
        standing = name if stem in macs else stem
        source = source_by_kernel[stem] if stem in source_by_kernel and multiplies else standing
        count = macs.get(source, computed)
        kind = "float" if name in expanded else _find_kind(op_type, kernel.inputs, kernel.outputs)
        previous = runs.get((name, op_type, kind))
        runs[name, op_type, kind] = NodeRun(name, source, op_type, kind, count + (previous.macs if previous else 0))
    return tuple(runs.values())


def classify_layers(
    layers: Sequence[EngineLayer],
    conversions: Sequence[str],
    source: ir.Model,
    macs: Mapping[str, int],
    source_by_kernel: Mapping[str, str],
) -> tuple[NodeRun, ...]:
    """Return an engine's layers as `NodeRun`s.

    Each source node with MACs becomes one `NodeRun`. This run belongs to the first layer that is named after the node
    or into which the node was merged. A source node without a layer counts as float, because nothing is known about it.
    A layer without a source node counts as a conversion.
    """
    types = {str(node.name): node.op_type for node in source.graph}
    makers = {name_of(output): str(node.name) for node in source.graph for output in node.outputs}
    # For each node, the node itself and the nodes that compute its inputs. A layer may have the name of a bias Add
    # instead of the name of the product that was merged with it.
    neighbours = {
        str(node.name): (str(node.name), *(makers[name_of(v)] for v in node.inputs if name_of(v) in makers))
        for node in source.graph
    }
    runs = []
    pending = dict(macs)
    for layer in layers:
        # Engines name a layer after a node, after a tensor, or by ONNX Runtime's name of a fused kernel.
        name = layer.name if layer.name in types else makers.get(layer.name, "")
        name = name or find_source_name(layer.name, source_by_kernel)
        node = name if name in types else source_by_kernel.get(name, name)
        kind: Kind = "int8" if layer.precision == "int8" else "float" if layer.precision else "other"
        merged = [inside for member in layer.merged for inside in neighbours.get(member, ()) if inside in pending]
        nodes = [node] if node in pending or layer.op_type in conversions else list(dict.fromkeys(merged)) or [node]
        for node in nodes:
            if layer.op_type in conversions or node not in types:
                runs.append(NodeRun(layer.name, layer.name, layer.op_type, "conversion", 0, layer.precision))
            else:
                runs.append(NodeRun(layer.name, node, types[node], kind, pending.pop(node, 0), layer.precision))
    runs += [NodeRun(name, name, types[name], "float", count) for name, count in pending.items() if name in types]
    return tuple(runs)


def find_source_name(name: str, names: Collection[str]) -> str:
    """Remove appended suffixes from `name` one by one until a known name is left, and return that name."""
    while name not in names and (shorter := _RENAMED.sub("", name)) != name:
        name = shorter
    return name


def _find_kind(op_type: str, inputs: list[TypedShape], outputs: list[TypedShape]) -> Kind:
    if op_type in _CONVERSIONS:
        return "conversion"
    if op_type in _MOVES_DATA | _CONTROL or not inputs:
        return "other"
    # The first inputs of QLinearConcat are its scales, so the output decides.
    if _DYNAMIC_INTEGER.match(op_type) or {d for d, _ in (inputs[0], *outputs[:1])} & {"int8", "uint8"}:
        return "int8"
    computed_in_float = inputs[0][0] in ("float", "float16", "double") or any(d == "float" for d, _ in outputs)
    return "float" if computed_in_float else "other"


def _count_macs(
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


def count_macs(source: ir.Model, feed: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Return `node_macs` for an inference on `feed`."""
    return node_macs(with_sizes(source, {name: array.shape for name, array in feed.items()}))
