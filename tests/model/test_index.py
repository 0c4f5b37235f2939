from __future__ import annotations

from edgeq.model.convert import from_proto
from edgeq.model.graph import GraphIndex, every_node, opset_of
from tests.graphs import model, proto

GRAPH = """
net (float[2] x, bool c) => (float[2] y)
<float[2] w = {1, 2}>
{
    two = Constant <value = float {2.0}> ()
    root = Sqrt (two)
    scaled = Mul (w, root)
    noise = RandomNormal <shape = [2]> ()
    added = Add (scaled, noise)
    chosen = If (c) <
        then_branch = yes () => (float[2] a) { a = Identity (w) },
        else_branch = no () => (float[2] b) { b = Neg (w) }>
    sum = Add (added, chosen)
    y = Add (sum, x)
}
"""


def test_deterministic_results_of_constants_are_constant() -> None:
    assert GraphIndex(model(GRAPH)).computed_constants == {"w", "two", "root", "scaled"}


def test_every_node_counts_those_of_bodies() -> None:
    assert sorted(node.op_type for node in every_node(model(GRAPH))) == sorted(
        ["Constant", "Sqrt", "Mul", "RandomNormal", "Add", "If", "Identity", "Neg", "Add", "Add"]
    )


def test_the_main_opset_by_either_of_its_names() -> None:
    given = proto("net (float x) => (float y) { y = Neg (x) }", opset=15)
    assert opset_of(model("net (float x) => (float y) { y = Neg (x) }", opset=15)) == 15
    given.opset_import[0].domain = "ai.onnx"
    assert opset_of(from_proto(given)) == 15
