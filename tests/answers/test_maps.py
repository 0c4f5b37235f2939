"""Compare resampled maps and masks with slow references, pixel by pixel."""

from __future__ import annotations

import math

import numpy as np
import pytest
from edgeq_device.answers.maps import map_to_original, masks_to_original, paste_masks, resize_bilinear
from edgeq_device.prepare.frame import Frame
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.answers.scenes import FRAMES, make_frame

ORIGINALS = [(37, 23), (21, 40)]
SIZE = (32, 24)


def sample(values: np.ndarray, x: float, y: float, edge: bool = True) -> float:
    """Return the bilinear value at a position whose pixel centres are whole numbers. Outside, the edge continues, or
    there are zeros.
    """
    total, (height, width) = 0.0, values.shape
    for row in (math.floor(y), math.floor(y) + 1):
        for column in (math.floor(x), math.floor(x) + 1):
            weight = (1 - abs(x - column)) * (1 - abs(y - row))
            if edge:
                total += weight * values[min(max(row, 0), height - 1), min(max(column, 0), width - 1)]
            elif 0 <= row < height and 0 <= column < width:
                total += weight * values[row, column]
    return total


def at_input(frame: Frame, column: int, row: int) -> tuple[float, float]:
    x, y = frame.to_input(np.array([column + 0.5, row + 0.5]))
    return float(x), float(y)


@settings(max_examples=50, deadline=None)
@given(*[st.integers(1, 9)] * 2, *[st.integers(1, 20)] * 2, st.integers(0, 1000))
def test_a_resized_map_has_aligned_corners(width: int, height: int, wide: int, high: int, seed: int) -> None:
    values = np.random.default_rng(seed).normal(size=(height, width))
    expected = [
        [sample(values, (x + 0.5) * width / wide - 0.5, (y + 0.5) * height / high - 0.5) for x in range(wide)]
        for y in range(high)
    ]
    np.testing.assert_allclose(resize_bilinear(values, (wide, high)), expected, atol=1e-12)


def test_an_enlarged_map_is_that_of_pillow() -> None:
    values = np.random.default_rng(0).uniform(0, 255, (7, 5)).astype(np.float32)
    expected = np.asarray(Image.fromarray(values).resize((20, 21), Image.Resampling.BILINEAR))
    np.testing.assert_allclose(resize_bilinear(values.astype(np.float64), (20, 21)), expected, atol=1e-3)


@pytest.mark.parametrize("kind", FRAMES)
@pytest.mark.parametrize("original", ORIGINALS)
@pytest.mark.parametrize("shape", [(24, 32), (6, 8), (5, 7)])
def test_a_map_returns_to_the_stored_image(kind: str, original: tuple[int, int], shape: tuple[int, int]) -> None:
    frame = make_frame(kind, SIZE, original)
    values = np.random.default_rng(1).normal(size=shape)
    expected = np.zeros(original[::-1])
    for y, x in np.ndindex(*expected.shape):
        at_x, at_y = at_input(frame, x, y)
        expected[y, x] = sample(values, at_x * shape[1] / SIZE[0] - 0.5, at_y * shape[0] / SIZE[1] - 0.5)
    np.testing.assert_allclose(map_to_original(values, frame), expected, atol=1e-9)


@pytest.mark.parametrize("kind", FRAMES)
@pytest.mark.parametrize("original", ORIGINALS)
def test_masks_return_to_the_stored_image(kind: str, original: tuple[int, int]) -> None:
    frame = make_frame(kind, SIZE, original)
    random = np.random.default_rng(2)
    values = random.normal(size=(4, 6, 8))
    # The third box is empty. The fourth reaches out of the input.
    boxes = np.array([[2.3, 3.1, 20.2, 17.7], [0, 0, 32, 24], [5, 5, 5, 5], [-9, -8, 15.5, 99]])
    expected = np.zeros((4, *original[::-1]), bool)
    for number, y, x in np.ndindex(*expected.shape):
        at_x, at_y = at_input(frame, x, y)
        x1, y1, x2, y2 = boxes[number]
        inside = max(x1, 0) <= at_x < min(x2, SIZE[0]) and max(y1, 0) <= at_y < min(y2, SIZE[1])
        expected[number, y, x] = inside and sample(values[number], at_x / 4 - 0.5, at_y / 4 - 0.5) > 0
    np.testing.assert_array_equal(masks_to_original(values, boxes, frame), expected)


@pytest.mark.parametrize("kind", FRAMES)
@pytest.mark.parametrize("original", ORIGINALS)
def test_pasted_masks_fill_their_boxes(kind: str, original: tuple[int, int]) -> None:
    frame = make_frame(kind, SIZE, original)
    values = np.random.default_rng(3).uniform(size=(4, 5, 7))
    boxes = np.array([[2.3, 3.1, 20.2, 17.7], [-4, -3, 40, 30], [5, 5, 5, 9], [np.nan] * 4])
    expected = np.zeros((4, *original[::-1]), bool)
    for number, y, x in np.ndindex(2, *expected.shape[1:]):
        at_x, at_y = at_input(frame, x, y)
        x1, y1, x2, y2 = boxes[number]
        at = (at_x - x1) / (x2 - x1) * 7 - 0.5, (at_y - y1) / (y2 - y1) * 5 - 0.5
        expected[number, y, x] = sample(values[number], *at, edge=False) > 0.5
    np.testing.assert_array_equal(paste_masks(values, boxes, frame), expected)
