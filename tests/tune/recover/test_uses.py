"""`edgeq.tune.recover.uses`: bodies and the outside read, too."""

from __future__ import annotations

from hypothesis import given, settings
from onnx import helper

from edgeq.tune.recover.uses import readers, reads, uses
from tests.tune.recover.graphs import nets
from tests.tune.recover.nets import Net


@given(nets())
@settings(max_examples=25)
def test_readers_and_uses_agree(drawn: tuple) -> None:
    model, _ = drawn
    outputs = [output.name for output in model.graph.output]
    for name, found in readers(model).items():
        assert all(name in reads(node) for node in found)
        inputs = sum(list(node.input).count(name) for node in found)
        bodies = sum(name not in node.input for node in found)
        assert uses(model)[name] == inputs + bodies + outputs.count(name)


def test_a_body_reads_from_outside() -> None:
    net = Net()
    net.node("Relu", ["x"], "y")
    inner = helper.make_graph(
        [helper.make_node("Neg", ["y"], ["z"])], "body", [], [helper.make_tensor_value_info("z", 1, None)]
    )
    net.nodes.append(helper.make_node("If", ["c"], ["out"], name="if", then_branch=inner, else_branch=inner))
    model = net.model({"x": [1, 2]}, ["out"])
    assert [node.name for node in readers(model)["y"]] == ["if"]
    assert uses(model)["y"] == 1
    assert uses(model)["out"] == 1
