"""Accuracy against labels, and against another model, of one or several sessions in one pass."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from edgeq.display import Displayed
from edgeq.errors import CheckFailedError, UsageError
from edgeq.measure.agreement import Agreement, Comparison
from edgeq.measure.inference import Session, inferences
from edgeq.measure.loaded_model import open_model
from edgeq.measure.rows import rows
from edgeq.measure.task import Task, make_task
from edgeq.progress import SILENT, Progress
from edgeq.records import Count, Finite
from edgeq.session import SessionSettings, open_session

if TYPE_CHECKING:
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
) -> Evaluation:
    """All figures of `sessions` from one pass over `samples`.

    Args:
        sessions: name → session.
        samples: labelled where `task` needs labels.
        task: what to measure against labels; None measures agreement only.
        reference: the session that the others are compared with; None compares nothing.
        settings: how each session was opened, for the record.
        count: take at most so many samples.

    Raises:
        DataError: no samples, a sample without the label that the task needs, or one that a session refuses.
        CheckFailedError: a metric is not finite.
    """
    if reference is not None and reference not in sessions:
        raise UsageError(f"no session is called {reference!r}", f"There are {', '.join(sessions)}")
    meters = {name: task.start() for name in sessions} if task is not None else {}
    comparisons = {name: Comparison(task) for name in sessions if name != reference} if reference is not None else {}
    seen = 0
    runs = inferences(sessions, samples, count=count, progress=progress)
    for sample, outputs in itertools.chain.from_iterable(rows(*run) for run in runs):
        seen += 1
        for name, meter in meters.items():
            meter.update(outputs[name], sample)
        for name, comparison in comparisons.items():
            assert reference is not None
            comparison.update(outputs[reference], outputs[name], sample.inputs)
    accuracy: dict[str, Accuracy] = {}
    for name, meter in meters.items():
        assert task is not None
        accuracy[name] = _accuracy(name, meter.result(), seen, task, (settings or {}).get(name) or SessionSettings())
    agreement = {name: comparison.result() for name, comparison in comparisons.items()}
    return Evaluation(MappingProxyType(accuracy), MappingProxyType(agreement), seen)


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
    samples: Samples,
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
        samples: what `edgeq.open_samples` gives, labelled.
        task: a task, or the name of one that needs no options.

    Raises:
        UsageError: an unknown task.
        ModelError, BundleError, RuntimeUnavailableError: the model cannot be opened.
        DataError, CheckFailedError: as `evaluate_sessions`.
    """
    chosen = make_task(task) if isinstance(task, str) else task
    with ExitStack() as stack:
        name, how = "the model", settings or SessionSettings()
        if isinstance(model, (str, Path)):
            loaded = stack.enter_context(open_model(Path(model), how))
            name, how, session = loaded.name, loaded.settings, loaded.session
        elif isinstance(model, bytes):
            session = open_session(model, how)
        else:
            session = model
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
