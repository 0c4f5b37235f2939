"""Measure models against labels: the protocol, the shipped tasks by name, and the interface for a user's own tasks.

Estimate how much a loss depends on the choice of samples. The estimate is the standard error of the difference between
two models.

If the metric is a mean of scores, the estimate is the standard error of the mean difference between the two models'
scores. Any other metric (mAP, AUC, F1, a correlation) is computed again for many random halves of the samples. Both
models get the same halves, so the difficulty that they share cancels. Each sample is in a half with probability one
half, so its weight is 0 or 2. These weights have mean and variance 1. With such weights, the deviations from the metric
over all samples follow the metric's sampling distribution, as they do in the bootstrap (A. Owen, D. Eckles:
Bootstrapping data arrays of arbitrary order, 2012, "double-or-nothing"). No sample counts twice. So the method also
works for meters that refuse a sample that they have already seen, and for meters that count ties.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgeq.data.records import Sample
from edgeq.errors import DataError, UsageError
from edgeq.measure.agreement import Outputs
from edgeq.util.display import Displayed
from edgeq.util.registry import TASKS, Registry, load_function, names_function


class Meter(Protocol):
    """Collect one model's outputs over the samples.

    To estimate the uncertainty of a loss, edgeq computes the primary metric over random halves of the samples, with a
    meter for each half (`ResampledMeter`). A meter may have one of two further methods, which make the result exact or
    cheap:

        scores() -> NDArray        a score for each row so far, if the primary metric is the mean of the scores
        resampled(halves) -> NDArray   the primary metric over each of the halves [H, N] (bool) of the N updates so far;
                                       NaN for a half for which the metric is undefined

    Workers can share the samples (`--workers`) if the meter has two more methods:

        collected() -> Any      the meter's state for the samples so far, without the task, as values that can be
            pickled
        take(collected) -> None   add the state that another meter collected from later samples

    A meter may have two methods that judge its figures (`doubts`):

        notes() -> Sequence[str]   reasons to doubt the figures, found in the labels and outputs so far; each is a
            sentence
        skill() -> Skill | None    a comparison with answers that ignore the inputs; None if there is nothing to compare
    """

    def update(self, outputs: Outputs, sample: Sample) -> None:
        """Add the outputs for one sample.

        Raises:
            DataError: the sample lacks the label that the task needs.
        """

    def result(self) -> Mapping[str, float]:
        """Return metric name → value, after the last sample."""


CONFIDENT = 2.0
"""Number of standard errors between a figure and the ends of its interval."""
_LEAST_SKILL = 0.25
"""The least share of the way from chance to perfection that a model in use covers."""


@dataclass(frozen=True)
class Skill:
    """Compare a model's answers with answers that do not depend on the inputs.

    Attributes:
        figure: text with the model's figure and the number of samples, such as "top-1 is 12 % on 64 rows".
        chance: the same figure of answers that ignore the inputs; 1 is perfect.
        low, high: interval of the model's figure, `CONFIDENT` standard errors to each side.
        shown_chance: `chance` as text.
        fix: likely causes, and what to do about them.
    """

    figure: str
    chance: float
    low: float
    high: float
    shown_chance: str
    fix: str

    @property
    def better(self) -> bool:
        """Return whether the model is certainly better than chance."""
        return self.low > self.chance

    @property
    def missing(self) -> bool:
        """Return whether the model certainly lacks the skill of a model in use. On few samples, this is never certain,
        because a hard set of samples may look the same.
        """
        return not self.better and self.high < self.chance + _LEAST_SKILL * (1 - self.chance)

    @property
    def doubt(self) -> str:
        """Return a sentence for a model that is not certainly better than chance."""
        return (
            f"{self.figure}, no better than a guess ({self.shown_chance}): a loss against it proves nothing. {self.fix}"
        )


def score_interval(right: float, rows: int) -> tuple[float, float]:
    """Return the interval of a share of which `right` of `rows` were seen (E. Wilson, 1927)."""
    squared = CONFIDENT**2
    centre = (right + squared / 2) / (rows + squared)
    reach = CONFIDENT / (rows + squared) * math.sqrt(right * (rows - right) / rows + squared / 4)
    return centre - reach, centre + reach


def skill_of(meter: Meter) -> Skill | None:
    """Return the comparison of a meter's figures with chance. Return None if the meter does not compare them."""
    return meter.skill() if hasattr(meter, "skill") else None


