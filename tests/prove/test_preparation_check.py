"""Test that edgeq finds a preparation that changes what a model computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from edgeq.prove.opening import check_preparation
from tests.backends.build import Bench, bench
from tests.graphs import proto

BODY = "g (float[1, 8, 8, 8] x) => (float[1, 8, 8, 8] y) {{ a = Relu (x) y = {} }}"


def prepared_as(folder: Path, node: str) -> Bench:
    return bench(folder, proto(BODY.format(node)))


@pytest.mark.parametrize(("node", "noted"), [("Neg (a)", 0), ("Abs (a)", 1)])
def test_another_result_is_noted(tmp_path: Path, node: str, noted: int) -> None:
    made = prepared_as(tmp_path, "Neg (a)")
    onnx.save(proto(BODY.format(node)), made.prepared.source)
    found = check_preparation(made.prepared, made.samples)
    new = found.notes[len(made.prepared.notes) :]
    assert ["preparation changed the model's outputs" in note for note in new] == [True] * noted


def test_keeps_preparations_that_cannot_be_compared(tmp_path: Path) -> None:
    made = prepared_as(tmp_path, "Neg (a)")
    made.prepared.source.write_bytes(b"no model")
    assert check_preparation(made.prepared, made.samples) is made.prepared


@pytest.mark.parametrize(("node", "noted"), [("Neg (a)", 0), ("Abs (a)", 1)])
def test_random_numbers_do_not_hide_another_result(tmp_path: Path, node: str, noted: int) -> None:
    nodes = "a = Neg (x) r = RandomNormalLike (a) b = %s y = Add (r, b)"
    body = f"g (float[1, 8, 8, 8] x) => (float[1, 8, 8, 8] y) {{ {nodes} }}"
    made = bench(tmp_path, proto(body % "Neg (a)"))
    onnx.save(proto(body % node), made.prepared.source)
    found = check_preparation(made.prepared, made.samples)
    new = found.notes[len(made.prepared.notes) :]
    assert ["preparation changed the model's outputs" in note for note in new] == [True] * noted


def test_a_dropout_that_the_preparation_removes_is_left_alone(tmp_path: Path) -> None:
    """onnxruntime removes a Dropout in training mode, but not without optimisation."""
    nodes = "d = Dropout (a, ratio, training) y = Neg (d)"
    body = "g (float[n, 8, 8, 8] x) => (float[n, 8, 8, 8] y) <float ratio = {0.5}, bool training = {1}>"
    made = bench(tmp_path, proto(f"{body} {{ a = Relu (x) {nodes} }}"))
    assert "Dropout" not in {node.op_type for node in made.prepared.model.graph}
    assert check_preparation(made.prepared, made.samples) is made.prepared


def test_ignores_differences_from_rounding_alone(tmp_path: Path) -> None:
    """Differences from rounding alone are ignored: the sine of huge values differs at each level of optimisation."""
    body = "g (float[1, 8, 8, 8] x) => (float[1, 8, 8, 8] y) <float[8, 8, 3, 3] w, float b = {{1e8}}> {{ {} }}"
    weights = np.random.default_rng(0).normal(size=(8, 8, 3, 3)).astype(np.float32) / 100

    def with_weights(nodes: str) -> onnx.ModelProto:
        model = proto(body.format(nodes))
        model.graph.initializer.append(numpy_helper.from_array(weights, "w"))
        return model

    made = bench(tmp_path, with_weights("a = Conv <pads = [1, 1, 1, 1]> (x, w) c = Mul (a, b) y = Sin (c)"))
    onnx.save(with_weights("c = Mul (x, b) a = Conv <pads = [1, 1, 1, 1]> (c, w) y = Sin (a)"), made.prepared.source)
    assert check_preparation(made.prepared, made.samples) is made.prepared
    onnx.save(proto(BODY.format("Abs (a)")), made.prepared.source)
    assert check_preparation(made.prepared, made.samples).notes[-1].startswith("the preparation changed")
