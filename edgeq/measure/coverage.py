"""Which arithmetic really runs on integers, read off ONNX Runtime's own profile of the optimised graph.

Counting Q/DQ nodes in a file shows what was requested. What runs is decided at load, when the optimiser fuses some of
them into integer kernels and leaves the rest in float, so one inference is run under the profiler and every kernel that
ran is classified by its name and the dtype of its inputs. Plug-in engines enter their own layers into that profile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.measure.node_runs import (
    RUNS,
    Kind,
    NodeRun,
    aliases,
    classify,
    engine_profile,
    layer_runs,
    profile,
    sized_macs,
    timed_profile,
)
from edgeq.model.graph import (
    DATA_MOVEMENT,
    GraphIndex,
    channel_axis,
    constant,
    constant_tensor,
    integer_inputs,
    is_constant,
    name_of,
    node_input,
    operator_of,
)
from edgeq.model.int8_prediction import NodePrediction
from edgeq.model.macs import node_macs
from edgeq.model.quant_params import LIMITS, QuantParams, params_at
from edgeq.run.engines import described
from edgeq.run.session import SessionSettings, open_session
from edgeq.util.display import Displayed
from edgeq.util.records import NOT_WRITTEN, Amount, Count, Share, written

Basis = Literal["", "native", "emulated", "modelled", "forecast", "unknown"]


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
        nodes = (*layer_runs(layers, engine.graph.conversions, source, inside, known), *elsewhere)
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


@dataclass(frozen=True)
class KernelTime:
    """One kernel: the source node that it stands for, its operator in the optimised graph, microseconds a run.

    The profiler costs about a microsecond a kernel, so these are for comparing layers; `bench` measures latency.
    """

    name: str
    op_type: str
    kind: Kind
    us: Amount = field(metadata=written(digits=2))


def kernel_times(
    model: Path,
    settings: SessionSettings,
    feed: Mapping[str, np.ndarray[Any, Any]],
    source: ir.Model,
    *,
    runs: int = RUNS,
    opener: Callable[[Path, SessionSettings], Any] = open_session,
) -> tuple[KernelTime, ...]:
    """Run `model` under the profiler; what each kernel takes, in execution order.

    Args:
        feed: one sample.
        source: the float model that it was made from, by whose nodes kernels are named.
        opener: see `edgeq.measure.node_runs.profile`.

    Raises:
        RuntimeUnavailableError: onnxruntime is missing, or refuses the model.
    """
    profiled = timed_profile(model, settings, feed, runs=runs, opener=opener)
    macs = {name: count for name, count in node_macs(source).items() if count}
    # The runtime may call a node by what it gives.
    nodes = {name_of(node.outputs[0]): node.name for node in source.graph if node.name and node.outputs}
    found = classify(profiled.kernels, profiled.weights, macs, aliases(source, macs))
    return tuple(
        KernelTime(nodes.get(run.source, run.source), run.op_type, run.kind, kernel.us)
        for run, kernel in zip(found, profiled.kernels, strict=True)
    )


@dataclass(frozen=True, eq=False)
class IntegerUse:
    """An integer tensor, and how the node that reads it interprets it.

    Attributes:
        value: the tensor, an activation or a constant.
        node, place: the reader, and which of its inputs the tensor is.
        params: the scale and zero point that the reader has for it.
    """

    value: ir.Value
    node: ir.Node
    place: int
    params: QuantParams


def integer_uses(graph: GraphIndex) -> Iterator[IntegerUse]:
    """Every integer input with a constant scale of every quantized operator, in order; int32 biases too."""
    for node in graph.graph:
        for places in integer_inputs(node):
            value = node_input(node, places.value)
            if value is None:
                continue
            if places.scale is None:
                params = _scaled_sums(node, value, places.zero_point)
            else:
                axis = channel_axis(node)
                params = params_at(node, places.scale, places.zero_point, integers=value, axis=axis)
            if params is not None:
                yield IntegerUse(value, node, places.value, params)
        bias = _bias(node)
        if bias is not None:
            yield bias


def activation_params(graph: GraphIndex) -> dict[str, QuantParams]:
    """Integer activation → its scale and zero point, where they are constant."""
    found: dict[str, QuantParams] = {}
    for use in integer_uses(graph):
        if not is_constant(use.value):
            found.setdefault(name_of(use.value), use.params)
    for node in graph.graph:
        places = operator_of(node).integer_output
        if places is not None:
            made = params_at(node, *places, integers=node.outputs[0])
            if made is not None:
                found.setdefault(name_of(node.outputs[0]), made)
        elif node.op_type in DATA_MOVEMENT and node.inputs:
            moved = found.get(name_of(node.inputs[0]))
            if moved is not None:
                for output in node.outputs:
                    found.setdefault(name_of(output), moved)
    return found


def _scaled_sums(node: ir.Node, weight: ir.Value, zero_point: int) -> QuantParams | None:
    """Of the weight of ConvInteger and MatMulInteger: the sums are cast and multiplied by activation scale x weight
    scale behind the node."""
    tensor = constant_tensor(weight)
    if tensor is None or tensor.dtype not in LIMITS:
        return None
    scale, zero_value = _constant_factor(node.outputs[0], depth=3), node_input(node, zero_point)
    zeros = constant(zero_value)
    if scale is None or (zero_value is not None and zeros is None):
        return None
    zero = np.zeros((), np.int64) if zeros is None else zeros.astype(np.int64)
    return QuantParams(scale.astype(np.float32), zero, tensor.dtype, axis=channel_axis(node))


def _constant_factor(value: ir.Value, *, depth: int) -> NDArray[Any] | None:
    """The constant that a tensor is multiplied by, directly or as a part of the other factor."""
    for node, place in value.uses() if depth else []:
        if node.op_type == "Cast":
            return _constant_factor(node.outputs[0], depth=depth - 1)
        if node.op_type == "Mul":
            other = node.inputs[1 - place]
            maker = other.producer() if other is not None else None
            parts = [other, *(maker.inputs if maker is not None and maker.op_type == "Mul" else ())]
            return next((found for found in map(constant, parts) if found is not None), None)
    return None


def _bias(node: ir.Node) -> IntegerUse | None:
    """The int32 bias of QLinearConv and QGemm: zero point 0, scale = the input's times the weight's."""
    row = operator_of(node)
    bias = node_input(node, row.bias)
    if bias is None or row.bias is None or row.integer_output is None or not is_constant(bias):
        return None
    scales = [constant(node_input(node, places.scale)) for places in row.integers]
    if scales[0] is None or scales[1] is None:
        return None
    scale = (scales[0] * scales[1]).astype(np.float32)
    return IntegerUse(bias, node, row.bias, QuantParams(scale, np.zeros((), np.int64), ir.DataType.INT32))