def doubts(meter: Meter) -> tuple[str, ...]:
    """Return reasons to doubt a meter's figures, one sentence each."""
    notes = tuple(meter.notes()) if hasattr(meter, "notes") else ()
    skill = skill_of(meter)
    return notes or ((skill.doubt,) if skill is not None and not skill.better else ())


class Task(Protocol):
    """Define a kind of accuracy.

    A task is an immutable value. `start` returns a new meter, so several models can share one pass.

    A task may also have an attribute `classes`. It is true if the output that the task reads (its attribute `output`,
    or the only output) contains class scores. Otherwise, the share of samples with the same top-1 is meaningless.
    """

    @property
    def name(self) -> str:
        """Return the name of the task on the command line."""
        ...

    @property
    def primary(self) -> str:
        """Return the name of the primary metric."""
        ...

    @property
    def higher_is_better(self) -> bool:
        """Return whether a higher value of the primary metric is better."""
        ...

    def start(self) -> Meter:
        """Return a new meter. It is for one model over all samples."""


_NUMBER = (numbers.Real, "a number from 0 to 1")
_NAME = (str, "a name")
# Field of TaskOptions → its type, and a readable name for that type.
_KINDS: Mapping[str, tuple[Any, str]] = {
    "class_offset": (numbers.Integral, "a whole number"),
    "annotations": ((str, os.PathLike), "a path"),
    "decoder": _NAME,
    "confidence": _NUMBER,
    "iou": _NUMBER,
    "output": _NAME,
}


@dataclass(frozen=True)
class TaskOptions(Displayed):
    """Hold options of tasks. None keeps the task's default.

    Attributes:
        class_offset: number of scores before class 0 that do not belong to a class (1 for MobileNet's background).
        annotations: COCO annotation file (instances); a str becomes a Path.
        decoder: name of a detector-head decoder, or "path.py:function".
        confidence: score that a detection must exceed to be kept.
        iou: overlap above which the lower-scoring of two boxes of one class is dropped.
        output: the model output to read, if there are several.
    """

    class_offset: int | None = None
    annotations: Path | None = None
    decoder: str | None = None
    confidence: float | None = None
    iou: float | None = None
    output: str | None = None

    def __post_init__(self) -> None:
        for name, value in self.given().items():
            kind, what = _KINDS[name]
            if not isinstance(value, kind) or isinstance(value, bool):
                raise UsageError(f"the task option {name} is {value!r}", f"Give {what}")
        if self.annotations is not None:
            object.__setattr__(self, "annotations", Path(self.annotations))

    def given(self) -> dict[str, object]:
        """Return the options that were set."""
        return {f.name: v for f in dataclasses.fields(self) if (v := getattr(self, f.name)) is not None}


def split_task_options(options: Mapping[str, Any]) -> tuple[TaskOptions, dict[str, Any]]:
    """Split a command's flat options into the options of a task and all others. Among the flat options, `output` is
    called `task_output`.
    """
    others = dict(options)
    names = {f.name: argument_of(f.name) for f in dataclasses.fields(TaskOptions)}
    return TaskOptions(**{name: others.pop(given) for name, given in names.items()}), others


def argument_of(name: str) -> str:
    """Return the argument of a command for a field of `TaskOptions`. The argument for `output` is `task_output`,
    because `output` names a file.
    """
    return "task_output" if name == "output" else name


@dataclass(frozen=True)
class TaskKind:
    """Describe a registered task.

    Attributes:
        name: name on the command line.
        title: description of what the task measures.
        make: function from options to the task.
        takes: names of the options that the task accepts.
    """

    name: str
    title: str
    make: Callable[[TaskOptions], Task]
    takes: frozenset[str]


REGISTRY: Registry[TaskKind] = Registry(TASKS, lambda found: isinstance(found, TaskKind), "edgeq.measure.task.TaskKind")


def make_task(name: str, options: TaskOptions | None = None) -> Task:
    """Return the registered task `name`. If `name` is "path.py:factory", return the task that a user's factory makes
    from the options.

    Raises:
        UsageError: the name is unknown, the task does not accept an option, or the factory cannot be loaded.
    """
    options = options or TaskOptions()
    if names_function(name):
        task: Task = load_function(name, "task", UsageError)(options)
        return _checked(task, f"what {name} returns", "Return an object like edgeq.measure.task.Task")
    kind = REGISTRY.load(name)
    foreign = sorted(set(options.given()) - kind.takes)
    if foreign:
        option = f"⟨{argument_of(foreign[0])}⟩"
        raise UsageError(f"{option} has no meaning for {name}", f"Leave {option} out, or choose another task")
    return kind.make(options)


