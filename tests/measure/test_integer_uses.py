from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeq.measure.integer_uses import find_activation_params, find_integer_uses
from edgeq.model.convert import to_bytes
from edgeq.model.graph import GraphIndex
from edgeq.model.quant_params import QuantParams, dynamic_params
from edgeq.run.session import open_session
from tests.graphs import model


def uses(body: str) -> dict[tuple[str | None, str | None], QuantParams]:
    """Return a mapping (tensor, the node that reads it) → the parameters with which the node reads it."""
    return {(use.value.name, use.node.name): use.params for use in find_integer_uses(GraphIndex(model(body)))}


def test_an_integer_convolution_has_scales_of_data_weight_and_bias() -> None:
    integer_uses = uses("""net (uint8[1,1,2,2] x) => (uint8[1,2,2,2] y)
        <float s = {0.5}, uint8 z = {7}, int8[2,1,1,1] w = {1, 2}, float[2] ws = {0.25, 2}, int8 wz = {0},
         int32[2] b = {1, 2}> { [conv] y = QLinearConv(x, s, z, w, ws, wz, s, z, b) }""")
    assert set(integer_uses) == {("x", "conv"), ("w", "conv"), ("b", "conv")}
    assert integer_uses["x", "conv"].range == (-3.5, 124.0)
    assert (integer_uses["w", "conv"].axis, integer_uses["w", "conv"].dtype) == (0, ir.DataType.INT8)
    np.testing.assert_array_equal(integer_uses["b", "conv"].dequantize(np.array([1, 2])), [0.125, 2])


@pytest.mark.parametrize("factor", ["Mul(c, a)", "Mul(a, c)"])
def test_integer_sums_are_scaled_behind_the_node(factor: str) -> None:
    integer_uses = uses(f"""net (float[1,2] x) => (float[1,2] y) <int8[2,2] w = {{1, 2, 3, 4}}, float ws = {{0.5}}> {{
        q, s, z = DynamicQuantizeLinear(x)
        [sum] i = MatMulInteger(q, w, z)
        c = Cast<to = 1>(i)
        a = Mul(s, ws)
        y = {factor}
    }}""")
    assert {key: float(params.scale) for key, params in integer_uses.items()} == {("w", "sum"): 0.5}


def test_parameters_that_are_computed_are_none() -> None:
    body = """net (uint8[2] q, float x) => (float[2] y) <float half = {0.5}> {
        s = Mul(x, half)
        y = DequantizeLinear(q, s)
    }"""
    assert uses(body) == {}


def test_integers_keep_their_meaning_where_they_are_moved() -> None:
    net = model("""net (float[2,2] x) => (float[4] y) <float s = {0.5}, uint8 z = {7}, int64[1] flat = {-1}> {
        q = QuantizeLinear(x, s, z)
        r = Reshape(q, flat)
        y = DequantizeLinear(r, s, z)
    }""")
    params = find_activation_params(GraphIndex(net))
    assert set(params) == {"q", "r"}
    assert params["r"].range == params["q"].range == (-3.5, 124.0)


@pytest.mark.parametrize(
    ("given_type", "read"), [("uint8", ir.DataType.UINT8), ("int8", ir.DataType.INT8), ("uint16", ir.DataType.UINT16)]
)
def test_without_a_zero_point_the_type_is_that_of_the_integers(given_type: str, read: ir.DataType) -> None:
    body = f"net ({given_type}[2] q) => (float[2] y) <float s = {{0.5}}> {{ [d] y = DequantizeLinear(q, s) }}"
    assert uses(body)["q", "d"].dtype is read


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=40))
@settings(max_examples=30)
def test_dynamic_scale_is_what_onnxruntime_takes(values: list[float]) -> None:
    x = np.array(values, np.float32)
    params = dynamic_params(x)
    net = model(
        f"net (float[{len(x)}] x) => (uint8[{len(x)}] q, float s, uint8 z) {{ q, s, z = DynamicQuantizeLinear(x) }}"
    )
    q, s, z = _run(net, {"x": x})
    with np.errstate(over="ignore", divide="ignore"):
        inverse = np.float32(1) / s
    if s == 0 or not np.isfinite(inverse):
        return  # all zeros, or too small for a scale: nothing to quantize
    assert float(params.scale) == pytest.approx(float(s), rel=1e-6)
    # At half a step the two may round differently, by one step.
    np.testing.assert_allclose(params.fake_quant(x), (q.astype(np.float32) - z) * s, atol=1.01 * float(s))


def _run(net: ir.Model, inputs: Mapping[str, np.ndarray]) -> list[Any]:
    return list(open_session(to_bytes(net)).run(None, dict(inputs)))
