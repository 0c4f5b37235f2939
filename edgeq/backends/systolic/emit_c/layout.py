"""The order of elements in C's memory: images are NHWC there, NCHW in the program.

An order is an int array: place p of the C buffer (one sample) holds element order[p] of the flattened program tensor.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Order = NDArray[np.int64]


def c_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one sample in C: [1, C, H, W] is H, W, C; other shapes lose the batch only."""
    if len(shape) == 4:
        return shape[2], shape[3], shape[1]
    return tuple(shape[1:])


def c_order(shape: tuple[int, ...]) -> Order:
    """The order in memory that goes with `c_shape`."""
    places = np.arange(math.prod(shape[1:]))
    if len(shape) == 4:
        return places.reshape(shape[1:]).transpose(1, 2, 0).ravel()
    return places


def c_axis(shape: tuple[int, ...], axis: int) -> int:
    """The axis of `c_shape` that is `axis` of `shape`, the batch counted in both."""
    return {1: 3, 2: 1, 3: 2}[axis] if len(shape) == 4 else axis


def moved(index: NDArray[np.int32], source: Order, target: Order) -> NDArray[np.int32]:
    """`index` (program places, -1: a zero) between C buffers: for each place of the target buffer its source place."""
    places = np.empty(source.size, np.int64)
    places[source] = np.arange(source.size)
    wanted = index[target]
    return np.where(wanted < 0, -1, places[np.maximum(wanted, 0)]).astype(np.int32)


def is_identity(index: NDArray[np.int32], source_size: int) -> bool:
    """Whether an index table copies all `source_size` elements of its source in their order."""
    return index.size == source_size and bool(np.array_equal(index, np.arange(source_size)))
