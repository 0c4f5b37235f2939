"""Test which kinds of integer products a model has."""

from __future__ import annotations

import pytest

from edgeq.model.integer_products import UNEVEN, integer_products
from tests.graphs import model

NET = """net (float[1,3] x) => (float[1,2] y) <float s = {{0.5}}, uint8 z = {{3}}, {kind}[3,2] w = {{{values}}},
    {kind} wz = {{0}}> {{
    q = QuantizeLinear (x, s, z)
    a = DequantizeLinear (q, s, z)
    b = DequantizeLinear (w, s, wz)
    y = MatMul (a, b)
}}"""


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        ("int8", "1, 2, 3, 4, 5, -127", ("MatMul u8s8",)),
        ("int8", "1, 2, 3, 4, 5, -128", ("MatMul u8s8", "MatMul u8s8 with -128")),
        ("uint8", "1, 2, 3, 4, 5, 0", ("MatMul u8u8",)),
    ],
)
def test_between_q_and_dq(kind: str, values: str, expected: tuple[str, ...]) -> None:
    assert integer_products(model(NET.format(kind=kind, values=values))) == expected


def test_integer_operators_and_floats() -> None:
    net = """net (uint8[1,1,2,2] x, float[1,2] f) => (int32[1,1,2,2] y, float[1,2] g)
        <int8[1,1,1,1] w = {-128}, float[2,2] v = {1, 2, 3, 4}> { y = ConvInteger (x, w)  g = MatMul (f, v) }"""
    assert integer_products(model(net)) == ("Conv u8s8", "Conv u8s8 with -128")


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ("pads = [0, 1, 0, 1]", (UNEVEN,)),
        ("pads = [1, 1, 1, 1]", ()),
        ("pads = [0, 1, 1, 0]", ()),
        ("pads = [0, 1, 0, 1], group = 2", ()),
    ],
)
def test_a_float_convolution_counts_if_its_padding_is_uneven(attributes: str, expected: tuple[str, ...]) -> None:
    net = f"""net (float[1,2,4,4] x) => (float[1,2,M,N] y) <float[2,2,1,1] w = {{1, 2, 3, 4}}> {{
        y = Conv <{attributes}> (x, w) }}"""
    assert integer_products(model(net)) == expected
