"""How closely one model's outputs follow another's, without labels.

Over all elements of all samples of an output, with r the reference and c the candidate:

    SQNR     10 log10(sum r^2 / sum (r - c)^2)    signal to quantization noise, dB
    cosine   sum r c / sqrt(sum r^2 sum c^2)
    top-1    share of rows whose largest element is at the same place (the first one, on a tie)
    same     share of equal elements, of outputs that are class numbers, indices or truth values: there a difference
             has no size, and SQNR means nothing

An output of several units, as boxes in pixels and scores, is judged by its worst slice: see `edgeq.measure.slices`.

A sample whose outputs differ in shape has no pairs of elements: it is counted, and left out of SQNR and cosine; its
rows and elements count as not the same. Where nothing was compared, SQNR is minus infinity.

Sums are kept, never the outputs, so memory does not grow with the samples.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgeq.display import Displayed
from edgeq.measure.class_scores import ClassScores
from edgeq.measure.inference import Outputs, Session, inferences
from edgeq.measure.rows import rows
from edgeq.measure.slices import SliceFigures, SliceSums
from edgeq.progress import SILENT, Progress
from edgeq.records import Amount, Count, Finite, NullIsInfinite, Share, computed

if TYPE_CHECKING:
    from edgeq.data.samples import Samples
    from edgeq.measure.task import Task

_UNIT = 2**1074
"""1 over the smallest float64: every other is a multiple of it."""
_NO_INPUTS: Outputs = MappingProxyType({})
_MOST_SLICES = 64
_ADDED = (
    "elements",
    "signal",
    "noise",
    "product",
    "candidate_power",
    "equal_rows",
    "equal_elements",
    "nonfinite",
    "mismatched",
    "unmatched_rows",
    "unmatched_elements",
)


@dataclass(frozen=True)
class SliceAgreement:
    """Agreement of a part of an output whose values have a unit of their own.

    Attributes:
        axis, first, last: the indices `first` to `last` along `axis`.
        peak: largest absolute value of the reference there.
        sqnr_db, cosine, max_abs_error: as `OutputAgreement` has them, over the slice.
    """

    axis: Count
    first: Count
    last: Count
    peak: Amount
    sqnr_db: NullIsInfinite
    cosine: Finite
    max_abs_error: Amount

    @property
    def where(self) -> str:
        """Name its place in the output."""
        indices = str(self.first) if self.first == self.last else f"{self.first}..{self.last}"
        return f"{indices} on axis {self.axis}"


@dataclass(frozen=True)
class OutputAgreement:
    """Agreement of one output.

    Attributes:
        name: the output.
        elements: how many pairs of elements the figures rest on.
        sqnr_db: dB; infinity where both are equal everywhere, minus infinity where a reference of nothing but zeros
            is not met, and where nothing was compared.
        cosine: -1 to 1; 1 where both are zero everywhere, 0 where one of them is, and where nothing was compared.
        max_abs_error: largest absolute difference, in the output's own unit.
        top1: share of equal arg-max, 0 to 1; None where the output does not hold class scores: see
            `Comparison`.
        nonfinite: pairs left out because NaN or an infinity stands in one of them and not the same in the other.
        mismatched: samples left out because the shapes differ (an output whose size depends on the values).
        same: share of equal elements, 0 to 1, where the output holds whole numbers of 32 bits and more, or booleans;
            else None.
        slices: its parts along each axis that has parts of unlike scale; none where it is of one unit.
    """

    name: str
    elements: Count
    sqnr_db: NullIsInfinite
    cosine: Finite
    max_abs_error: Amount
    top1: Share | None
    nonfinite: Count
    mismatched: Count
    same: Share | None = None
    slices: tuple[SliceAgreement, ...] = ()

    @computed
    def equal(self) -> bool:
        """Tell whether there are pairs of elements and each is equal."""
        return self.compared and self.max_abs_error == 0 and not self.nonfinite and not self.mismatched

    @property
    def compared(self) -> bool:
        """Tell whether any pair of elements was compared."""
        return self.elements > 0

    @property
    def worst_slice(self) -> SliceAgreement | None:
        """Return the slice with the lowest SQNR, if that is below the whole output's."""
        worst = min(self.slices, key=lambda part: part.sqnr_db, default=None)
        return worst if worst is not None and worst.sqnr_db < self.sqnr_db else None

    @property
    def least_db(self) -> float:
        """Return the SQNR by which it is judged: of the worst slice, or of the whole."""
        return self.worst_slice.sqnr_db if self.worst_slice is not None else self.sqnr_db

    @property
    def unlike(self) -> str:
        """Say what is wrong with the worst slice; "" where no slice is worse than the whole."""
        part = self.worst_slice
        if part is None:
            return ""
        others = max(other.peak for other in self.slices if other.axis == part.axis)
        reach = f"their values reach {part.peak:.3g} where" if part.peak < others else "on the same axis"
        return (
            f"output {self.name!r}, {part.where}: {part.sqnr_db:.1f} dB SQNR against float32 "
            f"({self.sqnr_db:.1f} dB over the whole output); {reach} others reach {others:.3g}"
        )

    @property
    def least_cosine(self) -> float:
        """Return the lowest cosine of the output and its slices."""
        return min(self.cosine, *(part.cosine for part in self.slices), 1.0)


