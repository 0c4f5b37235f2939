from __future__ import annotations

import numpy as np

from edgeq.model.graph import (
    GraphIndex,
    captured,
    constant,
    is_constant,
    name_of,
    node_input,
    only_reader,
    read_count,
    readers,
    reads,
    sizes,
)
from tests.graphs import model

BRANCHES = """
net (float[N,2] x, bool c) => (float[N,2] y)
<float[2,2] w = {1, 2, 3, 4}>
{
  [first] h = MatMul(x, w)
  [choice] y = If (c) <
    then_branch = one () => (float[N,2] a) { [inner] a = Add(h, w) },
    else_branch = two () => (float[N,2] b) { t = Relu(h)  b = Identity(t) }
  >
}
"""


def test_a_use_inside_a_body_is_a_use_of_the_node_that_holds_it() -> None:
    index = GraphIndex(model(BRANCHES))
    h, w = index.values["h"], index.values["w"]
    choice = index.nodes["choice"]
    assert [name_of(v) for v in captured(choice)] == ["h", "w"]
    assert [name_of(v) for v in reads(choice)] == ["c", "h", "w"]
    assert readers(h) == (choice,)
    assert readers(w) == (index.nodes["first"], choice)


def test_a_value_that_only_a_body_reads_has_no_only_reader() -> None:
    text = "net (float[2] x, bool c) => (float[2] y) { h = Neg(x) [choice] y = If (c) <then_branch = one () => "
    text += (
        "(float[2] a) { a = Abs(h) }, else_branch = two () => (float[2] b) { b = Constant <value_floats=[1.,2.]>() }>}"
    )
    index = GraphIndex(model(text))
    assert only_reader(index.values["h"]) is None
    assert readers(index.values["h"]) == (index.nodes["choice"],)


def test_only_reader() -> None:
    index = GraphIndex(
        model("net (float[2] x) => (float[2] y, float[2] z) { [a] h = Neg(x) [b] y = Add(h, h) z = Abs(x) }")
    )
    assert only_reader(index.values["h"]) is None, "it is read at two inputs"
    assert only_reader(index.values["y"]) is None, "it is a graph output"
    index = GraphIndex(model("net (float[2] x) => (float[2] y) { [a] h = Neg(x) [b] y = Abs(h) }"))
    assert only_reader(index.values["h"]) is index.nodes["b"]


def test_constants_are_initializers_and_constant_nodes() -> None:
    text = "net (float[2] x) => (float[2] y) <float[2] w = {1, 2}> "
    text += "{ k = Constant <value = float[2] {3, 4}>() s = Add(w, k) t = Add(s, x) y = Identity(t) }"
    index = GraphIndex(model(text))
    assert is_constant(index.values["w"])
    assert not is_constant(index.values["s"])
    assert constant(index.values["t"]) is None
    np.testing.assert_array_equal(index.constant("k"), [3, 4])
    assert index.computed_constants == {"w", "k", "s"}


def test_an_initializer_that_can_be_overridden_is_no_constant() -> None:
    index = GraphIndex(model("net (float[2] x, float[2] w = {1, 2}) => (float[2] y) { y = Add(x, w) }"))
    assert not is_constant(index.values["w"])
    assert index.inputs == ("x",)


def test_sizes_are_known_as_a_whole_or_not_at_all() -> None:
    index = GraphIndex(model("net (float[N,2] x, float[3,2] z) => (float[N,2] y) { y = Clip(x, , ) w = Neg(z) }"))
    assert sizes(index.values["x"]) is None
    assert sizes(index.values["z"]) == (3, 2)
    assert sizes(None) is None


def test_an_input_that_is_left_out_has_no_value() -> None:
    index = GraphIndex(model("net (float[2] x, float m) => (float[2] y) { [clip] y = Clip(x, , m) }"))
    clip = index.nodes["clip"]
    assert [name_of(node_input(clip, place)) for place in range(4)] == ["x", "", "m", ""]
    assert node_input(clip, None) is None


def test_reads_are_counted_by_input_and_as_output() -> None:
    index = GraphIndex(model(BRANCHES))
    assert read_count(index.values["h"]) == 2, "one in each body"
    assert read_count(index.values["y"]) == 1, "a graph output"
    twice = GraphIndex(model("net (float[2] x) => (float[2] y) { y = Add(x, x) }"))
    assert read_count(twice.values["x"]) == 2
