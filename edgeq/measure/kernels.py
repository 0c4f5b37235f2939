"""Find out which of ONNX Runtime's kernels ran, and how long each one took, by a run under its profiler.

The Q/DQ nodes of a file only show which nodes should run on integers. When ONNX Runtime loads the file, its optimiser
decides: it fuses some of these nodes into integer kernels and leaves the rest in float. So edgeq reads the profile of
the optimised graph.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx
from edgeq_device.system.places import scratch_folder

from edgeq.measure.inference import run_feed
from edgeq.run.session import SessionSettings, open_session

RUNS = 20
"""Number of runs that count when kernels are timed, after the warm-up."""
# The first runs allocate memory, so their times do not count.
_WARM_UP = 5
# ONNX Runtime writes several events for a node. Only the one with this ending is its kernel.
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
    # The MACs follow from the largest constant. The others are biases, scales and zero points.
    weights = {
        node.name: max((constants[i] for i in node.input if i in constants), key=math.prod, default=())
        for node in graph.node
    }
    products = (node for node in graph.node if node.op_type == "MatMulNBits")
    levels = {node.name: next((a.i for a in node.attribute if a.name == "accuracy_level"), 0) for node in products}
    expanded = frozenset(name for name, level in levels.items() if level != _INTEGER_LEVEL)
    return KernelProfile(read_kernel_runs(events), weights, expanded)


def time_kernels(
    model: Path,
    settings: SessionSettings,
    feed: Mapping[str, Any],
    *,
    runs: int = RUNS,
    opener: Callable[[Path, SessionSettings], Any] = open_session,
) -> KernelProfile:
    """Return the `profile` with each kernel only once. Its time is the typical one (`summarise_runs`) of `runs` runs
    after a warm-up.
    """
    profiled = profile(model, settings, feed, runs=_WARM_UP + runs, opener=opener)
    return replace(profiled, kernels=summarise_runs(profiled.kernels, _WARM_UP + runs))


def summarise_runs(kernels: Sequence[KernelRun], runs: int) -> tuple[KernelRun, ...]:
    """Return each kernel of `runs` runs once, in execution order, with the median of its times after the warm-up.

    The median is the time of an ordinary run. A mean would include interrupts of the system. The minimum would favour
    kernels whose time varies, such as conversions, whose speed is limited by memory. A kernel in a loop executes
    several times in each run. Its time is the sum of these executions, averaged over all runs.
    """
    kernel_by_name: dict[str, KernelRun] = {}
    times: dict[str, list[float]] = {}
    for kernel in kernels:
        kernel_by_name.setdefault(kernel.name, kernel)
        times.setdefault(kernel.name, []).append(kernel.us)
    # If a kernel ran several times in a run, its times cannot be assigned to the runs.
    once = {name: len(durations) == runs and runs > _WARM_UP for name, durations in times.items()}
    us = {
        n: statistics.median(durations[_WARM_UP:]) if once[n] else sum(durations) / runs
        for n, durations in times.items()
    }
    return tuple(replace(kernel, us=us[name]) for name, kernel in kernel_by_name.items())


def read_kernel_runs(events: Iterable[Mapping[str, Any]]) -> tuple[KernelRun, ...]:
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
