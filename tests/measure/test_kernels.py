"""Test kernel times: they come from the profile, have the names of source nodes, and leave the warm-up out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeq import demo
from edgeq.measure.kernel_times import kernel_times
from edgeq.measure.kernels import read_kernel_runs, summarise_runs
from edgeq.model.load import read_model
from edgeq.run.session import SessionSettings
from edgeq.util.records import plain


def event(name: str, op: str, microseconds: float, dtype: str = "float") -> dict[str, Any]:
    shapes = [{dtype: [1, 4]}]
    arguments = {"op_name": op, "input_type_shape": shapes, "output_type_shape": shapes}
    return {"cat": "Node", "name": f"{name}_kernel_time", "dur": microseconds, "args": arguments}


def test_the_median_after_the_warm_up() -> None:
    durations = [900, 800, 700, 600, 500, 10, 20, 30]
    events = [event("relu", "Relu", d) for d in durations] + [{"cat": "Session", "name": "model_run", "dur": 9}]
    (kernel,) = summarise_runs(read_kernel_runs(events), runs=8)
    assert (kernel.name, kernel.op_type, kernel.us) == ("relu", "Relu", 20)


def test_a_kernel_in_a_loop_gets_its_sum() -> None:
    events = [event("add", "Add", 5) for _ in range(24)]
    (kernel,) = summarise_runs(read_kernel_runs(events), runs=8)
    assert kernel.us == pytest.approx(15)


def test_order_is_that_of_execution() -> None:
    events = [event(name, "Relu", 1) for _ in range(6) for name in ("b", "a")]
    assert [k.name for k in summarise_runs(read_kernel_runs(events), runs=6)] == ["b", "a"]


def test_a_real_model() -> None:
    source = read_model(Path(demo.MODEL))
    (graph_input,) = source.graph.inputs
    feed = {graph_input.name: np.zeros([d if isinstance(d, int) else 1 for d in graph_input.shape], np.float32)}
    times = kernel_times(Path(demo.MODEL), SessionSettings(intra_op_threads=1), feed, source, runs=3)
    nodes = {node.name for node in source.graph}
    convolutions = [k for k in times if "Conv" in k.op_type]
    assert convolutions
    assert {k.name for k in convolutions} <= nodes
    assert all(k.us >= 0 for k in times)
    assert plain(times[0]).keys() == {"name", "op_type", "kind", "us"}
