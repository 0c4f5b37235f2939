"""Compare the arithmetic steps with brute force, element by element."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from data.helpers import spec
from edgeq.data.axes import ItemState
from edgeq.data.steps import build_step
from edgeq.data.steps.window import Window
from edgeq.errors import DataError

bytes_hwc = hnp.arrays(np.uint8, hnp.array_shapes(min_dims=3, max_dims=3, max_side=5).map(lambda s: (s[0], s[1], 3)))
constants = st.floats(-1e3, 1e3, width=32).filter(lambda v: abs(v) > 1e-3)


def one(operator: str, x: np.generic, c: float, dtype: type) -> np.generic:
    a, b = dtype(x), dtype(c)
    return {"multiply": a * b, "divide": a / b, "add": a + b, "subtract": a - b}[operator]


@given(bytes_hwc, st.sampled_from(["multiply", "divide", "add", "subtract"]), constants)
def test_scalar_constants_round_once_in_float32(array: np.ndarray, operator: str, constant: float) -> None:
    state = build_step({"op": operator, "value": constant}).apply(ItemState(array, "HWC"), None)
    assert state.array.dtype == np.float32
    expected = [one(operator, x, constant, np.float32) for x in array.ravel()]
    assert state.array.ravel().tolist() == [float(v) for v in expected]


@given(bytes_hwc, st.sampled_from(["mean", "std", "scale", "offset"]), st.tuples(constants, constants, constants))
def test_channel_constants_follow_the_channel_axis(array: np.ndarray, op: str, values: tuple[float, ...]) -> None:
    step = build_step({"op": op, "value": list(values)})
    hwc = step.apply(ItemState(array, "HWC"), None).array
    chw = step.apply(ItemState(array.transpose(2, 0, 1), "CHW"), None).array
    assert np.array_equal(hwc.transpose(2, 0, 1), chw)
    operator = {"mean": "subtract", "std": "divide", "scale": "multiply", "offset": "add"}[op]
    for c in range(3):
        assert hwc[0, 0, c] == one(operator, array[0, 0, c], values[c], np.float32)


@given(bytes_hwc, constants)
def test_a_dtype_step_moves_the_arithmetic_to_float64(array: np.ndarray, constant: float) -> None:
    state = build_step({"op": "dtype", "dtype": "float64"}).apply(ItemState(array, "HWC"), None)
    result = build_step({"op": "divide", "value": constant}).apply(state, None).array
    assert result.dtype == np.float64
    assert result.ravel().tolist() == [float(x) / constant for x in array.ravel()]


def test_constants_that_fit_no_channel_are_refused() -> None:
    with pytest.raises(DataError, match=r"source\.layout"):
        build_step({"op": "mean", "value": [1, 2]}).apply(ItemState(np.zeros((4, 4, 3), np.uint8), "HWC"), None)


@given(bytes_hwc)
def test_center_removes_the_mean(array: np.ndarray) -> None:
    result = build_step({"op": "center"}).apply(ItemState(array, "HWC"), None).array
    mean = np.float32(sum(int(v) for v in array.ravel()) / array.size)
    assert result.ravel().tolist() == [float(np.float32(v) - mean) for v in array.ravel()]


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_windows(frames: int, bins: int, size: int, step: int) -> None:
    array = np.arange(frames * bins, dtype=np.float32).reshape(frames, bins)
    if size > frames:
        with pytest.raises(DataError, match="does not fit"):
            Window(size, step).apply(ItemState(array, "TF"), None)
        return
    got = Window(size, step).apply(ItemState(array, "TF"), None).array
    expected = []
    start = 0
    while start + size <= frames:
        expected.append([array[start + i][j] for i in range(size) for j in range(bins)])
        start += step
    assert got.tolist() == expected


@pytest.mark.parametrize(
    ("axes", "want", "shape"),
    [
        ("HWC", "NCHW", (1, 3, 4, 5)),
        ("HWC", "NHWC", (1, 4, 5, 3)),
        ("CHW", "HWC", (5, 3, 4)),
        ("TF", "NCTF", None),
        ("TF", "NFT", None),
    ],
)
def test_layout_moves_axes_and_adds_the_missing(axes: str, want: str, shape: tuple[int, ...] | None) -> None:
    array = np.arange(60).reshape((4, 5, 3) if len(axes) == 3 else (6, 10))
    state = build_step({"op": "layout", "axes": want}).apply(ItemState(array, axes), None)
    assert state.axes == want
    if shape is not None:
        assert state.array.shape == shape
    for index in np.ndindex(array.shape):
        place = tuple(index[axes.index(a)] if a in axes else 0 for a in want)
        assert state.array[place] == array[index]


@pytest.mark.parametrize(
    ("shape", "axes", "want"),
    [
        (("N", 3, 8, 8), "HWC", "NCHW"),
        ((1, 8, 8, 3), "HWC", "NHWC"),
        ((1, 8, 8, 1), "HW", "NHWC"),
        ((3, 8, 8), "HWC", "CHW"),
        (("N", 8, 8), "HW", "NHW"),
        (("N", 10), "", ""),
    ],
)
def test_layout_model_reads_the_models_shape(shape: tuple[int | str, ...], axes: str, want: str) -> None:
    array = np.zeros((8, 8, 3)[: len(axes)] if axes else (10,))
    state = build_step({"op": "layout", "axes": "model"}).apply(ItemState(array, axes), spec("x", *shape))
    assert state.axes == want


def test_layout_needs_named_axes() -> None:
    step = build_step({"op": "layout", "axes": "NCHW"})
    with pytest.raises(DataError, match="Declare"):
        step.apply(ItemState(np.zeros((2, 2)), ""), None)
    with pytest.raises(DataError, match="no place"):
        step.apply(ItemState(np.zeros((2, 2)), "TF"), None)


def test_reshape_and_expand() -> None:
    state = ItemState(np.arange(6), "F")
    assert build_step({"op": "reshape", "shape": [2, -1]}).apply(state, None).array.shape == (2, 3)
    assert build_step({"op": "expand", "axis": 0}).apply(state, None).array.shape == (1, 6)
    with pytest.raises(DataError, match="cannot become"):
        build_step({"op": "reshape", "shape": [4, 2]}).apply(state, None)
    with pytest.raises(DataError, match="no place for axis"):
        build_step({"op": "expand", "axis": 3}).apply(state, None)
