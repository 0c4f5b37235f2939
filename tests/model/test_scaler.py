"""Test that Scaler becomes standard operators with the same results and known shapes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edgeq.model.prepare import prepare_model
from tests.graphs import proto

from .build import rand, run, write


def test_a_layer_behind_a_scaler_has_a_known_shape(tmp_path: Path) -> None:
    weights = {"w": rand(4, 8, seed=1)}
    given = proto(
        "g (float[N, 4] x) => (float[N, 8] y) { [s] a = ai.onnx.ml.Scaler<offset = [1.0, 2.0, 3.0, 4.0], "
        "scale = [0.5, 2.0, 8.0, 1.0]>(x) [m] b = MatMul(a, w) [r] y = Relu(b) }",
        weights,
        imports=', "ai.onnx.ml": 1',
    )
    source = write(tmp_path / "source.onnx", given)
    prepared = prepare_model(source, tmp_path / "work")
    assert "1 Scaler written as a difference and a product" in prepared.notes
    assert not any("unknown shape" in note for note in prepared.notes)
    feeds = {"x": 10 * rand(16, 4)}
    np.testing.assert_allclose(run(prepared.path, feeds)[0], run(source, feeds)[0], rtol=1e-5, atol=1e-5)
