"""Test scales that are powers of two, biases of few bits, and clamps that the hardware fuses with a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from onnx import numpy_helper

from edgeq.calibration.ranges import Range
from edgeq.errors import UsageError
from edgeq.model.quant_params import Grid, QuantParams, fit_scale
from edgeq.quantization.bias_fit import cut_bias, largest_bias, saturates_anyway
from edgeq.quantization.params import activation_params, weight_params
from edgeq.run.session import SessionSettings, open_session
from edgeq.scheme import Scheme
from tests.backends.build import Bench, bench, mixed, random, residual
from tests.graphs import proto

POSITIVE = st.floats(1e-30, 1e30)
SHIFTS: dict[str, Any] = {"scale": "power-of-two", "activation_type": "int8", "activation_symmetric": True}
UNFUSED = SessionSettings(optimization="none")


def is_power_of_two(scale: Any) -> bool:
    mantissa, _ = np.frexp(np.asarray(scale, np.float64))
    return bool(np.all(mantissa == 0.5))


@given(arrays(np.float64, 5, elements=POSITIVE))
def test_a_scale_grows_to_the_next_power_of_two(scales: NDArray[np.float64]) -> None:
    grown = fit_scale(scales, "power-of-two")
    assert is_power_of_two(grown)
    assert np.all((scales <= grown) & (grown < 2 * scales))
    np.testing.assert_array_equal(fit_scale(grown, "power-of-two"), grown)
    np.testing.assert_array_equal(fit_scale(scales, "any"), scales)


@given(st.floats(-1e6, 1e6, width=32), st.floats(-1e6, 1e6, width=32), st.sampled_from(["int8", "uint8"]))
def test_activations_get_the_finest_power_that_cuts_off_at_most_one_step(low: float, high: float, kind: str) -> None:
    dtype = ir.DataType[kind.upper()]
    params = activation_params(Range(min(low, 0), max(high, 0)), dtype, symmetric=True, form="power-of-two")
    bound, step = max(-min(low, 0), max(high, 0)), float(params.scale)
    assert is_power_of_two(step)
    assert bound <= 128 * step
    assert bound > 64 * step or bound < 1e-30
    assert params.low - int(params.zero_point) == -128


@given(arrays(np.float32, (3, 4), elements=st.floats(-1e3, 1e3, width=32)), st.booleans())
def test_weights_are_covered_by_powers_of_two(weight: NDArray[np.float32], per_channel: bool) -> None:
    params = weight_params(weight, 0 if per_channel else None, Scheme(**SHIFTS))
    assert is_power_of_two(params.scale)
    assert np.all(np.abs(weight).max(1) <= 127.001 * params.scale)
    assert np.all(np.abs(params.fake_quant(weight) - weight).max(1) <= 0.501 * params.scale)


def big_biases() -> onnx.ModelProto:
    """Return a model in which one bias is far larger than a product, and one channel has no weights at all."""
    body = """g (float[1, 8, 8, 8] x) => (float[1, 8, 8, 8] y) {
        [first] c = Conv<pads = [1, 1, 1, 1]>(x, w, b) [relu] r = Relu(c) [last] y = Conv<pads = [1, 1, 1, 1]>(r, v, d)
    }"""
    w, b = random(8, 8, 3, 3) * np.float32(1e-3), random(8, seed=3)
    w[2], b[2] = 0, -1500
    b[5] = 40
    return proto(body, {"w": w, "b": b, "v": random(8, 8, 3, 3, seed=1), "d": random(8, seed=4)})


def initializers(file: Path) -> dict[str, NDArray[Any]]:
    return {t.name: numpy_helper.to_array(t) for t in onnx.load(file).graph.initializer}


def pairs(file: Path) -> Iterator[tuple[onnx.NodeProto, NDArray[Any]]]:
    """Yield the QuantizeLinear and DequantizeLinear nodes of a file with their scales."""
    values = initializers(file)
    for node in onnx.load(file).graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            yield node, values[node.input[1]]


@pytest.mark.parametrize("make", [residual, mixed, big_biases])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("bits", [8, 20, 32])
@pytest.mark.parametrize("method", ["minmax", "mse"])
def test_every_scale_of_a_file_is_a_power_of_two_and_every_bias_fits(
    tmp_path: Path, make: Callable[[], onnx.ModelProto], per_channel: bool, bits: int, method: str
) -> None:
    built = bench(tmp_path, make()).build(**SHIFTS, per_channel=per_channel, bias_bits=bits, method=method)
    values, biases = initializers(built.model), 0
    for node, scale in pairs(built.model):
        assert is_power_of_two(scale), node.name
        integers = values.get(node.input[0])
        if integers is not None and integers.dtype == np.int32:
            biases += 1
            # In 32 bits, the products need room beside the bias.
            assert np.abs(integers.astype(np.int64)).max() < 2 ** (bits - 1 - (bits == 32))
            # The bias has the exponents of its input and of its weight.
            reader = next(n for n in onnx.load(built.model).graph.node if node.output[0] in n.input)
            scales = {n.output[0]: s for n, s in pairs(built.model)}
            np.testing.assert_array_equal(scale, scales[reader.input[0]] * scales[reader.input[1]])
    assert biases


def test_a_live_bias_raises_its_weights_exponent_and_a_dead_one_is_cut_off(tmp_path: Path) -> None:
    net = bench(tmp_path, big_biases())
    wide, narrow = (
        initializers(net.build(f"{bits}.onnx", **SHIFTS, per_channel=False, bias_bits=bits).model) for bits in (32, 20)
    )
    dead, live = 2, 5
    assert np.abs(wide["b_quantized"]).max() > 2**19
    assert narrow["b_quantized"][dead] == -(2**19 - 1)
    assert narrow["w_scale"] > wide["w_scale"]
    # The growth is that of the live bias alone: half the scale would be too small for it.
    assert 2**18 <= narrow["b_quantized"][live] < 2**19
    assert net.sqnr(net.build("20.onnx", **SHIFTS, per_channel=False, bias_bits=20)) > 20


@pytest.mark.parametrize("per_channel", [False, True])
def test_a_bias_beside_tiny_weights_leaves_room_for_the_products(tmp_path: Path, per_channel: bool) -> None:
    body = """g (float[1, 8, 8, 8] x) => (float[1, 8, 8, 8] y) { [last] y = Conv<pads = [1, 1, 1, 1]>(x, w, b) }"""
    w = random(8, 8, 3, 3)
    w[2] *= np.float32(1e-12)
    built = bench(tmp_path, proto(body, {"w": w, "b": random(8, seed=3)})).build(**SHIFTS, per_channel=per_channel)
    values = initializers(built.model)
    sums = np.abs(values["w_quantized"].astype(np.int64)).reshape(8, -1).sum(1) * 128
    assert np.all(np.abs(values["b_quantized"].astype(np.int64)) + sums < 2**31)


@given(st.data())
def test_a_bias_is_cut_off_only_where_the_result_does_not_change(data: st.DataObject) -> None:
    scheme = Scheme(**SHIFTS, bias_bits=8)
    exponents = st.integers(-4, 4)
    weight = QuantParams(np.asarray(2.0 ** data.draw(exponents), np.float32), np.asarray(0), ir.DataType.INT8)
    source = QuantParams(np.asarray(2.0 ** data.draw(exponents), np.float32), np.asarray(0), ir.DataType.INT8)
    values = data.draw(arrays(np.int64, (6, 3), elements=st.integers(-2, 2))) * weight.scale
    unit = weight.scale.astype(np.float64) * source.scale
    bias = (data.draw(arrays(np.int64, 6, elements=st.integers(-2000, 2000))) * unit).astype(np.float32)
    step = 2.0 ** data.draw(st.integers(-8, 4))
    low, high = (0.0 if data.draw(st.booleans()) else -128 * step), 127 * step
    dead = saturates_anyway(weight, values.astype(np.float32), 0, bias, source, (low, high), scheme)
    inputs = data.draw(arrays(np.int64, (3, 20), elements=st.integers(-128, 127))) * source.scale
    results, cut = (
        np.clip(values @ inputs + b[:, None], low, high) for b in (bias, cut_bias(bias, np.asarray(unit), scheme))
    )
    np.testing.assert_array_equal(results[dead], cut[dead])
    # A bias that fits needs nothing.
    assert not np.any(dead & (np.abs(bias) <= largest_bias(scheme) * unit))


@pytest.mark.parametrize("make", [residual, big_biases])
def test_a_fused_clamp_has_no_pair_before_it_and_the_same_results(
    tmp_path: Path, make: Callable[[], onnx.ModelProto]
) -> None:
    net = bench(tmp_path, make())
    apart, fused = (net.build(f"{len(f)}.onnx", **SHIFTS, per_channel=False, fused=f) for f in ((), ("Relu",)))
    graph = onnx.load(fused.model).graph
    relu = next(node for node in graph.node if node.op_type == "Relu")
    assert next(node for node in graph.node if relu.input[0] in node.output).op_type == "Conv"
    assert next(node for node in graph.node if relu.output[0] in node.input).op_type == "QuantizeLinear"
    assert sum(1 for _ in pairs(apart.model)) == sum(1 for _ in pairs(fused.model)) + 2
    assert run(net, apart.model) == run(net, fused.model)


def run(net: Bench, file: Path) -> list[bytes]:
    session = open_session(file, UNFUSED)
    return [session.run(None, dict(sample.inputs))[0].tobytes() for sample in net.samples]


def test_a_clamp_after_a_sum_keeps_its_pair(tmp_path: Path) -> None:
    body = """g (float[1, 8, 8, 8] x) => (float[1, 8, 8, 8] y) {
        [a] a = Conv<pads = [1, 1, 1, 1]>(x, w) [s] s = Add(a, x) [r] y = Relu(s)
    }"""
    built = bench(tmp_path, proto(body, {"w": random(8, 8, 3, 3)})).build(**SHIFTS, fused=("Relu",))
    relu = next(node for node in onnx.load(built.model).graph.node if node.op_type == "Relu")
    assert "DequantizeLinear" in relu.input[0]


def test_the_grid_of_a_method_has_the_scales_of_the_file() -> None:
    grid = Grid(ir.DataType.INT8, True, "power-of-two")
    assert float(grid.params(-1.0, 1.0).scale) == 2**-7
    assert float(grid.params(-1.01, 1.0).scale) == 2**-6
    assert grid.levels == 256


@pytest.mark.parametrize("change", [{"format": "QOperator"}, {"mode": "weight-only"}])
def test_other_forms_refuse_powers_of_two(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="cannot build with scale = power-of-two"):
        bench(tmp_path, residual()).build(**{**SHIFTS, **change})


@pytest.mark.parametrize(("field", "value"), [("scale", "shift"), ("bias_bits", 24)])
def test_unknown_values_are_refused(field: str, value: object) -> None:
    with pytest.raises(UsageError, match=f"scheme {field} is {value!r}"):
        Scheme(**{field: value})  # type: ignore[arg-type]
