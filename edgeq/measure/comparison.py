"""Compare one model's outputs with another's: collect the running sums for the figures of `edgeq.measure.agreement`.

edgeq stores only sums, never outputs, so the memory that it needs does not depend on the number of samples.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from edgeq_device.measure.basis import EVERYTHING, Basis
from edgeq_device.measure.pairs import OutputPair, pair_outputs, pair_tensor
from numpy.typing import NDArray

from edgeq.measure.agreement import Agreement, OutputAgreement, SliceAgreement
from edgeq.measure.class_scores import ClassScores
from edgeq.measure.inference import Outputs
from edgeq.measure.power_ratios import cosine, decibels
from edgeq.measure.slices import LEAST_VALUES, ROUNDED, SliceSums
from edgeq.measure.task import Task

_UNIT = 2**1074
"""The reciprocal of the smallest positive float64. Every float64 is a multiple of that number."""
_NO_INPUTS: Outputs = MappingProxyType({})
# Bounds the size of records. The worst slices, which decide, are kept.
_MOST_SLICES = 64


@dataclass
class OutputComparison:
    """Hold the running sums of one output.

    The sums are exact multiples of the smallest float64, so parts can be merged in any order.
    """

    name: str
    elements: int = 0
    signal: int = 0
    noise: int = 0
    product: int = 0
    candidate_power: int = 0
    sum: int = 0
    max_abs_error: float = 0.0
    equal_rows: int = 0
    equal_elements: int = 0
    indices: bool = False
    classes: ClassScores = field(default_factory=ClassScores)
    hidden: int = 0
    real: int = 0
    positions: int = 0
    nothing: int = 0
    strays: int = 0
    nonfinite: int = 0
    mismatched: int = 0
    unmatched_rows: int = 0
    unmatched_elements: int = 0
    rows: int = 0
    rows_found: int = 0
    ranked: bool = False
    slices: SliceSums | None = None

    def update(
        self,
        reference: NDArray[Any],
        candidate: NDArray[Any],
        inputs: Mapping[str, NDArray[Any]] = MappingProxyType({}),
        *,
        rows: int = 1,
        basis: Basis = EVERYTHING,
    ) -> None:
        """Add the arrays of one sample or of several single rows.

        The sums for several rows are the same as if the rows came one by one.

        Args:
            reference, candidate: numbers or booleans, of any shape.
            inputs: the inputs from which both were computed.
            rows: number of single rows; 1 for a sample.
            basis: what the figures are taken over.
        """
        self.add(pair_tensor(basis, self.name, reference, candidate, inputs), inputs, rows=rows)

    def add(self, pair: OutputPair, inputs: Mapping[str, NDArray[Any]], *, rows: int = 1) -> None:
        """Add one sample or several single rows, as `update` does."""
        reference, candidate = pair.reference, pair.candidate
        self.indices |= reference.dtype.kind == "b" or (reference.dtype.kind in "iu" and reference.dtype.itemsize >= 4)
        for count in ("hidden", "real", "positions", "nothing", "strays", "nonfinite", "rows", "rows_found"):
            setattr(self, count, getattr(self, count) + getattr(pair, count))
        self.ranked |= pair.ranked is not None
        # Without a counterpart, no element can be subtracted. Such a sample still counts against the shares.
        if reference.shape != candidate.shape:
            self.mismatched += 1
            self.unmatched_rows += len(reference) if reference.ndim else 1
            self.unmatched_elements += max(reference.size, candidate.size)
            return
        if pair.ranked is not None:
            columns = math.prod(reference.shape[pair.ranked + 1 :])
            self.unmatched_elements += (pair.rows - pair.rows_found) * columns
        # Rows without a fixed place have no counterpart whose arg-max could agree.
        best = self.classes.update(reference, inputs) if pair.ranked is None else None
        self.classes.shaped = self.classes.shaped and pair.ranked is None
        if best is not None:
            self.equal_rows += int((best == candidate.reshape(len(best), -1).argmax(1)).sum())
        (r, c), mask = pair.to_numbers(), pair.mask
        elements = r.size if mask is None else int(mask.sum())
        if not elements:
            return
        error = r - c
        self.elements += elements
        # The share of equal elements is only told for indices.
        if self.indices:
            self.equal_elements += elements - int(np.count_nonzero(error))
        # Each row is summed by itself, so that the sums are those of rows that come one by one.
        for a, b, e in zip(r.reshape(rows, -1), c.reshape(rows, -1), error.reshape(rows, -1), strict=True):
            self.signal += _units(_dot(a, a))
            self.noise += _units(_dot(e, e))
            self.product += _units(_dot(a, b))
            self.candidate_power += _units(_dot(b, b))
            self.sum += _units(float(np.add.reduce(a)))
        self.max_abs_error = max(self.max_abs_error, -float(error.min()), float(error.max()))
        if self.slices is not None and reference.dtype.kind == "f":
            self.slices.update(r, c, inputs.values(), rows=rows, mask=mask, ranked=pair.ranked)

    def merge(self, chunk: OutputComparison) -> None:
        """Add the sums of later samples."""
        for total in dataclasses.fields(self):
            # Annotations are texts here. Every count and every power is an int.
            if total.type == "int":
                setattr(self, total.name, getattr(self, total.name) + getattr(chunk, total.name))
        self.max_abs_error = max(self.max_abs_error, chunk.max_abs_error)
        self.indices |= chunk.indices
        self.ranked |= chunk.ranked
        self.classes.merge(chunk.classes)
        if self.slices is not None and chunk.slices is not None:
            self.slices.merge(chunk.slices)

    def result(self, *, classes: bool = False) -> OutputAgreement:
        """Return the figures of all samples so far.

        Args:
            classes: whether the output contains class scores, if it is shaped like them.
        """
        rows = self.classes.rows + self.unmatched_rows
        powers = (self.signal, self.noise, self.product, self.candidate_power)
        signal, noise, product, candidate_power = (power / _UNIT for power in powers)
        # The column of a class that hardly ever occurs may become constant without a loss.
        columns = self.slices.lost() if self.slices is not None and not classes else (0, 0)
        return OutputAgreement(
            name=self.name,
            elements=self.elements,
            sqnr_db=decibels(signal, noise) if self.elements else -math.inf,
            cosine=cosine(product, signal, candidate_power) if self.elements else 0.0,
            max_abs_error=self.max_abs_error,
            top1=_share(self.equal_rows, rows) if classes and self.classes.shaped and self.classes.rows else None,
            nonfinite=self.nonfinite,
            mismatched=self.mismatched,
            same=_share(self.equal_elements, self.elements + self.unmatched_elements) if self.indices else None,
            slices=() if classes else self.parts(),
            centred_db=None if classes or self.indices else self._centred_db(),
            hidden=self.hidden,
            real=self.real,
            positions=self.positions,
            nothing=self.nothing,
            strays=self.strays,
            rows_found=_share(self.rows_found, self.rows) if self.ranked else None,
            lost_columns=columns[0],
            columns=columns[1],
        )

    def parts(self) -> tuple[SliceAgreement, ...]:
        """Return the output's slices of different scale. If there are more than 64, return the 64 worst. Return () if
        slices were not recorded.
        """
        slices = sorted(self.slices.result() if self.slices is not None else (), key=lambda part: part.least_db)
        return tuple(sorted(slices[:_MOST_SLICES], key=lambda s: (s.axis, s.first)))

    def _centred_db(self) -> float | None:
        """Return the lower of two SQNRs: around the mean of all elements, and around the means of the columns."""
        if self.elements < LEAST_VALUES:
            return None
        # The integers are exact, so that subtracting the mean loses nothing.
        squares = self.signal * self.elements * _UNIT - self.sum**2
        varied = squares / (self.elements * _UNIT**2) if squares > 0 else 0.0
        if not self.noise or varied <= ROUNDED * (self.signal / _UNIT):
            return None
        overall = decibels(varied, self.noise / _UNIT)
        columns = self.slices.centred_db() if self.slices is not None else None
        return overall if columns is None else min(overall, columns)


@dataclass
class OutputSums:
    """Hold the running sums of all outputs of one pair of models.

    Attributes:
        task: task that decides which output contains class scores. If it is None, edgeq decides by the values: see
            `ClassScores`.
        basis: what the figures of each output are taken over.
        sliced: whether an output's slices are compared, too. They take two thirds of the time.
    """

    task: Task | None = None
    basis: Basis = EVERYTHING
    sliced: bool = True
    outputs: dict[str, OutputComparison] = field(default_factory=dict)
    count: int = 0
    _floats: set[str] = field(default_factory=set)

    def update(self, reference: Outputs, candidate: Outputs, inputs: Outputs = _NO_INPUTS, *, rows: int = 1) -> None:
        """Add the outputs (by name) and inputs of one sample, or of several single rows.

        An output that is not an array of numbers in both models is left out.
        """
        if rows > 1 and self.basis.ranked:  # Rows are matched within a sample.
            for row in range(rows):
                row_slice = slice(row, row + 1)
                parts = (reference, candidate, inputs)
                self.update(*({n: a[row_slice] if a.ndim else a for n, a in part.items()} for part in parts))
            return
        self.count += rows
        # Sequences are lists.
        reference, candidate = (
            {name: array for name, array in part.items() if isinstance(array, np.ndarray | np.generic)}
            for part in (reference, candidate)
        )
        self._floats.update(name for name, array in reference.items() if array.dtype.kind == "f")
        for pair in pair_outputs(self.basis, reference, candidate, inputs):
            self._output(pair.name).add(pair, inputs, rows=rows)

    def merge(self, chunk: OutputSums) -> None:
        """Add the sums of later samples."""
        self.count += chunk.count
        self._floats |= chunk._floats
        for name, output in chunk.outputs.items():
            self._output(name).merge(output)

    def result(self) -> Agreement:
        """Return the figures of all outputs and samples so far."""
        return Agreement(
            tuple(output.result(classes=self._holds_classes(output)) for output in self.outputs.values()), self.count
        )

    def _output(self, name: str) -> OutputComparison:
        if name not in self.outputs:
            self.outputs[name] = OutputComparison(name, slices=SliceSums() if self.sliced else None)
        return self.outputs[name]

    def _holds_classes(self, output: OutputComparison) -> bool:
        if self.task is None:
            alone = self._floats == {output.name}
            return alone and output.classes.plausible(output.name, one_unit=not output.parts())
        named = getattr(self.task, "output", None)
        return getattr(self.task, "classes", False) and named in (None, output.name)


def _share(part: int, total: int) -> float | None:
    return part / total if total else None


def _units(value: float) -> int:
    """Return a finite float64 as a multiple of the smallest float64. A value that overflowed counts as the largest
    float64.
    """
    numerator, denominator = min(value, sys.float_info.max).as_integer_ratio()
    return numerator * (_UNIT // denominator)


def _dot(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    # `a @ b` is not used, because BLAS would start its threads for it. If a runtime keeps the cores busy, starting the
    # threads takes a thousand times as long as the sum itself.
    return float(np.einsum("i,i->", a, b))
