"""Figures of how closely one model's outputs follow another's, without labels.

Over all elements of all samples of an output, with r the reference and c the candidate:

    SQNR     10 log10(sum r^2 / sum (r - c)^2)    signal to quantization noise, dB
    cosine   sum r c / sqrt(sum r^2 sum c^2)
    top-1    share of rows whose largest element is at the same place (the first one, on a tie)
    same     share of equal elements, of outputs that are class numbers, indices or truth values: there a difference
             has no size, and SQNR means nothing

An output of several units, as boxes in pixels and scores, is judged by its worst slice: see `edgeq.measure.slices`.

A sample whose outputs differ in shape has no pairs of elements: it is counted, and left out of SQNR and cosine; its
rows and elements count as not the same. Where nothing was compared, SQNR is minus infinity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edgeq_device.variants import slice_name

from edgeq.display import Displayed
from edgeq.records import Amount, Count, Finite, NullIsInfinite, Share, computed


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
        return slice_name(self.axis, self.first, self.last)


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
