"""The floating dtype of the arithmetic that follows."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from edgeq.data.records import State, check_size
from edgeq.data.step import Step, one_of
from edgeq.signature import TensorSpec


@dataclass(frozen=True)
class Dtype(Step):
    """Convert to a floating dtype; what follows is computed in it."""

    name: ClassVar[str] = "dtype"
    help: ClassVar[str] = "float16, float32 or float64: what follows is computed in it (without it: float32)"
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


STEP = Dtype
