"""Which arithmetic really runs on integers, read off ONNX Runtime's own profile of the optimised graph.

Counting Q/DQ nodes in a file shows what was requested. What runs is decided at load, when the optimiser fuses some of
them into integer kernels and leaves the rest in float, so one inference is run under the profiler and every kernel that
ran is classified by its name and the dtype of its inputs. Plug-in engines enter their own layers into that profile.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from edgeq.display import Displayed
from edgeq.engines import described
from edgeq.graph.query import consumers, name_of
from edgeq.measure.engine_profile import EngineLayer, engine_profile
from edgeq.measure.profile import KernelRun, TypedShape, profile
from edgeq.model.int8_prediction import NodePrediction
from edgeq.model.macs import node_macs, sized
from edgeq.records import NOT_WRITTEN, Count, Share, written
from edgeq.session import SessionSettings, open_session

Kind = Literal["int8", "float", "conversion", "other"]
Basis = Literal["", "native", "emulated", "modelled", "forecast", "unknown"]

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


@dataclass(frozen=True)
class FloatNode:
    """A node that ran in float, in which precision where that is known, and why."""

    name: str
    op_type: str
    macs: Count = 0
    reason: str = ""
    precision: str = ""


@dataclass(frozen=True)
class OperatorCoverage:
    """How many kernels of one type ran on integers and in float, and their MACs."""

    op_type: str
    int8_macs: Count = 0
    float_macs: Count = 0
    int8_kernels: Count = 0
    float_kernels: Count = 0


_DERIVED = -1.0
HERE = "this machine"
"""Where this machine's own kernels ran, onnxruntime's unless an engine is named before it."""


@dataclass(frozen=True)
class Coverage(Displayed):
    """The share of multiply-accumulates that ran on integers, and what did not.

    Attributes:
        basis: what it rests on: the target's kernels themselves ("native"), emulated, or an exact model of them; a
            forecast by rules; "unknown"; "" where a record does not say.
        how: on what it was measured, or by what rules it was forecast; of "unknown", why.
        reason: why a forecast was not measured, and what to do about it.
        int8_macs, float_macs: MACs of one inference, by what ran them.
        nodes: every kernel that ran, in execution order.
        float_nodes: those in float, each with its reason.
        int8_mac_share: integer MACs over all MACs, 0 when the graph has none, None where it is unknown. This and
            what follows are derived from `nodes` unless they are given, as a record gives them.
        kernels: how many of each kind ran.
        operators: kernel types that compute, the one with the most MACs first.
        precisions: MACs by "int8", "bf16", "f32" ..., where an engine computes in one that it was given.
    """

    int8_macs: Count = 0
    float_macs: Count = 0
    nodes: tuple[NodeRun, ...] = field(default=(), metadata=NOT_WRITTEN)
    float_nodes: tuple[FloatNode, ...] = ()
    int8_mac_share: Share | None = field(default=_DERIVED, metadata=written(digits=6))
    kernels: Mapping[str, Count] = field(default_factory=dict)
    operators: tuple[OperatorCoverage, ...] = ()
    basis: Basis = ""
    how: str = ""
    reason: str = ""
    precisions: Mapping[str, Count] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.int8_mac_share == _DERIVED:
            total = self.int8_macs + self.float_macs
            kinds = ("int8", "float", "conversion")
            share = None if self.basis == "unknown" else self.int8_macs / total if total else 0.0
            object.__setattr__(self, "int8_mac_share", share)
            object.__setattr__(self, "kernels", {kind: sum(n.kind == kind for n in self.nodes) for kind in kinds})
            object.__setattr__(self, "operators", _by_operator(self.nodes))
            named = sorted({n.precision for n in self.nodes if n.precision and n.macs})
            macs = {p: sum(n.macs for n in self.nodes if n.precision == p) for p in named}
            object.__setattr__(self, "precisions", macs)

    @property
    def measured(self) -> bool:
        """Whether it is a fact about the target's kernels."""
        return self.basis in ("native", "emulated", "modelled")

    @property
    def origin(self) -> str:
        """On what the share rests, to follow it in a sentence; "" for onnxruntime's kernels on this machine."""
        if self.basis == "forecast":
            return f"a forecast by {self.how}, not measured"
        return f"measured on {self.how}" if self.measured and self.how not in ("", HERE) else ""

    def summary(self) -> str:
        """The share and what it rests on, one line."""
        if self.int8_mac_share is None:
            return f"not known: {self.how}"
        about = "about " if self.basis == "forecast" else ""
        text = f"{about}{self.int8_mac_share:.1%} of the multiply-accumulates"
        total = sum(self.precisions.values())
        rest = [f"{macs / total:.1%} {name}" for name, macs in self.precisions.items() if name != "int8" and macs]
        text += f" ({', '.join(rest)})" if rest else ""
        return f"{text}: {self.origin}" if self.origin else text


