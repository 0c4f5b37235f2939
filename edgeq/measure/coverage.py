"""Find out which kernels and layers ran: for each one, its source node, its MACs, and whether it computed on integers.

edgeq reads this from ONNX Runtime's own profile of the optimised graph. The Q/DQ nodes of a file only show which nodes
should run on integers. When ONNX Runtime loads the file, its optimiser decides: it fuses some of these nodes into
integer kernels and leaves the rest in float. So edgeq runs one inference under the profiler, and classifies every
kernel that ran, using the kernel's name and the dtype of its inputs. Plug-in engines add their own layers to that
profile.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import onnx
import onnx_ir as ir
from edgeq_device.engines.catalog import engine_of_file
from edgeq_device.system.places import scratch_folder

from edgeq.measure.agreement import run_feed
from edgeq.model.graph import (
    consumers,
    name_of,
)
from edgeq.model.int8_prediction import NodePrediction
from edgeq.model.products import node_macs, sized
from edgeq.run.engines import Engine, ExecutionGraph, described
from edgeq.run.session import Engines, SessionSettings, open_session
from edgeq.util.display import Displayed
from edgeq.util.records import NOT_WRITTEN, Amount, Count, Share, write_as

RUNS = 20
"""Number of runs that count when kernels are timed, after the warm-up."""
_WARM_UP = 5
_SUFFIX = "_kernel_time"
# At this accuracy level, a product with weights in blocks multiplies integers.
_INTEGER_LEVEL = 4
TypedShape = tuple[str, list[int]]


@dataclass(frozen=True)
class KernelRun:
    """Describe one run of one kernel.

    Attributes:
        name: name of the node in the optimised graph.
        us: time in microseconds, of which the profiler itself takes about one.
        inputs, outputs: (element type, shape) of each input tensor and output tensor.
    """

    name: str
    op_type: str
    us: float
    inputs: list[TypedShape]
    outputs: list[TypedShape]


@dataclass(frozen=True)
class KernelProfile:
    """List the kernels that ran, in execution order.

    Attributes:
        kernels: kernels of all runs, one run after the other.
        weights: shape of each node's largest constant input in the optimised graph, by the node's name.
        expanded: names of the products whose integer weights are converted to float before the multiplication.
    """

    kernels: tuple[KernelRun, ...]
    weights: Mapping[str, tuple[int, ...]]
    expanded: frozenset[str] = frozenset()


def profile(
    model: Path,
    settings: SessionSettings,
    feed: Mapping[str, Any],
    *,
    runs: int = 1,
    opener: Callable[[Path, SessionSettings], Any] = open_session,
) -> KernelProfile:
    """Run `model` under the profiler.

    Args:
        feed: one sample.
        opener: function that opens the session. To run another machine's kernels, pass the opener of that machine.

    Raises:
        RuntimeUnavailableError: onnxruntime is missing, or refuses the model.
    """
    with scratch_folder("edgeq-profile-") as folder:
        optimized = Path(folder) / "optimized.onnx"
        profiled = replace(settings, save_optimized_to=optimized, profile_prefix=Path(folder) / "profile", draws=True)
        session = opener(model, profiled)
        for _ in range(runs):
            run_feed(session, None, feed, "one sample", model=str(model))
        events = json.loads(Path(session.end_profiling()).read_text("utf-8"))
        # Some engines write no optimised graph.
        graph = onnx.load(optimized, load_external_data=False).graph if optimized.exists() else onnx.GraphProto()
    constants = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    weights = {
        node.name: max((constants[i] for i in node.input if i in constants), key=math.prod, default=())
        for node in graph.node
    }
    products = (node for node in graph.node if node.op_type == "MatMulNBits")
    levels = {node.name: next((a.i for a in node.attribute if a.name == "accuracy_level"), 0) for node in products}
    expanded = frozenset(name for name, level in levels.items() if level != _INTEGER_LEVEL)
    return KernelProfile(kernel_runs(events), weights, expanded)


def timed_profile(
    model: Path,
    settings: SessionSettings,
    feed: Mapping[str, Any],
    *,
    runs: int = RUNS,
    opener: Callable[[Path, SessionSettings], Any] = open_session,
) -> KernelProfile:
    """Return the `profile` with each kernel only once. The time of a kernel is its `typical` time over `runs` runs
    after a warm-up.
    """
    found = profile(model, settings, feed, runs=_WARM_UP + runs, opener=opener)
    return replace(found, kernels=typical(found.kernels, _WARM_UP + runs))


def typical(kernels: Sequence[KernelRun], runs: int) -> tuple[KernelRun, ...]:
    """Return each kernel of `runs` runs once, in execution order, with the median of its times after the warm-up.

    The median is the time of an ordinary run. A mean would include interrupts of the system. The minimum would favour
    kernels whose time varies, such as conversions, whose speed is limited by memory. A kernel in a loop executes
    several times in each run. Its time is the sum of these executions, averaged over all runs.
    """
    first: dict[str, KernelRun] = {}
    times: dict[str, list[float]] = {}
    for kernel in kernels:
        first.setdefault(kernel.name, kernel)
        times.setdefault(kernel.name, []).append(kernel.us)
    once = {name: len(taken) == runs and runs > _WARM_UP for name, taken in times.items()}
    us = {n: statistics.median(taken[_WARM_UP:]) if once[n] else sum(taken) / runs for n, taken in times.items()}
    return tuple(replace(kernel, us=us[name]) for name, kernel in first.items())


def kernel_runs(events: Iterable[Mapping[str, Any]]) -> tuple[KernelRun, ...]:
    """Return the kernel runs among the events in a profile's JSON file."""
    return tuple(
        KernelRun(
            event["name"].removesuffix(_SUFFIX),
            event["args"]["op_name"],
            float(event["dur"]),
            [next(iter(typed.items())) for typed in event["args"].get("input_type_shape", ()) if typed],
            [next(iter(typed.items())) for typed in event["args"].get("output_type_shape", ()) if typed],
        )
        for event in events
        if event.get("cat") == "Node" and str(event.get("name", "")).endswith(_SUFFIX)
    )


