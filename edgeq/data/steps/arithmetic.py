"""Compute with numbers: constants, the item's mean, and the dtype of the arithmetic.

Arithmetic uses the array's floating dtype. Integers become float32 first, unless a `dtype` step chose another dtype.
Every constant is rounded to the dtype of the arithmetic before it is used, and each step rounds once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from edgeq.data.axes import ItemState
from edgeq.data.images import Array
from edgeq.data.limits import check_size
from edgeq.data.step import Step, field_kind, one_of, read_number
from edgeq.errors import DataError
from edgeq.signature import TensorSpec

Operator = Callable[[Array, Array], Array]
"""Elementwise operation on an array and a constant of the same floating dtype. The constant is broadcast."""


def _read_constant(value: Any) -> float | tuple[float, ...]:
    if isinstance(value, list | tuple) and value:
        return tuple(read_number(item) for item in value)
    return read_number(value)


@dataclass(frozen=True)
class Arithmetic(Step):
    """Compute x * c, x / c, x + c or x - c. c is one constant, or one constant per channel."""

    sign: ClassVar[str]
    compute: ClassVar[Operator]
    value: float | tuple[float, ...] = field(metadata=field_kind(_read_constant, takes_all=True))

    def __post_init__(self) -> None:
        # Dividing by 0 gives infinity in every sample, so the step itself is wrong.
        if self.sign == "/" and 0.0 in (self.value if isinstance(self.value, tuple) else (self.value,)):
            raise DataError(f"{self.name}: it divides by 0", "Correct the constant")

    def apply(self, state: ItemState, spec: TensorSpec | None) -> ItemState:
        """Return the result in the dtype of the array. Integers become float32 first.

        Raises:
            DataError: the number of constants differs from the size of the channel axis.
        """
        array = to_floating(state.array)
        with np.errstate(all="ignore"):  # a later check refuses values that are not finite and names the sample
            constant = np.asarray(self.value, array.dtype)
            if constant.ndim:
                constant = _align_channels(constant, array, state.axes)
            return replace(state, array=np.asarray(type(self).compute(array, constant), array.dtype))

    def describe(self) -> str:
        """Describe the operation, with its constants in full precision."""
        if isinstance(self.value, tuple):
            return f"x = x {self.sign} [{', '.join(map(repr, self.value))}], one per channel"
        return f"x = x {self.sign} {self.value!r}"


def to_floating(array: Array) -> Array:
    """Return `array` itself if its dtype is floating. Otherwise return it as float32.

    Raises:
        DataError: the result takes more bytes than a sample may.
    """
    if array.dtype.kind == "f":
        return array
    check_size(4 * array.size, "as float32", "Give smaller items")
    return array.astype(np.float32)


def _align_channels(constant: Array, array: Array, axes: str) -> Array:
    # Without declared axes, the last one is taken, as numpy's broadcasting would.
    axis = axes.index("C") if "C" in axes else array.ndim - 1
    if array.ndim == 0 or array.shape[axis] != constant.size:
        raise DataError(
            f"{constant.size} constants do not fit axis {axis} of shape {list(array.shape)}",
            "Declare the axes of the source (source.layout = 'CHW' or 'HWC'), or give one constant per channel",
        )
    # All axes but the channels get size 1, so that numpy broadcasts over them.
    shape: list[Any] = [1] * array.ndim
    shape[axis] = constant.size
    return constant.reshape(shape)


def _make_step(name: str, sign: str, compute: Operator, alias: str, help: str) -> type[Arithmetic]:
    """Make the class of a step. The class must be an attribute of this module, because other processes look it up here
    when they load samples.
    """
    members = {
        "name": name,
        "sign": sign,
        "compute": compute,
        "aliases": (alias,),
        "help": help,
        "__module__": __name__,
    }
    return type(name.title(), (Arithmetic,), members)


Add = _make_step("add", "+", operator.add, "offset", "x + CONSTANT")
Subtract = _make_step("subtract", "-", operator.sub, "mean", "x - CONSTANT")
Divide = _make_step("divide", "/", operator.truediv, "std", "x / CONSTANT")
Multiply = _make_step(
    "multiply", "*", operator.mul, "scale", "x * CONSTANT; a number, a fraction such as 1/255, or [one,per,channel]"
)


@dataclass(frozen=True)
class Center(Step):
    """Subtract the item's own mean. The mean is computed over all elements in float64 and rounded to the
    array's dtype.
    """

    name = "center"
    help = "x - mean(x), with the item's own mean"

    def apply(self, state: ItemState, spec: TensorSpec | None) -> ItemState:
        """Return x - mean(x) in the dtype of x. Integers become float32 first."""
        array = to_floating(state.array)
        # A float32 sum over a million pixels loses digits.
        mean = np.asarray(array.mean(dtype=np.float64)).astype(array.dtype)
        return replace(state, array=np.asarray(array - mean, array.dtype))

    def describe(self) -> str:
        """Describe the subtraction and the elements that the mean covers."""
        return "x = x - mean(x), the mean over all elements of this item"


@dataclass(frozen=True)
class Dtype(Step):
    """Convert to a floating dtype. The steps that follow compute in it."""

    name = "dtype"
    help = "float16, float32 or float64, the dtype of the steps that follow (default: float32)"
    dtype: str = field(metadata=one_of("float16", "float32", "float64"))

    def apply(self, state: ItemState, spec: TensorSpec | None) -> ItemState:
        """Return the values in the chosen dtype.

        Raises:
            DataError: the values take more bytes than a sample may.
        """
        check_size(np.dtype(self.dtype).itemsize * state.array.size, f"as {self.dtype}", "Give smaller items")
        return replace(state, array=state.array.astype(self.dtype))

    def describe(self) -> str:
        """Describe the conversion."""
        return f"x = {self.dtype}(x)"
