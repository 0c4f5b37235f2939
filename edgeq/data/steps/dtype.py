"""The floating dtype of the arithmetic that follows."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from edgeq.data.state import State
from edgeq.data.step import Step, one_of
from edgeq.signature import TensorSpec


@dataclass(frozen=True)
class Dtype(Step):
    """Convert to a floating dtype; what follows is computed in it."""

    name: ClassVar[str] = "dtype"
    help: ClassVar[str] = "float16, float32 or float64: what follows is computed in it (without it: float32)"
    dtype: str = field(metadata=one_of("float16", "float32", "float64"))

    def apply(self, state: State, spec: TensorSpec | None) -> State:
        """The values as that dtype."""
        return replace(state, array=state.array.astype(self.dtype))

    def describe(self) -> str:
        """The conversion."""
        return f"x = {self.dtype}(x)"


STEP = Dtype
