"""Compare the steps on pixels with brute force (sizes, geometry) and with Pillow's filters (pixels)."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from edgeq_device.prepare.frame import Frame
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from data.helpers import pixels, spec
from edgeq.data.axes import ItemState
from edgeq.data.images import find_frame, to_context
from edgeq.data.steps import build_step
from edgeq.errors import DataError

sides = st.integers(1, 40)


def state(height: int, width: int) -> ItemState:
    return ItemState(pixels(height, width), "HWC", "RGB", Frame.of(width, height))


@pytest.mark.parametrize(
    "table",
    [
        {"op": "resize", "size": 65536},
        {"op": "resize", "size": 9000, "rule": "short"},
        {"op": "letterbox", "size": 65536},
        {"op": "window", "frames": 40, "step": 1},
    ],
    ids=["resize", "short", "letterbox", "window"],
)
def test_refuses_results_larger_than_a_sample_may_be(table: dict[str, object]) -> None:
    array = np.zeros((80, 8192, 3), np.uint8) if table["op"] == "window" else pixels(1, 4)
    with pytest.raises(DataError, match=r"bytes, but a sample may take at most \d+.*EDGEQ_BUDGET"):
        build_step(table).apply(ItemState(np.tile(array, (1, 8, 1)), "HWC", "RGB"), None)


def rounded(value: Fraction, rule: str) -> int:
    return {"floor": math.floor, "ceil": math.ceil, "round": round}[rule](value)


@given(sides, sides, st.integers(1, 30), st.sampled_from(["floor", "round", "ceil"]), st.booleans())
def test_short_and_long_side(height: int, width: int, size: int, rounding: str, short: bool) -> None:
    rule = "short" if short else "long"
    known = min(width, height) if short else max(width, height)
    new = [rounded(Fraction(size * side, known), rounding) for side in (width, height)]
    step = build_step({"op": "resize", "size": size, "rule": rule, "rounding": rounding})
    if min(new) < 1:
        with pytest.raises(DataError, match="would shrink"):
            step.apply(state(height, width), None)
        return
    done = step.apply(state(height, width), None)
    assert done.array.shape == (new[1], new[0], 3)
    assert done.frame is not None
    assert done.frame.scale == (new[0] / width, new[1] / height)


@given(sides, sides, sides, sides, st.sampled_from(["bilinear", "bicubic", "nearest"]))
def test_exact_is_pillows(height: int, width: int, h: int, w: int, name: str) -> None:
    step = build_step({"op": "resize", "size": [w, h], "filter": name})
    done = step.apply(state(height, width), None)
    expected = Image.fromarray(pixels(height, width)).resize((w, h), Image.Resampling[name.upper()])
    assert np.array_equal(done.array, np.asarray(expected))


@given(sides, sides, st.integers(8, 40), st.sampled_from(["top-left", "center"]), st.integers(0, 255))
def test_letterbox(height: int, width: int, size: int, position: str, value: int) -> None:
    scale = min(size / width, size / height)
    w, h = int(width * scale), int(height * scale)
    step = build_step({"op": "letterbox", "size": size, "position": position, "value": value})
    if min(w, h) < 1:
        with pytest.raises(DataError, match="would shrink"):
            step.apply(state(height, width), None)
        return
    done = step.apply(state(height, width), None)
    left, top = (0, 0) if position == "top-left" else ((size - w) // 2, (size - h) // 2)
    inner = np.asarray(Image.fromarray(pixels(height, width)).resize((w, h), Image.Resampling.BILINEAR))
    for y in range(size):
        for x in range(size):
            inside = left <= x < left + w and top <= y < top + h
            expected = inner[y - top, x - left] if inside else [value] * 3
            assert done.array[y, x].tolist() == list(expected)
    assert done.frame is not None
    assert done.frame.offset == (left, top)


@given(st.integers(8, 40), st.integers(8, 40), st.integers(1, 8), st.sampled_from(["floor", "round"]))
def test_crop_keeps_the_centre(height: int, width: int, size: int, rounding: str) -> None:
    done = build_step({"op": "crop", "size": size, "rounding": rounding}).apply(state(height, width), None)
    left, top = rounded(Fraction(width - size, 2), rounding), rounded(Fraction(height - size, 2), rounding)
    assert np.array_equal(done.array, pixels(height, width)[top : top + size, left : left + size])
    assert done.frame is not None
    assert done.frame.offset == (-left, -top)


def test_crop_larger_than_the_image_is_refused() -> None:
    with pytest.raises(DataError, match="smaller than the crop"):
        build_step({"op": "crop", "size": 9}).apply(state(8, 20), None)


@given(st.integers(20, 60), st.integers(20, 60))
def test_boxes_come_back_to_the_original(height: int, width: int) -> None:
    current = state(height, width)
    for step in (
        {"op": "resize", "size": 30, "rule": "short"},
        {"op": "crop", "size": 28},
        {"op": "letterbox", "size": 64, "position": "center"},
    ):
        current = build_step(step).apply(current, None)
    assert current.frame is not None
    context = to_context(current.frame)
    assert context["original_size"] == (width, height)
    assert find_frame(context) == current.frame
    box = np.array([[3.0, 4.0, 15.0, 18.0]])
    placed = box * np.tile(context["scale"], 2) + np.tile(context["offset"], 2)
    np.testing.assert_allclose(current.frame.to_original(placed), box, atol=1e-9)


def test_channels() -> None:
    start = state(2, 2)
    bgr = build_step({"op": "channels", "order": "BGR"}).apply(start, None)
    assert np.array_equal(bgr.array[..., 0], start.array[..., 2])
    again = build_step({"op": "channels", "order": "BGR"}).apply(bgr, None)
    assert np.array_equal(again.array, bgr.array)
    back = build_step({"op": "channels", "order": "RGB"}).apply(bgr, None)
    assert np.array_equal(back.array, start.array)


def test_grey_is_the_documented_luma_from_either_order() -> None:
    start = state(4, 5)
    r, g, b = (start.array[..., i].astype(int) for i in range(3))
    expected = (19595 * r + 38470 * g + 7471 * b + 32768) >> 16
    grey = build_step({"op": "channels", "order": "L"})
    assert np.array_equal(grey.apply(start, None).array[..., 0], expected)
    bgr = build_step({"op": "channels", "order": "BGR"}).apply(start, None)
    assert np.array_equal(grey.apply(bgr, None).array[..., 0], expected)


def test_model_sizes_come_from_the_model() -> None:
    step = build_step({"op": "resize", "size": "model"})
    assert step.apply(state(9, 7), spec("x", "N", 3, 4, 5)).array.shape == (4, 5, 3)
    assert step.apply(state(9, 7), spec("x", 1, 4, 5, 3)).array.shape == (4, 5, 3)
    assert step.apply(state(9, 7), spec("x", "N", 3, "H", "W")).array.shape == (9, 7, 3)
    with pytest.raises(DataError, match="fixed height"):
        build_step({"op": "letterbox", "size": "model"}).apply(state(9, 7), spec("x", "N", 3, "H", "W"))


def test_rows_first_and_channels_first_arrays_resize_alike() -> None:
    step = build_step({"op": "letterbox", "size": 12, "value": [1, 2, 3]})
    hwc = step.apply(state(9, 7), None).array
    chw = step.apply(ItemState(pixels(9, 7).transpose(2, 0, 1), "CHW", "RGB"), None).array
    assert np.array_equal(hwc.transpose(2, 0, 1), chw)
    grey = step = build_step({"op": "resize", "size": 5})
    assert grey.apply(ItemState(pixels(9, 7)[..., 0], "HW"), None).array.shape == (5, 5)


@pytest.mark.parametrize(
    "table", [{"op": "resize", "size": 5}, {"op": "letterbox", "size": 12}, {"op": "channels", "order": "L"}]
)
def test_a_batch_axis_of_one_changes_nothing(table: dict[str, Any]) -> None:
    """A batch axis of 1, as an earlier `layout=NCHW` adds it, does not change the result."""
    step = build_step(table)
    plain = step.apply(ItemState(pixels(9, 7), "HWC", "RGB"), None)
    batch = step.apply(ItemState(pixels(9, 7).transpose(2, 0, 1)[None], "NCHW", "RGB"), None)
    assert batch.axes == "NCHW"
    assert np.array_equal(batch.array[0].transpose(1, 2, 0), plain.array)
    with pytest.raises(DataError, match="is not one image"):
        step.apply(ItemState(np.stack([pixels(9, 7)] * 2), "NHWC", "RGB"), None)


def test_floats_are_not_resized() -> None:
    with pytest.raises(DataError, match="uint8 images"):
        build_step({"op": "resize", "size": 5}).apply(ItemState(np.zeros((9, 7, 3), np.float32), "HWC"), None)
    with pytest.raises(DataError, match="not known to be an image"):
        build_step({"op": "crop", "size": 5}).apply(ItemState(np.zeros((9, 7)), ""), None)
