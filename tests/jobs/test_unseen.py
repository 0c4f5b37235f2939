"""Test models with an input that the calibration samples leave empty."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from edgeq.hardware.target import resolve
from edgeq.jobs.quantize import quantize
from edgeq.run.session import open_session
from tests.backends.build import random
from tests.graphs import proto

BODIES = {
    "state": "u = MatMul (x, w) v = MatMul (c, w) s = Add (u, v) hidden = Tanh (s) y = MatMul (hidden, w)",
    "gate": "u = MatMul (x, w) v = Mul (u, c) s = Add (u, v) y = MatMul (s, w)",
}


@pytest.mark.parametrize("target", ["generic-x86-64", "jetson-orin", "gemmini"])
@pytest.mark.parametrize("kind", BODIES)
def test_outputs_follow_float_when_the_input_is_in_use(kind: str, target: str, tmp_path: Path) -> None:
    """A chip whose layers know only integers has no range for the input and nowhere to go: there edgeq only warns."""
    made = proto(f"g (float[1, 32] x, float[1, 32] c) => (float[1, 32] y) {{ {BODIES[kind]} }}")
    made.graph.initializer.append(numpy_helper.from_array(random(32, 32) / np.float32(5), "w"))
    source, output = tmp_path / "m.onnx", tmp_path / "q.onnx"
    onnx.save(made, source)
    empty = np.zeros((1, 32), np.float32)
    samples = [{"x": random(1, 32, seed=seed), "c": empty} for seed in range(16)]
    result = quantize(source, samples, output, target=target, timed=False, emulate=False)
    assert any("input 'c' is zero in all calibration samples" in warning for warning in result.proof.warnings())
    if resolve(target).profile.integer_only:
        return
    used = [{"x": random(1, 32, seed=seed), "c": np.tanh(random(1, 32, seed=99 - seed))} for seed in range(16, 32)]
    wanted, given = (
        np.stack([session.run(["y"], sample)[0] for sample in used])
        for session in (open_session(source), open_session(output))
    )
    assert np.sum((given - wanted) ** 2) < 0.01 * np.sum(wanted**2)
