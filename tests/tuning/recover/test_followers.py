"""Test `edgeq.tuning.recover.followers`: nodes after a tensor compute what the model does, and no reader is missed."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from onnx import helper

from edgeq.model.graph import name_of, reads
from edgeq.tuning.recover.followers import Followers
from tests.tuning.recover.graphs import nets, tensors_of
from tests.tuning.recover.nets import Net


@given(nets(axes=1))
@settings(max_examples=40)
def test_the_function_is_what_the_model_makes(drawn: tuple) -> None:
    model, feed = drawn
    tensors = tensors_of(model, feed)
    followers = Followers(model)
    for name, values in tensors.items():
        follower = followers.find(name)
        found = followers.function(follower)(values)
        assert len(found) == len(follower.ends)
        for end, made in zip(follower.ends, found, strict=True):
            np.testing.assert_allclose(made, tensors[end].ravel(), rtol=1e-4, atol=1e-5)


@given(nets(axes=1))
@settings(max_examples=40)
def test_all_that_others_read_is_an_end(drawn: tuple) -> None:
    """All tensors that other nodes read are ends. Apart from its ends, only followers depend on the tensor."""
    model, _ = drawn
    followers = Followers(model)
    for node in model.graph:
        follower = followers.find(name_of(node.outputs[0]))
        hidden = {name_of(n.outputs[0]) for n in (node, *follower.nodes)} - set(follower.ends)
        for other in model.graph:
            if other not in follower.nodes:
                assert not hidden & {name_of(value) for value in reads(other)}
        assert not hidden & {output.name for output in model.graph.outputs}


def _net(*nodes: tuple[str, list[str], str]) -> Followers:
    net = Net()
    for name, value in (("half", 0.5), ("vector", [1.0, 2.0])):
        net.constant(name, value)
    for op_type, inputs, output in nodes:
        net.node(op_type, inputs, output)
    return Followers(net.model({"x": [1, 2], "z": [1, 2]}, [nodes[-1][2]]))


def test_only_scalars_and_the_tensor_itself() -> None:
    assert [n.op_type for n in _net(("Mul", ["x", "half"], "y")).find("x").nodes] == ["Mul"]
    assert _net(("Mul", ["x", "vector"], "y")).find("x").nodes == ()
    assert _net(("Mul", ["x", "z"], "y")).find("x").nodes == ()
    assert _net(("Softmax", ["x"], "y")).find("x").nodes == ()


def test_several_nodes_and_branches() -> None:
    followers = _net(
        ("Sigmoid", ["x"], "g"), ("Mul", ["g", "x"], "y"), ("Add", ["y", "half"], "w"), ("Add", ["y", "z"], "v")
    )
    found = followers.find("x")
    assert [node.outputs[0].name for node in found.nodes] == ["g", "y", "w"]
    assert found.ends == ("y",), "w is read by nobody"


def test_a_tensor_read_in_a_body_is_an_end() -> None:
    net = Net()
    net.node("Relu", ["x"], "y")
    body = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["n"])], "b", [], [helper.make_tensor_value_info("n", 1, None)]
    )
    net.nodes.append(helper.make_node("If", ["c"], ["out"], name="if", then_branch=body, else_branch=body))
    assert Followers(net.model({"x": [1, 2]}, ["y", "out"])).find("x").ends == ("x", "y")
