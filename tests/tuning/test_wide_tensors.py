"""Test which tensors get 16 bits first."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgeq.calibration.ranges import Range
from edgeq.run.session import open_session
from edgeq.tuning.ranking import rank_tensors
from tests.graphs import model, proto

NET = """g (float[1,64] x) => (float[1,64] y) <float s = {0.01}, float[1,64] a, float[1,64] b, float[1,64] c> {
    [coarse] a = Tanh(x) [fine] b = Mul(a, s) [quiet] c = Sin(b) [last] y = Add(c, x)
}"""
RANGES = {"a": Range(-100.0, 100.0), "b": Range(-0.01, 0.01), "c": Range(-0.01, 0.01), "y": Range(-4.0, 4.0)}
X = np.random.default_rng(0).normal(size=(1, 64)).astype(np.float32)


def noise(session: Any) -> float:
    right = open_session(proto(NET).SerializeToString()).run(None, {"x": X})[0]
    return float(((session.run(None, {"x": X})[0] - right) ** 2).sum() / (right**2).sum())


def test_the_noisiest_for_each_byte_come_first() -> None:
    ranking = rank_tensors(model(NET), RANGES, noise, lambda: False)
    names = [layer.name for layer in ranking.layers]
    assert names[:2] == ["last", "coarse"]
    assert set(names) == {"coarse", "fine", "quiet", "last"}
    assert all(layer.noise > 0 for layer in ranking.layers)
    assert ranking.field == "wide"
    assert ranking.costs.span == 4 * 64


def test_unmeasured_layers_come_last() -> None:
    ranking = rank_tensors(model(NET), RANGES, noise, lambda: True)
    assert [layer.noise for layer in ranking.layers] == [0.0] * 4


def test_a_tensor_that_is_only_clipped_goes_with_what_clips_it() -> None:
    net = """g (float[1,64] x) => (float[1,64] y) {
        [wide] a = Neg(x) [clip] b = Relu(a) [used] c = Tanh(b) [kept] d = Relu(c) [last] y = Add(c, d)
    }"""
    ranges = {name: Range(-4.0, 4.0) for name in "abcdy"}
    ranking = rank_tensors(model(net), ranges, lambda session: 1.0, lambda: False)
    assert {layer.name: layer.nodes for layer in ranking.layers} == {
        "clip": ("wide", "clip"),
        "used": ("used",),
        "kept": ("kept",),
        "last": ("last",),
    }
