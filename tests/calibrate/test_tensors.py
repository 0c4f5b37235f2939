from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper

from edgeq.calibrate.tensors import Derived, plan, quantizable_tensors
from edgeq.graph.index import GraphIndex
from edgeq.model.load import read_model

from .models import small_cnn, value, write


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
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["conv"]),
        helper.make_node("BatchNormalization", ["conv", "scale", "bias", "mean", "variance"], ["norm"]),
        helper.make_node("Constant", [], ["two"], value_float=2.0),
        helper.make_node("Sqrt", ["two"], ["root"]),
        helper.make_node("Mul", ["norm", "root"], ["scaled"]),
        helper.make_node("Shape", ["scaled"], ["size"]),
        helper.make_node("ArgMax", ["scaled"], ["index"], axis=1),
        helper.make_node("Cast", ["index"], ["y"], to=TensorProto.FLOAT),
    ]
    path = write(tmp_path / "m.onnx", nodes, [value("x", [1, 3, 4, 4])], [value("y", [1, 1, 4, 4])], weights)
    model = read_model(path)
    assert quantizable_tensors(model) == ("x", "norm", "scaled", "y")
    assert {"two", "root", "w"} <= GraphIndex(model).computed_constants


def test_a_convolution_that_something_else_reads_too_is_recorded(tmp_path: Path) -> None:
    weights = {"w": np.ones((4, 3, 1, 1), np.float32), **{n: np.ones(4, np.float32) for n in "abcd"}}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["conv"]),
        helper.make_node("BatchNormalization", ["conv", *"abcd"], ["norm"]),
        helper.make_node("Add", ["conv", "norm"], ["y"]),
    ]
    path = write(tmp_path / "m.onnx", nodes, [value("x", [1, 3, 4, 4])], [value("y", [1, 4, 4, 4])], weights)
    assert "conv" in quantizable_tensors(read_model(path))


def test_what_follows_from_others_is_not_fetched(tmp_path: Path) -> None:
    model = read_model(small_cnn(tmp_path / "m.onnx"))
    steps = plan(model, quantizable_tensors(model))
    assert steps.inputs == ("x",)
    assert steps.fetched == ("conv1", "conv2", "sum", "pool", "y")
    assert steps.derived == (
        Derived("clip1", "clip", ("conv1",), 0.0, 6.0),
        Derived("relu", "clip", ("sum",), 0.0),
        Derived("both", "union", ("relu", "clip1")),
        Derived("flat", "union", ("pool",)),
    )


def test_a_tensor_is_fetched_when_its_source_is_not_wanted_or_it_is_needed_whole(tmp_path: Path) -> None:
    model = read_model(small_cnn(tmp_path / "m.onnx"))
    assert plan(model, ["clip1", "relu"]).fetched == ("clip1", "relu")
    assert plan(model, ["conv1", "clip1"], whole=["clip1"]).fetched == ("conv1", "clip1")


def test_a_clip_whose_bounds_are_computed_is_fetched(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Abs", ["x"], ["a"]),
        helper.make_node("ReduceMax", ["x"], ["top"], keepdims=0),
        helper.make_node("Clip", ["a", "", "top"], ["y"]),
    ]
    path = write(tmp_path / "m.onnx", nodes, [value("x", [4])], [value("y", [4])])
    assert plan(read_model(path), ["a", "y"]).fetched == ("a", "y")