@dataclass(frozen=True)
class EngineLayer:
    """Describe one layer that an engine executed.

    Attributes:
        name: name of the node that the layer was made from, if the engine keeps names.
        op_type: the engine's name for the operator.
        kernel: name of the kernel that ran.
        precision: "int8", another of the engine's precisions, or "" if the kernel's name does not show it.
        merged: names of all nodes that the layer was made from, if the engine reports them.
    """

    name: str
    op_type: str
    kernel: str
    precision: str
    merged: tuple[str, ...] = ()


def engine_profile(
    model: Path,
    settings: SessionSettings,
    engine: Engine,
    feed: Mapping[str, Any],
    *,
    opener: Callable[[Path, SessionSettings], Any] | None = None,
) -> tuple[tuple[EngineLayer, ...], tuple[KernelRun, ...]]:
    """Return the layers of one inference in the engine, and the kernels of the nodes that the engine left to
    onnxruntime.

    Args:
        engine: the engine of `settings`; its execution graph must be visible.
        feed: one sample.
        opener: function that opens a session in a process of the engine; None starts a process.

    Raises:
        EngineError: the engine crashes or refuses the model.
    """
    with scratch_folder("edgeq-profile-") as folder, ExitStack() as stack:
        watched = replace(settings, engine=engine.watched(), profile_prefix=Path(folder) / "profile", draws=True)
        session = (opener or stack.enter_context(Engines()).open)(model, watched)
        session.run(None, dict(feed))
        events = json.loads(Path(session.end_profiling()).read_text("utf-8"))
        session.close()
    own = [event for event in events if event.get("args", {}).get("provider") != engine.provider]
    return layers_of(events, engine.graph), kernel_runs(own)


def layers_of(events: Iterable[Mapping[str, Any]], graph: ExecutionGraph) -> tuple[EngineLayer, ...]:
    """Return the layers among the events of a profile, in execution order, each once."""
    found: dict[str, EngineLayer] = {}
    for event in events:
        args = event.get("args", {})
        if event.get("cat") != graph.category or not {graph.operator, graph.kernel} <= args.keys():
            continue
        kernel = str(args[graph.kernel])
        precision = graph.precisions.get(kernel.rpartition("_")[2].lower(), "")
        name = re.sub(graph.renamed, "", str(event["name"])) if graph.renamed else str(event["name"])
        merged = tuple(filter(None, str(args.get(graph.merged, "")).split(",")))
        found.setdefault(str(event["name"]), EngineLayer(name, str(args[graph.operator]), kernel, precision, merged))
    return tuple(found.values())


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


