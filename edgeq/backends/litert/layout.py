"""Choose the order in which a file stores the axes of its tensors, and carry this order through a Reshape.

The file may store a tensor's axes in another order than the ONNX model: axis i in the file is axis order[i] in the
model. So a Transpose costs nothing. A convolution's NCHW tensor is stored as NHWC, with the order (0, 2, 3, 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

Order = tuple[int, ...]


def model_order(rank: int) -> Order:
    """Return the order of the model itself: 0, 1, 2…"""
    return tuple(range(rank))


def channels_last(rank: int) -> Order:
    """Return the order in which the channels (axis 1) come after all other axes."""
    return (0, *range(2, rank), 1) if rank > 1 else model_order(rank)


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
    # Axes of size 1 may stand anywhere without moving an element.
    wide = [axis for axis in permutation if shape[axis] != 1]
    return wide == sorted(wide)


def transposed(order: Order, permutation: Sequence[int]) -> Order:
    """Return the order in which the output of a Transpose is stored if the file moves no element."""
    return tuple(list(permutation).index(axis) for axis in order)


def groups(input_shape: Sequence[int], output_shape: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Split the axes before a Reshape into the smallest possible groups, and return each with the group of axes that it
    becomes. The groups are in order and leave out axes of size 1.
    """
    input_axes = [axis for axis, size in enumerate(input_shape) if size != 1]
    output_axes = [axis for axis, size in enumerate(output_shape) if size != 1]
    pairs: list[tuple[list[int], list[int]]] = []
    while input_axes or output_axes:
        ours, theirs = [input_axes.pop(0)], [output_axes.pop(0)]
        # Whichever group is smaller takes the next axis, until both hold the same number of elements.
        while prod(input_shape[a] for a in ours) != prod(output_shape[a] for a in theirs):
            if prod(input_shape[a] for a in ours) < prod(output_shape[a] for a in theirs):
                ours.append(input_axes.pop(0))
            else:
                theirs.append(output_axes.pop(0))
        pairs.append((ours, theirs))
    return pairs


def reshaped(input_shape: Sequence[int], order: Order, output_shape: Sequence[int]) -> tuple[Order, Order]:
    """Return the order in which the input of a Reshape must be stored so that no element moves, and the order of its
    output.

    The input's order is as close to `order` as possible. The output's order is channels-last or the model's order if
    possible.

    Args:
        input_shape, output_shape: shapes of input and output in the model; no size is 0.
        order: the order in which the input is stored now.
    """
    place = {axis: i for i, axis in enumerate(order)}
    sets = sorted(groups(input_shape, output_shape), key=lambda pair: min(place[axis] for axis in pair[0]))
    wide = [axis for ours, _ in sets for axis in ours]
    input_order = _with_units(wide, input_shape, order)
    output_axes = [axis for _, theirs in sets for axis in theirs]
    rank = len(output_shape)
    # Channels-last first, because the operators of images need it.
    for candidate in (channels_last(rank) if rank > 2 else model_order(rank), model_order(rank)):
        if [axis for axis in candidate if output_shape[axis] != 1] == output_axes:
            return input_order, candidate
    return input_order, _with_units(output_axes, output_shape, model_order(rank))


def _with_units(wide: Sequence[int], shape: Sequence[int], order: Order) -> Order:
    """Return an order of all axes. Axes of a size above 1 come in the order that `wide` gives, and axes of size 1 keep
    their places in `order`.
    """
    queue = list(wide)
    return tuple(axis if shape[axis] == 1 else queue.pop(0) for axis in order)
