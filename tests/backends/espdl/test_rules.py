"""Test that a graph with a fault that the runtime accepts silently, or crashes on, is refused with the rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from edgeq.backends.espdl.chips import family_named
from edgeq.backends.espdl.network import FILTER, EspGraph, EspNode, EspTensor
from edgeq.backends.espdl.rules import check
from edgeq.errors import ModelError

X, Y = EspTensor("x", (1, 4), "int8", (-4,)), EspTensor("y", (1, 3), "int8", (-2,))
W = EspTensor("w", (1, 1, 4, 3), "int8", (-6,), np.zeros((1, 1, 4, 3), np.int8), FILTER)
B = EspTensor("b", (3,), "int32", (-10,), np.array([0, 1, -(2**19)], np.int32))
GEMM = EspNode("Gemm", "y", (X, W, B), (Y,), {"activation": "Linear", "transA": 0, "transB": 0})
ADD = EspNode("Add", "y", (X, replace(X, name="z")), (replace(X, name="y"),))
SOFTMAX = EspNode("Softmax", "y", (X,), (EspTensor("y", (1, 4), "float32"),), {"axis": -1})


def graph(node: EspNode) -> EspGraph:
    return EspGraph((), (), (node,))


@pytest.mark.parametrize("node", [GEMM, ADD, SOFTMAX], ids=lambda node: node.kind)
def test_a_sound_node_passes(node: EspNode) -> None:
    check(graph(node), family_named("s3"))


@pytest.mark.parametrize(
    ("node", "change", "problem"),
    [
        (GEMM, lambda n: replace(n, attributes={"activation": "Linear", "transA": 0}), "transB is missing"),
        (GEMM, lambda n: replace(n, outputs=(replace(Y, exponents=(-11,)),)), "shifted to the left"),
        (GEMM, lambda n: replace(n, outputs=(replace(Y, exponents=(31,)),)), "the exponent 31"),
        (GEMM, lambda n: replace(n, inputs=(X, replace(W, exponents=(-6, -7, -6)), B)), "several exponents"),
        (GEMM, lambda n: replace(n, inputs=(replace(X, type="int16"), W, B)), "weights are int8"),
        (
            GEMM,
            lambda n: replace(
                n, inputs=(replace(X, type="int16"), replace(W, type="int16", values=np.full(W.shape, 2**23)), B)
            ),
            "more than 40 bits",
        ),
        (GEMM, lambda n: replace(n, inputs=(X, W, replace(B, values=np.full(3, 2**19)))), "more than 20 bits"),
        (ADD, lambda n: replace(n, inputs=(X, replace(X, name="z", exponents=(-3,)))), "different exponents"),
        (SOFTMAX, lambda n: replace(n, inputs=(replace(X, exponents=(0,)),)), "not negative"),
    ],
)
def test_a_fault_is_refused_with_its_rule(node: EspNode, change: Callable[[EspNode], EspNode], problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        check(graph(change(node)), family_named("s3"))
