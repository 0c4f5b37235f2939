"""Test the search for tensors that must be exact."""

from __future__ import annotations

import pytest

from edgeq.model.exact import Exactness
from edgeq.model.graph import name_of
from tests.graphs import model

HEAD = "g (float[1, 4] p, float[8, 4] x, int64[4] n) => ({} y) <float two = {{2}}, float half = {{0.5}}> {{ {} }}"


@pytest.mark.parametrize(
    ("output", "nodes"),
    [
        ("float[1, 4, 4]", "a = Mul (p, two) i = Cast <to = 7> (a) y = Gather (x, i)"),
        ("float[]", "a = Mul (p, two) i = Cast <to = 7> (a) j = Add (i, n) y = Gather (x, j)"),
        ("float[]", "a = Mul (p, two) i = Cast <to = 7> (a) s = Squeeze (i) y = Reshape (x, s)"),
        ("float[]", "a = Mul (p, two) i = Cast <to = 7> (a) s = Squeeze (i) y = Expand (two, s)"),
        ("float[]", "a = Mul (p, two) i = Cast <to = 6> (a) y = GatherElements (x, i)"),
    ],
)
def test_a_float_that_becomes_an_index_is_found(output: str, nodes: str) -> None:
    exactness = Exactness(model(HEAD.format(output, nodes)))
    (cast,) = exactness.index_casts()
    assert cast.inputs[0] is not None
    assert {name_of(value) for value in exactness.origins(cast.inputs[0])} == {"a", "p"}


@pytest.mark.parametrize(
    "nodes",
    ["a = Mul (p, two) y = Cast <to = 7> (a)", "i = ArgMax (x) s = Cast <to = 1> (i) y = Cast <to = 7> (s)"],
)
def test_integers_that_are_not_an_index_are_left_alone(nodes: str) -> None:
    assert not Exactness(model(HEAD.format("int64[]", nodes))).index_casts()


def test_whole_numbers_are_followed_through_operators() -> None:
    nodes = "a = Cast <to = 1> (n) b = Mul (a, two) c = Add (b, p) d = Mul (b, half) e = Floor (c) y = Sub (e, b)"
    found = Exactness(model(HEAD.format("float[1, 4]", nodes))).whole_numbers()
    assert [name_of(value) for value in found] == ["a", "b", "e", "y"]


def test_the_search_ends_at_layers() -> None:
    nodes = "h = MatMul (x, w) a = Relu (h) i = Cast <to = 7> (a) y = Gather (x, i)"
    made = model(f"g (float[8, 4] x, float[4, 4] w) => (float[] y) {{ {nodes} }}")
    exactness = Exactness(made)
    (cast,) = exactness.index_casts()
    assert cast.inputs[0] is not None
    assert {name_of(value) for value in exactness.origins(cast.inputs[0])} == {"a", "h"}
