"""Find the smallest rotated rectangles around points, and grow them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, List, Tuple

import numpy as np


@dataclass(frozen=True)
class Rectangle:
    """Hold a rotated rectangle in pixels.

    Attributes:
        centre: float64 [2], x and y.
        axes: float64 [2, 2], the unit vectors along its sides.
        half: float64 [2], half the length of each side.
    """

    centre: Any
    axes: Any
    half: Any

    @property
    def corners(self) -> Any:
        """Return the corners, float64 [4, 2], clockwise from the one nearest to the upper left."""
        signs = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]], np.float64)
        points = self.centre + (signs * self.half) @ self.axes
        # The axes may be mirrored; y points down, so a positive area is clockwise.
        along, across = points[1] - points[0], points[3] - points[0]
        points = points if along[0] * across[1] - along[1] * across[0] >= 0 else points[::-1]
        return np.roll(points, -int(points.sum(axis=1).argmin()), axis=0)

    def grown(self, margin: float) -> Rectangle:
        """Return the rectangle with `margin` pixels more on each side."""
        return Rectangle(self.centre, self.axes, self.half + margin)

    def contains(self, points: Any) -> Any:
        """Return bool [N]: whether each of the points [N, 2] is inside."""
        return (np.abs((points - self.centre) @ self.axes.T) <= self.half).all(axis=-1)


def find_rectangle(points: Any) -> Rectangle:
    """Return the rectangle of the smallest area around points [N, 2], N of at least 1.

    One of its sides lies on a side of the convex hull (H. Freeman and R. Shapira, 1975).
    """
    hull = find_hull(points)
    edges = np.roll(hull, -1, axis=0) - hull
    lengths = np.hypot(edges[:, 0], edges[:, 1])
    along = edges[lengths > 0] / lengths[lengths > 0, None] if len(hull) > 1 else np.array([[1.0, 0.0]])
    axes = np.stack([along, np.stack([-along[:, 1], along[:, 0]], axis=1)], axis=1)
    places = np.einsum("eik,nk->ein", axes, hull)
    low, high = places.min(axis=2), places.max(axis=2)
    best = int((high - low).prod(axis=1).argmin())
    middle, half = (low[best] + high[best]) / 2, (high[best] - low[best]) / 2
    return Rectangle(middle @ axes[best], axes[best], half)


def find_hull(points: Any) -> Any:
    """Return the convex hull of points [N, 2] as its corners in order (A. Andrew's monotone chain, 1979)."""
    ordered = np.unique(np.asarray(points, np.float64), axis=0).tolist()
    if len(ordered) < 3:
        return np.array(ordered)
    return np.array(_chain(ordered)[:-1] + _chain(ordered[::-1])[:-1])


def _chain(points: List[Tuple[float, float]]) -> List[Tuple[float, float]]:
    chain: List[Tuple[float, float]] = []
    for x, y in points:
        # A corner that does not turn left of the line to the next point is inside the hull.
        while len(chain) > 1:
            (x0, y0), (x1, y1) = chain[-2:]
            if (x1 - x0) * (y - y0) - (y1 - y0) * (x - x0) > 0:
                break
            chain.pop()
        chain.append((x, y))
    return chain
