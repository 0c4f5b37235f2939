"""Test which positions masks hide, in the forms that exporters of encoders write. Brute force decides: values at hidden
positions are replaced, and nothing else may change.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from edgeq_device.measure.basis import Axis
from edgeq_device.measure.pairs import find_visible
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeq.calibration.collect import collect
from edgeq.data.sample import Sample
from edgeq.model.convert import to_proto
from edgeq.model.graph import GraphIndex
from edgeq.model.padding import find_padding
from edgeq.model.shapes import write_shapes
from edgeq.run.session import open_session
from tests.graphs import model

WIDTH, VOCABULARY = 8, 12
MASKS = {
    "a difference times a large number": ("int64", """
      m1 = Unsqueeze (mask, axes)
      m2 = Cast <to = 1> (m1)
      m3 = Sub (unit, m2)
      m4 = Mul (m3, low)
      a = Add (scores, m4)"""),
    "a difference of floats": ("float", "m1 = Unsqueeze (mask, axes)\n m3 = Sub (unit, m1)\n m4 = Mul (m3, low)\n"
                                        "a = Add (scores, m4)"),
    "a selection by truth values": ("bool", "m1 = Unsqueeze (mask, axes)\n a = Where (m1, scores, low)"),
    "a selection by equality": ("int64", "m1 = Unsqueeze (mask, axes)\n e = Equal (m1, zero)\n"
                                         "a = Where (e, low, scores)"),
    "an expanded selection": ("int64", """
      m1 = Unsqueeze (mask, axes)
      shape1 = Shape (scores)
      m2 = Expand (m1, shape1)
      m3 = Cast <to = 1> (m2)
      m4 = Sub (unit, m3)
      m5 = Cast <to = 9> (m4)
      m6 = Where (m5, low, m4)
      a = Add (scores, m6)"""),
    "a comparison": ("int64", "m1 = Unsqueeze (mask, axes)\n e = Greater (m1, zero)\n far = Where (e, none, low)\n"
                              "a = Add (scores, far)"),
    "a comparison joined with a fixed mask": ("int64", """
      m1 = Unsqueeze (mask, axes)
      e = Cast <to = 9> (m1)
      both = And (always, e)
      a = Where (both, scores, low)"""),
}  # fmt: skip
NORMS = {
    "one node": "{y} = LayerNormalization <axis = -1> ({x}, gain, shift)",
    "written out": """
      {y}1 = ReduceMean <axes = [-1]> ({x})
      {y}2 = Sub ({x}, {y}1)
      {y}3 = Mul ({y}2, {y}2)
      {y}4 = ReduceMean <axes = [-1]> ({y}3)
      {y}5 = Add ({y}4, small)
      {y}6 = Sqrt ({y}5)
      {y}7 = Div ({y}2, {y}6)
      {y}8 = Mul ({y}7, gain)
      {y} = Add ({y}8, shift)""",
}
FLOWS = {
    "three axes": ("t = Identity (n)", "y = Identity (o)"),
    "joined axes": ("t = Reshape (n, rows)", "shape9 = Shape (n)\n y = Reshape (o, shape9)"),
}
ENDS = {
    "positions": "",
    "the first token": "end = Gather <axis = 1> (y, zero)",
    "a mean over real positions": """
      w1 = Unsqueeze (mask, two)
      w2 = Cast <to = 1> (w1)
      w3 = Mul (y, w2)
      w4 = ReduceSum <keepdims = 0> (w3, one)
      w5 = ReduceSum <keepdims = 0> (w2, one)
      end = Div (w4, w5)""",
}
LEAKS = {
    "a mean over all positions": "end = ReduceMean <axes = [1], keepdims = 0> (y)",
    "a largest value of all positions": "end = ReduceMax <axes = [1], keepdims = 0> (y)",
    "a convolution": "e1 = Transpose <perm = [0, 2, 1]> (y)\n end = Conv <pads = [1, 1]> (e1, kernel)",
    "an attention without a mask": """
      e1 = Transpose <perm = [0, 2, 1]> (y)
      e2 = MatMul (y, e1)
      e3 = Softmax <axis = 2> (e2)
      end = MatMul (e3, y)""",
    "a shift": "e1 = Slice (y, one, many, one)\n e2 = Slice (y, start, one, one)\n end = Concat <axis = 1> (e1, e2)",
}


def build(mask: str, norm: str, flow: str, end: str) -> Any:
    random = np.random.default_rng(0)
    kind, masking = MASKS[mask]
    joined, apart = FLOWS[flow]
    body = f"""
      tokens = Gather <axis = 0> (table, ids)
      x = Add (tokens, position)
      q0 = MatMul (x, wq)
      q1 = Reshape (q0, heads)
      q = Transpose <perm = [0, 2, 1, 3]> (q1)
      k = Transpose <perm = [0, 2, 3, 1]> (q1)
      raw = MatMul (q, k)
      scores = Div (raw, root)
      {masking}
      p = Softmax <axis = -1> (a)
      c = MatMul (p, q)
      c1 = Transpose <perm = [0, 2, 1, 3]> (c)
      c2 = Reshape (c1, join)
      sum = Add (c2, x)
      {NORMS[norm].format(x="sum", y="n")}
      {joined}
      f = MatMul (t, wf)
      r = Relu (f)
      o = MatMul (r, wo)
      {apart}
      {end}"""
    sizes = {"table": (VOCABULARY, WIDTH), "position": (1,), "wq": (WIDTH, WIDTH), "wf": (WIDTH, 16), "wo": (16, WIDTH),
             "gain": (WIDTH,), "shift": (WIDTH,), "kernel": (WIDTH, WIDTH, 3)}  # fmt: skip
    weights: dict[str, Any] = {name: random.normal(0, 1, size).astype(np.float32) for name, size in sizes.items()}
    weights |= {"unit": np.float32(1), "low": np.float32(-10000), "none": np.float32(0), "root": np.float32(2)}
    weights |= {"small": np.float32(1e-5), "always": np.ones((1, 1, 1, 1), bool), "axes": np.array([1, 2])}
    weights |= {"zero": np.array(0), "one": np.array([1]), "two": np.array([2]), "start": np.array([0])}
    weights |= {"many": np.array([2**31 - 1]), "rows": np.array([-1, WIDTH]), "join": np.array([0, 0, WIDTH])}
    weights |= {"heads": np.array([0, 0, 2, WIDTH // 2])}
    if kind == "float":
        weights["zero"] = np.array(0)
    used = {name: array for name, array in weights.items() if name in re.findall(r"\w+", body)}
    has_axes = any(part in end for part in ("Conv", "Slice", "e3"))
    outputs = f"float[n, s, {WIDTH}] y" + (f", float[n, {'d1, d2' if has_axes else WIDTH}] end" if end else "")
    text = f"m (int64[n, s] ids, {kind}[n, s] mask) => ({outputs}) {{ {body} }}"
    built = model(text, used)
    write_shapes(built, None)
    return built


def every_value(built: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return all float tensors that nodes compute."""
    proto = to_proto(built)
    described = {value.name: value for value in proto.graph.value_info}
    names = [name for node in proto.graph.node for name in node.output]
    del proto.graph.output[:]
    proto.graph.output.extend(described.get(name) or type(proto.graph.input[0])(name=name) for name in names)
    session = open_session(proto.SerializeToString())
    values = dict(zip(names, session.run(names, inputs), strict=True))
    return {name: value for name, value in values.items() if value.dtype == np.float32}