def as_task(given: Task | str, options: TaskOptions | None = None) -> Task:
    """Return `given` as a task. If `given` is the name of a task, the task is made with `options`.

    Raises:
        UsageError: for the same reasons as `make_task`, or if `given` is not a task.
    """
    if isinstance(given, str):
        return make_task(given, options)
    fix = 'Give a name, such as "classification", or an object like edgeq.measure.task.Task'
    return _checked(given, f"the task, of type {type(given).__name__},", fix)


def _checked(task: Task, what: str, fix: str) -> Task:
    missing = [a for a in ("name", "primary", "higher_is_better", "start") if not hasattr(task, a)]
    if missing:
        raise UsageError(f"{what} has no {missing[0]!r}", fix)
    return task


def integer_labels(sample: Sample) -> NDArray[np.int64]:
    """Return the sample's labels, [rows]. A single label gives one row.

    Raises:
        DataError: the sample has no label, or a label is not an integer.
    """
    if sample.label is None:
        raise DataError(f"{sample.name} has no label", "Give --labels, or compare with a --reference model instead")
    labels = np.asarray(sample.label).reshape(-1)
    if labels.dtype.kind not in "iub":
        raise DataError(f"{sample.name}: label {sample.label!r} is not a class index", "Give integer labels")
    return labels.astype(np.int64)


def pick_output(outputs: Outputs, name: str | None, sample: Sample) -> NDArray[Any]:
    """Return the output called `name`. Without a name, return the only output, or else the only floating-point output.

    Raises:
        UsageError: no output has the name, or no name is given and there is not exactly one floating-point output.
    """
    if name is not None:
        if name not in outputs:
            raise UsageError(f"the model has no output {name!r}", f"It has {', '.join(sorted(outputs))}")
        return outputs[name]
    floats = {made: array for made, array in outputs.items() if array.dtype.kind == "f"}
    if len(outputs) != 1 and len(floats) == 1:
        return next(iter(floats.values()))
    if len(outputs) != 1:
        listed = ", ".join(sorted(outputs)) or "none that is an array"
        raise UsageError(
            f"{sample.name}: the model's outputs are {listed}",
            "Choose one with --task-output NAME",
        )
    return next(iter(outputs.values()))


def only_input(sample: Sample) -> NDArray[Any]:
    """Return the sample's only input.

    Raises:
        UsageError: the model has several inputs.
    """
    if len(sample.inputs) != 1:
        raise UsageError(
            f"{sample.name} has {len(sample.inputs)} inputs, but this task takes one", "Write a task of your own"
        )
    return next(iter(sample.inputs.values()))


_Pairs = tuple[list[NDArray[Any]], ...]


class PairedMeter:
    """Collect the model's result for each row together with the row's label. See `Meter`."""

    def __init__(self) -> None:
        self._found: list[NDArray[Any]] = []
        self._wanted: list[NDArray[Any]] = []

    def add(self, found: NDArray[Any], wanted: NDArray[Any]) -> None:
        """Add the results and the labels of one sample, each [N]."""
        self._found.append(found)
        self._wanted.append(wanted)

    def collected(self) -> _Pairs:
        """Return the results and the labels, one array for each sample."""
        return self._found, self._wanted

    def take(self, collected: _Pairs) -> None:
        """Add the samples of another meter."""
        self._found += collected[0]
        self._wanted += collected[1]

    def rows(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the results and the labels of all samples, each [N]."""
        return np.concatenate(self._found), np.concatenate(self._wanted)

    def halves(self, halves: NDArray[np.bool_]) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """Yield the `rows` of each half. `halves` is [H, samples]."""
        found, wanted = self.rows()
        for chosen in np.repeat(halves, [len(one) for one in self._wanted], axis=1):
            yield found[chosen], wanted[chosen]


HALVES = 100
METERED = 32
"""Number of halves if the task's meter cannot compute the halves itself. Each half then has its own meter."""
_FEWEST_HALVES = 8


@dataclass(frozen=True)
class RowMetrics:
    """Hold one model's metrics over some rows, and the spread of the primary metric.

    Attributes:
        scores: score of each row. Their mean is the primary metric. None if the task has no such scores.
        halves: primary metric over each half; NaN for a half for which it is undefined (such as the AUC of a single
            class). Empty if there are `scores`.
    """

    metrics: Mapping[str, float]
    scores: NDArray[np.float64] | None = None
    halves: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))


