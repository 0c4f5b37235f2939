"""Define the interface of a task that measures a model against labels, and make tasks by name."""

from __future__ import annotations

import dataclasses
import numbers
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from edgeq.data.sample import Sample
from edgeq.errors import UsageError
from edgeq.measure.inference import Outputs
from edgeq.util.display import Displayed
from edgeq.util.registry import TASKS, Registry
from edgeq.util.user_code import load_function, names_function


class Meter(Protocol):
    """Collect one model's outputs over the samples.

    To estimate the uncertainty of a loss, edgeq computes the primary metric over random halves of the samples, with a
    meter for each half (`ResampledMeter`). A meter may have one of two further methods, which make the result exact or
    cheap:

        scores() -> NDArray        a score for each row so far, if the primary metric is the mean of the scores
        resampled(halves) -> NDArray   the primary metric over each of the halves [H, N] (bool) of the N updates so far;
                                       NaN for a half for which the metric is undefined

    Workers can share the samples (`workers`) if the meter has two more methods:

        collected() -> Any      the meter's state for the samples so far, without the task, as values that can be
            pickled
        take(collected) -> None   add the state that another meter collected from later samples

    A meter of a detector may have a method `scored()`, which returns the scores of the objects so far
    (`edgeq.measure.operating_point.ScoredObjects`). With the task's attribute `threshold`, they give what is found at
    the threshold.

    A meter may have two methods that judge its figures (`find_doubts`):

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
            kind, description = _KINDS[name]
            # Python counts True as a number.
            if not isinstance(value, kind) or isinstance(value, bool):
                raise UsageError(f"the task option {name} is {value!r}", f"Give {description}")
        # The class is frozen, but callers may give the path as text.
        if self.annotations is not None:
            object.__setattr__(self, "annotations", Path(self.annotations))

    def given(self) -> dict[str, object]:
        """Return the options that were set."""
        return {f.name: v for f in dataclasses.fields(self) if (v := getattr(self, f.name)) is not None}


def split_task_options(options: Mapping[str, Any]) -> tuple[TaskOptions, dict[str, Any]]:
    """Split a command's flat options into the options of a task and all others. Among the flat options, `output` is
    called `task_output`.
    """
    remaining = dict(options)
    names = {f.name: argument_of(f.name) for f in dataclasses.fields(TaskOptions)}
    return TaskOptions(**{name: remaining.pop(option) for name, option in names.items()}), remaining


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


REGISTRY: Registry[TaskKind] = Registry(TASKS, lambda entry: isinstance(entry, TaskKind), "edgeq.measure.task.TaskKind")


def make_task(name: str, options: TaskOptions | None = None) -> Task:
    """Return the registered task `name`. If `name` is "path.py:factory", return the task that a user's factory makes
    from the options.

    Raises:
        UsageError: the name is unknown, the task does not accept an option, or the factory cannot be loaded.
    """
    options = options or TaskOptions()
    if names_function(name):
        task: Task = load_function(name, "task", UsageError)(options)
        return _check_task(task, f"what {name} returns", "Return an object like edgeq.measure.task.Task")
    kind = REGISTRY.load(name)
    # A task would silently ignore an option of another task.
    foreign = sorted(set(options.given()) - kind.takes)
    if foreign:
        option = f"⟨{argument_of(foreign[0])}⟩"
        raise UsageError(f"{option} has no meaning for {name}", f"Leave {option} out, or choose another task")
    return kind.make(options)


def as_task(task: Task | str, options: TaskOptions | None = None) -> Task:
    """Return `task` as a task. If `task` is the name of a task, the task is made with `options`.

    Raises:
        UsageError: for the same reasons as `make_task`, or if `task` is not a task.
    """
    if isinstance(task, str):
        return make_task(task, options)
    fix = 'Give a name, such as "classification", or an object like edgeq.measure.task.Task'
    return _check_task(task, f"the task, of type {type(task).__name__},", fix)


def _check_task(task: Task, subject: str, fix: str) -> Task:
    missing = [a for a in ("name", "primary", "higher_is_better", "start") if not hasattr(task, a)]
    if missing:
        raise UsageError(f"{subject} has no {missing[0]!r}", fix)
    return task
