"""Run samples through models, and measure without labels how closely one model's outputs follow another's.

The figures cover all elements of all samples of an output. r is the reference and c the candidate:

    SQNR     10 log10(sum r^2 / sum (r - c)^2)    signal to quantization noise, dB
    cosine   sum r c / sqrt(sum r^2 sum c^2)
    top-1    share of rows whose largest element has the same index (the first index, on a tie)
    same     share of equal elements, for outputs that are class numbers, indices or truth values. The size of a
             difference between such values means nothing, and neither does SQNR

An output that mixes units, such as boxes in pixels and scores, is judged by its worst slice: see
`edgeq.measure.comparison`. Every output and slice is also judged around its mean, because the noise of a temperature of
300 K is not to be compared with 300 K:

    centred    10 log10(sum (r - mean)^2 / sum (r - c)^2)    dB, where the mean is that of the column or of the slice
    lost       -20 log10(share of rows, columns or elements without a counterpart)    dB: a tenth of the rows is as bad
               as noise with a tenth of the signal's amplitude

Elements that mean nothing and padded positions are left out, and rows without a fixed place are matched: see
`edgeq.measure.basis`.

If the two outputs for a sample have different shapes, their elements cannot be paired. The sample is counted, but SQNR
and cosine leave it out, and its rows and elements count as not the same. If nothing was compared, SQNR is minus
infinity.

Top-1 is meaningful only for class scores. If no task names the output with class scores, edgeq decides by the values.
An output counts as class scores if three conditions are true:

- It is the model's only float output.
- Its shape is [N, C] (further axes of length 1 are allowed). N is the number of rows of an input, C is at least two,
  and no input has the same shape.
- It looks like scores in at least one of the ways below.

An output looks like scores in one of these ways:

- Every row is a probability distribution: not negative, and summing to one. The arg-max differs between rows, or there
  are fewer than eight rows or more than 64 columns. Otherwise the rows may be compositions.
- The name suggests scores ("logits", "scores", "probabilities", ...).
- There are five columns or more, all of similar scale. The arg-max differs between rows. The largest probability in the
  softmax of a row is on average at least a tenth of the way from a guess to certainty. Embeddings and recurrent states
  are excluded because their softmax is closer to a guess. Landmarks in pixels are excluded because the same element is
  always the largest.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, Protocol

import numpy as np
from edgeq_device.engines.variant import name_slice
from edgeq_device.prepare.arrays import to_array
from numpy.typing import NDArray

from edgeq.data.samples import Sample, Samples
from edgeq.errors import BoardError, DataError, EngineError, RuntimeUnavailableError
from edgeq.util.display import SILENT, Displayed, Progress
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
    def where(self) -> str:
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
            `Comparison`.
        nonfinite: number of pairs left out because one element is NaN or infinite and the other is not the same.
        mismatched: number of samples left out because the shapes differ. This happens if the size of an output depends
            on the values.
        same: share of equal elements, 0 to 1, if the output contains booleans or integers of at least 32 bits; else
            None.
        slices: parts along each axis that has parts of different scale; empty if the output has one unit.
        centred_db: SQNR around the mean in dB; None if the reference does not vary, has too few values for a mean, or
            has no noise.
        hidden: number of elements left out because a mask hides their position (padding).
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
    def unlike(self) -> str:
        """Describe the level by which the output is judged, or return "" if it is the SQNR over the whole output."""
        level, text = min(self._levels(), key=lambda pair: pair[0])
        return f"output {self.name!r}{text}" if text and level < self.sqnr_db else ""

    def _levels(self) -> Iterator[tuple[float, str]]:
        """Yield each level in dB with the words that describe it."""
        whole = f"({self.sqnr_db:.1f} dB SQNR over the whole output)"
        yield self.sqnr_db, ""
        for part in self.slices:
            peers = max(other.peak for other in self.slices if other.axis == part.axis)
            reach = f"their values reach {part.peak:.3g} where" if part.peak < peers else "on the same axis"
            figure = f"{part.sqnr_db:.1f} dB SQNR against float32 ({self.sqnr_db:.1f} dB over the whole output)"
            if part.offset:
                yield part.least_db, f", {part.where}: {_around(part.least_db)} {whole}"
            else:
                yield part.least_db, f", {part.where}: {figure}; {reach} others reach {peers:.3g}"
        if self.centred_db is not None:
            yield self.centred_db, f": {_around(self.centred_db)} {whole}" if self.offset else ""
        if self.lost_columns:
            share = self.lost_columns / self.columns
            yield (
                -20 * math.log10(share),
                f": {self.lost_columns} of {self.columns} columns that vary in float32 are constant here {whole}",
            )
        if self.strays:
            share = self.strays / (self.strays + self.elements)
            yield (
                -20 * math.log10(share),
                f": {self.strays} elements mean nothing in one model alone (a mask chooses others) {whole}",
            )
        if self.rows_found is not None and self.rows_found < 1:
            yield (
                -20 * math.log10(1 - self.rows_found),
                f": {self.rows_found:.1%} of float32's rows are found again ({self.sqnr_db:.1f} dB SQNR over these)",
            )

    @property
    def basis(self) -> str:
        """State what the figures are taken over, or return "" if they are taken over all elements, in place."""
        parts = []
        if self.rows_found is not None:
            parts.append(f"its rows have no fixed place: {self.rows_found:.1%} of them were matched")
        if self.nothing:
            parts.append(f"{self.nothing} elements that mean nothing in both models are left out")
        if self.hidden:
            real = 1 - self.hidden / (self.hidden + self.elements + self.nothing + self.strays + self.nonfinite)
            parts.append(f"only the {real:.0%} of elements at real positions count, the rest is padding")
        return f"output {self.name!r}: {'; '.join(parts)}" if parts else ""

    @property
    def least_cosine(self) -> float:
        """Return the lowest cosine among the output and its slices. Noise with a power of n times the signal's gives a
        cosine of about 1 - n / 2; levels without a cosine count as such noise.
        """
        noise = 10 ** (-self.least_db / 10) if self.least_db < min(self.sqnr_db, 300.0) else 0.0
        return min(self.cosine, *(part.cosine for part in self.slices), max(-1.0, 1 - noise / 2))


def _is_offset(sqnr_db: float, centred_db: float | None) -> bool:
    moved = centred_db is not None and centred_db < min(sqnr_db - _HALF_DB, GOOD_DB)
    return moved and sqnr_db >= POOR_DB


def _around(level: float) -> str:
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

    def left_out(self, reference: str = "float32") -> tuple[str, ...]:
        """Return a sentence for each output that could not be compared on some samples. `reference` is the name of the
        other model.
        """
        found = []
        for output in self.outputs:
            if output.mismatched:
                some = f"{output.mismatched} of {self.samples} samples are left out of its figures"
                none = f"none of its {self.samples} samples could be compared with"
                what = some if output.compared else f"{none} {reference}"
                found.append(f"output {output.name!r}: {what}, because its size differs from {reference}'s")
        return tuple(found)

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
        found = [output.same for output in self.outputs if output.same is not None]
        return min(found) if found and len(found) == len(self.outputs) else None

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
        found = [output for output in self.outputs if output.elements or output.nonfinite or output.mismatched]
        return [output for output in found if output.same is None] or found


_HALF_DB = 3.0
_NAMED = re.compile(r"logit|prob|softmax|class|score", re.IGNORECASE)
_FEWEST_COLUMNS = 5
_LEAST_CONFIDENCE = 0.1
_FEW_ROWS = 8
_MOST_PARTS = 64


@dataclass
class ClassScores:
    """Collect facts about one output from the rows seen so far.

    Attributes:
        shaped: True if every array had the shape of class scores.
        alone: True if, in addition, every array was float, had as many rows as an input, and did not have the shape of
            an input.
        summed: True if every row is a distribution.
        bounded: True if all values are in 0..1.
        confidence: sum of the largest probability of each row.
        first: arg-max of the first row.
        varied: True if a later row has a different arg-max.
    """

    shaped: bool = True
    alone: bool = True
    summed: bool = True
    bounded: bool = True
    rows: int = 0
    columns: int = 2
    confidence: float = 0.0
    first: int | None = field(default=None, repr=False)
    varied: bool = False

    def update(self, output: NDArray[Any], inputs: Mapping[str, NDArray[Any]]) -> NDArray[np.int64] | None:
        """Add one sample and return the arg-max of each row, [N].

        Return None if the output does not have the shape of class scores in this sample or in an earlier one.
        """
        self.shaped = self.shaped and is_class_scores(output)
        if not self.shaped:
            return None
        scores = output.reshape(len(output), -1)
        best: NDArray[np.int64] = scores.argmax(1)
        shapes = [array.shape for array in inputs.values()]
        batched = len(output) == 1 or any(shape[:1] == output.shape[:1] for shape in shapes)
        self.alone = self.alone and output.dtype.kind == "f" and batched and output.shape not in shapes
        scores = scores.astype(np.float64)
        p = probabilities(scores)
        self.summed = self.summed and p is scores
        self.bounded = self.bounded and bool(scores.min() >= 0 and scores.max() <= 1)
        self.rows += len(p)
        self.columns = p.shape[1]
        self.confidence += float(p.max(1).sum())
        self.first = int(best[0]) if self.first is None else self.first
        self.varied = self.varied or bool((best != self.first).any())
        return best

    def merge(self, other: ClassScores) -> None:
        """Add the facts from later samples."""
        self.shaped, self.alone = self.shaped and other.shaped, self.alone and other.alone
        self.summed, self.bounded = self.summed and other.summed, self.bounded and other.bounded
        both = self.first is not None and other.first is not None
        self.varied = self.varied or other.varied or (both and self.first != other.first)
        self.first = other.first if self.first is None else self.first
        self.rows += other.rows
        self.columns = other.columns if other.rows else self.columns
        self.confidence += other.confidence

    @property
    def confident(self) -> bool:
        """Return whether the rows are, on average, at least a tenth of the way from a guess to certainty."""
        guess = 1 / self.columns
        return bool(self.rows) and (self.confidence / self.rows - guess) / (1 - guess) >= _LEAST_CONFIDENCE

    def plausible(self, name: str, *, one_unit: bool = True) -> bool:
        """Return whether the output called `name`, the model's only output, counts as class scores.

        Args:
            one_unit: whether all columns of the output have one scale.
        """
        if not (self.shaped and self.alone and self.rows):
            return False
        if self.summed:
            # In a composition, such as that of a soil, the largest part is always the same. It has few parts.
            return self.varied or self.rows < _FEW_ROWS or self.columns > _MOST_PARTS
        # Independent probabilities have an answer for each label, so the largest of them is not the answer.
        likely = one_unit and self.columns >= _FEWEST_COLUMNS and self.varied and self.confident
        return not self.bounded and (bool(_NAMED.search(name)) or likely)


def is_class_scores(array: NDArray[Any]) -> bool:
    """Return whether `array` has the shape of class scores: a batch axis, one axis of length two or more, and otherwise
    axes of length 1.
    """
    return array.ndim >= 2 and array.size > 0 and max(array.shape[1:]) == math.prod(array.shape[1:]) >= 2


def probabilities(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return `scores` [N, C] unchanged if no row has negative values and all rows sum to one. Otherwise return the
    softmax of each row, [N, C].
    """
    if scores.min() >= -1e-6 and np.abs(scores.sum(1) - 1).max() <= 1e-3:
        return scores
    finite = np.nan_to_num(scores, nan=np.finfo(np.float64).min, posinf=1e30)
    raised = np.exp(finite - finite.max(1, keepdims=True))
    spread: NDArray[np.float64] = raised / raised.sum(1, keepdims=True)
    return spread


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
    found = worst_db(agreement)
    if not found >= POOR_DB:  # The condition is also true for NaN.
        return "poor"
    whole = not any(output.mismatched for output in agreement.outputs)
    return "healthy" if found >= HEALTHY_DB and whole else "noisy"


