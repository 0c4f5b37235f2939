"""Choose the order in which a file stores the axes of its tensors, and carry this order through a Reshape.

The file may store a tensor's axes in another order than the ONNX model: axis i in the file is axis order[i] in the
model. So a Transpose costs nothing. A convolution's NCHW tensor is stored as NHWC, with the order (0, 2, 3, 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

Order = tuple[int, ...]


def plain(rank: int) -> Order:
    """Return the order of the model itself: 0, 1, 2…"""
    return tuple(range(rank))


def channels_last(rank: int) -> Order:
    """Return the order in which the channels (axis 1) come after all other axes."""
    return (0, *range(2, rank), 1) if rank > 1 else plain(rank)


def stored_shape(shape: Sequence[int], order: Order) -> tuple[int, ...]:
    """Return the shape of the file's tensor."""
    return tuple(shape[axis] for axis in order)


def moves(source: Order, target: Order) -> Order:
    """Return the permutation with which TRANSPOSE turns a tensor stored in the order `source` into one in the order
    `target`.
    """
    return tuple(source.index(axis) for axis in target)


def keeps_elements(shape: Sequence[int], permutation: Order) -> bool:
    """Return whether a permutation of a stored tensor leaves all its elements in the same place in memory."""
    wide = [axis for axis in permutation if shape[axis] != 1]
    return wide == sorted(wide)


def transposed(order: Order, permutation: Sequence[int]) -> Order:
    """Return the order in which the output of a Transpose is stored if the file moves no element."""
    return tuple(list(permutation).index(axis) for axis in order)


def groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Split the axes before a Reshape into the smallest possible groups, and return each with the group of axes that it
    becomes. The groups are in order and leave out axes of size 1.
    """
    left = [axis for axis, size in enumerate(before) if size != 1]
    right = [axis for axis, size in enumerate(after) if size != 1]
    found: list[tuple[list[int], list[int]]] = []
    while left or right:
        ours, theirs = [left.pop(0)], [right.pop(0)]
        while prod(before[a] for a in ours) != prod(after[a] for a in theirs):
            if prod(before[a] for a in ours) < prod(after[a] for a in theirs):
                ours.append(left.pop(0))
            else:
                theirs.append(right.pop(0))
        found.append((ours, theirs))
    return found


def reshaped(before: Sequence[int], order: Order, after: Sequence[int]) -> tuple[Order, Order]:
    """Return the order in which the input of a Reshape must be stored so that no element moves, and the order of its
    output.

    The input's order is as close to `order` as possible. The output's order is channels-last or the model's order if
    possible.

    Args:
        before, after: shapes of input and output in the model; no size is 0.
        order: the order in which the input is stored now.
    """
    place = {axis: i for i, axis in enumerate(order)}
    sets = sorted(groups(before, after), key=lambda pair: min(place[axis] for axis in pair[0]))
    wide = [axis for ours, _ in sets for axis in ours]
    needed = _with_units(wide, before, order)
    made = [axis for _, theirs in sets for axis in theirs]
    rank = len(after)
    for candidate in (channels_last(rank) if rank > 2 else plain(rank), plain(rank)):
        if [axis for axis in candidate if after[axis] != 1] == made:
            return needed, candidate
    return needed, _with_units(made, after, plain(rank))


def _with_units(wide: Sequence[int], shape: Sequence[int], order: Order) -> Order:
    """Return an order of all axes. Axes of a size above 1 come in the order that `wide` gives, and axes of size 1 keep
    their places in `order`.
    """
    rest = list(wide)
    return tuple(axis if shape[axis] == 1 else rest.pop(0) for axis in order)
