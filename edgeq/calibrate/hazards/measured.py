"""Figures of a calibrated tensor that decide whether 8 bits are enough for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import onnx_ir as ir

from edgeq.calibrate.histogram import Float64s, Int64s
from edgeq.calibrate.statistics import FINITE, Nonfinite, Statistics, TensorStatistics
from edgeq.graph.index import GraphIndex
from edgeq.graph.query import constant, name_of

LEVELS = 255
"""Steps of an 8-bit range."""
FEWEST = 16
"""Levels: a tensor that has fewer has lost more than four of its eight bits."""
_SMALL = 0.01


@dataclass(frozen=True)
class Spread:
    """Magnitudes of the finite values of one tensor, as float64 from its histogram.

    Attributes:
        low, high: the range, with zero in it.
        magnitudes: ascending, without zero; one for each bin and sign.
        counts: of values with them.
        zeros: count of values that are zero.
        nonfinite: the other elements.
    """

    low: float
    high: float
    magnitudes: Float64s
    counts: Int64s
    zeros: int
    nonfinite: Nonfinite = FINITE

    @classmethod
    def of(cls, tensor: TensorStatistics) -> Spread:
        """Return the spread of a tensor that calibration saw."""
        lower, upper = tensor.histogram.edges()
        middle = np.where(tensor.histogram.keys == 0, 0.0, np.abs(lower + upper) / 2)
        counts, order = tensor.histogram.counts, np.argsort(middle, kind="stable")
        middle, counts = middle[order], counts[order]
        zeros = int(np.searchsorted(middle, 0.0, side="right"))
        low, high = (min(tensor.minimum, 0.0), max(tensor.maximum, 0.0)) if tensor.count else (0.0, 0.0)
        return cls(low, high, middle[zeros:], counts[zeros:], int(counts[:zeros].sum()), tensor.nonfinite)

    @property
    def width(self) -> float:
        """The length of the range."""
        return self.high - self.low

    @property
    def noise(self) -> float:
        """The standard deviation of the error of 8 bits: a twelfth of the squared step, as power."""
        return self.width / LEVELS / math.sqrt(12)

    def levels(self, width: float) -> float:
        """Return how many steps of the range an interval of `width` takes."""
        return width / self.width * LEVELS if self.width else math.inf

    @cached_property
    def rms(self) -> float:
        """The root of the mean square."""
        total = int(self.counts.sum()) + self.zeros
        return math.sqrt(float(np.sum(self.counts * self.magnitudes**2)) / total) if total else 0.0

    @property
    def count(self) -> int:
        """Return the number of finite values."""
        return int(self.counts.sum()) + self.zeros

    @property
    def least(self) -> float:
        """The smallest magnitude that is not zero; infinite where there is none."""
        return float(self.magnitudes[0]) if self.magnitudes.size else math.inf

    @cached_property
    def small(self) -> float:
        """The magnitude under which a hundredth of the values that are not zero lie; infinite where there are none."""
        if not self.magnitudes.size:
            return math.inf
        sums = np.cumsum(self.counts)
        return float(self.magnitudes[np.searchsorted(sums, _SMALL * sums[-1])])


class Measured:
    """A prepared model with the spreads of its tensors.

    Attributes:
        model: the model.
        constants: names of tensors that are the same at each run.
    """

    def __init__(self, model: ir.Model, statistics: Statistics) -> None:
        self.model = model
        self.constants = GraphIndex(model).computed_constants
        self._tensors = statistics.tensors
        self._spreads: dict[str, Spread | None] = {}

    def spread(self, value: ir.Value | None) -> Spread | None:
        """Return the spread of a tensor; None where calibration did not see it."""
        name = name_of(value)
        if name not in self._spreads:
            found = self._tensors.get(name)
            self._spreads[name] = None if found is None or not found.samples else Spread.of(found)
        return self._spreads[name]

    def rms(self, value: ir.Value | None) -> float:
        """Return the root mean square of a tensor or constant; 1 where it is not known."""
        found = self.spread(value)
        if found is not None:
            return found.rms or 1.0
        values = self.numbers(value)
        return float(np.sqrt(np.mean(values**2))) or 1.0 if values is not None and values.size else 1.0

    def is_constant(self, value: ir.Value | None) -> bool:
        """Return whether a tensor is the same at each run."""
        return name_of(value) in self.constants

    def numbers(self, value: ir.Value | None) -> Float64s | None:
        """Return the values of a constant of floats; None for what is computed, and for other types."""
        values = constant(value)
        return values.astype(np.float64) if values is not None and values.dtype.kind == "f" else None
