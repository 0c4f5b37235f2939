"""Measure the share of a model's multiply-accumulates that ran on integers, and name the nodes that ran in float.

edgeq runs one inference under the profiler, and classifies every kernel that ran. Plug-in engines show layers instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from edgeq_device.engines.catalog import engine_of_file

from edgeq.measure.engine_layers import profile_engine
from edgeq.measure.kernels import profile
from edgeq.measure.node_runs import NodeRun, classify, classify_layers, count_macs, map_kernel_names
from edgeq.model.int8_prediction import NodePrediction
from edgeq.run.engines import find_description
from edgeq.run.session import SessionSettings, open_session
from edgeq.util.display import Displayed
from edgeq.util.records import NOT_WRITTEN, Count, Share, write_as

Basis = Literal["", "native", "emulated", "modelled", "forecast", "unknown"]


@dataclass(frozen=True)
class FloatNode:
    """Describe a node that ran in float: its precision, if known, and the reason why it ran in float."""

    name: str
    op_type: str
    macs: Count = 0
    reason: str = ""
    precision: str = ""


@dataclass(frozen=True)
class OperatorCoverage:
    """Count the kernels of one type that ran on integers and those that ran in float, with their MACs."""

    op_type: str
    int8_macs: Count = 0
    float_macs: Count = 0
    int8_kernels: Count = 0
    float_kernels: Count = 0


# Marks a share that is still to be computed. No share is negative, and None means "unknown".
_DERIVED = -1.0
HERE = "this machine"
"""`Coverage.how` for the kernels of this machine. These are onnxruntime's own kernels, unless the name of an engine
precedes this text."""


@dataclass(frozen=True)
class Coverage(Displayed):
    """Hold the share of multiply-accumulates that ran on integers, and the nodes that ran in float.

    Attributes:
        basis: source of the share: the target's own kernels ("native"), the same kernels emulated ("emulated"), an
            exact model of them ("modelled"), a forecast by rules ("forecast"), or "unknown"; "" if a record omits it.
        how: the machine that measured the share, or the rules that forecast it; for "unknown", the reason.
        reason: why the share is a forecast, and how to measure it.
        int8_macs, float_macs: MACs of one inference on integers and in float.
        nodes: every kernel that ran, in execution order.
        float_nodes: nodes that ran in float, each with its reason; empty for "unknown".
        int8_mac_share: integer MACs over all MACs; 0 if the graph has none, None if the share is unknown. This and the
            attributes below are computed from `nodes` unless a record contains them.
        kernels: number of kernels of each kind that ran.
        operators: types of the kernels that compute, those with the most MACs first.
        precisions: MACs by precision ("int8", "bf16", "f32" ...), if an engine has several.
    """

    int8_macs: Count = 0
    float_macs: Count = 0
    nodes: tuple[NodeRun, ...] = field(default=(), metadata=NOT_WRITTEN)
    float_nodes: tuple[FloatNode, ...] = ()
    int8_mac_share: Share | None = field(default=_DERIVED, metadata=write_as(digits=6))
    kernels: Mapping[str, Count] = field(default_factory=dict)
    operators: tuple[OperatorCoverage, ...] = ()
    basis: Basis = ""
    how: str = ""
    reason: str = ""
    precisions: Mapping[str, Count] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # A record contains these figures, but not the nodes, so they are fields and not properties.
        if self.int8_mac_share == _DERIVED:
            total = self.int8_macs + self.float_macs
            kinds = ("int8", "float", "conversion")
            share = None if self.basis == "unknown" else self.int8_macs / total if total else 0.0
            object.__setattr__(self, "int8_mac_share", share)
            object.__setattr__(self, "kernels", {kind: sum(n.kind == kind for n in self.nodes) for kind in kinds})
            object.__setattr__(self, "operators", _count_by_operator(self.nodes))
            named = sorted({n.precision for n in self.nodes if n.precision and n.macs})
            macs = {p: sum(n.macs for n in self.nodes if n.precision == p) for p in named}
            object.__setattr__(self, "precisions", macs)

    @property
    def measured(self) -> bool:
        """Return whether the share was measured on the target's kernels, emulated kernels or an exact model of them."""
        return self.basis in ("native", "emulated", "modelled")

    @property
    def origin(self) -> str:
        """Return a clause that names the source of the share, or "" for onnxruntime's kernels on this machine."""
        if self.basis == "forecast":
            return f"a forecast by {self.how}, not measured"
        return f"measured on {self.how}" if self.measured and self.how not in ("", HERE) else ""

    def summary(self) -> str:
        """Return the share and its source in one line."""
        if self.int8_mac_share is None:
            return f"not known: {self.how}"
        about = "about " if self.basis == "forecast" else ""
        text = f"{about}{self.int8_mac_share:.1%} of the multiply-accumulates"
        total = sum(self.precisions.values())
        # The share of int8 is the figure of the sentence itself.
        shares = [f"{macs / total:.1%} {name}" for name, macs in self.precisions.items() if name != "int8" and macs]
        text += f" ({', '.join(shares)})" if shares else ""
        return f"{text}: {self.origin}" if self.origin else text


