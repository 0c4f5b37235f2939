"""Run samples through models, and give figures of how closely one's outputs follow another's, without labels.

Over all elements of all samples of an output, with r the reference and c the candidate:

    SQNR     10 log10(sum r^2 / sum (r - c)^2)    signal to quantization noise, dB
    cosine   sum r c / sqrt(sum r^2 sum c^2)
    top-1    share of rows whose largest element is at the same place (the first one, on a tie)
    same     share of equal elements, of outputs that are class numbers, indices or truth values: there a difference
             has no size, and SQNR means nothing

An output of several units, as boxes in pixels and scores, is judged by its worst slice: see `edgeq.measure.comparison`.

A sample whose outputs differ in shape has no pairs of elements: it is counted, and left out of SQNR and cosine; its
rows and elements count as not the same. Where nothing was compared, SQNR is minus infinity.

Whether an output holds class scores, so that its arg-max means something: by its values where no task says so.

An output is taken for class scores if it is the model's only float output, of shape [N, C] (further axes of length 1
allowed) with N the rows of an input and C at least two, not of an input's shape, and one of these holds:

- every row is a probability distribution: not negative, summing to one;
- its name says so ("logits", "scores", "probabilities", ...);
- it has five columns or more, all of like scale, its arg-max differs between rows, and the softmax of a row is on
  average at least a tenth of the way from a guess to certainty. Elements of an embedding or of a recurrent state are
  further from certainty, and of landmarks in pixels the same one is always the largest.
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
from edgeq_device.arrays import one_array
from edgeq_device.variants import slice_name
from numpy.typing import NDArray

from edgeq.data.samples import Sample, Samples
from edgeq.errors import BoardError, DataError, EngineError, RuntimeUnavailableError
from edgeq.util.display import SILENT, Displayed, Progress
from edgeq.util.records import Amount, Count, Finite, NullIsInfinite, Share, computed


@dataclass(frozen=True)
class SliceAgreement:
    """Hold the agreement of a part of an output whose values have a unit of their own.

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
    """Hold the agreement of one output.

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
    """Hold the agreement of all numeric outputs that both models have, over `count` samples."""

    outputs: tuple[OutputAgreement, ...]
    count: Count = 0

    def __brief__(self) -> dict[str, Any]:
        return {
            "sqnr_db": self.sqnr_db,
            "top1_agreement": self.top1,
            "outputs": len(self.outputs),
            "samples": self.count,
        }

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
        """Return the worst output's top-1 agreement; None where no output is a set of class scores."""
        return min((output.top1 for output in self.outputs if output.top1 is not None), default=None)

    @computed
    def same(self) -> float | None:
        """Return the worst output's share of equal elements; None where an output has more than indices."""
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


_NAMED = re.compile(r"logit|prob|softmax|class|score", re.IGNORECASE)
_FEWEST_COLUMNS = 5
_LEAST_CONFIDENCE = 0.1


@dataclass
class ClassScores:
    """Collect facts about one output from its rows seen so far.

    Attributes:
        shaped: whether every array was shaped like class scores.
        alone: whether every array was also float, with the rows of an input, and not of an input's shape.
        summed: whether every row is a distribution.
        confidence: sum over the rows of their largest probability.
        first: arg-max of the first row; `varied` whether another row has another.
    """

    shaped: bool = True
    alone: bool = True
    summed: bool = True
    rows: int = 0
    columns: int = 2
    confidence: float = 0.0
    first: int | None = field(default=None, repr=False)
    varied: bool = False

    def update(self, output: NDArray[Any], inputs: Mapping[str, NDArray[Any]]) -> NDArray[np.int64] | None:
        """Add one sample: the arg-max of each row, [N]; None from the first output on that is not shaped so."""
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
        self.rows += len(p)
        self.columns = p.shape[1]
        self.confidence += float(p.max(1).sum())
        self.first = int(best[0]) if self.first is None else self.first
        self.varied = self.varied or bool((best != self.first).any())
        return best

    def merge(self, other: ClassScores) -> None:
        """Add what later samples say."""
        self.shaped, self.alone = self.shaped and other.shaped, self.alone and other.alone
        self.summed = self.summed and other.summed
        both = self.first is not None and other.first is not None
        self.varied = self.varied or other.varied or (both and self.first != other.first)
        self.first = other.first if self.first is None else self.first
        self.rows += other.rows
        self.columns = other.columns if other.rows else self.columns
        self.confidence += other.confidence

    @property
    def confident(self) -> bool:
        """Tell whether the rows are on average surer of their first class than a tenth of the way from a guess on."""
        guess = 1 / self.columns
        return bool(self.rows) and (self.confidence / self.rows - guess) / (1 - guess) >= _LEAST_CONFIDENCE

    def plausible(self, name: str, *, one_unit: bool = True) -> bool:
        """Return whether the only output of a model, called `name`, is to be taken for class scores.

        Args:
            one_unit: whether its columns are of one scale.
        """
        if not (self.shaped and self.alone and self.rows):
            return False
        likely = one_unit and self.columns >= _FEWEST_COLUMNS and self.varied and self.confident
        return self.summed or bool(_NAMED.search(name)) or likely


