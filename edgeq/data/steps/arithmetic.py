"""Compute with numbers: constants, the item's mean, and the dtype of the arithmetic."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace

import numpy as np

from edgeq.data.records import State, check_size
from edgeq.data.step import Arithmetic, Step, floating, one_of
from edgeq.errors import DataError
from edgeq.signature import TensorSpec


class Add(Arithmetic):
    """x + a constant, or one constant a channel."""

    name = "add"
    help = "x + CONSTANT"
    aliases = ("offset",)
    sign = "+"
    compute = operator.add


class Subtract(Arithmetic):
    """x - a constant, or one constant a channel."""

    name = "subtract"
    help = "x - CONSTANT"
    aliases = ("mean",)
    sign = "-"
    compute = operator.sub


class Multiply(Arithmetic):
    """x * a constant, or one constant a channel."""

    name = "multiply"
    help = "x * CONSTANT; a number, a fraction such as 1/255, or [one,a,channel]"
    aliases = ("scale",)
    sign = "*"
    compute = operator.mul


@dataclass(frozen=True)
class Divide(Arithmetic):
    """x / a constant, or one constant a channel."""

    name = "divide"
    help = "x / CONSTANT"
    aliases = ("std",)
    sign = "/"
    compute = operator.truediv

    def __post_init__(self) -> None:
        if 0.0 in (self.value if isinstance(self.value, tuple) else (self.value,)):
            raise DataError("divide: it divides by 0", "Correct the constant")


@dataclass(frozen=True)
class Center(Step):
    """Subtract the item's own mean (over all elements, summed in float64, rounded to the array's dtype)."""

    name = "center"
    help = "x - mean(x) of the item itself"

    def apply(self, state: State, spec: TensorSpec | None) -> State:
        """x - mean(x) in the dtype of x; integers become float32 first."""
        array = floating(state.array)
        mean = np.asarray(array.mean(dtype=np.float64)).astype(array.dtype)
        return replace(state, array=np.asarray(array - mean, array.dtype))

    def describe(self) -> str:
        """The subtraction, and what the mean is over."""
        return "x = x - mean(x), the mean over all elements of this item"


@dataclass(frozen=True)
class Dtype(Step):
    """Convert to a floating dtype; what follows is computed in it."""

    name = "dtype"
    help = "float16, float32 or float64: what follows is computed in it (without it: float32)"
    dtype: str = field(metadata=one_of("float16", "float32", "float64"))

    def apply(self, state: State, spec: TensorSpec | None) -> State:
        """The values as that dtype.

        Raises:
            DataError: they take more bytes than a sample may.
        """
        check_size(np.dtype(self.dtype).itemsize * state.array.size, f"as {self.dtype}", "Give smaller items")
        return replace(state, array=state.array.astype(self.dtype))

    def describe(self) -> str:
        """The conversion."""
        return f"x = {self.dtype}(x)"
