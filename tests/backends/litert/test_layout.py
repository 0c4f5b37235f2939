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
    remaining, sizes = prod(shape), []
    while remaining > 1:
        size = draw(st.sampled_from([size for size in range(2, remaining + 1) if remaining % size == 0]))
        sizes.append(size)
        remaining //= size
    for place in draw(st.lists(st.integers(0, 4), max_size=2)):
        sizes.insert(min(place, len(sizes)), 1)
    return shape, order, sizes or [1]


def elements(shape: list[int]) -> np.ndarray:
    """Return a tensor in the model's order whose elements are numbered."""
    return np.arange(prod(shape)).reshape(shape)


@given(stored(), st.data())
def test_a_transpose_moves_nothing(given_: tuple[list[int], Order], data: st.DataObject) -> None:
    shape, order = given_
    permutation = data.draw(st.permutations(range(len(shape))))
    array = elements(shape)
    output_order = transposed(order, permutation)
    assert np.array_equal(array.transpose(permutation).transpose(output_order), array.transpose(order))


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
    shape, order, new_shape = given_
    input_order, output_order = reshaped(shape, order, new_shape)
    assert sorted(input_order) == list(model_order(len(shape)))
    assert sorted(output_order) == list(model_order(len(new_shape)))
    array = elements(shape)
    in_file = array.transpose(input_order).reshape(stored_shape(new_shape, output_order))
    assert np.array_equal(in_file, array.reshape(new_shape).transpose(output_order))


@given(stored())
def test_a_reshape_that_only_splits_or_merges_moves_nothing(given_: tuple[list[int], Order]) -> None:
    shape, order = given_
    input_order, _ = reshaped(shape, order, [*shape[:-1], 1, shape[-1]])
    assert keeps_elements(stored_shape(shape, order), moves(order, input_order))
