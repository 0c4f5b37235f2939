"""Test `edgeq.tuning.recover.methods.nonlinear_ranges`: which tensors get another range, and that outputs improve."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import numpy_helper

from edgeq.tuning.recover.methods.nonlinear_ranges import NonlinearRanges
from edgeq.tuning.recover.run import Recoverer
from edgeq.util.display import SILENT
from tests.tuning.recover.nets import SCHEME, Net, few, job_of, noise_db, target

pytestmark = pytest.mark.usefixtures("exact_kernels")


def _wide_silu() -> Net:
    """Return a network with a SiLU, half of whose inputs are far below zero."""
    net = Net(3)
    net.conv("x", "c", 3, 8, 3, channels=3.0)
    net.weights[1].CopyFrom(numpy_helper.from_array(np.array([0, -80] * 4, np.float32), "c_b"))
    net.silu("c_out", "y")
    net.conv("y", "last", 8, 4, 1)
    return net


def test_outputs_gain_and_only_tensors_before_functions_change(tmp_path: Path) -> None:
    model = _wide_silu().model({"x": [1, 3, 10, 10]}, ["last_out"])
    samples = few(8, [1, 3, 10, 10])
    recoverer = Recoverer(job_of(model, tmp_path, samples), target(), tmp_path)
    plain = recoverer.state(SCHEME, [], tmp_path / "plain.onnx")
    better = recoverer.state(SCHEME, ["nonlinear-ranges"], tmp_path / "better.onnx")
    changed = {name for name in plain.ranges if plain.ranges[name] != better.ranges[name]}
    assert changed == {"c_out"}
    assert better.ranges["c_out"].low > 0.5 * plain.ranges["c_out"].low
    assert plain.artifact is not None
    assert better.artifact is not None
    held_out = few(8, [1, 3, 10, 10], seed=2)
    assert noise_db(model, better.artifact.model, held_out) > noise_db(model, plain.artifact.model, held_out) + 3


def test_a_tensor_that_others_read_too_keeps_its_range(tmp_path: Path) -> None:
    net = _wide_silu()
    net.node("Neg", ["c_out"], "n")
    job = job_of(net.model({"x": [1, 3, 10, 10]}, ["last_out", "n"]), tmp_path, few(4, [1, 3, 10, 10]))
    state = Recoverer(job, target(), tmp_path).state(SCHEME, [], tmp_path / "plain.onnx")
    found = NonlinearRanges().apply(state, few(1, [1]), tmp_path, SILENT)
    # Neg works on each element by itself. Both readers of the tensor count.
    assert found.ranges["c_out"] != state.ranges["c_out"]
    net.node("Softmax", ["c_out"], "s", axis=1)
    (tmp_path / "other").mkdir()
    job = job_of(net.model({"x": [1, 3, 10, 10]}, ["last_out", "s"]), tmp_path / "other", few(4, [1, 3, 10, 10]))
    state = Recoverer(job, target(), tmp_path).state(SCHEME, [], tmp_path / "plain.onnx")
    found = NonlinearRanges().apply(state, few(1, [1]), tmp_path, SILENT)
    assert found.ranges == state.ranges
    assert "no activation function" in found.notes[-1]
