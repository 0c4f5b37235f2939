"""Measure without labels how closely one model's outputs follow another's.

The figures cover all elements of all samples of an output. r is the reference and c the candidate:

    SQNR     10 log10(sum r^2 / sum (r - c)^2)    signal to quantization noise, dB
    cosine   sum r c / sqrt(sum r^2 sum c^2)
    top-1    share of rows whose largest element has the same index (the first index, on a tie). It is measured only for
             class scores: see `edgeq.measure.class_scores`
    same     share of equal elements, for outputs that are class numbers, indices or truth values. The size of a
             difference between such values means nothing, and neither does SQNR

An output that mixes units, such as boxes in pixels and scores, is judged by its worst slice: see
`edgeq.measure.slices`. Every output and slice is also judged around its mean, because the noise of a temperature of
300 K is not to be compared with 300 K:

    centred    10 log10(sum (r - mean)^2 / sum (r - c)^2)    dB, where the mean is that of the column or of the slice
    lost       -20 log10(share of rows, columns or elements without a counterpart)    dB: a tenth of the rows is as bad
               as noise with a tenth of the signal's amplitude

Elements that mean nothing and padded positions are left out, and rows without a fixed place are matched: see
`edgeq.measure.basis`.

If the two outputs for a sample have different shapes, their elements cannot be paired. The sample is counted, but SQNR
and cosine leave it out, and its rows and elements count as not the same. If nothing was compared, SQNR is minus
infinity.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from edgeq_device.engines.variant import name_slice

from edgeq.util.display import Displayed
from edgeq.util.records import Amount, Count, Finite, NullIsInfinite, Share, computed


@dataclass(frozen=True)
class SliceAgreement:
    """Hold the agreement of one slice of an output. The values of a slice have a unit of their own.

    Attributes:
        axis, first, last: position of the slice: indices `first` to `last` along `axis`.
        peak: largest absolute value of the reference in the slice.
        sqnr_db, cosine, max_abs_error, centred_db: figures over the slice; see `OutputAgreement`.
    """

    axis: Count
    first: Count
    last: Count
    peak: Amount
    sqnr_db: NullIsInfinite
    cosine: Finite
    max_abs_error: Amount
    centred_db: Finite | None = None

    @property
    def least_db(self) -> float:
        """Return the lower of the slice's SQNR and its SQNR around the mean."""
        return self.sqnr_db if self.centred_db is None else min(self.sqnr_db, self.centred_db)

    @property
    def offset(self) -> bool:
        """Return whether the distance from zero makes a poor result look good."""
        return _is_offset(self.sqnr_db, self.centred_db)

    @property
    def location(self) -> str:
        """Return a text that names the slice's position in the output."""
        return name_slice(self.axis, self.first, self.last)


