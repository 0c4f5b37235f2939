"""Change the shape of an item: insert an axis, or give the values a new shape."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from edgeq.data.axes import ItemState
from edgeq.data.step import Step, UnfitError, field_kind, parse_integer, whole_number
from edgeq.errors import DataError
from edgeq.signature import TensorSpec


@dataclass(frozen=True)
class Expand(Step):
    """Insert an axis of size 1."""

    name = "expand"
    help = "AXIS"
    axis: int = field(metadata=whole_number(-32))

    def apply(self, state: ItemState, spec: TensorSpec | None) -> ItemState:
        """Return the item with one more axis. The axes of the result have no declared meaning.

        Raises:
            DataError: the position of the new axis is beyond the item's axes.
        """
        # numpy would raise an error of its own, without the name of the sample or of the step.
        if not -state.array.ndim - 1 <= self.axis <= state.array.ndim:
            raise DataError(f"shape {list(state.array.shape)} has no place for axis {self.axis}", "Correct the step")
        return replace(state, array=np.expand_dims(state.array, self.axis), axes="")

    def describe(self) -> str:
        """Describe the position of the new axis."""
        return f"an axis of size 1 inserted at {self.axis}"


def _read_shape(value: Any) -> tuple[int, ...]:
    sizes = [value] if isinstance(value, str) else value
    if isinstance(sizes, list | tuple):
        sizes = [parse_integer(size) if isinstance(size, str) else size for size in sizes]
    # -1 is numpy's word for "whatever remains". A size of 0 would hold no values.
    if not isinstance(sizes, list | tuple) or not all(isinstance(n, int) and (n > 0 or n == -1) for n in sizes):
        raise UnfitError(value, "Give sizes, such as [1, 49, 10]")
    return tuple(sizes)


@dataclass(frozen=True)
class Reshape(Step):
    """Give the item a new shape. The shape does not include a batch axis, and one size may be -1."""

    name = "reshape"
    help = "[1,49,10]"
    shape: tuple[int, ...] = field(metadata=field_kind(_read_shape, takes_all=True))

    def apply(self, state: ItemState, spec: TensorSpec | None) -> ItemState:
        """Return the values in the new shape. The axes of the result have no declared meaning.

        Raises:
            DataError: the new shape has a different number of values.
        """
        try:
            array = state.array.reshape(self.shape)
        except ValueError as error:
            raise DataError(
                f"shape {list(state.array.shape)} cannot become {list(self.shape)}", "Correct the reshape step"
            ) from error
        return replace(state, array=array, axes="")

    def describe(self) -> str:
        """Describe the call of numpy's reshape."""
        return f"x = x.reshape({', '.join(map(str, self.shape))})"
