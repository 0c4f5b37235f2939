"""Accuracy against labels, and against another model, of one or several sessions in one pass."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from edgeq.errors import CheckFailedError, UsageError
from edgeq.measure.agreement import Agreement
from edgeq.measure.bench import open_model
from edgeq.measure.comparison import Comparison, rows
from edgeq.measure.latency import Outputs, Session, inferences
from edgeq.measure.task import Task, as_task
from edgeq.model.load import path_of
from edgeq.run.session import SessionSettings, open_session
from edgeq.util.display import SILENT, Displayed, Progress
from edgeq.util.records import Count, Finite

if TYPE_CHECKING:
    from edgeq.data.open_source import Data
    from edgeq.data.records import Sample
    from edgeq.data.samples import Samples


@dataclass(frozen=True)
class Accuracy(Displayed):
    """What a task measured of one model.

    Attributes:
        metrics: metric name → value, in the order the task gives.
        count: samples, rows of gathered batches counted singly.
        task: the task's name.
        primary: the metric that decides.
        higher_is_better: of the primary metric.
        settings: how the session was opened; outputs of the same model can differ under others.
    """

    metrics: Mapping[str, Finite]
    count: Count
    task: str
    primary: str
    higher_is_better: bool
    settings: SessionSettings = field(default_factory=SessionSettings)

    @property
    def value(self) -> float:
        """The primary metric's value."""
        return self.metrics[self.primary]

    def loss_against(self, reference: Accuracy) -> float:
        """How much worse this is than `reference` in the primary metric, in its unit; negative where it is better."""
        if (self.task, self.primary) != (reference.task, reference.primary):
            raise UsageError(
                f"{self.task} {self.primary} cannot be compared with {reference.task} {reference.primary}",
                "Evaluate both with the same task",
            )
        difference = reference.value - self.value
        return difference if self.higher_is_better else -difference


@dataclass(frozen=True)
class Evaluation:
    """Accuracy per session name (where a task was given) and agreement with the reference (where one was named)."""

    accuracy: Mapping[str, Accuracy]
    agreement: Mapping[str, Agreement]
    count: int


def evaluate_sessions(
    sessions: Mapping[str, Session],
    samples: Samples,
    *,
    task: Task | None = None,
    reference: str | None = None,
    settings: Mapping[str, SessionSettings] | None = None,
    progress: Progress = SILENT,
    count: int | None = None,
    known: Mapping[str, Sequence[Outputs]] = MappingProxyType({}),
) -> Evaluation:
    """All figures of `sessions` from one pass over `samples`.

    Args:
        sessions: name → session.
        samples: labelled where `task` needs labels.
        task: what to measure against labels; None measures agreement only.
        reference: the session that the others are compared with; None compares nothing.
        settings: how each session was opened, for the record.
        count: take at most so many samples.
        known: what some of the sessions make of each sample, by name: these are not run.

    Raises:
        DataError: no samples, a sample without the label that the task needs, or one that a session refuses.
        CheckFailedError: a metric is not finite.
    """
    running = RunningEvaluation(tuple(sessions), task, reference)
    for sample, outputs in inferences(sessions, samples, count=count, known=known, progress=progress):
        running.update(sample, outputs)
    return running.result(settings or {}, progress)


@dataclass(frozen=True)
class Collected:
    """What a `RunningEvaluation` holds, to be sent to another process: see `edgeq.measure.task.Meter.collected`."""

    meters: Mapping[str, Any]
    comparisons: Mapping[str, Comparison]
    count: int


