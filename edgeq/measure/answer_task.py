"""Judge a model by its answers where there are no labels: the float model's answers are the labels.

A detector that finds the same objects as the float model is as good as the float model, whatever its tensors' noise.
So the task `FloatAnswers` measures the share of the float model's answers that a model gives again. The float model
itself scores 1. Everything that reads a task (proof, repair, search, comparison, workers) then judges answers.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from edgeq_device.answers.answer import Answer
from edgeq_device.answers.decode import decode
from edgeq_device.answers.family import load_family
from edgeq_device.answers.head import Head
from numpy.typing import NDArray

from edgeq.data.array_store import ArrayStore
from edgeq.data.images import find_frame
from edgeq.data.sample import Sample
from edgeq.data.samples import Samples, SourceSamples
from edgeq.errors import DataError
from edgeq.measure.agreement import Closeness
from edgeq.measure.answer_meter import (
    FIGURES,
    AnswerFigure,
    AnswerTallies,
    AnswerTally,
    find_threshold,
    lower_threshold,
)
from edgeq.measure.inference import Outputs, Session, run_samples
from edgeq.measure.operating_point import ScoredObjects
from edgeq.measure.rows import split_rows
from edgeq.util.display import SILENT, Displayed, Progress


@dataclass(frozen=True)
class PackedAnswer:
    """Hold an answer with its arrays compressed, as the label of a sample. Masks and maps of many images would
    otherwise take gigabytes.
    """

    answer: Answer
    arrays: Mapping[str, tuple[str, tuple[int, ...], bytes]]

    @classmethod
    def of(cls, answer: Answer) -> PackedAnswer:
        """Return the packed form of an answer."""
        arrays = {f.name: array for f in fields(answer) if isinstance(array := getattr(answer, f.name), np.ndarray)}
        packed = {
            name: (array.dtype.str, array.shape, zlib.compress(np.ascontiguousarray(array).tobytes(), 1))
            for name, array in arrays.items()
        }
        bare: dict[str, Any] = dict.fromkeys(arrays)
        return cls(replace(answer, **bare), packed)

    def unpack(self) -> Answer:
        """Return the answer."""
        arrays: dict[str, Any] = {
            name: np.frombuffer(zlib.decompress(content), dtype).reshape(shape)
            for name, (dtype, shape, content) in self.arrays.items()
        }
        return replace(self.answer, **arrays)


@dataclass(frozen=True)
class AnswerLabels:
    """Look up the label of a record by its number. It is a `LabelOf` that can be sent to workers."""

    labels: Mapping[int, PackedAnswer]

    def __call__(self, index: int, record: Any) -> PackedAnswer | None:
        """Return the label of the record with this number in its source."""
        del record
        return self.labels.get(index)


@dataclass(frozen=True)
class AnsweredSamples(Displayed):
    """Hold samples with a label each. For the attributes, see `Samples`."""

    samples: Samples
    labels: Sequence[Any]

    @property
    def source(self) -> str:
        """Return the origin of the samples, for people."""
        return self.samples.source

    def __getattr__(self, name: str) -> Any:
        # The preprocessing and the names of scores are those of the samples, if they have any.
        if name in ("preprocess", "score_names", "notes"):
            return getattr(self.samples, name)
        raise AttributeError(name)

    def __len__(self) -> int:
        return len(self.labels)

    def __iter__(self) -> Any:
        return (replace(sample, label=label) for sample, label in zip(self.samples, self.labels, strict=True))

    def digest(self) -> str:
        """Return the digest of the samples. The labels follow from the samples and the float model."""
        return self.samples.digest()


POOR_SHARE = 0.8
"""Share of the float model's answers that a model gives again. Below it, one answer in five is missing or wrong."""


def decode_sample(head: Head, outputs: Outputs, sample: Sample) -> Answer:
    """Return the answer that a model's outputs for one sample give."""
    return decode(outputs, head, find_frame(sample.context))


def judges_answers(head: Head | None) -> bool:
    """Return whether a model with this head is judged by its answers."""
    return head is not None and load_family(head.family).task in FIGURES


def label_with_answers(
    samples: Samples,
    session: Session,
    head: Head,
    progress: Progress = SILENT,
    *,
    known_outputs: ArrayStore | None = None,
) -> Samples:
    """Return the samples with the float model's answers as their labels.

    Args:
        session: a session of the float model.
        known_outputs: the session's outputs by the sample's place. What is missing is computed and added.
    """
    labels: list[Any] = []
    lowered = lower_threshold(head)
    known = {"float32": known_outputs} if known_outputs is not None else {}
    for sample, outputs in run_samples({"float32": session}, samples, known_outputs=known, progress=progress):
        rows = [
            PackedAnswer.of(decode_sample(lowered, row_outputs["float32"], row))
            for row, row_outputs in split_rows(sample, outputs)
        ]
        labels.append(tuple(rows) if "rows" in sample.context else rows[0])
    # Labels that are looked up by number let workers read the samples themselves.
    if isinstance(samples, SourceSamples) and len(samples.selection) == len(labels) and not _gathers(labels):
        return replace(samples, labels=AnswerLabels(dict(zip(samples.selection, labels, strict=True))))
    return AnsweredSamples(samples, labels)


_FEWEST_ANSWERS = 5
"""With fewer answers of the float model, one answer would decide about a build."""


