"""Time each kernel of a model, to compare its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from edgeq.measure.kernels import RUNS, time_kernels
from edgeq.measure.node_runs import Kind, classify, map_kernel_names
from edgeq.model.graph import (
    name_of,
)
from edgeq.model.macs import node_macs
from edgeq.run.session import SessionSettings, open_session
from edgeq.util.records import Amount, write_as


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
        opener: see `edgeq.measure.kernels.profile`.

    Raises:
        RuntimeUnavailableError: onnxruntime is missing, or refuses the model.
    """
    profiled = time_kernels(model, settings, feed, runs=runs, opener=opener)
    macs = {name: count for name, count in node_macs(source).items() if count}
    # The runtime may name a node after its output.
    nodes = {name_of(node.outputs[0]): node.name for node in source.graph if node.name and node.outputs}
    node_runs = classify(profiled.kernels, profiled.weights, macs, map_kernel_names(source, macs))
    return tuple(
        KernelTime(nodes.get(run.source, run.source), run.op_type, run.kind, kernel.us)
        # The profile has each kernel once, so `classify` returns one run for each.
        for run, kernel in zip(node_runs, profiled.kernels, strict=True)
    )
