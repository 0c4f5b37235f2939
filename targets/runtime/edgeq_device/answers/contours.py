"""Trace the outline of a mask as a polygon."""

from __future__ import annotations

from typing import Any, Optional

import numpy as np

# The eight neighbours of a pixel, clockwise from the left, as (row, column).
_AROUND = ((0, -1), (-1, -1), (-1, 0), (-1, 1), (0, 1), (1, 1), (1, 0), (1, -1))


def trace(mask: Any) -> Any:
    """Return the outline of the mask's largest region, float64 [P, 2] as x, y, clockwise. It passes through the pixels
    of the region's edge, and a pixel's position is its column and row.

    Corners between which the outline is straight are left out. An empty mask gives an empty polygon. The outline is
    followed by Moore's neighbour tracing (G. Toussaint, "Grids, Connectivity and Contour Tracing").
    """
    labels, count = label_regions(mask)
    if not count:
        return np.zeros((0, 2))
    largest = int(np.bincount(labels.ravel())[1:].argmax()) + 1
    return trace_region(labels == largest)


def trace_region(region: Any) -> Any:
    """Return the outer outline of one connected region bool [H, W]; see `trace`."""
    padded = np.pad(np.asarray(region, bool), 1)
    start = tuple(int(n) for n in np.argwhere(padded)[0])
    # The first pixel in reading order has nothing on its left.
    here, background, points = start, 0, []
    first: Optional[int] = None
    while True:
        directions = [(background + turn) % 8 for turn in range(8)]
        direction = next((d for d in directions if padded[here[0] + _AROUND[d][0], here[1] + _AROUND[d][1]]), None)
        # The outline is closed when the first step is repeated. A region may pass its first pixel twice.
        if direction is None or (here == start and direction == first):
            break
        points.append(here)
        first = direction if first is None else first
        here = (here[0] + _AROUND[direction][0], here[1] + _AROUND[direction][1])
        # Search on from the neighbour that was seen last and is background.
        background = (direction + 5) % 8 if direction % 2 else (direction + 6) % 8
    points = points or [start]
    corners = np.array(points, np.float64)
    before, after = corners - np.roll(corners, 1, axis=0), np.roll(corners, -1, axis=0) - corners
    turning = (before != after).any(axis=1)
    return corners[turning][:, ::-1] - 1 if turning.any() else corners[:1, ::-1] - 1


def label_regions(mask: Any) -> Any:
    """Return int64 [H, W] with a number from 1 for each region of pixels that touch (at sides or corners), 0 elsewhere,
    and the number of regions. Regions are numbered in reading order of their first pixels.

    Runs of each row are joined with the runs that they touch in the row above (two passes with a union-find).
    """
    mask = np.asarray(mask, bool)
    height, width = mask.shape
    edges = np.diff(np.pad(mask, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    rows, firsts = np.nonzero(edges == 1)
    lasts = np.nonzero(edges == -1)[1]
    parents = np.arange(len(rows))

    def find(run: int) -> int:
        while parents[run] != run:
            parents[run] = parents[parents[run]]
            run = int(parents[run])
        return run

    starts = np.searchsorted(rows, np.arange(height + 1))
    for line in range(1, height):
        above, above_end = int(starts[line - 1]), int(starts[line])
        for run in range(above_end, int(starts[line + 1])):
            while above < above_end and lasts[above] < firsts[run]:
                above += 1
            other = above
            # Corners touch, so a run that ends where another begins belongs to it.
            while other < above_end and firsts[other] <= lasts[run]:
                first, second = sorted((find(run), find(other)))
                parents[second] = first
                other += 1
    roots = np.array([find(run) for run in range(len(rows))], np.int64)
    numbers = np.unique(roots, return_inverse=True)[1].reshape(-1) + 1 if len(roots) else roots
    labels = np.zeros((height, width), np.int64)
    for y, begin, end, number in zip(rows, firsts, lasts, numbers):
        labels[y, begin:end] = number
    return labels, int(numbers.max()) if len(numbers) else 0
