"""Cut a series into overlapping windows over time."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from edgeq.data.axes import ItemState
from edgeq.data.limits import check_size
from edgeq.data.step import Step, whole_number
from edgeq.errors import DataError
from edgeq.signature import TensorSpec


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
        # A last window that would be incomplete is left out, because padding would invent values.
        starts = range(0, array.shape[0] - self.frames + 1, self.step)
        # Overlapping windows repeat their values, so a small item can become very large.
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
