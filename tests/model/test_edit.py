from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgeq.model.convert import from_proto, to_bytes, to_proto
from edgeq.model.edit import (
    Editor,
    drop_unused_initializers,
    insert_behind,
    replace_node,
    replace_value,
    rewrite_nodes,
    set_constant,
)
from edgeq.model.graph import GraphIndex, constant
from edgeq.model.quant_params import QuantParams
from tests.graphs import model

NET = "net (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { [first] h = Add(x, w) [last] y = Abs(h) }"


def test_names_are_free_in_every_scope() -> None:
    text = "net (float[2] x, bool c) => (float[2] y) { [n] y = If (c) <then_branch = one () => (float[2] a) "
    text += "{ [inner] a = Neg(x) }, else_branch = two () => (float[2] b) { b = Abs(x) }> }"
    editor = Editor(model(text))
    assert editor.free_value_name("a") == "a_1"
    assert editor.free_value_name("a") == "a_2"
    assert editor.free_node_name("inner") == "inner_1"


def test_the_same_constant_is_made_once() -> None:
    editor = Editor(model(NET))
    one = editor.constant("k", np.ones(2, np.float32))
    assert editor.constant("k", np.ones(2, np.float32)) is one
    assert editor.constant("k", np.ones(2, np.float64)).name == "k_1"


def test_scalars_stay_scalars() -> None:
    net = model("net (float[2] x) => (float[2] y) <float s = {1}> { y = Mul(x, s) }")
    scale, zero = Editor(net).parameters(QuantParams(np.ones(1), np.zeros(1), ir.DataType.INT8), "q")
    assert scale.shape == zero.shape == ()
    set_constant(net.graph.initializers["s"], np.asarray(2.0))
    assert net.graph.initializers["s"].shape == ()
    assert constant(net.graph.initializers["s"]) == 2


def test_a_replaced_output_keeps_its_name() -> None:
    net = model(NET)
    index = GraphIndex(net)
    made = Editor(net).node("Neg", [index.values["h"]], "negated", before=index.nodes["last"])
    replace_value(index.values["y"], made)
    assert [output.name for output in net.graph.outputs] == ["y"]
    assert net.graph.outputs[0].producer() is made.producer()


def test_an_output_may_have_a_name_of_its_own() -> None:
    net = model(NET)
    editor = Editor(net)
    first, second = (editor.node("Neg", [net.graph.inputs[0]], "n", output="h") for _ in range(2))
    assert [(v.name, v.producer().name) for v in (first, second)] == [("h_1", "n"), ("h_2", "n_1")]
    assert editor.free_value_name("n") == "n"


def test_a_value_takes_over_the_name_between_nodes_too() -> None:
    net = model(NET)
    index = GraphIndex(net)
    made = Editor(net).node("Neg", [index.values["x"]], "negated", output="other", before=index.nodes["first"])
    assert (made.name, index.nodes["first"].name) == ("other", "first")
    replace_value(index.values["h"], made, keep_name=True)
    net.graph.remove(index.nodes["first"], safe=True)
    assert [(node.name, node.outputs[0].name) for node in net.graph] == [("negated", "h"), ("last", "y")]
    drop_unused_initializers(net.graph)
    assert not net.graph.initializers


def test_nodes_are_inserted_behind_a_value() -> None:
    net = model("net (float[2] x) => (float[2] h, float[2] y) { [first] h = Neg(x) [last] y = Abs(h) }")
    index = GraphIndex(net)
    editor, value = Editor(net), index.values["h"]
    one = editor.node("Exp", [value], "one", before=index.nodes["last"])
    two = editor.node("Log", [one], "two", before=index.nodes["last"])
    insert_behind(value, one, two, "inner")
    assert [node.inputs[0].name for node in net.graph] == ["x", "inner", "one", "h"]
    assert [output.name for output in net.graph.outputs] == ["h", "y"]


def test_a_node_with_several_outputs() -> None:
    net = model(NET)
    index = GraphIndex(net)
    parts = Editor(net).nodes("Split", [index.values["h"]], "split", ["h", "right"], attributes={"num_outputs": 2})
    assert [part.name for part in parts] == ["h_1", "right"]
    assert parts[0].producer() is net.graph[-1]