def aliases(source: ir.Model, macs: Mapping[str, int]) -> dict[str, str]:
    """Return kernel name → name of the source node, for all names under which ONNX Runtime may run a source node.

    A fusion names the fused kernel after the node, its output tensor, or the activation that was fused into it.
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
    """Return a function that finds the source node of a kernel or layer that multiplies. It maps the name of the kernel
    to the name of the node.

    The function returns an unknown name unchanged.
    """
    known = aliases(source, {name: macs for name, macs in node_macs(source).items() if macs})
    return lambda name: known.get(source_name(name, known), name)


def classify(
    kernels: Sequence[KernelRun],
    weights: Mapping[str, tuple[int, ...]],
    macs: Mapping[str, int],
    known: Mapping[str, str],
    expanded: Collection[str] = (),
) -> tuple[NodeRun, ...]:
    """Convert runs of kernels to `NodeRun`s.

    The MACs are those of the source node if its name can still be recognised. Otherwise they follow from the shapes
    that ran. A kernel in a loop's body runs many times. It becomes one `NodeRun` with the MACs of all its runs.

    Args:
        kernels: kernels of ONNX Runtime's profile.
        weights: `KernelProfile.weights`.
        macs: MACs by source node name, for nodes that have any.
        known: kernel name → name of the source node (`aliases`).
        expanded: `KernelProfile.expanded`.
    """
    runs: dict[tuple[str, str, Kind], NodeRun] = {}
    for kernel in kernels:
        name, op_type = kernel.name, kernel.op_type
        stem = source_name(name, known)
        computed = _macs_from_shapes(op_type, kernel.inputs, kernel.outputs, weights.get(name, ()))
        # A kernel's name refers to its source node only if the kernel multiplies. Activations that were not fused do
        # not multiply, and the scaling after a dynamically quantized node does not either.
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
    """Return an engine's layers as `NodeRun`s.

    Each source node with MACs becomes one `NodeRun`. This run belongs to the first layer that is named after the node
    or into which the node was merged. A source node without a layer counts as float, because nothing is known about it.
    A layer without a source node counts as a conversion.
    """
    types = {str(node.name): node.op_type for node in source.graph}
    made = {name_of(output): str(node.name) for node in source.graph for output in node.outputs}
    # For each node, the node itself and the nodes that compute its inputs. A layer may have the name of a bias Add
    # instead of the name of the product that was merged with it.
    before = {
        str(node.name): (str(node.name), *(made[name_of(value)] for value in node.inputs if name_of(value) in made))
        for node in source.graph
    }
    found = []
    left = dict(macs)
    for layer in layers:
        name = layer.name if layer.name in types else made.get(layer.name, source_name(layer.name, known))
        node = name if name in types else known.get(name, name)
        kind: Kind = "int8" if layer.precision == "int8" else "float" if layer.precision else "other"
        merged = [inside for one in layer.merged for inside in before.get(one, ()) if inside in left]
        nodes = [node] if node in left or layer.op_type in conversions else list(dict.fromkeys(merged)) or [node]
        for node in nodes:
            if layer.op_type in conversions or node not in types:
                found.append(NodeRun(layer.name, layer.name, layer.op_type, "conversion", 0, layer.precision))
            else:
                found.append(NodeRun(layer.name, node, types[node], kind, left.pop(node, 0), layer.precision))
    found += [NodeRun(name, name, types[name], "float", count) for name, count in left.items() if name in types]
    return tuple(found)


def source_name(name: str, known: Collection[str]) -> str:
    """Remove appended suffixes from `name` one by one until a known name is left, and return that name."""
    while name not in known and (shorter := _RENAMED.sub("", name)) != name:
        name = shorter
    return name


def _kind(op_type: str, inputs: list[TypedShape], outputs: list[TypedShape]) -> Kind:
    if op_type in _CONVERSIONS:
        return "conversion"
    if op_type in _MOVES_DATA | _CONTROL or not inputs:
        return "other"
    # The first inputs of QLinearConcat are its scales, so the output decides.
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
    """Return `node_macs` for an inference on `feed`."""
    return node_macs(sized(source, {name: array.shape for name, array in feed.items()}))


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
        macs: `sized_macs` of `source` and `feed`, if the caller already has them.
        opener: function that opens the session. None opens it here; a plug-in then runs in a separate process.
    """
    own = engine_of_file(model.name)
    if own is not None:
        return Coverage(basis="unknown", how=f"the work of a {own.suffix} file's operators is not counted")
    macs = {name: count for name, count in (macs or sized_macs(source, feed)).items() if count}
    known = aliases(source, macs)
    engine = described(settings.engine) if settings.engine is not None else None
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
    """Return predictions for the nodes of a model as a `Coverage`.

    Args:
        macs: MACs by node name, for nodes whose MACs differ from the prediction.
        how, reason: see `Coverage`.
    """
    nodes = [NodeRun(n.name, n.name, n.op_type, n.verdict, macs.get(n.name, n.macs)) for n in predicted]
    reasons = {n.name: n.reason for n in predicted}
    return coverage_of(nodes, lambda node: reasons[node.name], basis="forecast", how=how, reason=reason)


