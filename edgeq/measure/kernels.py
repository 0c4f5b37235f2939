"""What each kernel takes, by ONNX Runtime's own profile, under the name of its source node."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from edgeq.graph.query import name_of
from edgeq.measure.node_runs import Kind, aliases, classify
from edgeq.measure.profile import RUNS, timed_profile
from edgeq.model.macs import node_macs
from edgeq.records import Amount, written
from edgeq.session import SessionSettings, open_session


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
        opener: see `edgeq.measure.profile.profile`.

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
