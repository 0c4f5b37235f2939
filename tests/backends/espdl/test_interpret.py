"""Test the interpreter against definitions written out one number at a time, and against the maker's own files."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeq.backends.espdl.interpret import run
from edgeq.backends.espdl.network import DEPTHWISE, FILTER, EspNode, EspTensor
from edgeq.backends.espdl.products import largest_sum, run_conv, run_gemm
from edgeq.backends.espdl.reader import read
from edgeq.backends.espdl.rounding import ChipArithmetic, Rounding, saturate
from tests.backends.espdl.build import PORTABLE_MARGIN

ROUNDINGS: tuple[Rounding, ...] = ("half-up", "half-even")


def rounded(number: Fraction, rounding: Rounding) -> int:
    """Return a number rounded to an integer."""
    below, rest = math.floor(number), number - math.floor(number)
    tie_up = rounding == "half-up" or below % 2 == 1
    return below + (rest > Fraction(1, 2) or (rest == Fraction(1, 2) and tie_up))


@pytest.mark.parametrize("rounding", ROUNDINGS)
@given(number=st.integers(-(2**40), 2**40), shift=st.integers(0, 30))
def test_a_shift_rounds_as_the_division_by_a_power_of_two(rounding: Rounding, number: int, shift: int) -> None:
    result = ChipArithmetic(rounding).shift(np.array([number]), shift)
    assert result[0] == rounded(Fraction(number, 2**shift), rounding)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@given(number=st.integers(-(2**20), 2**20), shift=st.integers(0, 8))
def test_floats_round_as_integers_do(rounding: Rounding, number: int, shift: int) -> None:
    floats = np.array([number / 2**shift], np.float32)
    for margin in (0.0, PORTABLE_MARGIN):
        assert ChipArithmetic(rounding, tie_margin=margin).round(floats)[0] == rounded(
            Fraction(number, 2**shift), rounding
        )


def layer(kind: str, data: np.ndarray, weights: np.ndarray, bias: np.ndarray, shift: int, layout: str) -> EspNode:
    tensors = (
        EspTensor("x", data.shape, "int8", (-4,)),
        EspTensor("w", weights.shape, "int8", (-6,), weights, layout),
        EspTensor("b", bias.shape, "int32", (-10,), bias),
    )
    channels = weights.shape[2] if layout == DEPTHWISE else weights.shape[3]
    shape = (*data.shape[:-1], channels) if kind == "Gemm" else (1, 1, 1, channels)
    attributes = {"activation": "Linear", "pads": (0,) * 4, "strides": (1, 1), "dilations": (1, 1)}
    return EspNode(kind, "y", tensors, (EspTensor("y", shape, "int8", (shift - 10,)),), attributes)


def lane_sum(bias: int, products: list[int], bits: int) -> int:
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    lane = min(max(bias, low), high)
    for product in products:
        lane = min(max(lane + product, low), high)
    return lane


@pytest.mark.parametrize("rounding", ROUNDINGS)
@given(st.integers(0, 10**6), st.integers(0, 12), st.integers(1, 20))
def test_a_product_saturates_in_lanes_of_twenty_bits(rounding: Rounding, seed: int, shift: int, channels: int) -> None:
    random = np.random.default_rng(seed)
    # 127 · 127 · 64 leaves 20 bits, so these sums often saturate on the way.
    data = random.choice([-128, 127], (1, 64)).astype(np.int8)
    weights = random.choice([-127, 127], (1, 1, 64, channels)).astype(np.int8)
    bias = random.integers(-(2**19), 2**19, channels).astype(np.int32)
    node = layer("Gemm", data, weights, bias, shift, FILTER)
    result = run_gemm(node, data, ChipArithmetic(rounding, 20))
    for channel in range(channels):
        products = [int(x) * int(w) for x, w in zip(data[0], weights[0, 0, :, channel], strict=True)]
        # Channels that do not fill a block of 16 have an accumulator of 40 bits.
        total = lane_sum(int(bias[channel]), products, 20 if channel < channels // 16 * 16 else 40)
        assert result[0, channel] == min(max(rounded(Fraction(total, 2**shift), rounding), -128), 127)


@given(st.integers(0, 10**6))
def test_a_depthwise_layer_saturates_in_every_channel(seed: int) -> None:
    random = np.random.default_rng(seed)
    data = random.choice([-128, 127], (1, 7, 7, 3)).astype(np.int8)
    weights = random.choice([-127, 127], (7, 7, 3, 1)).astype(np.int8)
    bias = random.integers(-(2**19), 2**19, 3).astype(np.int32)
    result = run_conv(layer("Conv", data, weights, bias, 9, DEPTHWISE), data, ChipArithmetic("half-up", 20))
    for channel in range(3):
        products = (data[0, :, :, channel].astype(int) * weights[:, :, channel, 0]).ravel().tolist()
        total = lane_sum(int(bias[channel]), products, 20)
        assert result.ravel()[channel] == min(max(rounded(Fraction(total, 512), "half-up"), -128), 127)


def test_the_bound_of_all_sums_is_reached_by_the_worst_input() -> None:
    data, weights = np.full((1, 4), -128, np.int8), np.full((1, 1, 4, 2), -100, np.int8)
    node = layer("Gemm", data, weights, np.array([7, 9], np.int32), 4, FILTER)
    assert largest_sum(node) == 128 * 400 + 9


@given(st.integers(-(2**40), 2**40))
def test_a_number_outside_of_a_type_becomes_its_limit(number: int) -> None:
    assert saturate(np.array([number]), "int16")[0] == min(max(number, -32768), 32767)


@pytest.mark.parametrize("name", ["kws_plain", "kws_int16", "resnet20_half_up", "resnet20_half_even"])
def test_files_of_the_makers_exporter_give_the_values_that_they_state(name: str, shared_data: Path) -> None:
    file = shared_data.parent / "witness" / "espdl" / "files" / f"{name}.espdl"
    if not file.is_file():
        pytest.skip("shared/witness is not next to this checkout")
    content = read(file.read_bytes(), file)
    rounding: Rounding = "half-even" if name.endswith("even") else "half-up"
    inputs = {port.tensor.name: content.tests[port.tensor.name] for port in content.graph.inputs}
    values = run(content.graph, inputs, ChipArithmetic(rounding))
    stated = {tensor: content.tests[tensor.name] for tensor in values if tensor.name in content.tests}
    assert len(stated) > len(inputs)
    for tensor, expected in stated.items():
        # The runtime's own test allows one step in 16 bits, and rounding of floats.
        allowed = {"int8": 0, "int16": 1, "float32": 2e-5}[tensor.type]
        assert np.abs(values[tensor].astype(np.float64) - expected).max() <= allowed
