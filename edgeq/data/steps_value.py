"""The steps that change values and shapes: dtype, arithmetic with constants, centring, windows, layout.

Arithmetic runs in the array's floating dtype; integers become float32 first, unless a `dtype` step said otherwise.
Every constant is rounded to that dtype before it is used, and each step rounds once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from edgeq.data.state import Array, State, model_axes
from edgeq.errors import DataError
from edgeq.signature import TensorSpec

FLOATS = ("float16", "float32", "float64")


@dataclass(frozen=True)
class Dtype:
    """Convert to a floating dtype; what follows is computed in it."""

    op: ClassVar[str] = "dtype"
    dtype: str

    def apply(self, state: State, spec: TensorSpec | None) -> State:
        return replace(state, array=state.array.astype(self.dtype))

    def describe(self) -> str:
        return f"x = {self.dtype}(x)"


@dataclass(frozen=True)
class Arithmetic:
    """x (*, /, +, -) a constant, or one constant a channel."""

    op: ClassVar[str] = "arithmetic"
    operator: str
    value: float | tuple[float, ...]

    def apply(self, state: State, spec: TensorSpec | None) -> State:
        array = floating(state.array)
        constant = np.asarray(self.value, array.dtype)
        if constant.ndim:
            constant = _along_channels(constant, array, state.axes)
        if self.operator == "multiply":
            result = array * constant
        elif self.operator == "divide":
            result = array / constant
        elif self.operator == "add":
            result = array + constant
        else:
            result = array - constant
        return replace(state, array=np.asarray(result, array.dtype))

    def describe(self) -> str:
        sign = {"multiply": "*", "divide": "/", "add": "+", "subtract": "-"}[self.operator]
        if isinstance(self.value, tuple):
            return f"x = x {sign} [{', '.join(map(repr, self.value))}], one a channel"
        return f"x = x {sign} {self.value!r}"


@dataclass(frozen=True)
class Center:
    """Subtract the item's own mean (over all elements, summed in float64, rounded to the array's dtype)."""

    op: ClassVar[str] = "center"

    def apply(self, state: State, spec: TensorSpec | None) -> State:
        array = floating(state.array)
        mean = np.asarray(array.mean(dtype=np.float64)).astype(array.dtype)
        return replace(state, array=np.asarray(array - mean, array.dtype))

    def describe(self) -> str:
        return "x = x - mean(x), the mean over all elements of this item"


@dataclass(frozen=True)
class Window:
    """Overlapping windows of consecutive slices along the first axis; each window becomes one row of the batch."""

    op: ClassVar[str] = "window"
    frames: int
    step: int = 1

    def apply(self, state: State, spec: TensorSpec | None) -> State:
        array = state.array
        if array.ndim == 0 or array.shape[0] < self.frames:
            raise DataError(
                f"a window of {self.frames} frames does not fit into shape {list(array.shape)}", "Use fewer"
            )
        starts = range(0, array.shape[0] - self.frames + 1, self.step)
        rows = np.stack([array[i : i + self.frames].reshape(-1) for i in starts])
        return State(rows, "NF")

    def describe(self) -> str:
        return (
            f"row i of the batch = x[{self.step}*i : {self.step}*i + {self.frames}] flattened, "
            f"i = 0 .. (frames - {self.frames}) // {self.step}"
        )


@dataclass(frozen=True)
class Layout:
    """Order the axes; an axis the item lacks is inserted with size 1. "model": as the model's input shape asks."""

    op: ClassVar[str] = "layout"
    axes: str

    def apply(self, state: State, spec: TensorSpec | None) -> State:
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
        if self.axes == "model":
            return "axes ordered as the model's input (channels where its size is 1 or 3), a batch axis of 1 added"
        return f"axes ordered {self.axes}; an axis that is missing is added with size 1"


@dataclass(frozen=True)
class Reshape:
    """Give the item (without a batch axis) a new shape; one size may be -1."""

    op: ClassVar[str] = "reshape"
    shape: tuple[int, ...]

    def apply(self, state: State, spec: TensorSpec | None) -> State:
        try:
            array = state.array.reshape(self.shape)
        except ValueError as error:
            raise DataError(
                f"shape {list(state.array.shape)} cannot become {list(self.shape)}", "Correct the reshape step"
            ) from error
        return replace(state, array=array, axes="")

    def describe(self) -> str:
        return f"x = x.reshape({', '.join(map(str, self.shape))})"


@dataclass(frozen=True)
class Expand:
    """Insert an axis of size 1."""

    op: ClassVar[str] = "expand"
    axis: int

    def apply(self, state: State, spec: TensorSpec | None) -> State:
        if not -state.array.ndim - 1 <= self.axis <= state.array.ndim:
            raise DataError(f"shape {list(state.array.shape)} has no place for axis {self.axis}", "Correct the step")
        return replace(state, array=np.expand_dims(state.array, self.axis), axes="")

    def describe(self) -> str:
        return f"an axis of size 1 inserted at {self.axis}"


def floating(array: Array) -> Array:
    """`array` itself if it is floating, else as float32."""
    return array if array.dtype.kind == "f" else array.astype(np.float32)


def _along_channels(constant: Array, array: Array, axes: str) -> Array:
    axis = axes.index("C") if "C" in axes else array.ndim - 1
    if array.ndim == 0 or array.shape[axis] != constant.size:
        raise DataError(
            f"{constant.size} constants do not fit axis {axis} of shape {list(array.shape)}",
            "Declare the axes of the source (source.layout = 'CHW' or 'HWC'), or give one constant a channel",
        )
    shape: list[Any] = [1] * array.ndim
    shape[axis] = constant.size
    return constant.reshape(shape)
