"""Find the preprocessing that a float model was trained with, if none is named.

A wrong preprocessing costs more accuracy than any quantization. edgeq tries the common kinds of preprocessing on
samples from across the data. If there are labels, the kind with the best accuracy wins. Without labels, a preprocessing
is likelier if the model's scores contain more information about the images. The measure is the mutual information of
image and class, H(mean of p) - mean of H(p), where p is the softmax. It equals the mean over the images of the
divergence of p from the mean of p.

After each round, edgeq drops the candidates that are worse than the best by more than chance explains, judged by the
difference on the same samples. The remaining candidates get more samples in the next round. Candidates that are left
are tied. With labels, the best of them wins: most of them differ only in how they crop or resize, which hardly changes
the ranges of a model. If another of them makes other numbers of the same colour and is about as good, a third round
decides between the two. If even that shows no difference, edgeq asks.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from edgeq_device.answers.decode import decode
from edgeq_device.answers.family import Family, all_families, load_family
from numpy.typing import NDArray

from edgeq.data.images import Picture, find_frame
from edgeq.data.open_source import Data
from edgeq.data.preprocess import (
    NoPreprocessingError,
    Preprocess,
    candidates,
    choices,
    dedicated,
    load_preprocess,
    shipped,
)
from edgeq.data.sample import Sample
from edgeq.data.samples import Samples, SourceSamples, open_samples
from edgeq.describe.facts import ModelFacts
from edgeq.describe.read import describe_file
from edgeq.errors import CheckFailedError, DataError, EdgeqError, UsageError
from edgeq.measure.class_scores import probabilities
from edgeq.measure.find_head import fit_families, make_head, make_view
from edgeq.measure.find_task import find_detection, find_heads
from edgeq.measure.inference import Outputs, Session, infer
from edgeq.measure.resample import ResampledMeter, RowMetrics, loss_error
from edgeq.measure.rows import split_rows
from edgeq.measure.task import Task
from edgeq.measure.tasks.classification import infer_task
from edgeq.signature import Signature
from edgeq.util.display import SILENT, Progress
from edgeq.util.numbers import metric

_ROUNDS = (16, 64, 256)
"""Number of samples in each round. The third one is rarely needed."""
_SURE = 2.5
"""Number of standard errors of the difference. A candidate that is worse than the best by more than this is dropped."""
_NO_LEAD = 0.5
"""Number of standard errors. A lead below this does not show which of two candidates is better."""
# A colour whose channels and levels all differ, so that any two mappings of colours to numbers show.
_COLOUR = (40, 120, 250)
# Share of a mapping's range. Mappings that differ by less give a model nearly the same numbers.
_SAME_NUMBERS = 0.02
# Two confidences that differ by less belong to the same answer.
_SAME = 0.02
# A class offset shows only on rows of several classes.
_SETTLED_ON = 64
# A question that lists more candidates is hard to read.
_SHOWN = 4
BITS = "bits"
"""Name of the metric that is used without labels."""


@dataclass(frozen=True)
class PreprocessCandidate:
    """Describe one preprocessing and its result."""

    preprocess: str
    value: float


@dataclass(frozen=True)
class PreprocessSearch:
    """Describe the result of a search.

    Attributes:
        metric: metric by which candidates are compared: a task's primary metric, or `BITS`.
        count: number of samples in the last round.
        ranked: candidates of the last round, the best first.
        tied: number of candidates in `ranked` that these samples cannot distinguish from the best.
        rivals: tied candidates that are about as good as the best, but make other numbers of the same colour.
        usual: preprocessing that is usual for the model's head; "" if none is known.
        fitting: names of the preprocessings that fit the data and the model.
        doubt: reason why the labels cannot decide; "" if they can.
        heads: decoders that can read the model's outputs, if it is a detector and the images have no labels.
    """

    metric: str
    count: int
    ranked: tuple[PreprocessCandidate, ...]
    tied: int
    rivals: tuple[str, ...] = ()
    usual: str = ""
    fitting: tuple[str, ...] = ()
    doubt: str = ""
    heads: tuple[str, ...] = ()

    @property
    def decided(self) -> str | None:
        """Return the preprocessing that the labels show to be best, or None if they do not decide.

        It is the usual preprocessing if that is as good as the best. Otherwise it is the best one, unless it has
        rivals.
        """
        if self.metric == BITS or not self.ranked or self.ranked[0].value <= 0 or self.doubt:
            return None
        tied = [candidate.preprocess for candidate in self.ranked[: self.tied]]
        if self.usual in tied:
            return self.usual
        return None if self.rivals else tied[0]

    @property
    def decision_note(self) -> str:
        """Return a sentence with the decision and its basis."""
        best = next(candidate for candidate in self.ranked if candidate.preprocess == self.decided)
        runners_up = [candidate for candidate in self.ranked if candidate is not best][:1]
        next_best = "".join(
            f", the next {_quote(candidate.preprocess)} {metric(self.metric, candidate.value)}"
            for candidate in runners_up
        )
        doubt = ", which these samples do not show to be worse" if self.tied > 1 else ""
        return (
            f"preprocessing {_quote(best.preprocess)}: {self.metric} {metric(self.metric, best.value)} on "
            f"{self.count} samples{next_best}{doubt}; ⟨preprocess⟩ sets another"
        )

    @property
    def question(self) -> str:
        """Return a sentence that asks the user for the preprocessing and lists the likeliest candidates."""
        if not self.fitting:
            return choices()
        if self.doubt:
            return f"None of {len(self.fitting)} preprocessings fits the labels: with the best of them, {self.doubt}"
        if self.heads:
            several = f"NAME, as one of {', '.join(map(_quote, self.fitting[:_SHOWN]))}"
            suggestion = f"{_quote(self.usual)} if the model was trained with it" if self.usual else several
            return (
                f"Type ⟨preprocess⟩ {suggestion} (its outputs are those of {' or '.join(self.heads)}), or put the COCO "
                "annotations of the images next to them, as a .json file: mAP then decides"
            )
        if not self.ranked or self.ranked[0].value <= 0:
            listed = ", ".join(map(_quote, self.fitting[:_SHOWN]))
            usual = f"; {_quote(self.usual)} goes with outputs like these" if self.usual else ""
            return f"Which one was the model trained with? Type ⟨preprocess⟩ NAME, as one of {listed}{usual}"
        tied = self.ranked[: self.tied]
        listed = ", ".join(
            f"{_quote(candidate.preprocess)} {metric(self.metric, candidate.value)}" for candidate in tied[:_SHOWN]
        )
        suggestion = f"⟨preprocess⟩ {_quote(tied[0].preprocess)}"
        if self.metric == BITS:
            doubt = "no labels decide; " if len(tied) < 2 else ""
            return (
                f"Type {suggestion} if the model was trained with it ({doubt}the likeliest, by the bits of information "
                f"in its scores for {self.count} images: {listed}), or give labels"
            )
        return (
            f"Which one was the model trained with? By {self.metric}, {self.count} samples cannot tell these apart: "
            f"{listed}. Type {suggestion}, or another of them"
        )


def _quote(name: str) -> str:
    return shlex.quote(name)


def search(
    session: Session,
    signature: Signature,
    data: Data,
    *,
    task: Task | None = None,
    names: Sequence[str] | None = None,
    progress: Progress = SILENT,
) -> PreprocessSearch:
    """Try the common preprocessings on `data`.

    Args:
        session: session of the float model, which has `signature`.
        task: task by which to compare; None uses the task that labels and outputs suggest, if any.
        names: preprocessings to try; None tries the common ones.
    """
    remaining = {name: load_preprocess(name) for name in names or candidates(task.name if task else None)}
    fitting: tuple[str, ...] = ()
    tried_inputs: list[list[Mapping[str, NDArray[Any]]]] = []
    failure: EdgeqError | None = None
    usual, metric, sign, trials, count = "", BITS, 1, dict[str, _Trial](), 0
    for size in _ROUNDS:
        trials, opened_samples = {}, None
        with progress.stage("Trying preprocessings", len(remaining)) as advance:
            for name, preprocess in remaining.items():
                advance(1)
                samples = _open_fitting(data, signature, preprocess, size, opened_samples)
                if samples is None:
                    continue
                opened_samples = samples
                if size == _ROUNDS[0]:
                    # Two names may mean the same inputs for this model, and would then tie in every round.
                    inputs = [sample.inputs for sample in islice(samples, 2)]
                    if any(_are_equal(inputs, previous) for previous in tried_inputs):
                        continue
                    tried_inputs.append(inputs)
                if task is None:
                    task = infer_task(sample := next(iter(samples)), infer(session, sample))
                try:
                    trials[name] = _measure(session, samples, task)
                except (DataError, CheckFailedError, UsageError) as error:  # No known head fits these outputs.
                    failure = failure or error
                    continue
                usual, count = getattr(trials[name].task, "usual", "") or usual, len(samples)
            metric = task.primary if task is not None else BITS
            sign = 1 if task is None or task.higher_is_better else -1
            settled = [trial for trial in trials.values() if trial.task != task]
            if settled:  # A class offset found with the correct preprocessing applies to all.
                task = max(settled, key=lambda trial: sign * trial.figures.metrics[metric]).task
                for name, trial in list(trials.items()):
                    if trial.task == task:
                        continue
                    try:
                        trials[name] = _measure(session, trial.samples, task)
                    except (DataError, CheckFailedError, UsageError):  # Another head fits these outputs.
                        del trials[name]
        # An error counts only if no candidate fits. Wrong candidates often fail.
        if failure is not None and not trials:
            raise failure
        fitting = fitting or tuple(trials)
        tied = _find_tied({name: trial.figures for name, trial in trials.items()}, task, metric, count)
        remaining = {name: remaining[name] for name in tied}
        best = max(remaining, key=lambda name: sign * trials[name].figures.metrics[metric], default="")
        rivals = [] if metric == BITS else _find_rivals(best, remaining, trials, signature, count)
        # After the second round, the usual preprocessing wins if it leads. More samples do not cure doubtful labels.
        sure = best == usual or not rivals or all(trials[name].doubt for name in remaining)
        if len(remaining) < 2 or count < size or (size > _ROUNDS[0] and sure):
            break
        if size > _ROUNDS[0]:
            remaining = {name: remaining[name] for name in (best, *rivals)}
    # Without labels, more bits do not prove that a preprocessing is correct. Among tied candidates, the more common
    # ones come first.
    order = {name: place if metric == BITS and name in remaining else 0 for place, name in enumerate(trials)}
    values = {name: trial.figures.metrics[metric] for name, trial in trials.items()}
    ranked = sorted(trials, key=lambda name: (name not in remaining, order[name], -sign * values[name]))
    # One of many similar candidates may beat a guess by luck.
    doubtful = [trials[name].doubt for name in ranked[: len(remaining)] if trials[name].doubt]
    return PreprocessSearch(
        metric,
        count,
        tuple(PreprocessCandidate(name, values[name]) for name in ranked),
        len(remaining),
        tuple(rivals),
        usual if usual in fitting else "",
        fitting,
        doubtful[0] if 2 * len(doubtful) > len(remaining) else "",
    )


@dataclass(frozen=True)
class _Trial:
    """Hold the result of one candidate in one round.

    Attributes:
        samples: the samples with this preprocessing.
        figures: the model's metrics on them.
        task: the task with its open choices made. If the samples do not show how to make them, it is unchanged.
        doubt: reasons to doubt the labels; "" for none.
    """

    samples: Samples
    figures: RowMetrics
    task: Task | None
    doubt: str = ""


def _open_fitting(
    data: Data, signature: Signature, preprocess: Preprocess, size: int, opened: Samples | None = None
) -> Samples | None:
    """Return `size` samples with a preprocessing, or None if the preprocessing does not fit.

    Args:
        opened: the samples with another preprocessing. They save a walk through the folder.
    """
    try:
        same: Samples | None = opened.prepared_by(preprocess) if isinstance(opened, SourceSamples) else None
        samples = same or open_samples(replace(data, preprocess=preprocess, count=size), signature)
        next(iter(samples))
    except (DataError, CheckFailedError):
        return None
    return samples


def _are_equal(inputs: Sequence[Mapping[str, NDArray[Any]]], previous: Sequence[Mapping[str, NDArray[Any]]]) -> bool:
    """Return whether two candidates give a model the same inputs, up to rounding."""
    pairs = [(a[name], b.get(name)) for a, b in zip(inputs, previous, strict=False) for name in a]
    return all(b is not None and a.shape == b.shape and np.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs)


def _measure(session: Session, samples: Samples, task: Task | None) -> _Trial:
    """Measure the model on samples by the task, after its open choices are made. Without a task, measure the
    information in its scores.
    """
    row_pairs = ((row, out[""]) for sample in samples for row, out in split_rows(sample, {"": infer(session, sample)}))
    if task is None:
        scores = [scores for _, outputs in row_pairs if (scores := _read_scores(outputs)) is not None]
        return _Trial(samples, _measure_information(scores), None)
    opening_pairs = list(islice(row_pairs, _SETTLED_ON))
    settled, choice = task.settled(iter(opening_pairs)) if hasattr(task, "settled") else (task, "")
    meter = ResampledMeter(settled)
    for pairs in (opening_pairs, row_pairs):
        for row, outputs in pairs:
            meter.update(outputs, row)
    return _Trial(samples, meter.measured(), settled if choice else task, " ".join(meter.notes()))


def _find_tied(figures: Mapping[str, RowMetrics], task: Task | None, metric: str, count: int) -> list[str]:
    """Return the candidates that are not clearly worse than the best."""
    if not figures:
        return []
    sign = 1 if task is None or task.higher_is_better else -1
    best = max(figures.values(), key=lambda row_metrics: sign * row_metrics.metrics[metric])
    tied = []
    for name, row_metrics in figures.items():
        error = loss_error(best, row_metrics, further=1 / count) if row_metrics is not best else 0.0
        behind = sign * (best.metrics[metric] - row_metrics.metrics[metric])
        if error is None or behind <= _SURE * error:
            tied.append(name)
    return tied


def _find_rivals(
    best: str, tied: Mapping[str, Preprocess], trials: Mapping[str, _Trial], signature: Signature, count: int
) -> list[str]:
    """Return the tied candidates that are about as good as the best, but make other numbers of the same colour."""
    if not tied:
        return []
    numbers, rivals = _map_colour(tied[best], signature), list[str]()
    leader = trials[best]
    metric = leader.task.primary if leader.task is not None else BITS
    for name, preprocess in tied.items():
        figures = trials[name].figures
        error = loss_error(leader.figures, figures, further=1 / count)
        lead = abs(leader.figures.metrics[metric] - figures.metrics[metric])
        others = _map_colour(preprocess, signature)
        if name == best or numbers is None or others is None or (error is not None and lead > _NO_LEAD * error):
            continue
        if np.abs(numbers - others).max() > _SAME_NUMBERS * np.abs(numbers).max():
            rivals.append(name)
    return rivals


def _map_colour(preprocess: Preprocess, signature: Signature) -> NDArray[np.float64] | None:
    """Return the numbers that a preprocessing makes of a colour, [channels]; None if it takes no images."""
    try:
        # 512 pixels are enough for the usual resize and crop.
        picture = Picture(np.full((512, 512, 3), _COLOUR, np.uint8))
        array = preprocess(picture, signature.inputs[0]).array
    except DataError:
        return None
    if isinstance(array, Mapping) or array.ndim < 3:
        return None
    # The centre has the colour itself. A border may be padding.
    spots = array.reshape(-1, *array.shape[-3:])[0].astype(np.float64)
    # The channels are the shortest axis.
    spots = spots if spots.shape[0] <= spots.shape[-1] else np.moveaxis(spots, -1, 0)
    numbers: NDArray[np.float64] = spots[:, spots.shape[1] // 2, spots.shape[2] // 2]
    return numbers


def _read_scores(outputs: Outputs) -> NDArray[np.float64] | None:
    """Return the class scores of one image from the first output, [classes]. Return None if that output has none."""
    array = next(iter(outputs.values()), None)
    if array is None or array.dtype.kind != "f" or array.ndim != 2 or len(array) != 1 or array.shape[1] < 2:
        return None
    return probabilities(np.asarray(array, np.float64))[0] if np.isfinite(array).all() else None


def _measure_information(scores: Sequence[NDArray[np.float64]]) -> RowMetrics:
    """Return how many bits of information each image's scores contain.

    The mean of these numbers is the mutual information of image and class.
    """
    if not scores:
        return RowMetrics({BITS: 0.0}, np.zeros(2))
    p = np.stack(scores)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(p > 0, p * np.log2(p / p.mean(axis=0)), 0.0)
    bits: NDArray[np.float64] = terms.sum(axis=1)
    return RowMetrics({BITS: max(0.0, float(bits.mean()))}, bits)


def open_or_search(
    data: Data,
    signature: Signature,
    *,
    session: Callable[[], Session],
    labelled_data: Data | None = None,
    task: Task | None = None,
    fallback: Preprocess | None = None,
    facts: ModelFacts | None = None,
    progress: Progress = SILENT,
    **options: Any,
) -> Samples:
    """Open samples. If they are images and no preprocessing is named, use the first of these:

    - the preprocessing that the model or a file next to it states;
    - the one that labels show to be best, by a search;
    - the one that is usual for the model's head, if its outputs show the head.

    If `task` is None and the model is a detector, a COCO file next to the images is also used as labels.

    Args:
        session: function that opens the float model.
        labelled_data: labelled data on which the candidates are compared; None uses `data`.
        task: task by which to compare; see `search`.
        fallback: preprocessing to use if none is named for the images; None searches.
        facts: what files state about the model; None reads them for the `model` in the options.
        options: further arguments of `open_samples`.

    Raises:
        DataError: an error of `open_samples`, or no preprocessing can be decided on, in which case the message asks the
            user to name one.
    """
    try:
        return open_samples(data, signature, progress=progress, **options)
    # Only images need a preprocessing. Arrays are taken as they are.
    except NoPreprocessingError as error:
        if len(signature.inputs) > 1:
            fix = (
                "Give .npz files with an array for each input, or ⟨preprocess⟩ file.py:function that makes all inputs "
                "from an image"
            )
            inputs = "; ".join(map(str, signature.inputs))
            raise DataError(f"{data.source} contains images, but the model takes {inputs}", fix) from error
        if fallback is not None:
            return open_samples(data, signature, progress=progress, **{**options, "preprocess": fallback})
        labelled, model = labelled_data or data, options.get("model")
        if facts is None:
            facts = describe_file(Path(model)) if model is not None else ModelFacts()
        stated = _open_stated(data, signature, facts, options, progress)
        if stated is not None:
            return stated
        # The model is opened only now, because most callers name a preprocessing.
        progress.note(f"{labelled.source}: trying the usual preprocessings on up to {_ROUNDS[1]} samples")
        float_session = session()
        task = task or find_detection(labelled, signature, float_session)
        if task is None and (pair := _find_usual(labelled, signature, float_session, facts)) is not None:
            family, name = pair
            progress.note(f"found: preprocessing {name}, which suits the head {family}; ⟨preprocess⟩ sets another")
            return open_samples(data, signature, progress=progress, **{**options, "preprocess": load_preprocess(name)})
        result = search(float_session, signature, labelled, task=task, progress=progress)
        if task is None and result.decided is None and (heads := find_heads(signature, float_session)):
            usual = heads[0].preprocess if len(heads) == 1 else ""
            # What the head suggests must also fit the images.
            if usual and _open_fitting(labelled, signature, load_preprocess(usual), 1) is None:
                usual = ""
            result = replace(result, usual=usual, heads=tuple(head.name for head in heads))
        if result.decided is None:
            raise DataError(error.problem, result.question) from error
        progress.note(f"found: {result.decision_note}")
        return open_samples(data, signature, progress=progress, **{**options, "preprocess": result.decided})


def _open_stated(
    data: Data, signature: Signature, facts: ModelFacts, options: Mapping[str, Any], progress: Progress
) -> Samples | None:
    """Return samples with the preprocessing that files state, or None if none is stated. One that is only usual for
    what they state must fit the images.
    """
    stated = facts.preprocess
    if stated is None:
        return None
    preprocess = load_preprocess(stated.value)
    if stated.assumed and _open_fitting(data, signature, preprocess, 1) is None:
        return None
    title = preprocess.name if isinstance(stated.value, str) else preprocess.title
    progress.note(f"found: preprocessing {title}, by {stated.source}; ⟨preprocess⟩ sets another")
    return open_samples(data, signature, progress=progress, **{**options, "preprocess": preprocess})


def _find_usual(data: Data, signature: Signature, session: Session, facts: ModelFacts) -> tuple[str, str] | None:
    """Return the only family that the outputs fit and the name of its preprocessing, or None.

    Values show the head only for an image that is prepared in the right way. Each family is therefore tried with its
    own preprocessing, and a family without one with all of them.
    """
    families, fits = list(all_families()), dict[str, str]()
    for name in sorted({family.preprocess for family in families} & set(shipped())):
        samples = _open_fitting(data, signature, load_preprocess(name), 1)
        if samples is None:
            continue
        try:
            view = make_view(session, signature, next(iter(samples)), facts)
        except EdgeqError:  # The model does not take this input.
            continue
        tried = [family for family in families if family.preprocess in (name, "")]
        fits |= {found: family.preprocess for found, (family, _) in fit_families(view, facts, tried).items()}
    if len(fits) != 1:
        return None
    ((family, preprocess),) = fits.items()
    if not preprocess:
        preprocess = _find_most_confident(data, signature, session, facts, load_family(family))
    return (family, preprocess) if preprocess else None


def _find_most_confident(data: Data, signature: Signature, session: Session, facts: ModelFacts, family: Family) -> str:
    """Return the preprocessing of the family's task with which its answers are clearly the most confident, or "".

    Only a family whose answers have one confidence each, such as that of read text, is decided in this way.
    """
    confidences: dict[str, NDArray[np.float64]] = {}
    for name in dedicated(family.task):
        samples = _open_fitting(data, signature, load_preprocess(name), _ROUNDS[0])
        try:
            values = [_measure_confidence(session, signature, sample, facts, family) for sample in samples or ()]
        except EdgeqError:  # The model does not take this input.
            continue
        if values and None not in values:
            confidences[name] = np.asarray(values, np.float64)
    ranked = sorted(confidences, key=lambda name: -float(confidences[name].mean()))
    if len(ranked) < 2:
        return ranked[0] if ranked else ""
    # The same samples are compared, so their differences show what chance explains.
    lead = confidences[ranked[0]] - confidences[ranked[1]]
    # If the answers hardly depend on it, either will do.
    clear = lead.mean() > _SURE * lead.std() / np.sqrt(len(lead)) or np.abs(lead).max() < _SAME
    return ranked[0] if clear else ""


def _measure_confidence(
    session: Session, signature: Signature, sample: Sample, facts: ModelFacts, family: Family
) -> float | None:
    """Return the confidence of the answer for one image, or None if the family does not fit or gives none."""
    view, frame = make_view(session, signature, sample, facts), find_frame(sample.context)
    _, fit = fit_families(view, facts, [family]).get(family.name, (None, None))
    if fit is None or frame is None:
        return None
    return getattr(decode(view.outputs, make_head(family, fit, facts, {}), frame), "confidence", None)