def test_a_clone_is_changed_alone_and_shares_weights() -> None:
    net = model(NET)
    copy = net.clone()
    assert copy.graph.initializers["w"].const_value is net.graph.initializers["w"].const_value
    set_constant(copy.graph.initializers["w"], np.asarray([5.0, 6.0, 7.0]))
    assert GraphIndex(copy).constant("w").tolist() == [5, 6, 7]
    assert copy.graph.initializers["w"].dtype == ir.DataType.FLOAT
    assert GraphIndex(net).constant("w").tolist() == [1, 2]


def test_protobuf_and_back() -> None:
    net = model(NET)
    again = from_proto(to_proto(net))
    assert to_bytes(again) == to_bytes(net)
    assert to_bytes(net.clone()) == to_bytes(net)


SHARED = """
net (float[1,2] x) => (float[1,2] y)
<float[2,2] w = {1, 2, 3, 4}>
{
    [a] h = MatMul (x, w)
    [b] y = MatMul (h, w)
}
"""


def test_a_constant_input_is_changed_in_place_where_nothing_else_reads_it() -> None:
    made = model(SHARED)
    first, second = made.graph
    editor = Editor(made)
    editor.set_input(first, 1, np.zeros((2, 2), np.float32), "zeros")
    assert [value.name for value in first.inputs] == ["x", "zeros"]
    assert [value.name for value in second.inputs] == ["h", "w"]
    editor.set_input(second, 1, np.ones((2, 2), np.float32), "ones")
    assert second.inputs[1] is made.graph.initializers["w"]
    assert constant(second.inputs[1]).tolist() == [[1, 1], [1, 1]]


def test_an_input_that_is_left_out_is_added() -> None:
    made = model("net (float[1,2] x) => (float[1,2] y) <float[2,2] w = {1, 2, 3, 4}> { [g] y = Gemm (x, w) }")
    Editor(made).set_input(made.graph[0], 2, np.zeros(2, np.float32), "bias")
    assert [value.name for value in made.graph[0].inputs] == ["x", "w", "bias"]


def test_a_replaced_value_hands_on_its_name_where_it_is_to_stay() -> None:
    made = model("net (float[2] x) => (float[2] y) { a = Neg (x) b = Identity (a) y = Abs (b) }")
    _, identity, reader = made.graph
    replace_value(identity.outputs[0], identity.inputs[0], keep_name=True)
    made.graph.remove(identity, safe=True)
    assert [value.name for value in reader.inputs] == ["b"]
    assert made.graph[0].outputs[0].name == "b"


def test_nodes_are_inserted_before_or_after_others() -> None:
    net = model(NET)
    index, editor = GraphIndex(net), Editor(net)
    editor.node("Neg", [index.values["h"]], "behind", after=index.nodes["first"])
    editor.node("Neg", [index.values["x"]], "ahead", before=index.nodes["first"])
    editor.node("Neg", [index.values["h"]], "end")
    assert [node.name for node in net.graph] == ["ahead", "first", "behind", "last", "end"]


def test_nodes_are_rewritten_in_the_order_of_each_graph() -> None:
    text = "net (float[2] x, bool c) => (float[2] y) { a = Neg(x) b = Neg(a) y = If (c) <then_branch = one () => "
    net = model(text + "(float[2] p) { p = Neg(b) }, else_branch = two () => (float[2] q) { q = Abs(b) }> }")
    seen = []

    def twice(node: ir.Node, editor: Editor) -> bool:
        """Replace the second of two Neg in a row. Leave a single Neg."""
        seen.append(node.outputs[0].name)
        before = node.inputs[0].producer() if node.inputs[0] is not None else None
        if before is None or before.op_type != "Neg" or before.graph is not node.graph:
            return False
        assert before.inputs[0] is not None
        replace_node(node, editor.node("Identity", [before.inputs[0]], "same", before=node))
        return True

    assert rewrite_nodes(net, twice, "Neg") == 1
    assert seen == ["a", "b", "p"]
    assert [node.op_type for node in net.graph] == ["Neg", "Identity", "If"]
    assert net.graph[1].outputs[0].name == "b"
