"""Which arithmetic really runs on integers, read off ONNX Runtime's own profile of the optimised graph.

Counting Q/DQ nodes in a file shows what was requested. What runs is decided at load, when the optimiser fuses some of
them into integer kernels and leaves the rest in float, so one inference is run under the profiler and every kernel that
ran is classified by its name and the dtype of its inputs. Plug-in engines enter their own layers into that profile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from edgeq.display import Displayed
from edgeq.engines import described
from edgeq.measure.engine_profile import engine_profile
from edgeq.measure.node_runs import NodeRun, aliases, classify, layer_runs, sized_macs
from edgeq.measure.profile import profile
from edgeq.model.int8_prediction import NodePrediction
from edgeq.records import NOT_WRITTEN, Count, Share, written
from edgeq.session import SessionSettings, open_session

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
