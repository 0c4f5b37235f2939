"""Order the elements of tensors in C's memory.

Images are NHWC in C's memory and NCHW in the program. An order is an int array: element p of a sample in the C buffer
is element order[p] of the flattened program tensor.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Order = NDArray[np.int64]


def c_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of one sample in C: H, W, C for [1, C, H, W]. Other shapes stay the same, without the batch."""
    if len(shape) == 4:
        return shape[2], shape[3], shape[1]
    return tuple(shape[1:])


def c_order(shape: tuple[int, ...]) -> Order:
    """Return the order in memory that matches `c_shape`."""
    places = np.arange(math.prod(shape[1:]))
    if len(shape) == 4:
        return places.reshape(shape[1:]).transpose(1, 2, 0).ravel()
    return places


def c_axis(shape: tuple[int, ...], axis: int) -> int:
    """Return the position in C's layout of axis `axis` of `shape`. Both positions count the batch as axis 0."""
    # NCHW to NHWC: channels go last, rows and columns move up.
    return {1: 3, 2: 1, 3: 2}[axis] if len(shape) == 4 else axis


def moved(index: NDArray[np.int32], source: Order, target: Order) -> NDArray[np.int32]:
    """Translate an index table from program order to the orders of C buffers.

    Args:
        index: for each element of the target, the position of its source element; -1 means a zero.
        source, target: the orders of the two buffers.

    Returns:
        The same table, for elements in the order of the buffers.
    """
    # The inverse of the source's order: for each program position, its place in the buffer.
    places = np.empty(source.size, np.int64)
    places[source] = np.arange(source.size)
    source_places = index[target]
    return np.where(source_places < 0, -1, places[np.maximum(source_places, 0)]).astype(np.int32)


def is_identity(index: NDArray[np.int32], source_size: int) -> bool:
    """Return whether an index table copies all `source_size` elements of its source in order."""
    return index.size == source_size and bool(np.array_equal(index, np.arange(source_size)))