def _count_by_operator(nodes: Iterable[NodeRun]) -> tuple[OperatorCoverage, ...]:
    operators: dict[str, OperatorCoverage] = {}
    for node in nodes:
        if node.kind in ("int8", "float"):
            counts = operators.setdefault(node.op_type, OperatorCoverage(node.op_type))
            macs, kernels = f"{node.kind}_macs", f"{node.kind}_kernels"
            added = {macs: getattr(counts, macs) + node.macs, kernels: getattr(counts, kernels) + 1}
            operators[node.op_type] = replace(counts, **added)
    return tuple(sorted(operators.values(), key=lambda o: (-o.int8_macs - o.float_macs, o.op_type)))


def coverage_of(
    nodes: Iterable[NodeRun], why: Callable[[NodeRun], str], *, basis: Basis, how: str, reason: str = ""
) -> Coverage:
    """Return the coverage that follows from runs of nodes.

    Args:
        why: function that returns the reason why a node ran in float.
        basis, how, reason: see `Coverage`.
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
"""(source node name, operator type) → reason why the node ran in float."""


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
    """Run `model` once under the profiler and classify every kernel.

    If the model runs in a plug-in engine, classify every layer of the graph that the engine executes.

    Args:
        model: the artifact.
        settings: the session settings that ship with the artifact.
        feed: one sample.
        source: the float model that the artifact was made from. Its nodes give the names and the MACs of the kernels.
        explain: function that returns the reason why a node ran in float.
        basis, how: see `Coverage`. They describe the kernels on which `opener` runs the model.
        macs: `count_macs` of `source` and `feed`, if the caller already has them.
        opener: function that opens the session. None opens it here; a plug-in then runs in a separate process.
    """
    file_engine = engine_of_file(model.name)
    # Such a file contains no graph that onnxruntime could profile.
    if file_engine is not None:
        return Coverage(basis="unknown", how=f"the work of a {file_engine.suffix} file's operators is not counted")
    macs = {name: count for name, count in (macs or count_macs(source, feed)).items() if count}
    source_by_kernel = map_kernel_names(source, macs)
    engine = find_description(settings.engine) if settings.engine is not None else None
    if engine is not None:
        # An opener belongs to another machine, which `how` describes completely.
        how = f"{engine.name}, {how}" if opener is None else how
        if not engine.graph.category:
            return Coverage(basis="unknown", how=f"{engine.name} does not show what it executes")
        layers, kernels = profile_engine(model, settings, engine, feed, opener=opener)
        elsewhere = classify(kernels, {}, macs, source_by_kernel)
        # Nodes that the engine left to onnxruntime must not count as nodes of the engine that are missing.
        inside = {name: count for name, count in macs.items() if name not in {run.source for run in elsewhere}}
        nodes = (*classify_layers(layers, engine.graph.conversions, source, inside, source_by_kernel), *elsewhere)
    else:
        profiled = profile(model, settings, feed, opener=opener or open_session)
        nodes = classify(profiled.kernels, profiled.weights, macs, source_by_kernel, profiled.expanded)
    return coverage_of(nodes, lambda node: explain(node.source, node.op_type), basis=basis, how=how)


def forecast_coverage(predicted: Sequence[NodePrediction], macs: Mapping[str, int], how: str, reason: str) -> Coverage:
    """Return predictions for the nodes of a model as a `Coverage`.

    Args:
        macs: MACs by node name, for nodes whose MACs differ from the prediction.
        how, reason: see `Coverage`.
    """
    nodes = [NodeRun(n.name, n.name, n.op_type, n.verdict, macs.get(n.name, n.macs)) for n in predicted]
    # Rules give the reason together with the prediction.
    reasons = {n.name: n.reason for n in predicted}
    return coverage_of(nodes, lambda node: reasons[node.name], basis="forecast", how=how, reason=reason)
