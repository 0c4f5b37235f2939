"""An axis of size 1."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from edgeq.data.records import State
from edgeq.data.step import Step, whole_number
from edgeq.errors import DataError
from edgeq.signature import TensorSpec


@dataclass(frozen=True)
class Expand(Step):
    """Insert an axis of size 1."""

    name: ClassVar[str] = "expand"
    help: ClassVar[str] = "AXIS"
    axis: int = field(metadata=whole_number(-32))

    def apply(self, state: State, spec: TensorSpec | None) -> State:
        """An axis more; the axes have no declared meaning after it.

        Raises:
            DataError: an axis beyond those of the item.
        """
        if not -state.array.ndim - 1 <= self.axis <= state.array.ndim:
            raise DataError(f"shape {list(state.array.shape)} has no place for axis {self.axis}", "Correct the step")
        return replace(state, array=np.expand_dims(state.array, self.axis), axes="")

    def describe(self) -> str:
        """Where the axis is inserted."""
        return f"an axis of size 1 inserted at {self.axis}"


STEP = Expand