def is_class_scores(array: NDArray[Any]) -> bool:
    """Tell whether `array` is shaped like class scores: a batch axis, one axis of two or more, others of length 1."""
    return array.ndim >= 2 and array.size > 0 and max(array.shape[1:]) == math.prod(array.shape[1:]) >= 2


def probabilities(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return rows that are not negative and sum to one unchanged; the softmax of others. [N, C] → [N, C]."""
    if scores.min() >= -1e-6 and np.abs(scores.sum(1) - 1).max() <= 1e-3:
        return scores
    finite = np.nan_to_num(scores, nan=np.finfo(np.float64).min, posinf=1e30)
    raised = np.exp(finite - finite.max(1, keepdims=True))
    spread: NDArray[np.float64] = raised / raised.sum(1, keepdims=True)
    return spread


POOR_DB = 10.0
"""Below this, more than a tenth of the output's power is quantization noise."""
HEALTHY_DB = 20.0
"""From here on, at most a hundredth is."""
GOOD_DB = 30.0
"""From here on, more decibels hardly change an answer."""

Closeness = Literal["healthy", "noisy", "poor"]


def closeness(agreement: Agreement) -> Closeness:
    """Return how closely outputs follow float32's, by the worst output or slice of one.

    NaN and infinities of their own make them "poor". Outputs of which samples could not be compared are not "healthy".
    """
    found = worst_db(agreement)
    if not found >= POOR_DB:  # nor is NaN close
        return "poor"
    whole = not any(output.mismatched for output in agreement.outputs)
    return "healthy" if found >= HEALTHY_DB and whole else "noisy"


def worst_db(agreement: Agreement) -> float:
    """Return the SQNR in dB; minus infinity where an output is not finite and float32's is."""
    return -math.inf if any(output.nonfinite for output in agreement.outputs) else agreement.sqnr_db


Outputs = Mapping[str, NDArray[Any]]


class Session(Protocol):
    """Define the part of `onnxruntime.InferenceSession` that measuring needs."""

    def get_outputs(self) -> Sequence[Any]:
        """Return objects with the `name` of each output."""

    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any]) -> Sequence[Any]:
        """Return the named outputs (None for all) of one inference."""


def infer(session: Session, sample: Sample, *, model: str = "the model") -> Outputs:
    """Run one sample. Outputs that are not tensors become one array each, as `edgeq_device.arrays.one_array` has it.

    Raises:
        DataError: the session refuses the sample's names, dtypes or shapes.
        RuntimeUnavailableError: the runtime fails inside the model.
    """
    names = [output.name for output in session.get_outputs()]
    values = run_feed(session, names, sample.inputs, sample.name, model=model)
    return dict(zip(names, map(one_array, values), strict=True))


def run_feed(
    session: Any, names: Sequence[str] | None, feed: Mapping[str, Any], where: str, *, model: str
) -> Sequence[Any]:
    """Run one feed, with the errors of `infer`.

    Args:
        where: names the feed in messages.
    """
    try:
        return session.run(names, dict(feed))  # type: ignore[no-any-return]
    except (BoardError, EngineError):  # each says what failed
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
    """Yield each sample with what every session makes of it, in the order of `samples`; at most `count` samples.

    Args:
        known: what some of the sessions make of each sample, so that these are not run.

    Raises:
        DataError: there is no sample at all, or a session refuses one.
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