@dataclass(frozen=True)
class KernelTime:
    """Describe one kernel: its source node, its operator in the optimised graph, and the microseconds that one run
    takes.

    The profiler itself takes about a microsecond for each kernel. So use these times only to compare layers. `bench`
    measures latency.
    """

    name: str
    op_type: str
    kind: Kind
    us: Amount = field(metadata=write_as(digits=2))


def kernel_times(
    model: Path,
    settings: SessionSettings,
    feed: Mapping[str, np.ndarray[Any, Any]],
    source: ir.Model,
    *,
    runs: int = RUNS,
    opener: Callable[[Path, SessionSettings], Any] = open_session,
) -> tuple[KernelTime, ...]:
    """Run `model` under the profiler and return the time of each kernel, in execution order.

    Args:
        feed: one sample.
        source: the float model that `model` was made from. Its nodes give the names of the kernels.
        opener: see `edgeq.measure.coverage.profile`.

    Raises:
        RuntimeUnavailableError: onnxruntime is missing, or refuses the model.
    """
    profiled = timed_profile(model, settings, feed, runs=runs, opener=opener)
    macs = {name: count for name, count in node_macs(source).items() if count}
    # The runtime may name a node after its output.
    nodes = {name_of(node.outputs[0]): node.name for node in source.graph if node.name and node.outputs}
    found = classify(profiled.kernels, profiled.weights, macs, aliases(source, macs))
    return tuple(
        KernelTime(nodes.get(run.source, run.source), run.op_type, run.kind, kernel.us)
        for run, kernel in zip(found, profiled.kernels, strict=True)
    )


CheckKind = Literal["native", "emulated", "modelled", "none"]
_STRENGTH = {kind: place for place, kind in enumerate(get_args(CheckKind))}


@dataclass(frozen=True)
class ArtifactCheck:
    """Describe one check of one artifact for one target.

    Attributes:
        name: "load", "coverage", "accuracy", "self-test", "saturation" or "kernels".
        kind: whose arithmetic was checked: that of the target's own kernels ("native"), of the same kernels in an
            emulator ("emulated"), or of a model of them ("modelled"). "none" means that other kernels ran, or that
            nothing was checked.
        where: machine or simulator that ran the check.
        detail: the finding, one line.
        passed: whether the check passed; None if it cannot pass or fail.
    """

    name: str
    kind: CheckKind
    where: str = ""
    detail: str = ""
    passed: bool | None = None


def strongest(checks: Iterable[ArtifactCheck]) -> tuple[ArtifactCheck, ...]:
    """Return one check for each name. If several checks have the same name, return the one whose kind is nearest to the
    hardware. If two of these have the same kind, return the later one.

    The checks are in the order in which their names first appear.
    """
    best: dict[str, ArtifactCheck] = {}
    for check in checks:
        known = best.get(check.name)
        if known is None or _STRENGTH[check.kind] <= _STRENGTH[known.kind]:
            best[check.name] = check
    return tuple(best.values())


def summarise(checks: Iterable[ArtifactCheck]) -> str:
    """Return the checks, grouped by kind, in one line."""
    by_kind: dict[str, list[str]] = {}
    for check in checks:
        by_kind.setdefault("not on its kernels" if check.kind == "none" else check.kind, []).append(check.name)
    return "; ".join(f"{kind}: {', '.join(names)}" for kind, names in by_kind.items())
