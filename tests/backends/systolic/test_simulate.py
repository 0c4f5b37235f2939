"""Test the simulator against formulas that are computed number by number."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeq.backends.systolic.arithmetic import (
    convolve,
    largest_in_windows,
    multiply,
    rescale,
    round_values,
    shift_right,
    sum_windows,
    wrapped,
)
from edgeq.backends.systolic.array import ArrayConfig
from edgeq.backends.systolic.program import Conv, Fc, Pool, Program, ResidualAdd, Tensor, Tile
from edgeq.backends.systolic.simulate import LayerRun, Simulator, simulate
from edgeq.errors import DataError

F32 = np.float32


def nearest_even(value: float) -> int:
    floor = math.floor(value)
    fraction = value - floor
    return floor + int(fraction > 0.5 or (fraction == 0.5 and floor % 2 == 1))


def macro(value: np.float32) -> int:
    """Round like the header's macro: truncate v and v ± 1 in float32 and return the nearer of the two, on a tie the
    even one.
    """
    truncated = int(value)
    following = int(F32(value - F32(1)) if value < 0 else F32(value + F32(1)))
    fraction = abs(float(F32(value - F32(truncated))))
    return truncated if fraction < 0.5 or (fraction == 0.5 and truncated % 2 == 0) else following


def wrap(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


def one_conv(x: np.ndarray, step: Conv, *, shift: bool = False) -> np.ndarray:
    """Convolve one sample, one number at a time. Pooling pads with zeros."""
    outputs, depth, kh, kw = step.weights.shape
    _, _, rows, columns = step.conv_shape
    multipliers = [t.multiplier for t in step.tiles for _ in range(t.start, t.stop)]
    y = np.zeros((outputs, rows, columns), np.int8)
    for o in range(outputs):
        channel = o // (outputs // step.groups) * depth
        for r in range(rows):
            for c in range(columns):
                total = int(step.bias[o])
                for i in range(depth):
                    for a in range(kh):
                        for b in range(kw):
                            row = r * step.strides[0] + a * step.dilations[0] - step.pads[0]
                            column = c * step.strides[1] + b * step.dilations[1] - step.pads[1]
                            if 0 <= row < x.shape[1] and 0 <= column < x.shape[2]:
                                total += int(x[channel + i, row, column]) * int(step.weights[o, i, a, b])
                value = float(F32(F32(wrap(total)) * F32(multipliers[o])))
                y[o, r, c] = min(max(nearest_even(value), 0 if step.relu else -128), 127)
    return y


def program(step: object, *tensors: Tensor, array: ArrayConfig = ArrayConfig(dim=4)) -> Program:  # noqa: B008
    return Program("test", array, (), (), {t.name: t for t in tensors}, (step,))  # type: ignore[arg-type]


def random_conv(seed: int, *, relu: bool, groups: int, pool: Pool | None = None) -> tuple[Conv, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.integers(-128, 128, (2, 4, 6, 6), np.int8)
    step = Conv(
        "conv",
        "x",
        "y",
        rng.integers(-127, 128, (8, 4 // groups, 3, 2), np.int8),
        rng.integers(-5000, 5000, 8).astype(np.int32),
        groups,
        (2, 1),
        (1, 2),
        (1, 0, 2, 1),
        (Tile(0, 4, 1.0, 0.0021), Tile(4, 8, 1.0, 0.0003)),
        relu,
        pool,
        (1, 8, 4, 5),
    )
    return step, x


@pytest.mark.parametrize(("relu", "groups"), [(False, 1), (True, 1), (False, 2), (True, 4)])
def test_convolution_is_its_formula(relu: bool, groups: int) -> None:
    step, x = random_conv(1, relu=relu, groups=groups)
    shapes = Tensor("x", (1, 4, 6, 6), scale=1.0), Tensor("y", (1, 8, 4, 5), scale=1.0)
    y = Simulator(program(step, *shapes)).compute(step, [x])
    np.testing.assert_array_equal(y, np.stack([one_conv(sample, step) for sample in x]))


def test_fused_pooling_pads_with_zero() -> None:
    step, x = random_conv(2, relu=True, groups=1, pool=Pool(2, 2, 1))
    shapes = Tensor("x", (1, 4, 6, 6), scale=1.0), Tensor("y", (1, 8, 3, 3), scale=1.0)
    y = Simulator(program(step, *shapes)).compute(step, [x])
    unpooled = one_conv(x[0], step)
    padded = np.pad(unpooled, ((0, 0), (1, 1), (1, 1)))
    for r in range(3):
        for c in range(3):
            np.testing.assert_array_equal(y[0, :, r, c], padded[:, 2 * r : 2 * r + 2, 2 * c : 2 * c + 2].max((1, 2)))


def test_accumulators_wrap_and_are_counted() -> None:
    step = Fc(
        "fc",
        "x",
        "y",
        np.full((1, 2), 127, np.int8),
        np.array([2**31 - 10], np.int32),
        (Tile(0, 1, 1.0, 1e-8),),
        relu=False,
    )
    runs: dict[str, LayerRun] = {}
    steps = Simulator(program(step, Tensor("x", (1, 2), scale=1.0), Tensor("y", (1, 1), scale=1.0)))
    y = steps.compute(step, [np.array([[1, 1], [-1, -1]], np.int8)], runs)
    assert y.tolist() == [[nearest_even(float(F32(wrap(2**31 - 10 + 254)) * F32(1e-8)))], [21]]
    assert runs["fc"].overflows == 1
    assert runs["fc"].values == 2


@given(st.integers(-(2**31), 2**31 - 1), st.floats(2**-30, 8, width=32))
def test_rescaling_rounds_half_to_even(accumulator: int, multiplier: float) -> None:
    rounded = rescale(np.array([accumulator], np.int32), F32(multiplier))
    assert float(rounded[0]) == nearest_even(float(F32(F32(accumulator) * F32(multiplier))))


@given(st.floats(-300, 300, width=32))
def test_header_rounding_is_the_macro(value: float) -> None:
    rounded = int(np.clip(round_values(np.array([value], F32), rounding="header")[0], -128, 127))
    assert rounded == min(max(macro(F32(value)), -128), 127)


def test_header_rounding_differs_in_fourteen_values_only() -> None:
    edges = np.array([np.nextafter(F32(2**k), F32(0)) for k in range(-2, 9)], F32)
    values = np.concatenate([edges, -edges, np.array([0.5, 1.5, 2.5, -0.5], F32)])
    even = np.clip(round_values(values.copy()), -128, 127)
    header = np.clip(round_values(values, rounding="header"), -128, 127)
    assert int((even != header).sum()) == 14
    assert header.tolist() == [min(max(macro(v), -128), 127) for v in values]


@given(st.integers(-(2**31), 2**31 - 1), st.integers(-3, 30))
def test_shifts_round_half_to_even(accumulator: int, shift: int) -> None:
    rounded = shift_right(np.array([accumulator], np.int32), np.array([shift]))
    exact = accumulator * 2**-shift if shift < 0 else accumulator // 2**shift
    fraction = 0 if shift < 0 else accumulator - exact * 2**shift
    half = 2 ** (shift - 1) if shift > 0 else 1
    exact += int(shift > 0 and (fraction > half or (fraction == half and exact % 2 == 1)))
    assert float(rounded[0]) == float(F32(exact))


def test_partial_sums_of_an_output_stationary_array_have_twenty_bits() -> None:
    left, right = np.full((1, 96), 127.0), np.full((96, 1), 127.0)
    assert multiply(left, right)[0, 0] == 96 * 127 * 127
    assert multiply(left, right, 48)[0, 0] == 2 * 524287
    assert multiply(-left, right, 48)[0, 0] == 2 * -524288


def test_output_stationary_convolution_cuts_and_weight_stationary_does_not() -> None:
    x = np.full((1, 64, 3, 3), 127, np.int8)
    weights = np.full((1, 64, 3, 3), 127, np.int8)
    exact = convolve(x, weights, 1, (1, 1), (1, 1), (0, 0, 0, 0))
    cut = convolve(x, weights, 1, (1, 1), (1, 1), (0, 0, 0, 0), k_tile=64)
    assert exact[0, 0, 0, 0] == 576 * 127 * 127
    assert cut[0, 0, 0, 0] == 9 * 524287


def test_sums_beyond_float32_are_exact() -> None:
    weights = np.full((1, 2000, 1, 1), 127, np.int8)
    weights[0, 0] = 126
    x = np.full((1, 2000, 1, 1), 127, np.int8)
    assert convolve(x, weights, 1, (1, 1), (1, 1), (0, 0, 0, 0))[0, 0, 0, 0] == 127 * (1999 * 127 + 126)


def test_residual_addition_saturates_each_operand_first() -> None:
    step = ResidualAdd("add", "a", "b", "y", 1.0, 0.5, relu=False)
    tensors = [Tensor(name, (1, 4), scale=1.0) for name in "aby"]
    left, right = np.array([[127, -128, 1, 3]], np.int8), np.array([[127, -127, 1, 5]], np.int8)
    y = Simulator(program(step, *tensors)).compute(step, [left, right])
    # The right operand scales to 63.5 → 64, -63.5 → -64, 0.5 → 0, 2.5 → 2.
    assert y.tolist() == [[127, -128, 1, 5]]


def test_padding_is_never_the_largest_and_counts_in_sums() -> None:
    x = np.full((1, 1, 2, 2), -5, np.int8)
    assert largest_in_windows(x, (2, 2), (1, 1), (1, 1), (1, 1, 1, 1), (3, 3)).max() == -5
    assert sum_windows(x, (2, 2), (1, 1), (1, 1, 1, 1), (3, 3))[0, 0].tolist() == [
        [-5, -10, -5],
        [-10, -20, -10],
        [-5, -10, -5],
    ]


def test_wrapping_is_modulo_two_to_the_thirty_two() -> None:
    accumulator, overflows = wrapped(np.array([2.0**31 - 1, 5.0]), np.array([1, 1], np.int32))
    assert accumulator.tolist() == [-(2**31), 6]
    assert overflows == 1


def test_wrong_inputs_are_refused() -> None:
    tensors = {"x": Tensor("x", (1, 3), "float32")}
    empty = Program("test", ArrayConfig(), ("x",), ("x",), tensors, ())
    with pytest.raises(DataError, match="missing"):
        simulate(empty, {})
    with pytest.raises(DataError, match="float64"):
        simulate(empty, {"x": np.zeros((2, 3))})
    with pytest.raises(DataError, match="different numbers"):
        simulate(empty, {"x": np.zeros((0, 3), F32)})


def test_a_tensor_that_is_named_twice_comes_once() -> None:
    empty = Program("test", ArrayConfig(), ("x",), ("x",), {"x": Tensor("x", (1, 3), "float32")}, ())
    assert simulate(empty, {"x": np.zeros((2, 3), F32)}, keep=["x", "x"]).tensors["x"].shape == (2, 3)
