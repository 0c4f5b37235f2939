"""Subtract the item's mean."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from edgeq.data.records import State
from edgeq.data.step import Step, floating
from edgeq.signature import TensorSpec


@dataclass(frozen=True)
class Center(Step):
    """Subtract the item's own mean (over all elements, summed in float64, rounded to the array's dtype)."""

    name: ClassVar[str] = "center"
    help: ClassVar[str] = "x - mean(x) of the item itself"

    def apply(self, state: State, spec: TensorSpec | None) -> State:
        """x - mean(x) in the dtype of x; integers become float32 first."""
        array = floating(state.array)
        mean = np.asarray(array.mean(dtype=np.float64)).astype(array.dtype)
        return replace(state, array=np.asarray(array - mean, array.dtype))

    def describe(self) -> str:
        """The subtraction, and what the mean is over."""
        return "x = x - mean(x), the mean over all elements of this item"


STEP = Center
