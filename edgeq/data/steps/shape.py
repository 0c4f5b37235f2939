"""Change the order of axes, change shapes, and make windows over time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from edgeq.data.records import ItemState, check_size, model_axes
from edgeq.data.step import Step, UnfitError, field_kind, integer, whole_number
from edgeq.errors import DataError
from edgeq.signature import TensorSpec


def _read_axes(value: Any) -> str:
    if not isinstance(value, str) or not value.isalpha() or (value != "model" and len(set(value)) != len(value)):
        raise UnfitError(value, "Give one letter per axis, such as NCHW, or 'model'")
    return value


@dataclass(frozen=True)
class Layout(Step):
    """Order the axes. If the item lacks an axis, the axis is inserted with size 1. "model" means the order of the
    model's axes.
    """

    name = "layout"
    help = "NCHW, NHWC, CHW … or model"
    axes: str = field(metadata=field_kind(_read_axes))

    def apply(self, state: ItemState, spec: TensorSpec | None) -> ItemState:
        """Return the item with its axes transposed. Missing axes are inserted with size 1.

        Raises:
            DataError: the axes of the item are not declared, or the layout lacks one of them.
        """
        have, want = state.axes, self.axes
        if want == "model":
            want = model_axes(spec, have.replace("N", ""))
            if not want or not have:
                return state
        if not have:
            raise DataError(
                f"layout {want} needs to know the axes of shape {list(state.array.shape)}",
                "Declare them, for example source.layout = 'HWC'",
            )
        if set(have) - set(want):
            raise DataError(f"layout {want} has no place for the axes of {have}", "Name every axis of the source")
        array = state.array.transpose([have.index(axis) for axis in want if axis in have])
        missing = tuple(i for i, axis in enumerate(want) if axis not in have)
        return replace(state, array=np.expand_dims(array, missing), axes=want)

    def describe(self) -> str:
        """Describe the order of the axes, and what happens if an axis is missing."""
        if self.axes == "model":
            return "axes ordered as the model's input (channels where its size is 1 or 3), a batch axis of 1 added"
        return f"axes ordered {self.axes}; an axis that is missing is added with size 1"


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
        if not -state.array.ndim - 1 <= self.axis <= state.array.ndim:
            raise DataError(f"shape {list(state.array.shape)} has no place for axis {self.axis}", "Correct the step")
        return replace(state, array=np.expand_dims(state.array, self.axis), axes="")

    def describe(self) -> str:
        """Describe the position of the new axis."""
        return f"an axis of size 1 inserted at {self.axis}"


def _read_shape(value: Any) -> tuple[int, ...]:
    sizes = [value] if isinstance(value, str) else value
    if isinstance(sizes, list | tuple):
        sizes = [integer(size) if isinstance(size, str) else size for size in sizes]
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


@dataclass(frozen=True)
class Window(Step):
    """Make overlapping windows of consecutive slices along the first axis. Each window becomes one row of the batch."""

    name = "window"
    help = "FRAMES[:STEP]; windows along the first axis, flattened, one row of the batch each"
    one_row = False
    frames: int = field(metadata=whole_number(1))
    step: int = field(default=1, metadata=whole_number(1))

    def apply(self, state: ItemState, spec: TensorSpec | None) -> ItemState:
        """Return [windows, frames × the other sizes] with the axes "NF".

        Raises:
            DataError: the item has fewer frames than one window.
        """
        array = state.array
        if array.ndim == 0 or array.shape[0] < self.frames:
            raise DataError(
                f"a window of {self.frames} frames does not fit into shape {list(array.shape)}", "Use fewer"
            )
        starts = range(0, array.shape[0] - self.frames + 1, self.step)
        check_size(
            len(starts) * array[: self.frames].nbytes, f"{len(starts)} windows", "Take fewer, with a larger step"
        )
        rows = np.stack([array[i : i + self.frames].reshape(-1) for i in starts])
        return ItemState(rows, "NF")

    def describe(self) -> str:
        """Describe the slices that each row of the batch contains."""
        return (
            f"row i of the batch = x[{self.step}*i : {self.step}*i + {self.frames}] flattened, "
            f"i = 0 .. (frames - {self.frames}) // {self.step}"
        )