@dataclass(frozen=True)
class Agreement(Displayed):
    """Agreement of all outputs that both models have and that hold numbers, over `count` samples."""

    outputs: tuple[OutputAgreement, ...]
    count: Count = 0

    def __brief__(self) -> dict[str, Any]:
        return {"sqnr_db": self.sqnr_db, "top1": self.top1, "outputs": len(self.outputs), "samples": self.count}

    @computed
    def sqnr_db(self) -> float:
        """Return the SQNR of the worst output, or slice of one, dB, of those that hold more than indices, if any does;
        minus infinity where nothing was compared of one."""
        return min((output.least_db for output in self._signals), default=-math.inf)

    @property
    def worst(self) -> OutputAgreement | None:
        """Return the output that is judged worst of those that were compared; None where none was."""
        compared = [output for output in self._signals if output.compared]
        return min(compared, key=lambda output: output.least_db, default=None)

    def left_out(self, reference: str = "float32") -> tuple[str, ...]:
        """Write a sentence for each output of which samples could not be compared with `reference`'s."""
        found = []
        for output in self.outputs:
            if output.mismatched:
                some = f"{output.mismatched} of {self.count} samples are left out of its figures"
                none = f"none of its {self.count} samples could be compared, so no figure says how it follows"
                what = some if output.compared else f"{none} {reference}"
                found.append(f"output {output.name!r}: {what}, since its size is not that of {reference}'s")
        return tuple(found)

    @property
    def compared(self) -> bool:
        """Tell whether any pair of elements was compared."""
        return any(output.compared for output in self.outputs)

    @computed
    def top1(self) -> float | None:
        """The worst output's top-1 agreement; None where no output holds class scores."""
        return min((output.top1 for output in self.outputs if output.top1 is not None), default=None)

    @computed
    def same(self) -> float | None:
        """The worst output's share of equal elements; None where an output holds more than indices."""
        found = [output.same for output in self.outputs if output.same is not None]
        return min(found) if found and len(found) == len(self.outputs) else None

    @property
    def cosine(self) -> float:
        """Return the cosine of the worst output, or slice of one, of the same outputs; 0 where nothing was compared."""
        return min((output.least_cosine for output in self._signals), default=0.0)

    @property
    def _signals(self) -> Sequence[OutputAgreement]:
        # An output that is empty in every sample, as where a detector finds nothing, says nothing of the others.
        found = [output for output in self.outputs if output.elements or output.nonfinite or output.mismatched]
        return [output for output in found if output.same is None] or found


