"""Test `edgeq.tuning.recover.layers`: a layer's weight times its patches gives the layer's output."""

from __future__ import annotations

import numpy as np
import pytest

from edgeq.tuning.recover.layers import Weights, find_layers
from tests.tuning.recover.nets import Net, run

CONVS = {
    "plain": {"kernel": 3},
    "grouped": {"kernel": 3, "groups": 2},
    "depthwise": {"kernel": 3, "groups": 4},
    "strided": {"kernel": 3, "strides": [2, 1], "pads": [0, 1, 1, 0]},
    "dilated": {"kernel": 3, "dilations": [2, 1], "pads": [2, 1, 2, 1]},
    "same upper": {"kernel": 2, "strides": [2, 2], "auto_pad": "SAME_UPPER", "pads": None},
    "same lower": {"kernel": 2, "strides": [2, 2], "auto_pad": "SAME_LOWER", "pads": None},
    "valid": {"kernel": 3, "auto_pad": "VALID", "pads": None},
}


@pytest.mark.parametrize("kind", CONVS)
def test_patches_times_rows_is_the_convolution(kind: str) -> None:
    net = Net()
    options = dict(CONVS[kind])
    if options.get("pads", 0) is None:
        options.pop("pads")
        net.conv("x", "c", 4, 8, bias=False, **options)  # type: ignore[arg-type]
        del net.nodes[-1].attribute[[a.name for a in net.nodes[-1].attribute].index("pads")]
    else:
        net.conv("x", "c", 4, 8, bias=False, **options)  # type: ignore[arg-type]
    model = net.model({"x": ["N", 4, 9, 7]}, ["c_out"])
    x = np.random.default_rng(0).normal(size=(2, 4, 9, 7)).astype(np.float32)
    (layer,) = find_layers(model)
    patches = layer.patches(x, 10**6, np.random.default_rng(0))
    made = patches @ layer.rows(Weights(model).array("c_w")).transpose(0, 2, 1)
    (wanted,) = run(model, {"x": x})
    expected = wanted.transpose(0, 2, 3, 1).reshape(-1, layer.groups, 8 // layer.groups).transpose(1, 0, 2)
    np.testing.assert_allclose(made, expected, atol=1e-4)


def test_few_patches_are_drawn_from_all() -> None:
    net = Net()
    net.conv("x", "c", 2, 2)
    (layer,) = find_layers(net.model({"x": [1, 2, 8, 8]}, ["c_out"]))
    x = np.random.default_rng(0).normal(size=(1, 2, 8, 8)).astype(np.float32)
    every = layer.patches(x, 64, np.random.default_rng(0))[0]
    some = layer.patches(x, 10, np.random.default_rng(0))[0]
    assert some.shape == (10, 18)
    assert len({tuple(p) for p in some.tolist()}) == 10
    assert {tuple(p) for p in some.tolist()} <= {tuple(p) for p in every.tolist()}


@pytest.mark.parametrize(("op_type", "transposed"), [("Gemm", False), ("Gemm", True), ("MatMul", True)])
def test_matrix_products(op_type: str, transposed: bool) -> None:
    net = Net()
    w = net.random.normal(size=(5, 3) if transposed else (3, 5))
    extra = {} if op_type == "MatMul" else {"transB": int(not transposed)}
    net.node(op_type, ["x", net.constant("w", w)], "y", **extra)
    model = net.model({"x": [4, 5]}, ["y"])
    x = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)
    (layer,) = find_layers(model)
    rows = layer.rows(w.astype(np.float32))
    assert (layer.outputs, layer.taps, layer.transposed) == (3, 5, transposed)
    np.testing.assert_allclose(
        layer.patches(x, 99, np.random.default_rng(0))[0] @ rows[0].T, run(model, {"x": x})[0], atol=1e-5
    )
    np.testing.assert_array_equal(layer.unrows(rows), w.astype(np.float32))


def test_layers_that_are_none() -> None:
    net = Net()
    net.node("MatMul", ["x", "x"], "both")
    net.node("Gemm", ["x", net.constant("w", np.eye(4))], "scaled", alpha=2.0)
    net.node("MatMul", ["x", net.constant("v", np.ones((2, 4, 4)))], "batched")
    assert find_layers(net.model({"x": [4, 4]}, ["both", "scaled", "batched"])) == ()


def test_unrows_inverts_rows_of_grouped_convolutions() -> None:
    net = Net()
    net.conv("x", "c", 4, 8, groups=2)
    model = net.model({"x": [1, 4, 5, 5]}, ["c_out"])
    weight = Weights(model).array("c_w")
    (layer,) = find_layers(model)
    np.testing.assert_array_equal(layer.unrows(layer.rows(weight)), weight)