def _by_operator(nodes: Iterable[NodeRun]) -> tuple[OperatorCoverage, ...]:
    found: dict[str, OperatorCoverage] = {}
    for node in nodes:
        if node.kind in ("int8", "float"):
            known = found.setdefault(node.op_type, OperatorCoverage(node.op_type))
            macs, kernels = f"{node.kind}_macs", f"{node.kind}_kernels"
            added = {macs: getattr(known, macs) + node.macs, kernels: getattr(known, kernels) + 1}
            found[node.op_type] = replace(known, **added)
    return tuple(sorted(found.values(), key=lambda o: (-o.int8_macs - o.float_macs, o.op_type)))


def coverage_of(
    nodes: Iterable[NodeRun], why: Callable[[NodeRun], str], *, basis: Basis, how: str, reason: str = ""
) -> Coverage:
    """What runs of nodes amount to.

    Args:
        why: the reason of each that is in float.
        basis, how, reason: as `Coverage` has them.
    """
    nodes = tuple(nodes)
    floats = [n for n in nodes if n.kind == "float"]
    return Coverage(
        int8_macs=sum(n.macs for n in nodes if n.kind == "int8"),
        float_macs=sum(n.macs for n in floats),
        nodes=nodes,
        float_nodes=tuple(FloatNode(n.source, n.op_type, n.macs, why(n), n.precision) for n in floats),
        basis=basis,
        how=how,
        reason=reason,
    )


Explain = Callable[[str, str], str]
"""(source node name, operator type) → why it ran in float."""


def measure_coverage(
    model: Path,
    settings: SessionSettings,
    feed: Mapping[str, np.ndarray],
    source: ir.Model,
    explain: Explain,
    *,
    basis: Basis = "native",
    how: str = HERE,
    macs: Mapping[str, int] | None = None,
    opener: Callable[[Path, SessionSettings], Any] | None = None,
) -> Coverage:
    """Run `model` once under the profiler and classify every kernel; in a plug-in, every layer of the graph that it
    executes.

    Args:
        model: the artifact.
        settings: the session settings that ship with it.
        feed: one sample.
        source: the float model that the artifact was made from, by whose nodes kernels are named and counted.
        explain: gives the reason for a node that ran in float.
        basis, how: of the kernels that `opener` runs it on, as `Coverage` has them.
        macs: `sized_macs` of `source` and `feed`, where they are known.
        opener: None opens it here, for a plug-in in a process of its own.
    """
    macs = {name: count for name, count in (macs or sized_macs(source, feed)).items() if count}
    known, engine = aliases(source, macs), described(settings.engine)
    if engine is not None:
        how = f"{engine.name}, {how}" if opener is None else how
        if not engine.graph.category:
            return Coverage(basis="unknown", how=f"{engine.name} does not show what it executes")
        layers, kernels = engine_profile(model, settings, engine, feed, opener=opener)
        elsewhere = classify(kernels, {}, macs, known)
        inside = {name: count for name, count in macs.items() if name not in {run.source for run in elsewhere}}
        nodes = (*_layer_runs(layers, engine.graph.conversions, source, inside, known), *elsewhere)
    else:
        profiled = profile(model, settings, feed, opener=opener or open_session)
        nodes = classify(profiled.kernels, profiled.weights, macs, known, profiled.expanded)
    return coverage_of(nodes, lambda node: explain(node.source, node.op_type), basis=basis, how=how)


def forecast_coverage(predicted: Sequence[NodePrediction], macs: Mapping[str, int], how: str, reason: str) -> Coverage:
    """What rules say of each node, in the terms of a measurement.

    Args:
        macs: by node name, where they are other than predicted.
        how, reason: as `Coverage` has them.
    """
    nodes = [NodeRun(n.name, n.name, n.op_type, n.verdict, macs.get(n.name, n.macs)) for n in predicted]
    reasons = {n.name: n.reason for n in predicted}
    return coverage_of(nodes, lambda node: reasons[node.name], basis="forecast", how=how, reason=reason)


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


def _layer_runs(
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
