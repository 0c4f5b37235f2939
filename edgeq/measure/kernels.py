"""Where the time goes: what each kernel takes, by ONNX Runtime's own profile, under the name of its source node."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from edgeq.graph.convert import from_proto
from edgeq.measure.coverage import Kind, aliases, judge
from edgeq.measure.profile import KernelRun, profile
from edgeq.model.macs import node_macs
from edgeq.records import Amount, written
from edgeq.session import SessionSettings

RUNS = 20
_WARM_UP = 5


@dataclass(frozen=True)
class KernelTime:
    """One kernel: the source node that it stands for, its operator in the optimised graph, microseconds a run.

    The profiler costs about a microsecond a kernel, so these are for comparing layers; latency is what `bench` says.
    """

    name: str
    op_type: str
    kind: Kind
    us: Amount = field(metadata=written(digits=2))


def kernel_times(
    model: Path,
    settings: SessionSettings,
    feed: Mapping[str, np.ndarray[Any, Any]],
    source: onnx.ModelProto,
    *,
    runs: int = RUNS,
) -> tuple[KernelTime, ...]:
    """Run `model` under the profiler; what each kernel takes, in execution order.

    Args:
        feed: one sample.
        source: the float model that it was made from, with shapes; weights need not be loaded.

    Raises:
        RuntimeUnavailableError: onnxruntime is missing, or refuses the model.
    """
    profiled = profile(model, settings, feed, runs=_WARM_UP + runs)
    macs = {name: count for name, count in node_macs(from_proto(source)).items() if count}
    # The runtime may call a node by what it gives.
    nodes = {node.output[0]: node.name for node in source.graph.node if node.name and node.output}
    found = times_of(profiled.kernels, profiled.weights, macs, aliases(source, macs), _WARM_UP + runs)
    return tuple(replace(kernel, name=nodes.get(kernel.name, kernel.name)) for kernel in found)


def times_of(
    kernels: Sequence[KernelRun],
    weights: Mapping[str, tuple[int, ...]],
    macs: Mapping[str, int],
    known: Mapping[str, str],
    runs: int,
) -> tuple[KernelTime, ...]:
    """The median over the runs of each kernel's time, the first `_WARM_UP` of them left out.

    A kernel in a loop runs several times a run; it gets their sum, as a mean over all runs. Other arguments: `judge`.
    """
    durations: dict[str, list[float]] = {}
    first: dict[str, KernelRun] = {}
    for kernel in kernels:
        first.setdefault(kernel.name, kernel)
        durations.setdefault(kernel.name, []).append(kernel.us)
    found = []
    for run, taken in zip(judge(list(first.values()), weights, macs, known), durations.values(), strict=True):
        us = statistics.median(taken[_WARM_UP:]) if len(taken) == runs and runs > _WARM_UP else sum(taken) / runs
        found.append(KernelTime(run.source, run.op_type, run.kind, us))
    return tuple(found)
