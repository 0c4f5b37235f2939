"""Axes in another order give the same numbers: transposes that cost nothing, and reshapes of reordered tensors."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edgeq.backends.litert.layout import Order, keeps_elements, model_order, moves, reshaped, stored_shape, transposed

SHAPES = st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=5)


@st.composite
def stored(draw: st.DrawFn) -> tuple[list[int], Order]:
    """Draw a shape and an order in which its axes are stored."""
    shape = draw(SHAPES)
    return shape, tuple(draw(st.permutations(range(len(shape)))))


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[list[int], Order, list[int]]:
    """Draw a shape, the order in which its axes are stored, and another shape with the same number of elements."""
    shape, order = draw(stored())
    left, made = prod(shape), []
    while left > 1:
        size = draw(st.sampled_from([size for size in range(2, left + 1) if left % size == 0]))
        made.append(size)
        left //= size
    for place in draw(st.lists(st.integers(0, 4), max_size=2)):
        made.insert(min(place, len(made)), 1)
    return shape, order, made or [1]


def elements(shape: list[int]) -> np.ndarray:
    """Return a tensor in the model's order whose elements are numbered."""
    return np.arange(prod(shape)).reshape(shape)


@given(stored(), st.data())
def test_a_transpose_moves_nothing(given_: tuple[list[int], Order], data: st.DataObject) -> None:
    shape, order = given_
    permutation = data.draw(st.permutations(range(len(shape))))
    array = elements(shape)
    after = transposed(order, permutation)
    assert np.array_equal(array.transpose(permutation).transpose(after), array.transpose(order))


@given(stored(), st.data())
def test_moves_lead_from_one_order_to_another(given_: tuple[list[int], Order], data: st.DataObject) -> None:
    shape, order = given_
    target = tuple(data.draw(st.permutations(range(len(shape)))))
    array, permutation = elements(shape), moves(order, target)
    assert np.array_equal(array.transpose(order).transpose(permutation), array.transpose(target))
    if keeps_elements(stored_shape(shape, order), permutation):
        assert np.array_equal(array.transpose(order).ravel(), array.transpose(target).ravel())


@given(reshapes())
def test_a_reshape_goes_through_orders(given_: tuple[list[int], Order, list[int]]) -> None:
    shape, order, made = given_
    needed, after = reshaped(shape, order, made)
    assert sorted(needed) == list(model_order(len(shape)))
    assert sorted(after) == list(model_order(len(made)))
    array = elements(shape)
    in_file = array.transpose(needed).reshape(stored_shape(made, after))
    assert np.array_equal(in_file, array.reshape(made).transpose(after))


@given(stored())
def test_a_reshape_that_only_splits_or_merges_moves_nothing(given_: tuple[list[int], Order]) -> None:
    shape, order = given_
    needed, _ = reshaped(shape, order, [*shape[:-1], 1, shape[-1]])
    assert keeps_elements(stored_shape(shape, order), moves(order, needed))