class RunningEvaluation:
    """What several models show over the samples: of each a meter, and a comparison with the reference.

    Args:
        names: of the models.
        task, reference: as `evaluate_sessions` has them.
    """

    def __init__(self, names: Sequence[str], task: Task | None, reference: str | None) -> None:
        if reference is not None and reference not in names:
            raise UsageError(f"no session is called {reference!r}", f"There are {', '.join(names)}")
        self._task, self._reference = task, reference
        self._meters = {name: task.start() for name in names} if task is not None else {}
        compared = [name for name in names if name != reference] if reference is not None else []
        self._comparisons = {name: Comparison(task) for name in compared}
        self._seen = 0

    def update(self, sample: Sample, outputs: dict[str, Outputs]) -> None:
        """Add a sample, with what each model made of it."""
        for row, made in rows(sample, outputs):
            self._seen += 1
            for name, meter in self._meters.items():
                meter.update(made[name], row)
            for name, comparison in self._comparisons.items():
                assert self._reference is not None
                comparison.update(made[self._reference], made[name], row.inputs)

    def collected(self) -> Collected:
        """All so far, but for the task.

        Raises:
            UsageError: the task's meters have no `collected`.
        """
        meters = {}
        for name, meter in self._meters.items():
            if not hasattr(meter, "collected") or not hasattr(meter, "take"):
                assert self._task is not None
                raise UsageError(
                    f"the meters of {self._task.name} cannot be shared among workers",
                    "Give them `collected` and `take` (docs/eval.md), or leave --workers out",
                )
            meters[name] = meter.collected()
        without = {name: replace(comparison, task=None) for name, comparison in self._comparisons.items()}
        return Collected(meters, without, self._seen)

    def take(self, part: Collected) -> None:
        """Add what was collected of later samples."""
        for name, meter in self._meters.items():
            meter.take(part.meters[name])  # type: ignore[attr-defined]  # `collected` has made sure
        for name, comparison in self._comparisons.items():
            comparison.merge(part.comparisons[name])
        self._seen += part.count

    def result(self, settings: Mapping[str, SessionSettings], progress: Progress = SILENT) -> Evaluation:
        """The figures. `settings`: how each session was opened, for the record; what meters note goes to `progress`.

        Raises:
            CheckFailedError: a metric is not finite.
        """
        accuracy: dict[str, Accuracy] = {}
        for name, meter in self._meters.items():
            assert self._task is not None
            how = settings.get(name) or SessionSettings()
            accuracy[name] = _accuracy(name, meter.result(), self._seen, self._task, how)
            for note in meter.notes() if hasattr(meter, "notes") else ():
                progress.note(f"{name}: {note}")
        agreement = {name: comparison.result() for name, comparison in self._comparisons.items()}
        return Evaluation(MappingProxyType(accuracy), MappingProxyType(agreement), self._seen)


def evaluate_many(
    sessions: Mapping[str, Session],
    samples: Samples,
    task: Task,
    *,
    settings: Mapping[str, SessionSettings] | None = None,
    progress: Progress = SILENT,
    count: int | None = None,
) -> dict[str, Accuracy]:
    """Accuracy of several open sessions on the same samples, each decoded once. Errors as `evaluate_sessions`."""
    return dict(
        evaluate_sessions(sessions, samples, task=task, settings=settings, progress=progress, count=count).accuracy,
    )


def evaluate(
    model: Path | str | bytes | Session,
    samples: Samples | Data | str | Path | Iterable[Any],
    task: Task | str,
    *,
    settings: SessionSettings | None = None,
    progress: Progress = SILENT,
    count: int | None = None,
) -> Accuracy:
    """Accuracy of a model file, a bundle, a serialized model or an open session.

    Args:
        model: a bundle runs with the options that it carries; for an open session `settings` only records how it was
            opened.
        samples: labelled; `edgeq.Data`, or whatever else `edgeq.open_samples` takes or gives. For an open session,
            which does not carry its model's signature, only what it gives.
        task: a task, or the name of one that needs no options; `edgeq.make_task` makes one with options.
        count: take at most so many samples.

    Raises:
        UsageError: an unknown task, something that is no model, or samples that an open session cannot open.
        ModelError, BundleError, RuntimeUnavailableError: the model cannot be opened.
        DataError, CheckFailedError: as `evaluate_sessions`.
    """
    from edgeq.data.samples import Samples, open_samples
    from edgeq.model.load import own_signature

    chosen = as_task(task)
    if chosen is None:
        raise UsageError("nothing to measure", 'Give a task, such as "classification"')
    with ExitStack() as stack:
        name, how = "the model", settings or SessionSettings()
        signature, preprocess, beside = None, None, None
        if isinstance(model, bytes):
            session = open_session(model, how)
            signature = None if isinstance(samples, Samples) else own_signature(model, Path(name))
        elif isinstance(model, (str, os.PathLike)) or not hasattr(model, "get_outputs"):
            loaded = stack.enter_context(open_model(path_of(model), how))
            name, how, session = loaded.name, loaded.settings, loaded.session
            signature, preprocess = loaded.signature, loaded.preprocess
            beside = loaded.path if loaded.variant is None else None
        else:
            session = model
        if not isinstance(samples, Samples):
            if signature is None:
                raise UsageError(
                    "an open session does not say what samples it takes",
                    "Give the model's path instead, or samples that edgeq.open_samples gave",
                )
            samples = open_samples(samples, signature, preprocess=preprocess, model=beside, progress=progress)
        found = evaluate_many({name: session}, samples, chosen, settings={name: how}, progress=progress, count=count)
    return found[name]


def _accuracy(name: str, metrics: Mapping[str, float], count: int, task: Task, settings: SessionSettings) -> Accuracy:
    bad = [metric for metric, value in metrics.items() if not math.isfinite(value)]
    if bad:
        raise CheckFailedError(f"{name}: {task.name} {bad[0]} is not finite", "Look for NaN in the model's outputs")
    return Accuracy(
        metrics=MappingProxyType(dict(metrics)),
        count=count,
        task=task.name,
        primary=task.primary,
        higher_is_better=task.higher_is_better,
        settings=settings,
    )
