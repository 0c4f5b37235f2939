"""Test that float sums are rounded in the order of ncnn's kernels, against loops over single numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from edgeq.backends.ncnn.emulation import emulation
from tests.backends.ncnn.networks import run_onnx
from tests.graphs import attributes, proto

SOURCE = Path("net.onnx")


def fused(total: np.float32, factors: Sequence[tuple[np.float32, np.float32]]) -> np.float32:
    """Add products with one rounding for each."""
    for a, b in factors:
        total = np.float32(np.float64(a) * np.float64(b) + np.float64(total))
    return total


def rounded(total: np.float32, factors: Sequence[tuple[np.float32, np.float32]]) -> np.float32:
    """Add rounded products."""
    for a, b in factors:
        total = np.float32(total + np.float32(a * b))
    return total


def one_output(
    factors: Sequence[tuple[np.float32, np.float32]],
    bias: np.float32,
    row: int,
    column: int,
    rows: int,
    columns: int,
    stride: int,
) -> np.float32:
    """Return one output of a 3 x 3 depthwise convolution as ncnn's kernels add it."""
    if stride == 1 and row < rows // 2 * 2:
        return fused(bias, [*factors[3:], *factors[:3]] if row % 2 == 0 else factors)
    if column < columns // 4 * 4:
        return fused(bias, factors)
    if column < columns // 2 * 2:
        (a, b), *odd = factors[1::2]
        return np.float32(fused(bias, factors[::2]) + fused(np.float32(a * b), odd))
    return rounded(bias, factors)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [4, 7, 9])
def test_a_depthwise_layer_adds_as_the_kernels_do(size: int, stride: int) -> None:
    random, channels = np.random.default_rng(size), 4
    x = random.normal(0, 1, (1, channels, size, size)).astype(np.float32)
    w = random.normal(0, 1, (channels, 1, 3, 3)).astype(np.float32)
    b = random.normal(0, 1, channels).astype(np.float32)
    count = (size - 1) // stride + 1
    settings = attributes({"group": channels, "pads": [1, 1, 1, 1], "strides": [stride, stride]})
    text = f"g (float[1,4,{size},{size}] x) => (float[1,4,{count},{count}] y) {{ [n] y = Conv{settings}(x, w, b) }}"
    model = ir.serde.deserialize_model(proto(text, {"w": w, "b": b}))
    padded = np.pad(x[0], ((0, 0), (1, 1), (1, 1)))
    expected = np.zeros((channels, count, count), np.float32)
    for channel, row, column in np.ndindex(expected.shape):
        window = padded[channel, row * stride :, column * stride :][:3, :3]
        factors = list(zip(window.ravel(), w[channel].ravel(), strict=True))
        expected[channel, row, column] = one_output(factors, b[channel], row, column, count, count, stride)
    np.testing.assert_array_equal(run_onnx(emulation(model, SOURCE), {"x": x})["y"], expected.ravel())


def test_other_kernels_add_rounded_products_in_order() -> None:
    random = np.random.default_rng(0)
    x, w = (random.normal(0, 1, shape).astype(np.float32) for shape in ((1, 4, 6, 6), (4, 1, 5, 5)))
    text = "g (float[1,4,6,6] x) => (float[1,4,2,2] y) { [n] y = Conv<group=4>(x, w) }"
    model = ir.serde.deserialize_model(proto(text, {"w": w}))
    expected = np.zeros((4, 2, 2), np.float32)
    for channel, row, column in np.ndindex(expected.shape):
        window = x[0, channel, row : row + 5, column : column + 5]
        factors = list(zip(window.ravel(), w[channel].ravel(), strict=True))
        expected[channel, row, column] = rounded(np.float32(0), factors)
    np.testing.assert_array_equal(run_onnx(emulation(model, SOURCE), {"x": x})["y"], expected.ravel())


def test_a_global_mean_adds_in_order_and_multiplies() -> None:
    x = np.random.default_rng(0).normal(0, 1, (1, 5, 7, 3)).astype(np.float32)
    text = "g (float[N,5,7,3] x) => (float[N,5,1,1] y) { [n] y = GlobalAveragePool(x) }"
    model = emulation(ir.serde.deserialize_model(proto(text)), SOURCE)
    totals: NDArray[np.float32] = np.zeros(5, np.float32)
    for column in x.reshape(5, -1).T:
        totals = totals + column
    expected = totals * (np.float32(1) / np.float32(21))
    np.testing.assert_array_equal(run_onnx(model, {"x": x})["y"], expected)
    assert len(run_onnx(model, {"x": np.concatenate([x, x])})["y"]) == 10


@pytest.mark.parametrize(
    "settings",
    [{"group": 4, "auto_pad": "SAME_UPPER"}, {"group": 4, "dilations": [2, 2]}, {"group": 4, "strides": [1, 2]}],
)
def test_every_depthwise_layer_keeps_its_result(settings: dict[str, object]) -> None:
    random = np.random.default_rng(0)
    x, w = (random.normal(0, 1, shape).astype(np.float32) for shape in ((1, 4, 9, 8), (4, 1, 3, 3)))
    text = f"g (float[1,4,9,8] x) => (float[] y) {{ [n] y = Conv{attributes(settings)}(x, w) }}"
    model = ir.serde.deserialize_model(proto(text, {"w": w}))
    emulated = emulation(model, SOURCE)
    assert "Conv" not in {node.op_type for node in emulated.graph}
    expected = run_onnx(model, {"x": x})["y"]
    np.testing.assert_allclose(run_onnx(emulated, {"x": x})["y"], expected, rtol=0, atol=1e-5)
