"""Compute the overlap of convex polygons, such as rotated boxes and lines of text.

Positions are in pixels, x to the right and y down.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def find_corners(boxes: NDArray[Any], angles: NDArray[Any]) -> Floats:
    """Return the corners [N, 4, 2] of boxes [N, 4] (x1, y1, x2, y2 before the rotation) that are turned clockwise by
    angles [N] in radians around their centres.
    """
    centres, half = (boxes[:, :2] + boxes[:, 2:]) / 2, (boxes[:, 2:] - boxes[:, :2]) / 2
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    x, y = half[:, :1] * [-1, 1, 1, -1], half[:, 1:] * [-1, -1, 1, 1]
    corners: Floats = np.stack([x * cos - y * sin, x * sin + y * cos], axis=-1) + centres[:, None]
    return corners


def compute_polygon_overlaps(polygons: NDArray[Any], others: NDArray[Any]) -> Floats:
    """Return the intersection over union of each of the polygons [N, P, 2] with each of `others` [M, Q, 2], [N, M].

    A polygon that is not convex counts as its convex hull. A polygon without an area overlaps nothing.
    """
    overlaps = np.zeros((len(polygons), len(others)))
    if not overlaps.size:
        return overlaps
    hulls, other_hulls = ([_find_hull(points) for points in group] for group in (polygons, others))
    areas, other_areas = (np.array([_area(hull) for hull in group]) for group in (hulls, other_hulls))
    low, high = polygons.min(axis=1), polygons.max(axis=1)
    other_low, other_high = others.min(axis=1), others.max(axis=1)
    # Most polygons of an image lie apart, which their upright boxes show.
    touching = (np.maximum(low[:, None], other_low) < np.minimum(high[:, None], other_high)).all(axis=2)
    for i, j in zip(*np.nonzero(touching), strict=True):
        common = _area(_clip(hulls[i], other_hulls[j]))
        union = areas[i] + other_areas[j] - common
        overlaps[i, j] = common / union if union > 0 else 0.0
    return overlaps


def _find_hull(points: NDArray[Any]) -> Floats:
    """Return the convex hull of points [P, 2], clockwise on the screen (A. Andrew's monotone chain, 1979)."""
    ordered = sorted({(float(x), float(y)) for x, y in points})
    chains = []
    for sequence in (ordered, ordered[::-1]):
        chain: list[tuple[float, float]] = []
        for point in sequence:
            while len(chain) > 1 and _cross(chain[-2], chain[-1], point) <= 0:
                chain.pop()
            chain.append(point)
        chains += chain[:-1]
    return np.array(chains or ordered, np.float64).reshape(-1, 2)


def _cross(origin: Any, end: Any, point: Any) -> float:
    return float((end[0] - origin[0]) * (point[1] - origin[1]) - (end[1] - origin[1]) * (point[0] - origin[0]))


def _clip(polygon: Floats, window: Floats) -> Floats:
    """Return the part of a convex polygon inside another (I. Sutherland, G. Hodgman, 1974)."""
    points = polygon
    for start, end in zip(window, np.roll(window, -1, axis=0), strict=True):
        if not len(points):
            break
        edge = end - start
        side = edge[0] * (points[:, 1] - start[1]) - edge[1] * (points[:, 0] - start[0])
        following, following_side = np.roll(points, -1, axis=0), np.roll(side, -1)
        clipped = []
        for point, target, here_side, next_side in zip(points, following, side, following_side, strict=True):
            if here_side >= 0:
                clipped.append(point)
            if (here_side >= 0) != (next_side >= 0):
                clipped.append(point + (target - point) * (here_side / (here_side - next_side)))
        points = np.array(clipped, np.float64).reshape(-1, 2)
    return points


def _area(polygon: Floats) -> float:
    """Return the area of a polygon by the shoelace formula."""
    if len(polygon) < 3:
        return 0.0
    # Far from the origin, the products would lose the digits of a small area.
    x, y = (polygon - polygon[0]).T
    return abs(float(x @ np.roll(y, -1) - y @ np.roll(x, -1))) / 2


def compute_polygon_cover(polygons: NDArray[Any], others: NDArray[Any]) -> Floats:
    """Return the share of the area of each polygon [N, P, 2] that lies in each of `others` [M, Q, 2], [N, M]."""
    hulls, windows = ([_find_hull(points) for points in group] for group in (polygons, others))
    cover = [[_area(_clip(hull, window)) / (_area(hull) or 1.0) for window in windows] for hull in hulls]
    return np.array(cover, np.float64).reshape(len(polygons), len(others))