def texts(random: np.random.Generator, lengths: list[int], kind: str) -> dict[str, Any]:
    size = max(lengths)
    mask = np.arange(size)[None] < np.array(lengths)[:, None]
    types = {"int64": np.int64, "bool": bool, "float": np.float32}
    return {"ids": random.integers(0, VOCABULARY, mask.shape), "mask": mask.astype(types[kind])}


LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=3)
CASES = [
    *((mask, "one node", "three axes", "positions") for mask in MASKS),
    *((next(iter(MASKS)), norm, flow, end) for norm in NORMS for flow in FLOWS for end in ENDS),
]


@pytest.mark.parametrize(("mask", "norm", "flow", "end"), CASES)
@settings(max_examples=8, deadline=None)
@given(LENGTHS, st.integers(0, 2**32 - 1))
def test_hidden_positions_change_nothing_else(
    mask: str, norm: str, flow: str, end: str, lengths: list[int], seed: int
) -> None:
    random = np.random.default_rng(seed)
    built = build(mask, norm, flow, ENDS[end])
    padding = find_padding(GraphIndex(built))
    assert dict(padding.masks) == {"mask": False}
    assert {"x", "q", "k", "c", "n", "r", "y"} <= set(padding.axes)
    inputs = texts(random, lengths, MASKS[mask][0])
    real = inputs["mask"].astype(bool)
    other = {**inputs, "ids": np.where(real, inputs["ids"], random.integers(0, VOCABULARY, real.shape))}
    values, changed = every_value(built, inputs), every_value(built, other)
    for name, array in values.items():
        visible = find_visible(padding, name, array.shape, inputs)
        marks = np.ones(array.shape, bool) if visible is None else np.broadcast_to(visible, array.shape)
        # Masked scores stay visible, because their low numbers must remain known.
        if name != "a":
            assert changed[name][marks] == pytest.approx(array[marks], rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("leak", LEAKS)
def test_positions_that_real_ones_read_are_not_hidden(leak: str) -> None:
    padding = find_padding(GraphIndex(build(next(iter(MASKS)), "one node", "three axes", LEAKS[leak])))
    assert not {"x", "q", "c", "n", "y"} & set(padding.axes), "the end reads them, and all of them lead to it"
    keys = {"k", "raw", "scores", "p"}
    assert all(padding.axes[name].place == 3 for name in keys & set(padding.axes)), "the attention hides its keys alone"


@pytest.mark.parametrize("norm", NORMS)
@settings(max_examples=8, deadline=None)
@given(LENGTHS, st.integers(0, 2**32 - 1))
def test_statistics_with_and_without_padding_are_equal(norm: str, lengths: list[int], seed: int) -> None:
    built = build(next(iter(MASKS)), norm, "three axes", ENDS["a mean over real positions"])
    padded = texts(np.random.default_rng(seed), lengths, "int64")
    single = [{name: array[k : k + 1, :size] for name, array in padded.items()} for k, size in enumerate(lengths)]
    tensors = ["x", "q", "k", "scores", "p", "c", "n", "r", "y", "end"]
    channels = {"n": 2, "y": 2, "r": 2}
    with_padding, without = (
        collect(built, Feeds(feeds), tensors, channels=channels).tensors for feeds in ([padded], single)
    )
    for name in tensors:
        a, b = with_padding[name], without[name]
        assert (a.minimum, a.maximum) == pytest.approx((b.minimum, b.maximum), rel=1e-4, abs=1e-5)
        assert a.count == b.count
        assert int(a.histogram.counts.sum()) == int(b.histogram.counts.sum())
    for name in channels:
        a, b = with_padding[name].channels, without[name].channels
        assert a is not None
        assert b is not None
        assert a.minimum == pytest.approx(b.minimum, rel=1e-4, abs=1e-5)
        assert a.maximum == pytest.approx(b.maximum, rel=1e-4, abs=1e-5)


def test_a_fused_attention_hides_positions() -> None:
    built = model(
        "m (float[n, s, 8] x, int32[n, s] mask) => (float[n, s, 8] y) {"
        " y = com.microsoft.Attention <num_heads = 2> (x, w, b, mask) }",
        {"w": np.eye(8, 24, dtype=np.float32), "b": np.zeros(24, np.float32)},
    )
    padding = find_padding(GraphIndex(built))
    assert padding.axes == {"x": Axis(1, "mask"), "y": Axis(1, "mask")}


class Feeds:
    """Yield the given inputs."""

    source = "made up"

    def __init__(self, feeds: list[dict[str, Any]]) -> None:
        self._feeds = feeds

    def __len__(self) -> int:
        return len(self._feeds)

    def __iter__(self) -> Any:
        return (Sample(f"s{place}", feed) for place, feed in enumerate(self._feeds))

    def digest(self) -> str:
        return "0" * 64
