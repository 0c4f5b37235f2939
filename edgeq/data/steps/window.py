"""Overlapping windows along the first axis."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from edgeq.data.records import State, check_size
from edgeq.data.step import Step, whole_number
from edgeq.errors import DataError
from edgeq.signature import TensorSpec


@dataclass(frozen=True)
class Window(Step):
    """Overlapping windows of consecutive slices along the first axis; each window becomes one row of the batch."""

    name: ClassVar[str] = "window"
    help: ClassVar[str] = "FRAMES[:STEP]; windows along the first axis, flattened, one row of the batch each"
    one_row: ClassVar[bool] = False
    frames: int = field(metadata=whole_number(1))
    step: int = field(default=1, metadata=whole_number(1))

    def apply(self, state: State, spec: TensorSpec | None) -> State:
        """[windows, frames × the other sizes], axes "NF".

        Raises:
            DataError: fewer frames than one window has.
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
        return State(rows, "NF")

    def describe(self) -> str:
        """Which slices each row of the batch holds."""
        return (
            f"row i of the batch = x[{self.step}*i : {self.step}*i + {self.frames}] flattened, "
            f"i = 0 .. (frames - {self.frames}) // {self.step}"
        )


STEP = Window