@dataclass
class OutputComparison:
    """The running sums of one output, in units of the smallest float64: exact, so that parts merge in any order."""

    name: str
    elements: int = 0
    signal: int = 0
    noise: int = 0
    product: int = 0
    candidate_power: int = 0
    max_abs_error: float = 0.0
    equal_rows: int = 0
    equal_elements: int = 0
    indices: bool = False
    classes: ClassScores = field(default_factory=ClassScores)
    nonfinite: int = 0
    mismatched: int = 0
    unmatched_rows: int = 0
    unmatched_elements: int = 0
    slices: SliceSums | None = None

    def update(
        self,
        reference: NDArray[Any],
        candidate: NDArray[Any],
        inputs: Mapping[str, NDArray[Any]] = MappingProxyType({}),
        *,
        rows: int = 1,
    ) -> None:
        """Add one sample's arrays: numbers or booleans, of any shape; and the inputs that they were computed from. Or
        those of several single rows: the sums are what they would be one by one."""
        self.indices |= reference.dtype.kind == "b" or (reference.dtype.kind in "iu" and reference.dtype.itemsize >= 4)
        if reference.shape != candidate.shape:
            self.mismatched += 1
            self.unmatched_rows += len(reference) if reference.ndim else 1
            self.unmatched_elements += max(reference.size, candidate.size)
            return
        best = self.classes.update(reference, inputs)
        if best is not None:
            self.equal_rows += int((best == candidate.reshape(len(best), -1).argmax(1)).sum())
        r = np.asarray(reference, np.float64).ravel()
        c = np.asarray(candidate, np.float64).ravel()
        every = r, c
        finite = np.isfinite(r) & np.isfinite(c)
        if not finite.all():
            same = (r == c) | (np.isnan(r) & np.isnan(c))
            self.nonfinite += int((~finite & ~same).sum())
            r, c = r[finite], c[finite]
        if not r.size:
            return
        error = r - c
        self.elements += r.size
        self.equal_elements += int((error == 0).sum())
        parts = rows if r.size == reference.size else 1
        for a, b, e in zip(r.reshape(parts, -1), c.reshape(parts, -1), error.reshape(parts, -1), strict=True):
            self.signal += _units(_dot(a, a))
            self.noise += _units(_dot(e, e))
            self.product += _units(_dot(a, b))
            self.candidate_power += _units(_dot(b, b))
        self.max_abs_error = max(self.max_abs_error, float(np.abs(error).max()))
        if self.slices is not None and reference.dtype.kind == "f":
            whole, other = (np.where(finite, x, 0.0).reshape(reference.shape) for x in every)
            self.slices.update(whole, other, inputs.values(), rows=rows)

    def merge(self, other: OutputComparison) -> None:
        """Add what was seen of later samples."""
        for name in _ADDED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.max_abs_error = max(self.max_abs_error, other.max_abs_error)
        self.indices |= other.indices
        self.classes.merge(other.classes)
        if self.slices is not None and other.slices is not None:
            self.slices.merge(other.slices)

    def result(self, *, classes: bool = False) -> OutputAgreement:
        """The figures of all samples so far.

        Args:
            classes: whether it holds class scores, if it is shaped so.
        """
        rows = self.classes.rows + self.unmatched_rows
        return OutputAgreement(
            name=self.name,
            elements=self.elements,
            sqnr_db=decibels(self.signal / _UNIT, self.noise / _UNIT) if self.elements else -math.inf,
            cosine=(
                _cosine(self.product / _UNIT, self.signal / _UNIT, self.candidate_power / _UNIT)
                if self.elements
                else 0.0
            ),
            max_abs_error=self.max_abs_error,
            top1=_share(self.equal_rows, rows) if classes and self.classes.shaped and self.classes.rows else None,
            nonfinite=self.nonfinite,
            mismatched=self.mismatched,
            same=_share(self.equal_elements, self.elements + self.unmatched_elements) if self.indices else None,
            slices=() if classes else self.parts(),
        )

    def parts(self) -> tuple[SliceAgreement, ...]:
        """Return its slices of unlike scale, if these were asked for: the worst where there are many."""
        found = sorted(map(_slice, self.slices.result() if self.slices is not None else ()), key=lambda s: s.sqnr_db)
        return tuple(sorted(found[:_MOST_SLICES], key=lambda s: (s.axis, s.first)))


