"""Compare outlines with a fill of polygons, and regions with a flood fill."""

from __future__ import annotations

import numpy as np
from edgeq_device.answers.contours import label_regions, trace
from hypothesis import given, settings
from hypothesis import strategies as st


@st.composite
def masks(draw: st.DrawFn) -> np.ndarray:
    height, width = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    share = draw(st.sampled_from([0.2, 0.5, 0.7, 0.9]))
    return np.random.default_rng(draw(st.integers(0, 2**31))).uniform(size=(height, width)) < share


def flood(mask: np.ndarray, start: tuple[int, int], corners: bool) -> np.ndarray:
    """Return the pixels that are reached from `start` within the mask."""
    reached, pending = np.zeros(mask.shape, bool), [start]
    while pending:
        y, x = pending.pop()
        if not (0 <= y < mask.shape[0] and 0 <= x < mask.shape[1]) or reached[y, x] or not mask[y, x]:
            continue
        reached[y, x] = True
        steps = [(a, b) for a in (-1, 0, 1) for b in (-1, 0, 1) if corners or a * b == 0]
        pending += [(y + a, x + b) for a, b in steps]
    return reached


def fill(polygon: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Return the pixels on the polygon's edges or inside it, by the crossing rule."""
    filled = np.zeros(shape, bool)
    ends = np.roll(polygon, -1, axis=0)
    for y in range(shape[0]):
        for x in range(shape[1]):
            inside = False
            for (ax, ay), (bx, by) in zip(polygon, ends, strict=True):
                cross = (bx - ax) * (y - ay) - (by - ay) * (x - ax)
                on_edge = min(ax, bx) <= x <= max(ax, bx) and min(ay, by) <= y <= max(ay, by)
                if abs(cross) < 1e-9 and on_edge:
                    filled[y, x] = True
                if (ay > y) != (by > y) and x < (bx - ax) * (y - ay) / (by - ay) + ax:
                    inside = not inside
            filled[y, x] |= inside
    return filled


@settings(max_examples=300, deadline=None)
@given(masks())
def test_filling_an_outline_gives_the_region_without_its_holes(mask: np.ndarray) -> None:
    polygon = trace(mask)
    if not mask.any():
        assert polygon.shape == (0, 2)
        return
    labels, _ = label_regions(mask)
    region = labels == int(np.bincount(labels.ravel())[1:].argmax()) + 1
    outside = flood(~np.pad(region, 1), (0, 0), corners=False)[1:-1, 1:-1]
    np.testing.assert_array_equal(fill(polygon, mask.shape), ~outside)


@settings(max_examples=300, deadline=None)
@given(masks())
def test_regions_are_those_of_a_flood_fill(mask: np.ndarray) -> None:
    labels, count = label_regions(mask)
    expected = np.zeros(mask.shape, np.int64)
    number = 0
    for y, x in np.argwhere(mask):
        if not expected[y, x]:
            number += 1
            expected[flood(mask, (int(y), int(x)), corners=True)] = number
    assert count == number
    np.testing.assert_array_equal(labels, expected)


def test_an_outline_is_clockwise_without_points_on_straight_edges() -> None:
    mask = np.zeros((8, 9), bool)
    mask[2:6, 3:8] = True
    assert trace(mask).tolist() == [[3, 2], [7, 2], [7, 5], [3, 5]]
    assert trace(np.eye(1, dtype=bool)).tolist() == [[0, 0]]