class ResampledMeter:
    """Measure one model over the rows so far, and estimate the uncertainty of the figures. The argument is the task.

    The estimate uses `scores()` or `resampled(halves)` of the task's meter (see `Meter`). If the meter has neither, a
    separate meter is used for each half, which costs `METERED` / 2 updates for each row.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._whole = task.start()
        alone = hasattr(self._whole, "scores") or hasattr(self._whole, "resampled")
        self._halves: list[Meter] = [] if alone else [task.start() for _ in range(METERED)]
        self._random = np.random.default_rng(0)
        self._members = np.zeros(METERED, np.int64)
        self.rows = 0

    def update(self, outputs: Outputs, sample: Sample) -> None:
        """Add one row: a model's outputs, and the sample with its label."""
        self._whole.update(outputs, sample)
        self.rows += 1
        if self._halves:
            for half in np.flatnonzero(self._random.random(METERED) < 0.5):
                self._halves[half].update(outputs, sample)
                self._members[half] += 1

    def notes(self) -> tuple[str, ...]:
        """Return reasons to doubt the figures of the rows so far."""
        return doubts(self._whole)

    def measured(self) -> RowMetrics:
        """Return the metrics so far."""
        if not self._halves:
            known = measured(self._whole, self.rows)
            assert known is not None, "the meter has one of the two methods"
            return known
        values = [self._value(m) if n else math.nan for m, n in zip(self._halves, self._members, strict=True)]
        return RowMetrics(dict(self._whole.result()), None, np.asarray(values, np.float64))

    def _value(self, half: Meter) -> float:
        try:
            return half.result()[self._task.primary]
        except DataError:
            return math.nan


def measured(meter: Any, rows: int) -> RowMetrics | None:
    """Return the metrics of a meter over `rows` rows. Return None if the meter has neither `scores` nor `resampled`, so
    that the spread of the metrics is not known.
    """
    if hasattr(meter, "scores"):
        return RowMetrics(dict(meter.result()), np.asarray(meter.scores(), np.float64))
    if hasattr(meter, "resampled"):
        return RowMetrics(dict(meter.result()), None, np.asarray(meter.resampled(random_halves(rows)), np.float64))
    return None


def random_halves(rows: int) -> NDArray[np.bool_]:
    """Draw the rows of each half, bool[HALVES, rows].

    The halves are the same for every model. If there are more rows, the halves of the first rows do not change.
    """
    return (np.random.default_rng(0).random((rows, HALVES)) < 0.5).T


def loss_error(reference: RowMetrics, candidate: RowMetrics, *, further: float) -> float | None:
    """Return the standard error of the difference between two models' primary metrics on the same rows. Return None if
    it is unknown.

    Args:
        further: standard error to add for differences that only other rows would show. Without it, the error would be 0
            if the models agree on all measured rows.
    """
    if reference.scores is not None and candidate.scores is not None:
        differences = reference.scores - candidate.scores
        if len(differences) < 2:
            return None
        return math.hypot(float(differences.std(ddof=1)) / math.sqrt(len(differences)), further)
    differences = reference.halves - candidate.halves
    known = differences[np.isfinite(differences)]
    return math.hypot(float(known.std(ddof=1)), further) if len(known) >= _FEWEST_HALVES else None


_SURE = 1.96  # two-sided 95 % of the normal distribution


def loss_interval(task: Task, reference: Meter, candidate: Meter, rows: int) -> tuple[float, float] | None:
    """Return the 95 % interval of the loss of a model against a reference over many other samples, from the meters of
    both over the same `rows` rows. Return None if it is not known.

    A model that agrees with the reference on all rows may still lose one row on as many others.
    """
    before, after = measured(reference, rows), measured(candidate, rows)
    error = loss_error(before, after, further=1 / rows) if before is not None and after is not None else None
    if before is None or after is None or error is None:
        return None
    drop = before.metrics[task.primary] - after.metrics[task.primary]
    drop = drop if task.higher_is_better else -drop
    return drop - _SURE * error, drop + _SURE * error
