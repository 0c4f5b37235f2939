"""Test `recover.methods.split_gates`: which nodes are gates, and that a split network computes the same."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeq.model.convert import to_proto
from edgeq.model.graph import GraphIndex
from edgeq.tuning.recover.methods.split_gates import VALUE, Gate, find_gates, split_gates
from tests.graphs import model as text_model
from tests.tuning.recover.graphs import nets
from tests.tuning.recover.nets import Net, run, two_gates


def _factor(gate: Gate, random: np.random.Generator) -> np.ndarray:
    return np.exp(random.normal(0, 1, gate.layer.outputs)) if gate.readers else np.ones(gate.layer.outputs)


SILU = nets(chain=("layer", "silu", "layer"))
GELU = nets(chain=("layer", "silu", "layer", "gelu", "layer"))


@given(st.one_of(SILU, GELU), st.integers(0, 10**6))
@settings(max_examples=100)
def test_any_network_computes_what_it_did(drawn: tuple, seed: int) -> None:
    model, feed = drawn
    gates = find_gates(model)
    before = run(model, feed)
    random = np.random.default_rng(seed)
    split_gates(model, [(gate, _factor(gate, random)) for gate in gates])
    onnx.checker.check_model(to_proto(model))
    for a, b in zip(before, run(model, feed), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * max(1.0, float(np.abs(a).max())))


def test_split_networks_have_both_forms() -> None:
    model = two_gates()
    gates = find_gates(model)
    assert [gate.layer.name for gate in gates] == ["first", "second", "depthwise"]
    assert [[reader.name for reader in gate.readers] for gate in gates] == [["second"], ["depthwise"], ["last"]]
    x = {"x": np.random.default_rng(0).normal(size=(1, 3, 12, 12)).astype(np.float32)}
    before = run(model, x)[0]
    # The order must not matter: a copy must be of the layer that an earlier gate has scaled.
    split_gates(model, [(gate, np.geomspace(0.1, 10, 8)) for gate in reversed(gates)])
    np.testing.assert_allclose(run(model, x)[0], before, rtol=1e-3, atol=1e-4)
    index = GraphIndex(model)
    assert index.nodes["first" + VALUE].inputs[0] is index.nodes["first"].inputs[0]
    assert index.values["first_out" + VALUE] in index.nodes["first_act_Mul"].inputs
    assert index.nodes["first_act_gate_Sigmoid"].inputs[0] is index.values["first_out"]
    assert index.values["first_out" + VALUE].shape == index.values["first_out"].shape


def _gated(*more: tuple[str, list[str], str], outputs: tuple[str, ...] = ("z",), bias: bool = True) -> ir.Model:
    net = Net()
    net.conv("x", "c", 2, 2, 1, bias=bias)
    net.silu("c_out", "y")
    net.conv("y", "reader", 2, 2, 1)
    for op_type, inputs, output in more:
        net.node(op_type, inputs, output)
    net.node("Relu", ["reader_out"], "z")
    return net.model({"x": [1, 2, 3, 3]}, list(outputs))


def test_products_with_other_readers_are_not_scaled() -> None:
    assert [bool(g.readers) for g in find_gates(_gated())] == [True]
    assert [bool(g.readers) for g in find_gates(_gated(outputs=("z", "y")))] == [False]
    assert [bool(g.readers) for g in find_gates(_gated(("Neg", ["y"], "n"), outputs=("z", "n")))] == [False]


@pytest.mark.parametrize("tensor", ["c_out", "y_gate"])
def test_products_with_inner_readers_are_not_gates(tensor: str) -> None:
    assert find_gates(_gated(outputs=("z", tensor))) == ()
    assert find_gates(_gated(("Neg", [tensor], "n"), outputs=("z", "n"))) == ()


def test_a_body_that_reads_the_inside_makes_it_no_gate() -> None:
    text = "net (float[1,2,3,3] x, bool c) => (float[1,2,3,3] y, float[1,2,3,3] z) <float[2,2,1,1] w = {1, 2, 3, 4}> { "
    text += "[conv] t = Conv (x, w) g = Sigmoid (t) y = Mul (t, g) z = If (c) <then_branch = one () => (float[1,2,3,3] "
    text += "a) { a = Neg (READ) }, else_branch = two () => (float[1,2,3,3] b) { b = Neg (x) }> }"
    assert [gate.layer.name for gate in find_gates(text_model(text.replace("READ", "x")))] == ["conv"]
    assert find_gates(text_model(text.replace("READ", "t"))) == ()


def test_shared_weights_make_it_no_gate() -> None:
    model = _gated()
    GraphIndex(model).nodes["reader"].replace_input_with(1, model.graph.initializers["c_w"])
    assert find_gates(model) == ()


def test_a_layer_without_bias_is_split_too() -> None:
    model = _gated(bias=False)
    (gate,) = find_gates(model)
    split_gates(model, [(gate, np.ones(2))])
    assert len(GraphIndex(model).nodes["c" + VALUE].inputs) == 2


def test_products_that_are_no_gates() -> None:
    net = Net()
    net.conv("x", "a", 2, 2, 1)
    net.conv("x", "b", 2, 2, 1)
    net.node("Sigmoid", ["b_out"], "g")
    net.node("Mul", ["a_out", "g"], "gated by another")
    net.node("Mul", ["gated by another", "gated by another"], "squared")
    assert find_gates(net.model({"x": [1, 2, 3, 3]}, ["squared"])) == ()


def test_a_product_along_another_axis_is_not_scaled() -> None:
    net = Net()
    net.conv("x", "c", 2, 4, 1)
    net.silu("c_out", "y")
    net.node("MatMul", ["y", net.constant("w", net.random.normal(size=(4, 4)))], "z")
    (gate,) = find_gates(net.model({"x": [1, 2, 4, 4]}, ["z"]))
    assert gate.readers == ()
