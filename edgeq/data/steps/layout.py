"""Order the axes of an item."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from edgeq.data.axes import ItemState, model_axes
from edgeq.data.step import Step, UnfitError, field_kind
from edgeq.errors import DataError
from edgeq.signature import TensorSpec


def _read_axes(value: Any) -> str:
    # A letter twice would make the order ambiguous. "model" contains none twice, but it is a word, not axes.
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
            # If either order is unknown, nothing can be moved, and the model's own check of shapes decides.
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
        # The usual missing axis is the batch.
        missing = tuple(i for i, axis in enumerate(want) if axis not in have)
        return replace(state, array=np.expand_dims(array, missing), axes=want)

    def describe(self) -> str:
        """Describe the order of the axes, and what happens if an axis is missing."""
        if self.axes == "model":
            return "axes ordered as the model's input (channels where its size is 1 or 3), a batch axis of 1 added"
        return f"axes ordered {self.axes}; an axis that is missing is added with size 1"
