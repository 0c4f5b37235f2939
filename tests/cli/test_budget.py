"""Test models that would run forever or use all memory: the command ends with one line."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from edgeq.errors import BudgetError, ModelError, RuntimeUnavailableError
from tests.cli import process
from tests.graphs import proto

HOSTILE = {
    "endless": (
        """g (float[1,4] x) => (float[1,4] y) <int64 n = {4611686018427387904}, bool go = {1}> {
            m = MatMul(x, w)
            y = Loop(n, go, m) <body = l (int64 i, bool g, float[1,4] a) => (bool h, float[1,4] d)
                { h = Identity(g)  d = Add(a, a) }> }""",
        "seconds=3",
        BudgetError.exit_code,
        "ended after 3 s of processor time without progress",
    ),
    "declared": (
        """g (float[1,4] x) => (float[1,4] y) <int64[1] s = {4000000000}, int64[1] axes = {0}> {
            m = MatMul(x, w)  c = ConstantOfShape<value = float[1] {1.0}>(s)
            r = ReduceSum<keepdims = 0>(c, axes)  y = Add(m, r) }""",
        "memory=3GiB",
        ModelError.exit_code,
        "tensor 'c' has the shape [4000000000], 16000000000 bytes",
    ),
    "huge": (
        """g (float[1,4] x) => (float[1,4] y) <int64[1] s = {4000000000}, int64[1] axes = {0}> {
            m = MatMul(x, w)  c = ConstantOfShape<value = float[1] {1.0}>(s)
            r = ReduceSum<keepdims = 0>(c, axes)  y = Add(m, r) }""",
        "memory=3GiB,sample=20GiB",
        RuntimeUnavailableError.exit_code,
        "Failed to allocate memory",
    ),
}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits are those of Linux")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_model_ends_in_one_line(name: str, tmp_path: Path) -> None:
    body, budget, code, says = HOSTILE[name]
    model = proto(body)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(4, dtype=np.float32), "w"))
    onnx.save(model, tmp_path / "m.onnx")
    np.savez(tmp_path / "x.npz", x=np.ones((2, 1, 4), np.float32))
    ran = process.run(
        *("quantize", "m.onnx", "--data", "x.npz", "-o", "q.onnx", "--no-timing", "-q"),
        cwd=tmp_path,
        env={"EDGEQ_BUDGET": budget},
    )
    assert ran.returncode == code, ran.stderr
    assert says in ran.stderr
    assert (ran.stdout, ran.stderr.count("\n")) == ("", 1)
    assert not (tmp_path / "q.onnx").exists()
