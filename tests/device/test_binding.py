"""Test bound sessions on the CPU. They run the same code as on a GPU, with another device's name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from edgeq_device.engines.cuda import BoundSession

from tests import graphs
from tests.graphs import proto


def pair(path: Path) -> tuple[BoundSession, onnxruntime.InferenceSession]:
    plain = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return BoundSession(plain, onnxruntime, "cpu", ["a note"]), plain


@pytest.fixture
def fixed(tmp_path: Path) -> Path:
    """Write a model with two outputs, whose sizes are all known."""
    path = tmp_path / "fixed.onnx"
    body = "g (float[2, 3] x) => (float[2, 3] twice, float[2, 3] minus) { twice = Add(x, x) minus = Neg(x) }"
    path.write_bytes(proto(body).SerializeToString())
    return path


def test_results_are_those_of_a_plain_session(models: dict[str, Path]) -> None:
    bound, plain = pair(models["narrow"])
    random = np.random.default_rng(0)
    for rows in (1, 4, 1):
        x = random.standard_normal((rows, 64), dtype=np.float32)
        np.testing.assert_array_equal(bound.run(None, {"x": x})[0], plain.run(None, {"x": x})[0])
    assert bound.get_providers() == ["CPUExecutionProvider"]
    assert bound.notes == ("a note",)


def test_fixed_outputs_are_not_overwritten_by_the_next_run(fixed: Path) -> None:
    bound, _ = pair(fixed)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    first = bound.run(None, {"x": x})[0]
    bound.run(None, {"x": -x})
    np.testing.assert_array_equal(first, 2 * x)


def test_many_shapes_do_not_fill_the_device(models: dict[str, Path]) -> None:
    bound, plain = pair(models["narrow"])
    for rows in range(1, 12):
        x = np.full((rows, 64), rows, np.float32)
        np.testing.assert_array_equal(bound.run(None, {"x": x})[0], plain.run(None, {"x": x})[0])
    assert len(bound._bindings) == 8


def test_an_output_whose_size_depends_on_the_values(tmp_path: Path) -> None:
    model = graphs.proto("g (float[N,2] x) => (int64[D,K] y, float[N,2] z) { y = NonZero (x) z = Neg (x) }")
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    bound, _ = pair(tmp_path / "m.onnx")
    for row, found in (([0, 1], 1), ([2, 1], 2), ([0, 0], 0)):
        y, z = bound.run(None, {"x": np.array([row], np.float32)})
        assert (y.shape, z.shape) == ((2, found), (1, 2))


def test_outputs_come_in_the_order_asked_for(fixed: Path) -> None:
    bound, _ = pair(fixed)
    x = np.ones((2, 3), np.float32)
    minus, twice = bound.run(["minus", "twice"], {"x": x})
    assert minus[0, 0] == -1
    assert twice[0, 0] == 2


def test_scalars_stay_scalars(tmp_path: Path) -> None:
    model = graphs.proto("g (float[N] x, int64 k) => (int64 y) { y = Identity (k) n = Relu (x) }")
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    bound, _ = pair(tmp_path / "m.onnx")
    (found,) = bound.run(None, {"x": np.zeros(2, np.float32), "k": np.array(7)})
    assert (found.shape, int(found)) == ((), 7)


def test_arrays_that_are_not_contiguous(fixed: Path) -> None:
    bound, _ = pair(fixed)
    x = np.arange(6, dtype=np.float32).reshape(3, 2).T
    np.testing.assert_array_equal(bound.run(["minus"], {"x": x})[0], -x)
