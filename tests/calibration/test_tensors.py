from __future__ import annotations

from pathlib import Path

import numpy as np

from edgeq.calibration.plan import DerivedTensor, plan_statistics, quantizable_tensors
from edgeq.model.graph import GraphIndex
from edgeq.model.load import read_model

from .models import small_cnn, write


def test_float_inputs_activations_and_outputs_are_recorded(tmp_path: Path) -> None:
    model = read_model(small_cnn(tmp_path / "m.onnx"))
    names = ("x", "conv1", "clip1", "conv2", "sum", "relu", "both", "pool", "flat", "y")
    assert quantizable_tensors(model) == names


def test_weights_constants_integers_and_folded_outputs_are_not(tmp_path: Path) -> None:
    weights = {
        "w": np.ones((4, 3, 1, 1), np.float32),
        **{name: np.ones(4, np.float32) for name in ("scale", "bias", "mean", "variance")},
        "shape": np.int64([1, -1]),
    }
    body = """g (float[1, 3, 4, 4] x) => (float[1, 1, 4, 4] y) {
        conv = Conv(x, w)
        norm = BatchNormalization(conv, scale, bias, mean, variance)
        two = Constant<value_float = 2.0>()
        root = Sqrt(two)
        scaled = Mul(norm, root)
        size = Shape(scaled)
        index = ArgMax<axis = 1>(scaled)
        y = Cast<to = 1>(index)
    }"""
    path = write(tmp_path / "m.onnx", body, weights)
    model = read_model(path)
    assert quantizable_tensors(model) == ("x", "norm", "scaled", "y")
    assert {"two", "root", "w"} <= GraphIndex(model).computed_constants


def test_a_convolution_that_something_else_reads_too_is_recorded(tmp_path: Path) -> None:
    weights = {"w": np.ones((4, 3, 1, 1), np.float32), **{n: np.ones(4, np.float32) for n in "abcd"}}
    body = """g (float[1, 3, 4, 4] x) => (float[1, 4, 4, 4] y) {
        conv = Conv(x, w)
        norm = BatchNormalization(conv, a, b, c, d)
        y = Add(conv, norm)
    }"""
    path = write(tmp_path / "m.onnx", body, weights)
    assert "conv" in quantizable_tensors(read_model(path))


def test_derived_tensors_are_not_fetched(tmp_path: Path) -> None:
    model = read_model(small_cnn(tmp_path / "m.onnx"))
    steps = plan_statistics(model, quantizable_tensors(model))
    assert steps.inputs == ("x",)
    assert steps.fetched == ("conv1", "conv2", "sum", "pool", "y")
    assert steps.derived == (
        DerivedTensor("clip1", "clip", ("conv1",), 0.0, 6.0),
        DerivedTensor("relu", "clip", ("sum",), 0.0),
        DerivedTensor("both", "union", ("relu", "clip1")),
        DerivedTensor("flat", "union", ("pool",)),
    )


def test_a_tensor_is_fetched_when_its_source_is_not_wanted_or_it_is_needed_whole(tmp_path: Path) -> None:
    model = read_model(small_cnn(tmp_path / "m.onnx"))
    assert plan_statistics(model, ["clip1", "relu"]).fetched == ("clip1", "relu")
    assert plan_statistics(model, ["conv1", "clip1"], underived=["clip1"]).fetched == ("conv1", "clip1")


def test_a_clip_whose_bounds_are_computed_is_fetched(tmp_path: Path) -> None:
    body = "g (float[4] x) => (float[4] y) { a = Abs(x) top = ReduceMax<keepdims = 0>(x) y = Clip(a, , top) }"
    path = write(tmp_path / "m.onnx", body)
    assert plan_statistics(read_model(path), ["a", "y"]).fetched == ("a", "y")
