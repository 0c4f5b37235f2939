"""Kernels and layers that ran: the source node of each, its MACs, and whether it computed on integers."""

from __future__ import annotations

import json
import math
import re
import statistics
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnx_ir as ir

from edgeq.measure.latency import run_feed
from edgeq.model.graph import consumers, name_of
from edgeq.model.macs import node_macs, sized
from edgeq.run.engines import Engine, ExecutionGraph
from edgeq.run.session import Engines, SessionSettings, open_session
from edgeq.util.records import Count

RUNS = 20
"""Runs that count where kernels are timed."""
_WARM_UP = 5
_SUFFIX = "_kernel_time"
# The accuracy level at which a product of weights in blocks multiplies integers.
_INTEGER_LEVEL = 4
TypedShape = tuple[str, list[int]]


@dataclass(frozen=True)
class KernelRun:
    """One run of one kernel.

    Attributes:
        name: of the node in the optimised graph.
        us: microseconds; the profiler itself costs about one.
        inputs, outputs: (element type, shape) of the tensors that went in and came out.
    """

    name: str
    op_type: str
    us: float
    inputs: list[TypedShape]
    outputs: list[TypedShape]


@dataclass(frozen=True)
class Profile:
    """What ran, in execution order.

    Attributes:
        kernels: of all runs, one after the other.
        weights: shape of each node's largest constant input in the optimised graph, by the node's name.
        expanded: names of products whose integer weights are expanded to float before they multiply.
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
) -> Profile:
    """Run `model` under the profiler.

    Args:
        feed: one sample.
        opener: opens the session; another machine's, for another machine's kernels.

    Raises:
        RuntimeUnavailableError: onnxruntime is missing, or refuses the model.
    """
    with tempfile.TemporaryDirectory(prefix="edgeq-profile-") as folder:
        optimized = Path(folder) / "optimized.onnx"
        profiled = replace(settings, save_optimized_to=optimized, profile_prefix=Path(folder) / "profile")
        session = opener(model, profiled)
        for _ in range(runs):
            run_feed(session, None, feed, "one sample", model=str(model))
        events = json.loads(Path(session.end_profiling()).read_text("utf-8"))
        graph = onnx.load(optimized, load_external_data=False).graph
        return Profile(kernel_runs(events), _weight_shapes(graph), frozenset(_expanded(graph)))


def timed_profile(
    model: Path,
    settings: SessionSettings,
    feed: Mapping[str, Any],
    *,
    runs: int = RUNS,
    opener: Callable[[Path, SessionSettings], Any] = open_session,
) -> Profile:
    """`profile` with each kernel once, at its `typical` time over `runs` runs behind a warm-up."""
    found = profile(model, settings, feed, runs=_WARM_UP + runs, opener=opener)
    return replace(found, kernels=typical(found.kernels, _WARM_UP + runs))


def typical(kernels: Sequence[KernelRun], runs: int) -> tuple[KernelRun, ...]:
    """Each kernel of `runs` runs once, in execution order, with the median of its times behind the warm-up.

    The median, because it is the time of an ordinary run: a mean takes in interrupts of the system, and the shortest of
    some runs favours kernels whose time varies, such as conversions that are bound by memory. A kernel in a loop, which
    runs several times a run, has their sum, as a mean over all runs.
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
    """The runs of kernels among the events of a profile, which are what its JSON holds."""
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


def _expanded(graph: onnx.GraphProto) -> Iterator[str]:
    for node in graph.node:
        if node.op_type == "MatMulNBits":
            level = {attribute.name: attribute.i for attribute in node.attribute}.get("accuracy_level", 0)
            if level != _INTEGER_LEVEL:
                yield node.name


def _weight_shapes(graph: onnx.GraphProto) -> dict[str, tuple[int, ...]]:
    constants = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    return {
        node.name: max((constants[i] for i in node.input if i in constants), key=math.prod, default=())
        for node in graph.node
    }


@dataclass(frozen=True)
class EngineLayer:
    """One layer that was executed.

    Attributes:
        name: of the node that it was made of, as far as the engine keeps names.
        op_type: as the engine calls it.
        kernel: the name of what ran it.
        precision: "int8", one of the engine's precisions, or "" where it computes in neither.
    """

    name: str
    op_type: str
    kernel: str
    precision: str


def engine_profile(
    model: Path,
    settings: SessionSettings,
    engine: Engine,
    feed: Mapping[str, Any],
    *,
    opener: Callable[[Path, SessionSettings], Any] | None = None,
) -> tuple[tuple[EngineLayer, ...], tuple[KernelRun, ...]]:
    """The layers of one inference in the engine, and the kernels of what it left to onnxruntime.

    Args:
        engine: that of `settings`, whose graph can be seen.
        feed: one sample.
        opener: opens a session in a process of the engine; None starts one.

    Raises:
        EngineError: the engine crashes or refuses the model.
    """
    with tempfile.TemporaryDirectory(prefix="edgeq-profile-") as folder, ExitStack() as stack:
        watched = replace(settings, engine=engine.watched(), profile_prefix=Path(folder) / "profile")
        session = (opener or stack.enter_context(Engines()).open)(model, watched)
        session.run(None, dict(feed))
        events = json.loads(Path(session.end_profiling()).read_text("utf-8"))
        session.close()
    own = [event for event in events if event.get("args", {}).get("provider") != engine.provider]
    return layers_of(events, engine.graph), kernel_runs(own)


def layers_of(events: Iterable[Mapping[str, Any]], graph: ExecutionGraph) -> tuple[EngineLayer, ...]:
    """The layers among the events of a profile, in the order of execution, each once."""
    found: dict[str, EngineLayer] = {}
    for event in events:
        args = event.get("args", {})
        if event.get("cat") != graph.category or not {graph.operator, graph.kernel} <= args.keys():
            continue
        kernel = str(args[graph.kernel])
        precision = graph.precisions.get(kernel.rpartition("_")[2].lower(), "")
        name = re.sub(graph.renamed, "", str(event["name"])) if graph.renamed else str(event["name"])
        found.setdefault(str(event["name"]), EngineLayer(name, str(args[graph.operator]), kernel, precision))
    return tuple(found.values())


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
