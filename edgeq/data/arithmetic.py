"""What the steps of arithmetic with a constant share.

Arithmetic runs in the array's floating dtype; integers become float32 first, unless a `dtype` step chose another.
Every constant is rounded to that dtype before it is used, and each step rounds once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from edgeq.data.records import check_size
from edgeq.data.state import Array, State
from edgeq.data.step import Step, field_kind, read_number
from edgeq.errors import DataError
from edgeq.signature import TensorSpec

Operator = Callable[[Array, Array], Array]
"""Elementwise; the array and the constant have one floating dtype, the constant broadcasts against the array."""


def _read_constant(value: Any) -> float | tuple[float, ...]:
    if isinstance(value, list | tuple) and value:
        return tuple(read_number(item) for item in value)
    return read_number(value)


@dataclass(frozen=True)
class Arithmetic(Step):
    """x (*, /, +, -) a constant, or one constant a channel."""

    sign: ClassVar[str]
    compute: ClassVar[Operator]
    value: float | tuple[float, ...] = field(metadata=field_kind(_read_constant, many=True))

    def apply(self, state: State, spec: TensorSpec | None) -> State:
        """The result in the dtype of the array; integers become float32 first.

        Raises:
            DataError: as many constants as the channel axis does not have.
        """
        array = floating(state.array)
        with np.errstate(all="ignore"):  # what is not finite is refused with the sample's name
            constant = np.asarray(self.value, array.dtype)
            if constant.ndim:
                constant = _along_channels(constant, array, state.axes)
            return replace(state, array=np.asarray(type(self).compute(array, constant), array.dtype))

    def describe(self) -> str:
        """The operation with its constants in full precision."""
        if isinstance(self.value, tuple):
            return f"x = x {self.sign} [{', '.join(map(repr, self.value))}], one a channel"
        return f"x = x {self.sign} {self.value!r}"


def floating(array: Array) -> Array:
    """`array` itself if it is floating, else as float32.

    Raises:
        DataError: it takes more bytes than a sample may.
    """
    if array.dtype.kind == "f":
        return array
    check_size(4 * array.size, "as float32", "Give smaller items")
    return array.astype(np.float32)


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
