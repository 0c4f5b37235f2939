"""ONNX Runtime's own profile of a model: every kernel that ran, what it took, and of what types and shapes."""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx

from edgeq.measure.inference import run_feed
from edgeq.session import SessionSettings, open_session

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
