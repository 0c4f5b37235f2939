"""What goes into a model and what comes out: names, dtypes, shapes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Dimension = int | str | None
"""A size, the name of a symbolic size, or None where nothing is known."""


@dataclass(frozen=True)
class TensorSpec:
    """One model input or output. `shape` is None when even the rank is unknown."""

    name: str
    dtype: np.dtype[np.generic]
    shape: tuple[Dimension, ...] | None

    def __str__(self) -> str:
        if self.shape is None:
            return f"{self.name}: {self.dtype}[?]"
        return f"{self.name}: {self.dtype}[{', '.join('?' if d is None else str(d) for d in self.shape)}]"


@dataclass(frozen=True)
class Signature:
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
