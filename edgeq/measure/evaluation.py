"""`edgeq eval` as a function: a model or bundle, data, a task, perhaps a reference, to figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgeq.data.samples import open_samples
from edgeq.errors import UsageError
from edgeq.measure.accuracy import Accuracy, examine, settings_to_dict
from edgeq.measure.agreement import Agreement
from edgeq.measure.subject import Subject, open_subject
from edgeq.measure.task import TaskOptions, make_task
from edgeq.progress import SILENT, Progress
from edgeq.session import SessionSettings


@dataclass(frozen=True)
class Question:
    """What to evaluate.

    Attributes:
        model: model file or bundle.
        data: as `edgeq.data.samples.open_samples` takes it.
        task: name of a task, or "path.py:factory"; None with a reference measures agreement only.
        options: of the task.
        reference: a second model or bundle, run on the same samples.
        variant: of a bundle; None takes the one that fits this machine.
        preprocess: None takes what the bundle says, or nothing.
        labels, count, start, stride: as `open_samples` takes them.
        settings: for model files; a bundle brings its own.
    """

    model: Path
    data: Any
    task: str | None = None
    options: TaskOptions = field(default_factory=TaskOptions)
    reference: Path | None = None
    variant: str | None = None
    preprocess: Any = None
    labels: Any = None
    count: int | None = None
    start: int = 0
    stride: int = 1
    settings: SessionSettings = field(default_factory=SessionSettings)


def question_of_options(given: Mapping[str, Any]) -> Question:
    """A question from flat options: the fields of `Question` and `TaskOptions`, `threads` and `optimization`."""
    rest = dict(given)
    settings = SessionSettings(intra_op_threads=rest.pop("threads"), optimization=rest.pop("optimization"))
    options = TaskOptions(**{f.name: rest.pop(f.name) for f in dataclasses.fields(TaskOptions)})
    return Question(**rest, options=options, settings=settings)


@dataclass(frozen=True)
class Answer:
    """What was found. `accuracy` and the reference's are None without a task, `agreement` without a reference."""

    question: Question
    variant: str | None
    settings: SessionSettings
    count: int
    accuracy: Accuracy | None
    reference_accuracy: Accuracy | None
    reference_variant: str | None
    agreement: Agreement | None

    @property
    def loss(self) -> float | None:
        """How much worse than the reference, in the primary metric's unit."""
        if self.accuracy is None or self.reference_accuracy is None:
            return None
        return self.accuracy.loss_against(self.reference_accuracy)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; every key is always there."""
        accuracy, reference = self.accuracy, self.reference_accuracy
        return {
            "model": str(self.question.model),
            "variant": self.variant,
            "data": str(self.question.data),
            "count": self.count,
            "task": accuracy.task if accuracy else None,
            "primary": accuracy.primary if accuracy else None,
            "higher_is_better": accuracy.higher_is_better if accuracy else None,
            "metrics": dict(accuracy.metrics) if accuracy else {},
            "options": {name: _plain(value) for name, value in self.question.options.given().items()},
            "settings": settings_to_dict(self.settings),
            "reference": {
                "model": str(self.question.reference),
                "variant": self.reference_variant,
                "metrics": dict(reference.metrics) if reference else {},
                "loss": self.loss,
                "agreement": self.agreement.to_dict(),
            }
            if self.agreement
            else None,
        }


def answer(question: Question, *, progress: Progress = SILENT) -> Answer:
    """Open everything, run every sample once, and measure.

    Raises:
        UsageError: neither a task nor a reference, or an option that makes no sense.
        EdgeqError: whatever is wrong with the model, the bundle or the data.
    """
    if question.task is None and question.reference is None:
        raise UsageError("nothing to measure", "Give a --task for labelled data, or a --reference to compare with")
    task = make_task(question.task, question.options) if question.task is not None else None
    if task is None and question.options.given():
        raise UsageError("task options without a task", "Give a --task")
    with ExitStack() as stack:
        subject = stack.enter_context(open_subject(question.model, question.settings, variant=question.variant))
        subjects = {"model": subject}
        if question.reference is not None:
            subjects["reference"] = stack.enter_context(open_subject(question.reference, question.settings))
            _check_same_inputs(subject, subjects["reference"])
        preprocess = question.preprocess if question.preprocess is not None else subject.preprocess
        samples = open_samples(
            question.data,
            subject.signature,
            preprocess=preprocess,
            labels=question.labels,
            count=question.count,
            start=question.start,
            stride=question.stride,
            model=question.model if subject.variant is None else None,
            progress=progress,
        )
        found = examine(
            {key: s.session for key, s in subjects.items()},
            samples,
            task=task,
            reference="reference" if question.reference is not None else None,
            settings={key: s.settings for key, s in subjects.items()},
            progress=progress,
        )
    reference = subjects.get("reference")
    return Answer(
        question=question,
        variant=subject.variant,
        settings=subject.settings,
        count=found.count,
        accuracy=found.accuracy.get("model"),
        reference_accuracy=found.accuracy.get("reference"),
        reference_variant=reference.variant if reference else None,
        agreement=found.agreement.get("model"),
    )


def _check_same_inputs(subject: Subject, reference: Subject) -> None:
    names: Mapping[str, list[str]] = {s.name: sorted(i.name for i in s.signature.inputs) for s in (subject, reference)}
    if len({tuple(inputs) for inputs in names.values()}) > 1:
        listed = "; ".join(f"{name} takes {', '.join(inputs)}" for name, inputs in names.items())
        raise UsageError(f"the models' inputs differ: {listed}", "Compare models with the same inputs")


def _plain(value: object) -> Any:
    return str(value) if isinstance(value, Path) else value
