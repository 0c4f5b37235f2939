"""Test that constants take up a division exactly, in the forms that exporters of transformers write, and only where
nothing else reads what changes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeq.model.convert import to_proto
from edgeq.model.edit import Editor
from edgeq.model.graph import GraphIndex, readers
from edgeq.model.shapes import write_shapes
from edgeq.run.session import open_session
from edgeq.tuning.recover.channel_folds import find_fold
from tests.graphs import model

SHAPE = (2, 5, 8)
"""Shape of the input x and of the tensor t that is divided."""
HEADS = {"heads": np.array([0, 0, 2, 4]), "join": np.array([0, 0, 8])}
VALUES = "w = MatMul (x, m)\n b = Add (w, v)\n"
ATTENTION = """
  r = Reshape (b, heads)
  h = Transpose <perm = [0, 2, 1, 3]> (r)
  s = MatMul (h2, k)
  p = Softmax <axis = 3> (s)
  c = MatMul (p, h)
  back = Transpose <perm = [0, 2, 1, 3]> (c)
  t = Reshape (back, join)"""
QUERIES = """
  r2 = Reshape (x, heads)
  h2 = Transpose <perm = [0, 2, 1, 3]> (r2)
  k = Transpose <perm = [0, 2, 3, 1]> (r2)"""
FORMS = {
    "a normalization": "t = LayerNormalization <axis = -1> (x, g, v)",
    "a normalization that is written out": """
      mean = ReduceMean <axes = [2]> (x)
      centred = Sub (x, mean)
      z = Mul (centred, g)
      t = Add (z, v)""",
    "a linear layer": f"{VALUES} t = Identity (b)",
    "a layer and its activation function": f"{VALUES} t = Relu (b)",
    "a Gemm": "flat = Reshape (x, rows)\n f = Gemm <transB = 1> (flat, m, v)\n t = Reshape (f, shape)",
    "the values of an attention": VALUES + QUERIES + ATTENTION,
    "values that a Split separates": f"""
      w = MatMul (x, wide)
      c0, c1, b = Split <axis = 2> (w)
      {QUERIES} {ATTENTION}""",
    "values that a Gather chooses": f"""
      w = MatMul (x, wide)
      parts = Reshape (w, three)
      moved = Transpose <perm = [2, 0, 3, 1, 4]> (parts)
      h2 = Gather <axis = 0> (moved, zero)
      k0 = Gather <axis = 0> (moved, one)
      h = Gather <axis = 0> (moved, two)
      k = Transpose <perm = [0, 1, 3, 2]> (k0)
      {ATTENTION.split("(r)")[1]}""",
    "a gate": f"{VALUES} u = MatMul (x, m)\n g1 = Sigmoid (u)\n t = Mul (g1, b)",
    "a divisor": f"{VALUES} u = Exp (b)\n t = Div (u, g)",
}
REFUSED = {
    "a number in an activation function": f"{VALUES} e = Erf (b)\n a = Add (e, n)\n q = Mul (b, a)\n t = Mul (q, half)",
    "another reader": f"{VALUES} t = Relu (b)\n y2 = Exp (b)",
    "a function that does not commute with factors": f"{VALUES} t = Tanh (b)",
    "a square": f"{VALUES} t = Mul (b, b)",
    "a sum with itself": f"{VALUES} t = Add (b, b)",
    "keys": VALUES
    + QUERIES.replace("(r2)\n  k", "(r2)\n  k1")
    + """
      r = Reshape (b, heads)
      h = Transpose <perm = [0, 2, 3, 1]> (r)
      s = MatMul (h2, h)
      back = Transpose <perm = [0, 2, 1, 3]> (s)
      t = Reshape (back, pairs)""",
}


def weights() -> dict[str, Any]:
    random = np.random.default_rng(0)
    floats = {"m": (8, 8), "wide": (8, 24), "v": (8,), "g": (8,)}
    arrays = {name: random.uniform(0.5, 1.5, shape).astype(np.float32) for name, shape in floats.items()}
    numbers = {"half": np.float32(0.5), "n": np.float32(1), "zero": np.array(0), "one": np.array(1), "two": np.array(2)}
    shapes = {"rows": np.array([-1, 8]), "shape": np.array(SHAPE), "three": np.array([0, 0, 3, 2, 4])}
    return {**arrays, **numbers, **shapes, **HEADS, "pairs": np.array([0, 0, 10])}


def run(built: Any, x: np.ndarray) -> Mapping[str, np.ndarray]:
    session = open_session(to_proto(built).SerializeToString())
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, {"x": x}), strict=True))


def build(body: str, width: int = 8) -> Any:
    used = {name: array for name, array in weights().items() if name in re.findall(r"\w+", body)}
    outputs = "float[2, 5, 8] y2, " if "y2" in body else ""
    text = f"m (float[2, 5, 8] x) => ({outputs}float[2, 5, {width}] y) {{ {body}\n y = Identity (t) }}"
    built = model(text, used)
    write_shapes(built, None)
    return built


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=5, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_the_tensor_is_divided_exactly(form: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    x = random.normal(0, 1, SHAPE).astype(np.float32)
    k = np.exp(random.normal(0, 1, 8))
    built = build(FORMS[form])
    before = run(built, x)["y"]
    index = GraphIndex(built)
    fold = find_fold(index.values["t"], k.reshape(1, 1, 8), readers(index.values["t"]))
    assert fold is not None
    count = len(list(built.graph))
    fold.apply(Editor(built))
    assert len(list(built.graph)) == count, "no node is added"
    assert run(built, x)["y"] == pytest.approx(before / k, rel=1e-4, abs=1e-5)
    assert "t" in fold.divisors


@pytest.mark.parametrize("form", REFUSED)
def test_a_division_that_would_change_something_else_is_refused(form: str) -> None:
    width = 10 if form == "keys" else 8
    index = GraphIndex(build(REFUSED[form], width))
    assert find_fold(index.values["t"], np.ones((1, 1, width)), readers(index.values["t"])) is None
