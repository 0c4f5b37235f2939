"""Summarise the values of each tensor as the rules for hazards need them: range, magnitudes, and noise of 8 bits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import onnx_ir as ir

from edgeq.calibration.statistics import FINITE, Float64s, Int64s, Nonfinite, Statistics, TensorStatistics
from edgeq.model.exact import Exactness
from edgeq.model.graph import (
    GraphIndex,
    constant,
    name_of,
)

LEVELS = 255
"""Number of steps of an 8-bit range."""
MIN_LEVELS = 16
"""Smallest number of levels that a tensor needs. With fewer levels, it has lost more than four of its eight bits."""
# Share of the nonzero values that count as small.
_SMALL = 0.01


@dataclass(frozen=True)
class Spread:
    """Hold the magnitudes of the finite values of one tensor, taken from the tensor's histogram, as float64.

    Attributes:
        low, high: ends of the range, which includes zero.
        magnitudes: magnitudes in ascending order, without zero; one for each bin and sign.
        counts: number of values with each magnitude.
        zeros: number of values that are zero.
        nonfinite: numbers of NaN and infinite elements.
    """

    low: float
    high: float
    magnitudes: Float64s
    counts: Int64s
    zeros: int
    nonfinite: Nonfinite = FINITE

    @classmethod
    def of(cls, tensor: TensorStatistics) -> Spread:
        """Return the spread of a tensor from its statistics."""
        lower, upper = tensor.histogram.edges()
        middle = np.where(tensor.histogram.keys == 0, 0.0, np.abs(lower + upper) / 2)
        counts, order = tensor.histogram.counts, np.argsort(middle, kind="stable")
        middle, counts = middle[order], counts[order]
        # Zeros are counted apart, because every range represents them exactly.
        zeros = int(np.searchsorted(middle, 0.0, side="right"))
        low, high = (min(tensor.minimum, 0.0), max(tensor.maximum, 0.0)) if tensor.count else (0.0, 0.0)
        return cls(low, high, middle[zeros:], counts[zeros:], int(counts[:zeros].sum()), tensor.nonfinite)

    @property
    def width(self) -> float:
        """Return the length of the range."""
        return self.high - self.low

    @property
    def noise(self) -> float:
        """Return the standard deviation of the rounding error in 8 bits: the step over the square root of twelve."""
        return self.width / LEVELS / math.sqrt(12)

    def levels(self, width: float) -> float:
        """Return how many steps of the range fit into an interval of `width`."""
        return width / self.width * LEVELS if self.width else math.inf

    @cached_property
    def rms(self) -> float:
        """Return the root mean square."""
        total = int(self.counts.sum()) + self.zeros
        return math.sqrt(float(np.sum(self.counts * self.magnitudes**2)) / total) if total else 0.0

    @property
    def count(self) -> int:
        """Return the number of finite values."""
        return int(self.counts.sum()) + self.zeros

    @property
    def smallest(self) -> float:
        """Return the smallest nonzero magnitude; infinity if all values are zero."""
        return float(self.magnitudes[0]) if self.magnitudes.size else math.inf

    @cached_property
    def small(self) -> float:
        """Return the magnitude that bounds the smallest hundredth of the nonzero values. Return infinity if all values
        are zero.
        """
        if not self.magnitudes.size:
            return math.inf
        sums = np.cumsum(self.counts)
        return float(self.magnitudes[np.searchsorted(sums, _SMALL * sums[-1])])


class ModelSpreads:
    """Pair a prepared model with the spreads of its tensors.

    Attributes:
        model: the prepared model.
        constants: names of the tensors that have the same values in each run.
        index_casts: Cast nodes whose output leads to an index.
    """

    def __init__(self, graph: GraphIndex, statistics: Statistics) -> None:
        self.model = graph.model
        self.constants = graph.computed_constants
        self.index_casts = Exactness(graph).index_casts()
        self._tensors = statistics.tensors
        self._spreads: dict[str, Spread | None] = {}

    def spread(self, value: ir.Value | None) -> Spread | None:
        """Return the spread of a tensor, or None if the tensor has no statistics."""
        return self.spread_of(name_of(value))

    def spread_of(self, name: str) -> Spread | None:
        """Return the spread of the tensor `name`, or None if the tensor has no statistics."""
        if name not in self._spreads:
            tensor = self._tensors.get(name)
            self._spreads[name] = None if tensor is None or not tensor.samples else Spread.of(tensor)
        return self._spreads[name]

    def rms(self, value: ir.Value | None) -> float:
        """Return the root mean square of a tensor or constant. Return 1 if it is zero or unknown."""
        spread = self.spread(value)
        if spread is not None:
            return spread.rms or 1.0
        values = self.numbers(value)
        return float(np.sqrt(np.mean(values**2))) or 1.0 if values is not None and values.size else 1.0

    def is_constant(self, value: ir.Value | None) -> bool:
        """Return whether a tensor has the same values in each run."""
        return name_of(value) in self.constants

    def numbers(self, value: ir.Value | None) -> Float64s | None:
        """Return the values of a float constant; None for computed values and other types."""
        values = constant(value)
        return values.astype(np.float64) if values is not None and values.dtype.kind == "f" else None


def is_empty(spread: Spread | None) -> bool:
    """Return whether a tensor has no elements other than zero in all samples."""
    return spread is not None and not spread.magnitudes.size and not spread.nonfinite
