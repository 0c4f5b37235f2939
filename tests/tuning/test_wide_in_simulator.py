"""Test a tensor that needs 16 bits, from the search to the simulator's confirmation, if the simulator is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import pytest

import edgeq
from edgeq.measure.task import make_task
from edgeq.run.session import open_session
from edgeq.tuning.goal import Goal
from tests.backends.qnn.test_qnn import simulator
from tests.graphs import proto

NET = """g (float[1,8] x, float[64,8] a, float[17,64] w, float[64,17] v, float[6,64] b) => (float[1,6] y) {
    [before] p = Gemm<transB=1>(x, a)
    [relu] q = Relu(p)
    [first] h = Gemm<transB=1>(q, w)
    [clip] r = Relu(h)
    [last] s = Gemm<transB=1>(r, v)
    [second] t = Relu(s)
    [behind] y = Gemm<transB=1>(t, b)
}"""


def network(path: Path) -> Path:
    """Write four layers with a channel in the middle that is 300 times as large as the others and has no weight."""
    random, made = np.random.default_rng(0), proto(NET)
    weights = {
        "a": random.normal(size=(64, 8)),
        "w": random.normal(size=(17, 64)) * np.where(np.arange(17) < 16, 1, 300)[:, None] / 8,
        "v": random.normal(size=(64, 17)) * (np.arange(17) < 16) / 4,
        "b": random.normal(size=(6, 64)) / 8,
    }
    for name, array in weights.items():
        made.graph.input.remove(next(value for value in made.graph.input if value.name == name))
        made.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    onnx.save(made, path)
    return path


@simulator
def test_gives_16_bits_to_tensors_that_need_them_in_the_simulator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor that 8 bits cannot represent gets 16 bits, and the simulator confirms this.

    The test disables the methods that would come first: ranges that leave the channel out, and recoveries.
    """
    monkeypatch.setattr("edgeq.tuning.build.method_candidates", lambda *arguments: ())
    monkeypatch.setattr("edgeq.tuning.local.LocalEvaluator.recovery_groups", lambda self: ())
    model, random = network(tmp_path / "net.onnx"), np.random.default_rng(1)
    inputs = [random.normal(size=(1, 8)).astype(np.float32) for _ in range(60)]
    session = open_session(model)
    labelled = [({"x": x}, int(session.run(None, {"x": x})[0].argmax())) for x in inputs]
    goal = Goal(max_drop=0.02)
    how: dict[str, Any] = {
        "val": labelled,
        "target": "hexagon-v73",
        "task": make_task("classification"),
        "goal": goal,
    }
    tuned = edgeq.tune(model, [{"x": x} for x in inputs], tmp_path / "out", selftest=1, **how)
    chosen = tuned.record["chosen"]
    assert {"first", "clip"} & set(chosen["wide"])
    assert chosen["simulator"]["drop"] <= 0.02
    assert 0 < chosen["wide_share"] < 1
    narrow = tuned.outcome.trials[0]
    assert narrow.assessment is not None
    assert narrow.assessment.drop > 0.2