@dataclass
class Comparison:
    """The running sums of all outputs of one pair of models.

    Attributes:
        task: which output holds class scores: a classification's. None finds out by the values, see `class_scores`.
    """

    task: Task | None = None
    outputs: dict[str, OutputComparison] = field(default_factory=dict)
    count: int = 0
    _floats: set[str] = field(default_factory=set)

    def update(self, reference: Outputs, candidate: Outputs, inputs: Outputs = _NO_INPUTS, *, rows: int = 1) -> None:
        """Add one sample, or several single rows: outputs by name, and its inputs. What is no array of numbers in both
        is left out."""
        self.count += rows
        self._floats.update(name for name, array in reference.items() if array.dtype.kind == "f")
        for name, array in reference.items():
            other = candidate.get(name)
            if other is not None and array.dtype.kind in "biuf" and other.dtype.kind in "biuf":
                self.outputs.setdefault(name, OutputComparison(name, slices=SliceSums())).update(
                    array, other, inputs, rows=rows
                )

    def merge(self, other: Comparison) -> None:
        """Add what was seen of later samples."""
        self.count += other.count
        self._floats |= other._floats
        for name, output in other.outputs.items():
            self.outputs.setdefault(name, OutputComparison(name, slices=SliceSums())).merge(output)

    def result(self) -> Agreement:
        """The figures of all outputs and samples so far."""
        return Agreement(
            tuple(output.result(classes=self._holds_classes(output)) for output in self.outputs.values()), self.count
        )

    def _holds_classes(self, output: OutputComparison) -> bool:
        if self.task is None:
            alone = self._floats == {output.name}
            return alone and output.classes.plausible(output.name, one_unit=not output.parts())
        named = getattr(self.task, "output", None)
        return getattr(self.task, "classes", False) and named in (None, output.name)


def compare_many(
    reference: Session,
    candidates: Mapping[str, Session],
    samples: Samples,
    progress: Progress = SILENT,
    *,
    count: int | None = None,
) -> dict[str, Agreement]:
    """Agreement of each candidate with the reference, in one pass over the samples."""
    comparisons = {name: Comparison() for name in candidates}
    key = "reference"
    while key in candidates:
        key += "'"
    runs = inferences({key: reference, **candidates}, samples, count=count, progress=progress)
    for sample, outputs in itertools.chain.from_iterable(rows(*run) for run in runs):
        for name, comparison in comparisons.items():
            comparison.update(outputs[key], outputs[name], sample.inputs)
    return {name: comparison.result() for name, comparison in comparisons.items()}


def compare_sessions(
    reference_session: Session,
    candidate_session: Session,
    samples: Samples,
    progress: Progress = SILENT,
    *,
    count: int | None = None,
) -> Agreement:
    """Agreement of the candidate with the reference over `samples` (at most `count`).

    Raises:
        DataError: there are no samples, or a session refuses one.
    """
    return compare_many(reference_session, {"candidate": candidate_session}, samples, progress, count=count)[
        "candidate"
    ]


def decibels(signal: float, noise: float) -> float:
    """10 log10(signal / noise) of two powers; infinity without noise, minus infinity without signal."""
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _slice(sums: SliceFigures) -> SliceAgreement:
    # Of each pair e = r - c, so that 2 r c = r^2 + c^2 - e^2.
    product = (sums.signal + sums.candidate_power - sums.noise) / 2
    return SliceAgreement(
        axis=sums.axis,
        first=sums.first,
        last=sums.last,
        peak=sums.peak,
        sqnr_db=decibels(sums.signal, sums.noise),
        cosine=_cosine(product, sums.signal, sums.candidate_power),
        max_abs_error=sums.max_abs_error,
    )


def _units(value: float) -> int:
    """A finite float64 as a whole number of the smallest ones; one that overflowed counts as the largest."""
    numerator, denominator = min(value, sys.float_info.max).as_integer_ratio()
    return numerator * (_UNIT // denominator)


def _dot(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    # Not `a @ b`: BLAS starts its threads for it, and beside a runtime that keeps the cores busy that takes a thousand
    # times as long as the sum itself.
    return float(np.einsum("i,i->", a, b))


def _cosine(product: float, a: float, b: float) -> float:
    if a == 0 or b == 0:
        return 1.0 if a == b else 0.0
    # Rounding can leave the quotient a few ulp outside.
    return max(-1.0, min(1.0, product / (math.sqrt(a) * math.sqrt(b))))
