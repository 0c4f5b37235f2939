"""`edgeq.tune.recover.gates`: what is a gate and what is none; split, a network computes what it did."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from edgeq.tune.recover.gates import VALUE, Gate, find_gates, split_all
from tests.tune.recover.graphs import nets
from tests.tune.recover.nets import Net, run, two_gates


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
    split_all(model, [(gate, _factor(gate, random)) for gate in gates])
    onnx.checker.check_model(model)
    for a, b in zip(before, run(model, feed), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * max(1.0, float(np.abs(a).max())))


def test_split_networks_have_both_forms() -> None:
    model = two_gates()
    gates = find_gates(model)
    assert [gate.layer.name for gate in gates] == ["first", "second", "depthwise"]
    assert [[reader.name for reader in gate.readers] for gate in gates] == [["second"], ["depthwise"], ["last"]]
    split_all(model, [(gate, np.full(8, 2.0)) for gate in reversed(gates)])
    nodes = {node.name: node for node in model.graph.node}
    assert nodes["first" + VALUE].input[0] == nodes["first"].input[0]
    assert "first_out" + VALUE in nodes["first_act_Mul"].input
    assert nodes["first_act_gate_Sigmoid"].input[0] == "first_out"
    assert {v.name for v in model.graph.value_info} >= {"first_out" + VALUE}


def _gated(*more: tuple[str, list[str], str], outputs: tuple[str, ...] = ("z",), bias: bool = True) -> onnx.ModelProto:
    net = Net()
    net.conv("x", "c", 2, 2, 1, bias=bias)
    net.silu("c_out", "y")
    net.conv("y", "reader", 2, 2, 1)
    for op_type, inputs, output in more:
        net.node(op_type, inputs, output)
    net.node("Relu", ["reader_out"], "z")
    return net.model({"x": [1, 2, 3, 3]}, list(outputs))


def test_what_else_reads_the_product_keeps_it_from_being_scaled() -> None:
    assert [bool(g.readers) for g in find_gates(_gated())] == [True]
    assert [bool(g.readers) for g in find_gates(_gated(outputs=("z", "y")))] == [False]
    assert [bool(g.readers) for g in find_gates(_gated(("Neg", ["y"], "n"), outputs=("z", "n")))] == [False]


@pytest.mark.parametrize("tensor", ["c_out", "y_gate"])
def test_what_else_reads_the_inside_makes_it_no_gate(tensor: str) -> None:
    assert find_gates(_gated(outputs=("z", tensor))) == ()
    assert find_gates(_gated(("Neg", [tensor], "n"), outputs=("z", "n"))) == ()


def test_a_body_that_reads_the_inside_makes_it_no_gate() -> None:
    model = _gated()
    body = helper.make_graph(
        [helper.make_node("Neg", ["c_out"], ["n"])], "b", [], [helper.make_tensor_value_info("n", 1, None)]
    )
    model.graph.node.append(helper.make_node("If", ["c"], ["out"], name="if", then_branch=body, else_branch=body))
    assert find_gates(model) == ()


def test_shared_weights_make_it_no_gate() -> None:
    model = _gated()
    next(node for node in model.graph.node if node.name == "reader").input[1] = "c_w"
    assert find_gates(model) == ()


def test_a_layer_without_bias_is_split_too() -> None:
    model = _gated(bias=False)
    (gate,) = find_gates(model)
    split_all(model, [(gate, np.ones(2))])
    assert len(next(node for node in model.graph.node if node.name == "c" + VALUE).input) == 2


def test_products_that_are_no_gates() -> None:
    net = Net()
    net.conv("x", "a", 2, 2, 1)
    net.conv("x", "b", 2, 2, 1)
    net.node("Sigmoid", ["b_out"], "g")
    net.node("Mul", ["a_out", "g"], "gated by another")
    net.node("Mul", ["gated by another", "gated by another"], "squared")
    assert find_gates(net.model({"x": [1, 2, 3, 3]}, ["squared"])) == ()
