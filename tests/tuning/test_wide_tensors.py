"""Test which tensors get 16 bits first."""

from __future__ import annotations

import numpy as np
import pytest

from edgeq.calibration.ranges import Range
from edgeq.run.session import open_session
from edgeq.tuning.ranking import rank_tensors
from tests.graphs import model, proto
from tests.measure.fakes import FakeSample, FakeSamples

NET = """g (float[1,64] x) => (float[1,64] y) <float s = {0.01}, float[1,64] a, float[1,64] b, float[1,64] c> {
    [coarse] a = Tanh(x) [fine] b = Mul(a, s) [quiet] c = Sin(b) [last] y = Add(c, x)
}"""
RANGES = {"a": Range(-100.0, 100.0), "b": Range(-0.01, 0.01), "c": Range(-0.01, 0.01), "y": Range(-4.0, 4.0)}
X = np.random.default_rng(0).normal(size=(1, 64)).astype(np.float32)


SAMPLES = FakeSamples([FakeSample("x", {"x": X})])


def test_the_noisiest_for_each_byte_come_first() -> None:
    ranking = rank_tensors(model(NET), RANGES, SAMPLES)
    names = [layer.name for layer in ranking.layers]
    assert names[:2] == ["last", "coarse"]
    assert set(names) == {"coarse", "fine", "quiet", "last"}
    assert all(layer.noise > 0 for layer in ranking.layers)
    assert ranking.field == "wide"
    assert ranking.costs.span == 4 * 64


def test_noise_is_that_of_one_rounded_tensor() -> None:
    """The noise of "coarse" is about that of a model in which only its output is rounded."""
    ranking = rank_tensors(model(NET), RANGES, SAMPLES)
    rounded = """g (float[1,64] x) => (float[1,64] y) <float s = {0.01}, float step = {0.7843137}, uint8 zero = {128}> {
        t = Tanh(x) q = QuantizeLinear(t, step, zero) a = DequantizeLinear(q, step, zero) b = Mul(a, s) c = Sin(b)
        y = Add(c, x)
    }"""
    right, changed = (open_session(proto(text).SerializeToString()).run(None, {"x": X})[0] for text in (NET, rounded))
    expected = float(((changed - right) ** 2).sum() / (right**2).sum())
    noise = {layer.name: layer.noise for layer in ranking.layers}
    # Without another tensor behind it, each element is a channel of its own, and two directions are exact.
    assert noise["coarse"] == pytest.approx(expected, rel=0.1)


def test_a_tensor_that_is_only_clipped_goes_with_what_clips_it() -> None:
    net = """g (float[1,64] x) => (float[1,64] y) {
        [wide] a = Neg(x) [clip] b = Relu(a) [used] c = Tanh(b) [kept] d = Relu(c) [last] y = Add(c, d)
    }"""
    ranges = {name: Range(-4.0, 4.0) for name in "abcdy"}
    ranking = rank_tensors(model(net), ranges, FakeSamples([FakeSample("x", {"x": X})]))
    assert {layer.name: layer.nodes for layer in ranking.layers} == {
        "clip": ("wide", "clip"),
        "used": ("used",),
        "kept": ("kept",),
        "last": ("last",),
    }


def test_the_errors_of_weights_count_where_they_are_raised_too() -> None:
    net = """g (float[1,64] x) => (float[1,64] y) {
        [first] a = MatMul(x, w) [clip] b = Relu(a) [last] y = MatMul(b, v)
    }"""
    square = np.eye(64, dtype=np.float32)
    ranges = {name: Range(-4.0, 4.0) for name in "aby"}
    samples, whole = FakeSamples([FakeSample("x", {"x": X})]), model(net, {"w": square, "v": 2 * square})
    without = rank_tensors(whole, ranges, samples)
    plain = {layer.name: layer.noise for layer in without.layers}
    ranking = rank_tensors(whole, ranges, samples, weights={"w": 0.1 * square})
    raised = {layer.name: layer.noise for layer in ranking.layers}
    # All products of the first layer grow by a tenth, and the outputs with them.
    assert raised["clip"] - plain["clip"] == pytest.approx(0.01, rel=0.1)
    assert raised["last"] == plain["last"]
    assert ranking.costs.span == without.costs.span + 64 * 64
