"""A new shape."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from edgeq.data.records import State
from edgeq.data.step import Step, UnfitError, field_kind, integer
from edgeq.errors import DataError
from edgeq.signature import TensorSpec


def _read_shape(value: Any) -> tuple[int, ...]:
    sizes = [value] if isinstance(value, str) else value
    if isinstance(sizes, list | tuple):
        sizes = [integer(size) if isinstance(size, str) else size for size in sizes]
    if not isinstance(sizes, list | tuple) or not all(isinstance(n, int) and (n > 0 or n == -1) for n in sizes):
        raise UnfitError(value, "Give sizes, such as [1, 49, 10]")
    return tuple(sizes)


@dataclass(frozen=True)
class Reshape(Step):
    """Give the item (without a batch axis) a new shape; one size may be -1."""

    name: ClassVar[str] = "reshape"
    help: ClassVar[str] = "[1,49,10]"
    shape: tuple[int, ...] = field(metadata=field_kind(_read_shape, many=True))

    def apply(self, state: State, spec: TensorSpec | None) -> State:
        """The values in that shape; the axes have no declared meaning after it.

        Raises:
            DataError: another number of values.
        """
        try:
            array = state.array.reshape(self.shape)
        except ValueError as error:
            raise DataError(
                f"shape {list(state.array.shape)} cannot become {list(self.shape)}", "Correct the reshape step"
            ) from error
        return replace(state, array=array, axes="")

    def describe(self) -> str:
        """The call of numpy's reshape."""
        return f"x = x.reshape({', '.join(map(str, self.shape))})"


STEP = Reshape
