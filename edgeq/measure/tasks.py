"""Define the tasks that edgeq ships.

- Classification measures top-1. With more than five classes, it also measures top-5.
- Anomaly detection with an autoencoder measures the ROC AUC of the reconstruction error against labels 0 (normal) and
  1.
- Similarity of sentence (or image) pairs measures the rank correlation between the cosine similarity of two embeddings
  and a score given by people.
- Object detection measures COCO's mean average precision of a detector head's boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from edgeq.data.records import Sample, to_original
from edgeq.errors import DataError, UsageError
from edgeq.measure.agreement import Outputs
from edgeq.measure.boxes import (
    BoxUnit,
    CocoAnnotations,
    Detections,
    Floats,
    Image,
    Matches,
    box_unit,
    guesses,
    in_pixels,
    load_annotations,
    load_package,
    match_image,
    mean_average_precision,
    mean_average_precisions,
    suppress,
)
from edgeq.measure.decoders import REGISTRY as HEADS
from edgeq.measure.decoders import Decode, Decoder, load_decoder, recognise
from edgeq.measure.task import (
    CONFIDENT,
    PairedMeter,
    Skill,
    TaskKind,
    TaskOptions,
    integer_labels,
    only_input,
    pick_output,
    score_interval,
)
from edgeq.util.display import Displayed
from edgeq.util.numbers import share
from edgeq.util.registry import DECODERS, names_function


@dataclass(frozen=True)
class Classification(Displayed):
    """Compare class scores [N, classes] (further axes of length 1 are allowed) with an integer label for each row.

    A model with one score for each row is a binary classifier with a sigmoid: a score above one half means class 1. A
    row with NaN always counts as wrong.

    Attributes:
        class_offset: number of scores before class 0 that do not belong to a class (MobileNet's background: 1). With
            None, labelled samples decide (`settled`); until then the offset is 0.
        output: the output with the scores; None if the model has only one.
    """

    classes: ClassVar[bool] = True
    class_offset: int | None = None
    output: str | None = None
    name: str = "classification"
    primary: str = "top1"
    higher_is_better: bool = True

    def __post_init__(self) -> None:
        if self.class_offset is not None and self.class_offset < 0:
            raise UsageError(f"class offset is {self.class_offset}", "It counts scores to skip: 0 or more")

    @property
    def offset(self) -> int:
        """Return the number of scores to skip."""
        return self.class_offset or 0

    def settled(self, pairs: Iterable[tuple[Sample, Outputs]]) -> tuple[Classification, str]:
        """Return the task with the class offset that labelled rows show, and a text about the choice ("" for none).

        The offset is 1 if the model has more scores than the labels need, and if the model is correct far more often
        with this offset. Otherwise it is 0.
        """
        if self.class_offset is not None:
            return self, ""
        rows, right = 0, [0, 0]
        for sample, outputs in pairs:
            labels = integer_labels(sample)
            scores = _class_scores(pick_output(outputs, self.output, sample), len(labels), sample)
            if scores.shape[1] < max(3, int(labels.max(initial=0)) + 2):
                return replace(self, class_offset=0), ""
            rows += len(labels)
            for offset in (0, 1):
                right[offset] += int((scores[:, offset:].argmax(axis=1) == labels).sum())
        if right[1] < _LEAST_BESIDE or right[1] <= 4 * right[0]:
            return replace(self, class_offset=0), ""
        found = f"class offset 1, with which {right[1]} of {rows} samples are right, and {right[0]} without"
        return replace(self, class_offset=1), f"{found}; --class-offset sets another"

    def start(self) -> ClassificationMeter:
        """Return a meter for top-1 and top-5."""
        return ClassificationMeter(self)


def infer_task(sample: Sample, outputs: Outputs) -> Classification | None:
    """Return the task that a sample's label and a model's outputs for the sample suggest. Return None if no task can be
    inferred.

    The task is classification if the labels are class numbers, and if the only float output has one row of class scores
    for each label, with a score for each class number.
    """
    found = [array for array in outputs.values() if array.dtype.kind == "f"]
    label = np.asarray(sample.label).reshape(-1) if sample.label is not None else np.zeros(0)
    if len(found) != 1 or label.dtype.kind not in "iu" or not len(label):
        return None
    shape = found[0].shape
    if len(shape) < 2 or shape[0] != len(label) or shape[1] < 2 or any(size != 1 for size in shape[2:]):
        return None
    return Classification() if label.min() >= 0 and label.max() < shape[1] else None


_LEAST_BESIDE = 8
"""If labels shifted by one make at least this many rows correct, edgeq does not attribute this to chance."""
_LEAST_JUDGED = 10
"""Smallest number of rows for which the share of correct answers is compared with that of guesses."""


class ClassificationMeter:
    """Measure top-1 and top-5 of class scores. See `edgeq.measure.task.Meter`."""

    def __init__(self, task: Classification) -> None:
        self._task = task
        self._ranks: list[int] = []
        self._classes = 0
        self._labels: list[int] = []
        self._best: list[int] = []

    def update(self, outputs: Outputs, sample: Sample) -> None:
        """Record the rank of the label for each row of the scores [rows, classes].

        Raises:
            DataError: the scores have another shape, or a label has no score.
            UsageError: the class offset leaves no class.
        """
        labels = integer_labels(sample)
        scores = _class_scores(pick_output(outputs, self._task.output, sample), len(labels), sample)
        scores = scores[:, self._task.offset :]
        if not scores.shape[1]:
            raise UsageError(f"class offset {self._task.offset} leaves no class", "Give a smaller --class-offset")
        if scores.shape[1] == 1:
            if scores.dtype.kind != "f":
                raise DataError(
                    f"{sample.name}: one integer score for each row",
                    "Export a float score: integers do not show where one half is",
                )
            scores = np.concatenate([1 - scores, scores], axis=1)
        self._classes = scores.shape[1]
        outside = labels[(labels < 0) | (labels >= self._classes)]
        if outside.size:
            raise DataError(
                f"{sample.name}: label {outside[0]} is not one of the model's {self._classes} classes",
                "Check the labels and --class-offset; --classes FILE gives names their numbers",
            )
        self._ranks += ranks(scores, labels).tolist()
        self._labels += labels.tolist()
        self._best += scores.argmax(axis=1).tolist()

    def collected(self) -> tuple[list[int], int, list[int], list[int]]:
        """Return the ranks of the rows' labels, the number of classes, the labels, and the best class of each row."""
        return self._ranks, self._classes, self._labels, self._best

    def take(self, collected: tuple[list[int], int, list[int], list[int]]) -> None:
        """Add the rows of another meter."""
        ranks, self._classes, labels, best = collected
        self._ranks += ranks
        self._labels += labels
        self._best += best

    def notes(self) -> tuple[str, ...]:
        """Return a warning if the labels seem to start at another number than the model's classes.

        Otherwise, return a warning if the model's answers are not better than a guess.
        """
        labels, best = np.array(self._labels, np.int64), np.array(self._best, np.int64)
        rows, right = len(labels), int((np.array(self._ranks) < 1).sum())
        fixes = (
            ("plus", 1, f"--class-offset {self._task.offset + 1} if the model has a class before theirs"),
            ("minus", -1, "count the labels from 0, or give a smaller --class-offset"),
        )
        beside = tuple(
            f"the best class is the label {sign} 1 in {found} of {rows} rows and the label in {right}: {fix}"
            for sign, shift, fix in fixes
            if (found := int((best == labels + shift).sum())) >= _LEAST_BESIDE and found > 4 * right
        )
        if beside and self._classes > 2:
            return beside
        skill = self.skill()
        return () if skill is None or skill.better else (skill.doubt,)

    def skill(self) -> Skill | None:
        """Return how top-1 compares with that of guesses. Return None if there are too few rows."""
        rows, right = len(self._labels), int((np.array(self._ranks) < 1).sum())
        if rows < _LEAST_JUDGED:
            return None
        guessed = by_chance(np.array(self._labels, np.int64), np.array(self._best, np.int64), self._classes)
        fix = (
            f"The labels have {len(set(self._labels))} classes, the scores {self._classes}; `--classes FILE` "
            "names them (one name per line in the order of the scores), `--class-offset` skips some"
        )
        figure = f"top-1 is {share(right / rows)} on {rows} rows"
        return Skill(figure, guessed, *score_interval(right, rows), share(guessed), fix)

    def scores(self) -> NDArray[np.float64]:
        """Return 1 for each row that is correct, else 0."""
        return (np.array(self._ranks) < 1).astype(np.float64)

    def result(self) -> Mapping[str, float]:
        """Return "top1" and, with more than five classes, "top5": shares of rows, from 0 to 1."""
        found = np.array(self._ranks)
        metrics = {"top1": float((found < 1).mean())}
        if self._classes > 5:
            metrics["top5"] = float((found < 5).mean())
        return metrics


def by_chance(labels: NDArray[np.int64], best: NDArray[np.int64], classes: int) -> float:
    """Return the share of correct answers that a model would reach by chance.

    Such a model gives each answer as often as the measured model does, but ignores the sample. The share is the
    agreement by chance in Cohen's kappa. If all labels are the same class, the share is 1 / `classes`.
    """
    values, counts = np.unique(labels, return_counts=True)
    if len(values) < 2:
        return 1 / max(2, classes)
    answered = np.array([(best == value).mean() for value in values])
    return float((counts / len(labels)) @ answered)


def ranks(scores: NDArray[Any], labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count, for each row, the classes that rank before the correct one, [N]. `scores` is [N, C] and `labels` is [N].

    Of equal scores, the lower index ranks first, as with arg-max. The label of a row with NaN ranks last: C.
    """
    own = scores[np.arange(len(labels)), labels][:, None]
    before = np.arange(scores.shape[1])[None] < labels[:, None]
    rank = ((scores > own) | ((scores == own) & before)).sum(axis=1)
    if scores.dtype.kind == "f":
        rank[np.isnan(scores).any(axis=1)] = scores.shape[1]
    found: NDArray[np.int64] = rank
    return found


def _class_scores(output: NDArray[Any], rows: int, sample: Sample) -> NDArray[Any]:
    batch = output if output.ndim > 1 else output[None]
    inner = batch.shape[1:]
    if len(batch) != rows or not batch.size or max(inner) != int(np.prod(inner)):
        raise DataError(
            f"{sample.name}: {rows} label(s), but scores of shape {list(output.shape)}",
            "Classification takes [rows, classes]; choose the output with --task-output, or another task",
        )
    return batch.reshape(rows, -1)


@dataclass(frozen=True)
class Anomaly(Displayed):
    """Score each sample by the mean squared difference between output and input.

    A sample with one label gets one score for its whole batch (the windows of one recording). A sample with a label for
    each row gets one score for each row.
    """

    output: str | None = None
    name: str = "anomaly"
    primary: str = "auc"
    higher_is_better: bool = True

    def start(self) -> AnomalyMeter:
        """Return a meter for ROC AUC."""
        return AnomalyMeter(self)


class AnomalyMeter(PairedMeter):
    """Measure the ROC AUC of the reconstruction error. See `edgeq.measure.task.Meter`."""

    def __init__(self, task: Anomaly) -> None:
        super().__init__()
        self._task = task

    def update(self, outputs: Outputs, sample: Sample) -> None:
        """Add the mean squared reconstruction error of a sample, or of each row if the sample has a label for each row.

        Raises:
            DataError: a label is not 0 or 1, the output does not have the shape of the input, or the number of labels
                fits neither the sample nor its rows.
        """
        labels = integer_labels(sample)
        if not np.isin(labels, (0, 1)).all():
            raise DataError(f"{sample.name}: label {sample.label!r}", "Anomaly labels are 0 (normal) and 1 (anomalous)")
        given = np.asarray(only_input(sample), np.float64)
        made = np.asarray(pick_output(outputs, self._task.output, sample), np.float64)
        if given.shape != made.shape:
            raise DataError(
                f"{sample.name}: input {list(given.shape)}, but output {list(made.shape)}",
                "Give an autoencoder: its output has its input's shape",
            )
        if len(labels) not in (1, len(given)):
            raise DataError(
                f"{sample.name}: {len(labels)} labels for a batch of {len(given)}",
                "Give one label, or one for each row",
            )
        self.add(((given - made) ** 2).reshape(len(labels), -1).mean(axis=1), labels)

    def result(self) -> Mapping[str, float]:
        """Return "auc", from 0 to 1.

        Raises:
            DataError: all samples have the same label.
        """
        scores, labels = self.rows()
        if not 0 < labels.sum() < len(labels):
            raise DataError(
                f"all {len(labels)} samples are labelled {labels[0]}", "AUC needs both; raise --count or use --stride"
            )
        return {"auc": roc_auc(scores, labels)}

    def skill(self) -> Skill | None:
        """Return how the AUC compares with that of scores that ignore the input. Return None without both labels.

        The interval uses the AUC's standard error for such scores (H. Mann, D. Whitney, 1947).
        """
        scores, labels = self.rows()
        p, n = int(labels.sum()), int((1 - labels).sum())
        auc = roc_auc(scores, labels)
        if not math.isfinite(auc):
            return None
        reach = CONFIDENT * math.sqrt((p + n + 1) / (12 * p * n))
        fix = "Check --preprocess, and that the labels are 0 for normal and 1 for anomalous samples"
        return Skill(f"AUC is {auc:.3f} on {p + n} scores", 0.5, auc - reach, auc + reach, "0.5", fix)

    def resampled(self, halves: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the AUC over each half. `halves` is [H, samples]. The AUC is NaN for a half whose samples all have the
        same label.
        """
        return np.array([roc_auc(scores, labels) for scores, labels in self.halves(halves)])


def roc_auc(scores: NDArray[Any], labels: NDArray[Any]) -> float:
    """Return the area under the ROC curve. This is the probability that a positive scores above a negative, where a tie
    counts one half.

    The area equals Mann and Whitney's U divided by the number of pairs, computed from mean ranks. It is NaN if a score
    is NaN or all labels are the same.
    """
    positives = labels == 1
    p = int(positives.sum())
    n = len(labels) - p
    if not p or not n:
        return float("nan")
    return float((mean_ranks(scores)[positives].sum() - p * (p + 1) / 2) / (p * n))


@dataclass(frozen=True)
class Similarity(Displayed):
    """Score pairs of rows in a sample's batch: rows 0 and 1 are a pair, rows 2 and 3 are a pair, and so on. Each pair
    has one score.

    An output [rows, width] contains embeddings. An output [rows, positions, width] is averaged over the positions that
    a mask marks with a value other than 0. The mask is the input with "mask" in its name. Without a mask, all positions
    count.
    """

    output: str | None = None
    name: str = "similarity"
    primary: str = "spearman"
    higher_is_better: bool = True

    def start(self) -> SimilarityMeter:
        """Return a meter for rank correlation."""
        return SimilarityMeter(self)


class SimilarityMeter(PairedMeter):
    """Measure the correlation between the cosine similarity of two embeddings and a reference score. See
    `edgeq.measure.task.Meter`.
    """

    def __init__(self, task: Similarity) -> None:
        super().__init__()
        self._task = task

    def update(self, outputs: Outputs, sample: Sample) -> None:
        """Add the cosine similarity and the score of each pair of embeddings.

        Raises:
            DataError: an output is not an embedding, a label is not a number, or the batch does not have two rows for
                each score.
        """
        embedded = embeddings(pick_output(outputs, self._task.output, sample), sample)
        scores = _pair_scores(sample)
        if len(embedded) != 2 * len(scores):
            raise DataError(
                f"{sample.name}: {len(embedded)} rows for {len(scores)} scores",
                "Give two rows and one score for each pair",
            )
        length = np.linalg.norm(embedded, axis=1, keepdims=True)
        unit = embedded / np.where(length > 0, length, 1)
        self.add((unit[0::2] * unit[1::2]).sum(axis=1), scores)

    def result(self) -> Mapping[str, float]:
        """Return "spearman" and "pearson", from -1 to 1.

        Raises:
            DataError: all pairs have the same score.
        """
        found, wanted = self.rows()
        if len(set(wanted.tolist())) < 2:
            raise DataError(f"all {len(wanted)} pairs have the same score", "Correlation needs different scores")
        return {"spearman": correlation(mean_ranks(found), mean_ranks(wanted)), "pearson": correlation(found, wanted)}

    def skill(self) -> Skill | None:
        """Return how the rank correlation compares with that of unrelated numbers. Return None if it is not defined."""
        cosines, scores = self.rows()
        if len(set(scores.tolist())) < 2 or not np.isfinite(cosines).all():
            return None
        value, reach = correlation(mean_ranks(cosines), mean_ranks(scores)), CONFIDENT / math.sqrt(len(scores) - 1)
        figure = f"the rank correlation is {value:.3f} on {len(scores)} pairs"
        fix = "Check --preprocess, --task-output, and that each pair has its own score"
        return Skill(figure, 0.0, value - reach, value + reach, "0", fix)

    def resampled(self, halves: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the rank correlation over each half. `halves` is [H, samples]. The correlation is NaN if all pairs of
        a half have the same score.
        """
        values = []
        for found, wanted in self.halves(halves):
            varied = len(np.unique(wanted)) > 1
            values.append(correlation(mean_ranks(found), mean_ranks(wanted)) if varied else np.nan)
        return np.array(values)


def embeddings(output: NDArray[Any], sample: Sample) -> NDArray[np.float64]:
    """Return the embeddings, float64 [rows, width]. They are the output itself, or its mean over the positions that the
    mask marks.
    """
    values = np.asarray(output, np.float64)
    if values.ndim == 2:
        return values
    if values.ndim != 3:
        raise DataError(
            f"{sample.name}: an output of shape {list(values.shape)} is not an embedding",
            "Choose one of [rows, width] or [rows, positions, width] with --task-output",
        )
    fitting = [np.asarray(v) for n, v in sorted(sample.inputs.items()) if "mask" in n and v.shape == values.shape[:2]]
    mask = (fitting[0] != 0)[..., None] if fitting else np.ones((*values.shape[:2], 1), bool)
    summed: NDArray[np.float64] = np.where(mask, values, 0.0).sum(axis=1)
    summed /= np.maximum(mask.sum(axis=1), 1)
    return summed


def correlation(a: NDArray[Any], b: NDArray[Any]) -> float:
    """Return Pearson's correlation coefficient. It is NaN if a value is NaN, and 0 if `a` or `b` is constant."""
    x, y = a - a.mean(), b - b.mean()
    size = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / size if size else 0.0


def mean_ranks(values: NDArray[Any]) -> NDArray[np.float64]:
    """Return the rank of each value, beginning with 1. Equal values share their mean rank. All ranks are NaN if a value
    is NaN.
    """
    if np.isnan(values).any():
        return np.full(values.shape, np.nan)
    _, place, times = np.unique(values, return_inverse=True, return_counts=True)
    ranks: NDArray[np.float64] = (np.cumsum(times) - (times - 1) / 2)[place]
    return ranks


def _pair_scores(sample: Sample) -> NDArray[np.float64]:
    if sample.label is None:
        raise DataError(f"{sample.name} has no label", "Give --labels, or compare with a --reference model instead")
    label = np.asarray(sample.label).reshape(-1)
    if label.dtype.kind not in "iuf" or not np.isfinite(label.astype(np.float64)).all():
        raise DataError(f"{sample.name}: label {sample.label!r} is not a score", "Give a number for each pair")
    return label.astype(np.float64)


@dataclass(frozen=True)
class Detection(Displayed):
    """Compare detected boxes with annotations. Each sample is one image, which the annotations list by its file name.

    Boxes are mapped back to the original image, using the geometry that resize or letterbox stored in the sample's
    context. They are not clipped to the image.

    Attributes:
        annotations: the annotated objects.
        decoder: decoder for the model's head. With None, the outputs decide (`settled`).
        usual: name of the preprocessing that is usual for the head; "" if none is known.
        confidence: score that a candidate must exceed to be kept. The default is low, because average precision also
            counts low-scoring boxes.
        iou: overlap above which the lower-scoring of two boxes of one class is dropped.
        limit: maximum number of detections for each image; COCO counts 100.
        unit: unit of the decoder's boxes. With None, the outputs decide (`settled`); until then, it is "pixels".
    """

    annotations: CocoAnnotations
    decoder: Decode | None
    confidence: float = 0.01
    iou: float = 0.65
    limit: int = 100
    name: str = "detection"
    primary: str = "mAP50-95"
    higher_is_better: bool = True
    usual: str = ""
    unit: BoxUnit | None = None

    def __post_init__(self) -> None:
        for option, value in (("confidence", self.confidence), ("iou", self.iou)):
            if not 0 <= value <= 1:
                raise UsageError(f"⟨{option}⟩ is {value}", "Give a number from 0 to 1")

    def settled(self, pairs: Iterable[tuple[Sample, Outputs]]) -> tuple[Detection, str]:
        """Return the task with the decoder that fits the first sample's outputs, with the unit of its boxes, and a text
        about the choice ("" for none).

        If several decoders fit, the decoder whose boxes are correct on the samples is chosen.

        Raises:
            UsageError: no decoder fits the outputs, or several are equally good.
        """
        pairs = iter(pairs)
        if self.decoder is not None:
            task = self if self.unit is not None else self._with_unit(pairs)
            return task, _UNITS[task.unit or "pixels"]
        sample, outputs = first = next(pairs)
        known = recognise(outputs, input_size(sample))
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in outputs.items())
        decided = f"the outputs {shapes}"
        rows = [first]
        if len(known) > 1:
            rows += pairs
            values = {decoder.name: self._precision(decoder, rows) for decoder in known}
            best, second, *_ = sorted(values.values(), reverse=True)
            if best > 2 * second:
                known = [decoder for decoder in known if values[decoder.name] == best]
                decided = f"its mAP of {best:.4f} on {len(rows)} samples (the next {second:.4f})"
        if len(known) != 1:
            several = f"{' and '.join(one.name for one in known)} both fit" if known else "no decoder is known for"
            raise UsageError(f"{several} the outputs {shapes}", f"Choose {_DECODERS}")
        chosen = replace(self, decoder=known[0].decode, usual=known[0].preprocess)._with_unit(chain(rows, pairs))
        unit = _UNITS[chosen.unit or "pixels"]
        choice = f"decoder {known[0].name}, by {decided}; --decoder sets another"
        return chosen, f"{choice}; {unit}" if unit else choice

    def _with_unit(self, pairs: Iterable[tuple[Sample, Outputs]]) -> Detection:
        """Return the task with the unit of the decoder's boxes. Samples are read until one has a box."""
        assert self.decoder is not None, "the caller made sure"
        for sample, outputs in pairs:
            size = input_size(sample)
            candidates = self.decoder(outputs, size)
            unit = box_unit(candidates.take(candidates.scores > self.confidence).boxes, size)
            if unit is not None:
                return replace(self, unit=unit)
        return replace(self, unit="pixels")

    def _precision(self, decoder: Decoder, rows: Sequence[tuple[Sample, Outputs]]) -> float:
        """Return the mean average precision with one decoder. Return 0 if some outputs do not belong to its head."""
        try:
            meter = replace(self, decoder=decoder.decode)._with_unit(rows).start()
            for sample, outputs in rows:
                meter.update(outputs, sample)
            return meter.result()[self.primary]
        except (DataError, UsageError):
            return 0.0

    def start(self) -> DetectionMeter:
        """Return a meter for mean average precision."""
        if self.decoder is None:
            raise UsageError("detection needs a decoder", f"Choose {_DECODERS}")
        return DetectionMeter(self)


_UNITS: Mapping[BoxUnit, str] = {
    "pixels": "",
    "shares": "the model's boxes are shares of the image's size (0 to 1), not pixels",
    "pixels, scaled": "the model's boxes are pixels, not shares of the image's size",
}
_DECODERS = f"--decoder {', '.join(DECODERS.names())}, or path.py:function"


def detection(options: TaskOptions) -> Detection:
    """Return the detection task for the command line's options. The options must include annotations."""
    if options.annotations is None:
        fix = "Give a COCO instances file with --annotations, or put it next to the images; edgeq then finds the rest"
        raise UsageError("detection needs annotations", fix)
    thresholds: Mapping[str, Any] = {k: v for k, v in options.given().items() if k in ("confidence", "iou")}
    annotations = load_annotations(options.annotations)
    if options.decoder is None:
        return Detection(annotations, None, **thresholds)
    known = "" if names_function(options.decoder) else HEADS.load(options.decoder).preprocess
    return Detection(annotations, load_decoder(options.decoder), usual=known, **thresholds)


# Number of other images whose boxes are compared with an image's objects, to find out how many overlap by chance.
_SHIFTS = 4


class DetectionMeter:
    """Measure the mean average precision of boxes. See `edgeq.measure.task.Meter`."""

    def __init__(self, task: Detection) -> None:
        self._task = task
        self._package = load_package()  # If no COCO package is installed, this fails now, before minutes of inference.
        self._found: list[tuple[Image, Detections]] = []
        self._matches: list[Mapping[int, Matches]] = []
        self._seen: set[int] = set()

    def update(self, outputs: Outputs, sample: Sample) -> None:
        """Decode and suppress the boxes of one image, and map them to pixels of the original image.

        Raises:
            DataError: the annotations lack the image or a class, or the image was already added.
        """
        image = self._image(sample)
        size = input_size(sample)
        assert self._task.decoder is not None, "the task made sure"
        candidates = in_pixels(self._task.decoder(outputs, size), self._task.unit or "pixels", size)
        categories = len(self._task.annotations.categories)
        if len(candidates) and candidates.classes.max() >= categories:
            raise DataError(
                f"{self._task.annotations.source} has {categories} categories, but the model's classes go up to "
                f"{candidates.classes.max()}",
                "Use the annotations that the model was trained for, or a decoder that maps the classes",
            )
        kept = suppress(candidates, confidence=self._task.confidence, iou=self._task.iou, limit=self._task.limit)
        boxes = _placed(kept.boxes, sample, image, size)
        self._found.append((image, Detections(boxes, kept.scores, kept.classes)))

    def collected(self) -> list[tuple[Image, Detections]]:
        """Return the images and their detections."""
        return self._found

    def take(self, collected: list[tuple[Image, Detections]]) -> None:
        """Add the images of another meter.

        Raises:
            DataError: this meter already has one of the images.
        """
        for image, _ in collected:
            if image.id in self._seen:
                raise DataError(f"the image with id {image.id} comes twice", "Give each image once")
            self._seen.add(image.id)
        self._found += collected

    def result(self) -> Mapping[str, float]:
        """Return COCO's metrics, each from 0 to 1. "mAP50-95" is one of them."""
        return mean_average_precision(self._task.annotations, self._found, self._package)

    def skill(self) -> Skill | None:
        """Return how many objects are found, in comparison with the objects of other images. Return None without
        objects.

        Objects of one image are alike, so the upper limit counts images instead of objects.
        """
        hits, objects = self._overlapping(0)
        if not objects:
            return None
        shifts = range(1, min(len(self._found), _SHIFTS + 1))
        chance = sum(self._overlapping(shift)[0] for shift in shifts) / (objects * max(1, len(shifts)))
        images = sum(any(match.objects for match in image.values()) for image in self._matched())
        low, _ = score_interval(hits, objects)
        _, high = score_interval(images * hits / objects, images)
        figure = f"the boxes overlap {hits} of {objects} objects by half"
        fix = (
            "Check --preprocess and --decoder, and that the annotations' categories are in the order of the model's "
            "classes"
        )
        return Skill(figure, chance, low, high, f"{chance * objects:.1f} objects", fix)

    def _overlapping(self, shift: int) -> tuple[int, int]:
        """Return how many objects a box of their class overlaps by half or more, and the number of objects. Each image
        gets the boxes of the image that is `shift` places before it.
        """
        matched = self._matched()
        if shift:
            moved = zip(self._found, self._found[-shift:] + self._found[:-shift], strict=True)
            matched = [match_image(self._task.annotations, image, boxes) for (image, _), (_, boxes) in moved]
        every = [match for image in matched for match in image.values()]
        return sum(int(match.right[0].sum()) for match in every), sum(match.objects for match in every)

    def _matched(self) -> list[Mapping[int, Matches]]:
        """Return the matches of each image with its own objects."""
        self._matches += [match_image(self._task.annotations, *one) for one in self._found[len(self._matches) :]]
        return self._matches

    def boxes(self) -> list[dict[str, Any]]:
        """Return the detections in the images so far, as COCO's list of results."""
        return guesses(self._task.annotations, self._found)

    def resampled(self, halves: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return mAP50-95 over each half. `halves` is [H, images]. The value is NaN for a half whose images have no
        object.
        """
        matches = self._matched()
        # COCO's packages sort images by id. For equal scores, this order decides.
        order = sorted(range(len(self._found)), key=lambda i: self._found[i][0].id)
        return mean_average_precisions([matches[i] for i in order], halves[:, order])

    def _image(self, sample: Sample) -> Image:
        context = sample.context
        file = str(context.get("path", context.get("file", sample.name)))
        try:
            image = self._task.annotations.image(file)
        except DataError as error:
            raise DataError(f"{sample.name}: {error.problem}", error.fix) from error
        if image.id in self._seen:
            raise DataError(f"{sample.name}: image {image.id} comes twice", "Give each image once")
        self._seen.add(image.id)
        return image


def input_size(sample: Sample) -> tuple[int, int]:
    """Return the width and height of the model's image input.

    It must be the only input. Its shape must be [1, C, H, W] or [1, H, W, C], where C is 1, 3 or 4.

    Raises:
        DataError: the input is not one image.
    """
    shape = only_input(sample).shape
    if len(shape) == 4 and shape[0] == 1:
        if shape[1] in (1, 3, 4):
            return shape[3], shape[2]
        if shape[3] in (1, 3, 4):
            return shape[2], shape[1]
    raise DataError(f"{sample.name}: input of shape {list(shape)} is not one image", "Detection takes one image a run")


def _placed(boxes: Floats, sample: Sample, image: Image, size: tuple[int, int]) -> Floats:
    """Convert boxes [N, 4] from pixels of the model's input to pixels of the original image."""
    original = sample.context.get("original_size")
    if image.size is not None and original is not None and tuple(original) != image.size:
        raise DataError(
            f"{sample.name} is {original[0]}x{original[1]}, but annotated as {image.size[0]}x{image.size[1]}",
            "Use images and annotations of the same data set",
        )
    if "scale" in sample.context:
        return to_original(boxes, sample.context)
    if image.size is not None and image.size != size:
        raise DataError(
            f"{sample.name}: boxes cannot be mapped from the model's {size[0]}x{size[1]} to the image's "
            f"{image.size[0]}x{image.size[1]}",
            "Read image files with a --preprocess that resizes or letterboxes",
        )
    return boxes


CLASSIFICATION = TaskKind(
    "classification",
    "top-1 and top-5 of class scores, or of one sigmoid score",
    lambda options: Classification(class_offset=options.class_offset, output=options.output),
    frozenset({"class_offset", "output"}),
)
ANOMALY = TaskKind(
    "anomaly",
    "ROC AUC of an autoencoder's reconstruction error",
    lambda options: Anomaly(output=options.output),
    frozenset({"output"}),
)
SIMILARITY = TaskKind(
    "similarity",
    "rank correlation of the cosine of two embeddings with a score",
    lambda options: Similarity(output=options.output),
    frozenset({"output"}),
)
DETECTION = TaskKind(
    "detection",
    "COCO mean average precision of boxes",
    detection,
    frozenset({"annotations", "decoder", "confidence", "iou"}),
)
