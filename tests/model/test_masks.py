from __future__ import annotations

import pytest

from edgeq.model.int8_prediction import predict_int8
from edgeq.model.int8_rules import int8_rules
from edgeq.model.masks import MASK_REASON, find_masks
from tests.graphs import model

ADDED = """g (float[1,4,4] s, float[1,1,4] keep) => (float[1,4,4] y) <float one = {1}, float far = {-10000}> {
    [less] l = Sub(one, keep) [bias] b = Mul(l, far) [add] a = Add(s, b) [soft] y = Softmax(a)
}"""
CHOSEN = """g (float[1,4,4] s, bool[1,4,4] keep) => (float[1,4,4] y) <float far = {-3.4e38}> {
    [choose] c = Where(keep, s, far) [turn] t = Transpose<perm = [0, 2, 1]>(c) [soft] y = Softmax(t)
}"""
GIVEN = """g (float[1,4,4] x, float[1,4] mask) => (float[1,4,4] y) <int64[1] axes = {1}> {
    [scores] s = MatMul(x, x) [more] m = Unsqueeze(mask, axes) [add] a = Add(m, s) [soft] y = Softmax(a)
}"""
RESIDUAL = """g (float[1,4,4] x) => (float[1,4,4] y) {
    [own] s = MatMul(x, x) [add] a = Add(x, s) [soft] y = Softmax(a)
}"""
BIASED = """g (float[1,4,4] x) => (float[1,4,4] y) <float[4] b = {1, 2, 3, 4}> {
    [add] a = Add(x, b) [soft] y = Softmax(a)
}"""
SCALED = """g (float[1,4,4] s) => (float[1,4,4] y) <float far = {1024}, float near = {-50}> {
    [near] n = Add(s, near) [soft] p = Softmax(n) [boxes] y = Mul(p, far)
}"""


@pytest.mark.parametrize(
    ("body", "nodes"),
    [
        (ADDED, {"bias", "add", "soft"}),
        (CHOSEN, {"choose", "turn", "soft"}),
        (GIVEN, {"more", "add", "soft"}),
        (RESIDUAL, set()),
        (BIASED, set()),
        (SCALED, set()),
    ],
    ids=["added", "chosen", "given", "residual", "biased", "scaled"],
)
def test_finds_masks_through_the_operators_before_softmax(body: str, nodes: set[str]) -> None:
    found = find_masks(model(body))
    assert found == nodes


def test_they_are_float_with_their_reason() -> None:
    net = model(ADDED)
    for node in net.graph:
        node.outputs[0].dtype = net.graph.inputs[0].dtype
    reasons = {n.name: n.reason for n in predict_int8(net, int8_rules("cpu")) if n.verdict == "float"}
    assert {name for name, reason in reasons.items() if reason == MASK_REASON} == {"bias", "add", "soft"}
