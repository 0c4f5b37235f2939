"""Weights that models have in common become separate files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx

from edgeq.bundle.write import share_weights
from edgeq.model.load import model_files
from edgeq.run.session import open_session
from tests.graphs import proto


def save(path: Path, *arrays: np.ndarray) -> Path:
    weights = {f"w{i}": array for i, array in enumerate(arrays)}
    made = [*(f"t{i}" for i in range(1, len(arrays))), "y"]
    nodes = (f"{y} = MatMul({x}, {w})" for y, x, w in zip(made, ["x", *made], weights, strict=False))
    model = proto(f"test (float[1, 32] x) => (float[1, 32] y) {{ {' '.join(nodes)} }}", weights)
    path.write_bytes(model.SerializeToString())
    return path


def square(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(32, 32)).astype(np.float32)


def test_equal_weights_share_one_file_named_by_its_content(tmp_path: Path) -> None:
    a, b = save(tmp_path / "a.onnx", square(0), square(1)), save(tmp_path / "b.onnx", square(0), square(2))
    placed = share_weights({"a": a, "b": b, "again": a}, tmp_path / "shared")
    assert placed["a"] == placed["again"]
    external = {name: {f.name: f.read_bytes() for f in model_files(path)[1:]} for name, path in placed.items()}
    assert external["a"] == external["b"]
    assert len(external["a"]) == 1
    x = {"x": np.ones((1, 32), np.float32)}
    for name, before in (("a", a), ("b", b)):
        np.testing.assert_array_equal(open_session(placed[name]).run(None, x)[0], open_session(before).run(None, x)[0])
        onnx.checker.check_model(str(placed[name]))


def test_a_tensor_twice_in_one_model_is_one_file(tmp_path: Path) -> None:
    a, b = save(tmp_path / "a.onnx", square(0), square(0)), save(tmp_path / "b.onnx", square(0))
    placed = share_weights({"a": a, "b": b}, tmp_path / "shared")
    assert len(model_files(placed["a"])) == 2


def test_nothing_in_common_and_one_model_alone_stay_as_they_are(tmp_path: Path) -> None:
    a, b = save(tmp_path / "a.onnx", square(0)), save(tmp_path / "b.onnx", square(1))
    assert share_weights({"a": a, "b": b}, tmp_path / "shared") == {"a": a, "b": b}
    assert share_weights({"a": a, "b": a}, tmp_path / "shared") == {"a": a, "b": a}