def worst_db(agreement: Agreement) -> float:
    """Return the lowest level in dB. Return minus infinity if the NaN or infinities of an output differ from
    float32's.
    """
    return -math.inf if any(output.nonfinite for output in agreement.outputs) else agreement.least_db


Outputs = Mapping[str, NDArray[Any]]
"""Output name → array, for one sample."""


class Session(Protocol):
    """Define the part of the interface of `onnxruntime.InferenceSession` that the measurements use."""

    def get_outputs(self) -> Sequence[Any]:
        """Return an object with a `name` for each output."""

    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any]) -> Sequence[Any]:
        """Return the named outputs (None for all) of one inference."""


def infer(session: Session, sample: Sample, *, model: str = "the model") -> Outputs:
    """Run one sample and return the outputs by name.

    An output that is not a tensor becomes one array: see `edgeq_device.prepare.arrays.to_array`.

    Raises:
        DataError: the session refuses the sample's names, dtypes or shapes.
        RuntimeUnavailableError: the runtime fails inside the model.
    """
    names = [output.name for output in session.get_outputs()]
    values = run_feed(session, names, sample.inputs, sample.name, model=model)
    return dict(zip(names, map(to_array, values), strict=True))


def run_feed(
    session: Any, names: Sequence[str] | None, feed: Mapping[str, Any], where: str, *, model: str
) -> Sequence[Any]:
    """Run a session on one feed. For the errors, see `infer`.

    Args:
        names: the outputs to compute; None computes all.
        where: name of the feed in messages.
    """
    try:
        return session.run(names, dict(feed))  # type: ignore[no-any-return]
    except (BoardError, EngineError):  # The messages of these errors already name what failed.
        raise
    except Exception as error:  # onnxruntime's exceptions share no base class below Exception
        text = " ".join(str(error).split())
        if type(error).__name__ in ("InvalidArgument", "ValueError"):
            raise DataError(
                f"{where}: {model} refuses it: {text}", "Compare with the inputs that `edgeq inspect` lists"
            ) from error
        raise RuntimeUnavailableError(
            f"{where}: onnxruntime fails in {model}: {text}", "Try another graph optimization level or provider"
        ) from error


def inferences(
    sessions: Mapping[str, Session],
    samples: Samples,
    *,
    count: int | None = None,
    known: Mapping[str, Sequence[Outputs]] = MappingProxyType({}),
    progress: Progress = SILENT,
) -> Iterator[tuple[Sample, dict[str, Outputs]]]:
    """Yield each sample with the outputs of every session, in the order of `samples`, for at most `count` samples.

    Args:
        known: session name → its known outputs, one for each sample. edgeq does not run the sessions listed here.

    Raises:
        DataError: there are no samples, or a session refuses one.
    """
    total = len(samples) if count is None else min(count, len(samples))
    seen = 0
    with progress.stage("Evaluating", total) as advance:
        for place, sample in enumerate(itertools.islice(iter(samples), count)):
            yield (
                sample,
                {
                    name: known[name][place] if name in known else infer(session, sample, model=name)
                    for name, session in sessions.items()
                },
            )
            seen += 1
            advance(1)
    if not seen:
        raise DataError(f"{samples.source}: no samples to evaluate", "Point --data at samples, or raise --count")