@dataclass(frozen=True)
class OutputAgreement:
    """Hold the agreement of one output.

    Attributes:
        name: name of the output.
        elements: number of pairs of elements that were compared.
        sqnr_db: SQNR in dB. It is infinity if all elements are equal. It is minus infinity if nothing was compared, or
            if the reference is zero everywhere and the candidate is not.
        cosine: cosine, -1 to 1. It is 1 if the reference and the candidate are zero everywhere, and 0 if only one of
            them is, or if nothing was compared.
        max_abs_error: largest absolute difference, in the output's own unit.
        top1: share of rows with equal arg-max, 0 to 1; None if the output does not contain class scores: see
            `edgeq.measure.class_scores`.
        nonfinite: number of pairs left out because one element is NaN or infinite and the other is not the same.
        mismatched: number of samples left out because the shapes differ. This happens if the size of an output depends
            on the values.
        same: share of equal elements, 0 to 1, if the output contains booleans or integers of at least 32 bits; else
            None.
        slices: parts along each axis that has parts of different scale; empty if the output has one unit.
        centred_db: SQNR around the mean in dB; None if the reference does not vary, has too few values for a mean, or
            has no noise.
        hidden: number of elements left out because a mask hides their position (padding).
        real, positions: numbers of real positions and of all positions; zeros if no mask hides positions.
        nothing: number of elements left out because they mean nothing in both models.
        strays: number of elements that mean nothing in one of the models alone.
        rows_found: share of rows with a counterpart, if rows have no fixed place; else None.
        lost_columns: number of columns that vary in the reference and are constant in the candidate.
        columns: number of columns that vary in the reference, on the axis of `lost_columns`.
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
    centred_db: Finite | None = None
    hidden: Count = 0
    real: Count = 0
    positions: Count = 0
    nothing: Count = 0
    strays: Count = 0
    rows_found: Share | None = None
    lost_columns: Count = 0
    columns: Count = 0

    @computed
    def equal(self) -> bool:
        """Return whether at least one pair of elements was compared and all pairs are equal."""
        return self.compared and self.max_abs_error == 0 and not self.nonfinite and not self.mismatched

    @property
    def compared(self) -> bool:
        """Return whether any pair of elements was compared."""
        return self.elements > 0

    @property
    def offset(self) -> bool:
        """Return whether the distance from zero makes a poor result look good."""
        return _is_offset(self.sqnr_db, self.centred_db)

    @property
    def least_db(self) -> float:
        """Return the level in dB by which the output is judged: the lowest of all its levels."""
        return min(level for level, _ in self._levels())

    @property
    def level_note(self) -> str:
        """Describe the level by which the output is judged, or return "" if it is the SQNR over the whole output."""
        level, text = min(self._levels(), key=lambda pair: pair[0])
        return f"output {self.name!r}{text}" if text and level < self.sqnr_db else ""

    def _levels(self) -> Iterator[tuple[float, str]]:
        """Yield each level in dB with the words that describe it."""
        overall = f"({self.sqnr_db:.1f} dB SQNR over the whole output)"
        # The SQNR of the whole output comes first: it wins a tie, and then needs no words.
        yield self.sqnr_db, ""
        for part in self.slices:
            highest_peak = max(peer.peak for peer in self.slices if peer.axis == part.axis)
            reach = f"their values reach {part.peak:.3g} where" if part.peak < highest_peak else "on the same axis"
            figure = f"{part.sqnr_db:.1f} dB SQNR against float32 ({self.sqnr_db:.1f} dB over the whole output)"
            if part.offset:
                yield part.least_db, f", {part.location}: {_centred_note(part.least_db)} {overall}"
            else:
                yield part.least_db, f", {part.location}: {figure}; {reach} others reach {highest_peak:.3g}"
        if self.centred_db is not None:
            yield self.centred_db, f": {_centred_note(self.centred_db)} {overall}" if self.offset else ""
        if self.lost_columns:
            share = self.lost_columns / self.columns
            yield (
                -20 * math.log10(share),
                f": {self.lost_columns} of {self.columns} columns that vary in float32 are constant here {overall}",
            )
        if self.strays:
            share = self.strays / (self.strays + self.elements)
            yield (
                -20 * math.log10(share),
                f": {self.strays} elements mean nothing in one model alone (a mask chooses others) {overall}",
            )
        if self.rows_found is not None and self.rows_found < 1:
            yield (
                -20 * math.log10(1 - self.rows_found),
                f": {self.rows_found:.1%} of float32's rows are found again ({self.sqnr_db:.1f} dB SQNR over these)",
            )

    @property
    def basis_note(self) -> str:
        """State what the figures are taken over, or return "" if they are taken over all elements, in place."""
        parts = []
        if self.rows_found is not None:
            parts.append(f"its rows have no fixed place: {self.rows_found:.1%} of them were matched")
        if self.nothing:
            parts.append(f"{self.nothing} elements that mean nothing in both models are left out")
        if self.hidden:
            parts.append(f"the figures are over {self.real} real of {self.positions} positions, the rest is padding")
        return f"output {self.name!r}: {'; '.join(parts)}" if parts else ""

    @property
    def least_cosine(self) -> float:
        """Return the lowest cosine among the output and its slices. Noise with a power of n times the signal's gives a
        cosine of about 1 - n / 2; levels without a cosine count as such noise.
        """
        # Above 300 dB, the noise is far below the resolution of a float64.
        noise = 10 ** (-self.least_db / 10) if self.least_db < min(self.sqnr_db, 300.0) else 0.0
        return min(self.cosine, *(part.cosine for part in self.slices), max(-1.0, 1 - noise / 2))


def _is_offset(sqnr_db: float, centred_db: float | None) -> bool:
    moved = centred_db is not None and centred_db < min(sqnr_db - _HALF_DB, GOOD_DB)
    return moved and sqnr_db >= POOR_DB


def _centred_note(level: float) -> str:
    return f"{level:.1f} dB SQNR around the mean, because the values vary little in comparison with their size"


@dataclass(frozen=True)
class Agreement(Displayed):
    """Hold the agreement of all numeric outputs that both models have, measured on `samples` samples."""

    outputs: tuple[OutputAgreement, ...]
    samples: Count = 0

    def __brief__(self) -> dict[str, Any]:
        return {
            "sqnr_db": self.sqnr_db,
            "top1_agreement": self.top1,
            "outputs": len(self.outputs),
            "samples": self.samples,
        }

    @computed
    def sqnr_db(self) -> float:
        """Return the lowest SQNR in dB among the outputs and their slices. Return minus infinity if an output was not
        compared.

        Outputs of indices and truth values count only if there are no other outputs.
        """
        figures = (db for output in self._signals for db in (output.sqnr_db, *(p.sqnr_db for p in output.slices)))
        return min(figures, default=-math.inf)

    @computed
    def least_db(self) -> float:
        """Return the lowest level in dB of the outputs that `sqnr_db` uses; see `OutputAgreement.least_db`."""
        return min((output.least_db for output in self._signals), default=-math.inf)

    @property
    def worst(self) -> OutputAgreement | None:
        """Return the compared output with the lowest level, or None if no output was compared."""
        compared = [output for output in self._signals if output.compared]
        return min(compared, key=lambda output: output.least_db, default=None)

    def mismatch_notes(self, reference: str = "float32") -> tuple[str, ...]:
        """Return a sentence for each output that could not be compared on some samples. `reference` is the name of the
        other model.
        """
        sentences = []
        for output in self.outputs:
            if output.mismatched:
                some = f"{output.mismatched} of {self.samples} samples are left out of its figures"
                none = f"none of its {self.samples} samples could be compared with"
                extent = some if output.compared else f"{none} {reference}"
                sentences.append(f"output {output.name!r}: {extent}, because its size differs from {reference}'s")
        return tuple(sentences)

    @property
    def compared(self) -> bool:
        """Return whether any pair of elements was compared."""
        return any(output.compared for output in self.outputs)

    @computed
    def top1(self) -> float | None:
        """Return the lowest top-1 agreement among the outputs, or None if no output contains class scores."""
        return min((output.top1 for output in self.outputs if output.top1 is not None), default=None)

    @computed
    def same(self) -> float | None:
        """Return the lowest share of equal elements among the outputs. Return None unless all outputs are indices or
        truth values.
        """
        shares = [output.same for output in self.outputs if output.same is not None]
        # If any output has a level in dB, that level describes the model better than a share of equal elements.
        return min(shares) if shares and len(shares) == len(self.outputs) else None

    @property
    def cosine(self) -> float:
        """Return the lowest cosine among the outputs that `sqnr_db` uses, and their slices. Return 0 if nothing was
        compared.
        """
        return min((output.least_cosine for output in self._signals), default=0.0)

    @property
    def _signals(self) -> Sequence[OutputAgreement]:
        # An output may be empty in every sample, for example if a detector finds nothing. It then carries no
        # information about the other outputs.
        nonempty = [output for output in self.outputs if output.elements or output.nonfinite or output.mismatched]
        # The SQNR of indices and truth values means nothing, but some models have no other output.
        return [output for output in nonempty if output.same is None] or nonempty


# A factor of two in power. A smaller difference between two levels does not change a judgement.
_HALF_DB = 3.0
POOR_DB = 10.0
"""Below this SQNR in dB, more than a tenth of the output's power is quantization noise."""
HEALTHY_DB = 20.0
"""At this SQNR in dB or above, at most a hundredth of the output's power is quantization noise."""
GOOD_DB = 30.0
"""Above this SQNR in dB, a higher value hardly changes an answer."""
Closeness = Literal["healthy", "noisy", "poor"]


def closeness(agreement: Agreement) -> Closeness:
    """Return how closely outputs follow float32's outputs, judged by the worst output or slice.

    The result is "poor" if the outputs contain NaN or infinities where float32's outputs do not. It is at most "noisy"
    if an output could not be compared on some samples.
    """
    level = worst_db(agreement)
    if not level >= POOR_DB:  # The condition is also true for NaN.
        return "poor"
    # Nothing is known of the samples that were left out.
    all_compared = not any(output.mismatched for output in agreement.outputs)
    return "healthy" if level >= HEALTHY_DB and all_compared else "noisy"


def worst_db(agreement: Agreement) -> float:
    """Return the lowest level in dB. Return minus infinity if the NaN or infinities of an output differ from
    float32's.
    """
    # NaN or infinities in one model alone outweigh the level of all other elements.
    return -math.inf if any(output.nonfinite for output in agreement.outputs) else agreement.least_db
