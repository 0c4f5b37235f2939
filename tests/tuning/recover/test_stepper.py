"""Test `edgeq.tuning.recover.stepper`: a model run piece by piece gives the same outputs as at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeq.model.edit import set_constant
from edgeq.model.graph import GraphIndex, name_of
from edgeq.tuning.recover.stepper import Stepper
from tests.graphs import model as text_model
from tests.tuning.recover.graphs import nets, tensors_of
from tests.tuning.recover.nets import Net


@given(nets(axes=1), st.data())
@settings(max_examples=40)
def test_pieces_are_the_whole(drawn: tuple, data: st.DataObject) -> None:
    model, feed = drawn
    feeds = [feed, {"x": feed["x"] * 2 + 1}]
    wanted = [tensors_of(model, f) for f in feeds]
    stepper = Stepper(model, feeds, threads=1)
    names = [name_of(node.outputs[0]) for node in model.graph]
    for name in sorted(data.draw(st.lists(st.sampled_from(names), unique=True)), key=names.index):
        for values, whole in zip(stepper.advance(name), wanted, strict=True):
            np.testing.assert_allclose(values, whole[name], rtol=1e-5, atol=1e-5)


def _chain() -> Net:
    net = Net()
    net.node("Add", ["x", net.constant("a", [1.0])], "y")
    net.node("Mul", ["y", net.constant("b", [3.0])], "z")
    net.node("Add", ["z", "x"], "w")
    return net


def test_changes_are_seen_behind_them_and_not_before() -> None:
    model = _chain().model({"x": [1]}, ["w"])
    stepper = Stepper(model, [{"x": np.array([1.0], np.float32)}])
    assert stepper.advance("y")[0] == [2.0]
    stepper.add("y", np.array([10.0], np.float32))
    for name, value in (("a", 100.0), ("b", 5.0)):
        set_constant(model.graph.initializers[name], np.array([value]))
    assert stepper.advance("z")[0] == [60.0], "b as it is when the node runs; a too late"
    assert stepper.advance("w")[0] == [61.0]


def test_weights_are_dequantized_where_they_are_read() -> None:
    model = text_model("""
    net (float[2] x) => (float[2] y)
    <int8[2] w = {1, 2}, float s = {0.5}>
    { weight = DequantizeLinear (w, s)  a = Neg (x)  y = Mul (a, weight) }""")
    stepper = Stepper(model, [{"x": np.ones(2, np.float32)}])
    stepper.advance("a")
    set_constant(model.graph.initializers["w"], np.array([4, -4], np.int8))
    np.testing.assert_array_equal(stepper.advance("y")[0], [-2.0, 2.0])


def test_keeps_only_needed_tensors() -> None:
    stepper = Stepper(_chain().model({"x": [1]}, ["w"]), [{"x": np.array([1.0], np.float32)}])
    stepper.advance("z")
    with pytest.raises(KeyError):
        stepper.advance("y")


def test_sequences_pass_from_piece_to_piece() -> None:
    net = Net()
    net.node("SplitToSequence", ["x"], "parts", axis=0)
    net.node("Neg", ["x"], "n")
    net.node("ConcatFromSequence", ["parts"], "joined", axis=0)
    model = net.model({"x": [2, 2]}, ["n"])
    model.graph.outputs.append(GraphIndex(model).values["joined"])
    x = np.arange(4, dtype=np.float32).reshape(2, 2)
    stepper = Stepper(model, [{"x": x}])
    stepper.advance("n")
    np.testing.assert_array_equal(stepper.advance("joined")[0], x)