def answer_labels(
    samples: Samples,
    session: Session,
    head: Head | None,
    progress: Progress = SILENT,
    *,
    known_outputs: ArrayStore | None = None,
) -> tuple[FloatAnswers | None, Samples]:
    """Return the task of giving the float model's answers, and the samples with these answers as their labels. Return
    None and the samples if the answers are not known, do not decide, or are too few. Then the noise decides.

    For the arguments, see `label_with_answers`.
    """
    if head is None or not judges_answers(head):
        return None, samples
    labelled = label_with_answers(samples, session, head, progress, known_outputs=known_outputs)
    task = FloatAnswers(head)
    count = 0.0
    for sample in labelled:
        for label in sample.label if isinstance(sample.label, tuple) else (sample.label,):
            answer = label.unpack()
            tally = task.figure.compare(answer, answer, task.threshold)
            count += sum(tally.total.values())
            if count >= 2 * _FEWEST_ANSWERS:
                return task, labelled
    progress.note("the float model gives hardly any answers on these samples, so the noise of its outputs decides")
    return None, samples


def _gathers(labels: Sequence[Any]) -> bool:
    return any(isinstance(label, tuple) for label in labels)


@dataclass(frozen=True)
class FloatAnswers(Displayed):
    """Measure the share of the float model's answers that a model gives again.

    The label of a sample is the float model's answer for it (`label_with_answers`).

    Attributes:
        head: how outputs become answers.
        reads_answers: answers decide about the quality of a build, whatever the noise of its outputs.
        labelled: the labels are not those of people.
    """

    head: Head
    name: str = "answers"
    higher_is_better: bool = True
    reads_answers: bool = True
    labelled: bool = False

    @property
    def primary(self) -> str:
        """Return the figure that decides: the share of answers that agree, in the terms of the head's task."""
        return self.figure.primary

    @property
    def threshold(self) -> float:
        """Return the score from which an answer counts."""
        return find_threshold(self.head)

    @property
    def default_drop(self) -> float:
        """Return the share of the answers that may be lost, if the user sets no limit."""
        return 1 - self.figure.healthy

    def level(self, value: float) -> Closeness:
        """Return how closely a model follows the float model, by its primary figure."""
        return "healthy" if value >= self.figure.healthy else "noisy" if value >= POOR_SHARE else "poor"

    @property
    def figure(self) -> AnswerFigure:
        """Return how the answers of the head's task are compared."""
        return FIGURES[load_family(self.head.family).task]

    def start(self) -> AnswerMeter:
        """Return a meter for one model."""
        return AnswerMeter(self)


class AnswerMeter:
    """Measure the share of the float model's answers that one model gives again. See `edgeq.measure.task.Meter`."""

    def __init__(self, task: FloatAnswers) -> None:
        self._task, self._head = task, lower_threshold(task.head)
        self._tallies = AnswerTallies()

    def update(self, outputs: Outputs, sample: Sample) -> None:
        """Add the outputs for one sample, whose label is the float model's answer.

        Raises:
            DataError: the sample has another label, or the outputs do not belong to the head.
        """
        if not isinstance(sample.label, PackedAnswer):
            raise DataError(f"{sample.name} has no answer of the float model", "Leave ⟨labels⟩ out, or give a ⟨task⟩")
        candidate = decode_sample(self._head, outputs, sample)
        compare = self._task.figure.compare
        self._tallies.tallies.append(compare(sample.label.unpack(), candidate, find_threshold(self._task.head)))

    def result(self) -> Mapping[str, float]:
        """Return the figures by name; the primary figure is the first."""
        return self._tallies.figures(self._task.primary)

    def resampled(self, halves: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the primary figure over each half, which is [H, samples]."""
        return self._tallies.primary_over(halves)

    def collected(self) -> list[AnswerTally]:
        """Return the tallies so far."""
        return self._tallies.tallies

    def take(self, collected: list[AnswerTally]) -> None:
        """Add the tallies of later samples."""
        self._tallies.tallies += collected

    def scored(self) -> ScoredObjects | None:
        """Return the scores of the objects so far; None if the answers are not objects."""
        parts = [tally.scored for tally in self._tallies.tallies if tally.scored is not None]
        return ScoredObjects.join(parts) if parts else None

    def sample_figures(self) -> NDArray[np.float64]:
        """Return the primary figure of each sample, [samples]."""
        return self._tallies.sample_figures()


def describe_answers(metrics: Mapping[str, float], primary: str, samples: int) -> str:
    """Return a sentence on the answers that a model gives again, from the figures of `FloatAnswers`."""
    if "found" in metrics:
        return (
            f"answers: {metrics['found']:.1%} of float32's objects are found again ({samples} samples), with a mean "
            f"overlap of {metrics['overlap']:.3f}; {metrics['extra']:.1%} of int8's objects are new"
        )
    if "exact" in metrics:
        return (
            f"answers: {metrics['characters']:.2%} of float32's characters are read again, and {metrics['exact']:.1%} "
            f"of the texts as a whole ({samples} samples)"
        )
    if "pixels" in metrics:
        share = f"{metrics['pixels']:.2%} of the pixels have float32's class"
        return f"answers: {share}, mIoU {metrics['mIoU']:.3f} ({samples} samples)"
    return f"answers: {metrics[primary]:.2%} of the {primary} are as in float32 ({samples} samples)"
