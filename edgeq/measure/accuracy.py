"""Measure accuracy against labels, and against another model, for one or several sessions in one pass over the samples.

The figures come from sums that are updated sample by sample. So the samples can be shared among workers
(`edgeq.measure.shared_evaluation`), and edgeq can time the runs (`edgeq.measure.timed_evaluation`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from edgeq_device.measure.basis import EVERYTHING, Basis

from edgeq.data.array_store import ArrayStore
from edgeq.data.open_source import Data
from edgeq.data.samples import Sample, Samples, open_samples
from edgeq.errors import CheckFailedError, UsageError
from edgeq.measure.agreement import Agreement
from edgeq.measure.baseline import BaselineMargin, BaselineSums
from edgeq.measure.comparison import OutputSums
from edgeq.measure.inference import Outputs, Session, run_samples
from edgeq.measure.loaded_model import open_model
from edgeq.measure.operating_point import OperatingPoint, find_operating_point
from edgeq.measure.resample import loss_interval, measure_rows
from edgeq.measure.rows import split_rows
from edgeq.measure.skill import find_doubts
from edgeq.measure.task import Task, as_task
from edgeq.model.load import unchecked_signature
from edgeq.run.session import SessionSettings, open_session
from edgeq.util.display import SILENT, Displayed, Progress
from edgeq.util.paths import path_of
from edgeq.util.records import Count, Finite


@dataclass(frozen=True)
class Accuracy(Displayed):
    """Hold the accuracy of one model, as a task measured it.

    Attributes:
        metrics: metric name → value, in the order of the task.
        samples: number of samples; each row of a gathered batch counts as one.
        task: name of the task.
        primary: name of the primary metric.
        higher_is_better: True if a higher value of the primary metric is better.
        settings: settings of the session. The same model can give other outputs under other settings.
        doubts: reasons to doubt the figures, found in labels and outputs. Each is a sentence.
    """

    metrics: Mapping[str, Finite]
    samples: Count
    task: str
    primary: str
    higher_is_better: bool
    settings: SessionSettings = field(default_factory=SessionSettings)
    doubts: tuple[str, ...] = ()

    def __brief__(self) -> dict[str, Any]:
        return {"metrics": self.metrics, "task": self.task, "samples": self.samples, "doubts": self.doubts}

    @property
    def value(self) -> float:
        """Return the value of the primary metric."""
        return self.metrics[self.primary]

    def loss_against(self, reference: Accuracy) -> float:
        """Return how much worse this model is than `reference` in the primary metric. A negative value means better."""
        if (self.task, self.primary) != (reference.task, reference.primary):
            raise UsageError(
                f"{self.task} {self.primary} cannot be compared with {reference.task} {reference.primary}",
                "Evaluate both with the same task",
            )
        # A loss is positive if the model is worse, whichever way the metric points.
        difference = reference.value - self.value
        return difference if self.higher_is_better else -difference


@dataclass(frozen=True)
class Evaluation:
    """Hold the accuracy of each session if a task was given, and its agreement with the reference if a reference was
    given.

    These attributes map session names to values. `loss_interval` has the 95 % interval of each session's loss against
    the reference over many other samples, in the unit of the primary metric. It is empty without a task or a reference,
    and lacks sessions whose interval is not known. `baseline` has the sessions with an output that resembles an input.
    `operating` has what the sessions find at the task's threshold, if the task counts objects.
    """

    accuracy: Mapping[str, Accuracy]
    agreement: Mapping[str, Agreement]
    samples: int
    loss_interval: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    baseline: Mapping[str, BaselineMargin] = field(default_factory=dict)
    operating: Mapping[str, OperatingPoint] = field(default_factory=dict)


def evaluate_sessions(
    sessions: Mapping[str, Session],
    samples: Samples,
    *,
    task: Task | None = None,
    reference: str | None = None,
    settings: Mapping[str, SessionSettings] | None = None,
    progress: Progress = SILENT,
    count: int | None = None,
    known_outputs: Mapping[str, ArrayStore] = MappingProxyType({}),
    basis: Basis = EVERYTHING,
) -> Evaluation:
    """Evaluate `sessions` in one pass over `samples`, and return all figures.

    Args:
        sessions: name → session.
        samples: samples, with labels if `task` needs them.
        task: task that measures accuracy against labels; None measures only agreement.
        reference: name of the session that the others are compared with; None compares nothing.
        settings: settings of each session, for the record.
        count: maximum number of samples.
        known_outputs: session name → its outputs by the sample's place. What is missing is computed and added.
        basis: what the figures of the reference's outputs are taken over.

    Raises:
        DataError: there are no samples, a sample lacks the label that the task needs, or a session refuses a sample.
        CheckFailedError: a metric is not finite.
    """
    running = RunningEvaluation(tuple(sessions), task, reference, basis)
    for sample, outputs in run_samples(sessions, samples, count=count, known_outputs=known_outputs, progress=progress):
        running.update(sample, outputs)
    return running.result(settings or {})


@dataclass(frozen=True)
class Collected:
    """Hold the sums of a `RunningEvaluation` in a form that can be sent to another process. See
    `edgeq.measure.task.Meter`.
    """

    meters: Mapping[str, Any]
    comparisons: Mapping[str, OutputSums]
    count: int
    baselines: Mapping[str, BaselineSums]


class RunningEvaluation:
    """Measure several models over the samples so far, and compare each with the reference.

    Args:
        names: names of the models.
        task, reference, basis: see `evaluate_sessions`.
    """

    def __init__(
        self, names: Sequence[str], task: Task | None, reference: str | None, basis: Basis = EVERYTHING
    ) -> None:
        if reference is not None and reference not in names:
            raise UsageError(f"no session is called {reference!r}", f"The sessions are {', '.join(names)}")
        self._task, self._reference = task, reference
        self._meters = {name: task.start() for name in names} if task is not None else {}
        # The reference compared with itself would only report a perfect agreement.
        compared = [name for name in names if name != reference] if reference is not None else []
        self._comparisons = {name: OutputSums(task, basis) for name in compared}
        self._baselines = {name: BaselineSums() for name in compared}
        self._row_count = 0

    def update(self, sample: Sample, outputs: dict[str, Outputs]) -> None:
        """Add a sample and each model's outputs for it."""
        # The rows of a gathered batch have labels of their own, and the last rows may be padding.
        for row, row_outputs in split_rows(sample, outputs):
            self._row_count += 1
            for name, meter in self._meters.items():
                meter.update(row_outputs[name], row)
            for name, comparison in self._comparisons.items():
                assert self._reference is not None
                comparison.update(row_outputs[self._reference], row_outputs[name], row.inputs)
                self._baselines[name].update(row_outputs[self._reference], row_outputs[name], row.inputs)

    def collected(self) -> Collected:
        """Return the sums so far, without the task.

        Raises:
            UsageError: the task's meters have no method `collected`.
        """
        meters = {}
        for name, meter in self._meters.items():
            if not hasattr(meter, "collected") or not hasattr(meter, "take"):
                assert self._task is not None
                raise UsageError(
                    f"the meters of {self._task.name} cannot be shared among workers",
                    "Give them `collected` and `take` (docs/eval.md), or leave ⟨workers⟩ out",
                )
            meters[name] = meter.collected()
        # The sums travel without the task: a user's task may not be picklable, and the receiver has the same task and
        # basis.
        bare = {
            name: replace(comparison, task=None, basis=EVERYTHING) for name, comparison in self._comparisons.items()
        }
        return Collected(meters, bare, self._row_count, self._baselines)

    def take(self, part: Collected) -> None:
        """Add the sums that were collected from later samples."""
        for name, meter in self._meters.items():
            meter.take(part.meters[name])  # type: ignore[attr-defined]  # `collected` has made sure
        for name, comparison in self._comparisons.items():
            comparison.merge(part.comparisons[name])
            self._baselines[name].merge(part.baselines[name])
        self._row_count += part.count

    def result(self, settings: Mapping[str, SessionSettings]) -> Evaluation:
        """Return the figures.

        Args:
            settings: settings of each session, for the record.

        Raises:
            CheckFailedError: a metric is not finite.
        """
        accuracy: dict[str, Accuracy] = {}
        for name, meter in self._meters.items():
            assert self._task is not None
            metrics = MappingProxyType(dict(meter.result()))
            # A comparison with NaN is always false, so a NaN would pass every limit on the loss.
            bad = [metric for metric, value in metrics.items() if not math.isfinite(value)]
            if bad:
                fix = "Look for NaN in the model's outputs"
                raise CheckFailedError(f"{name}: {self._task.name} {bad[0]} is not finite", fix)
            accuracy[name] = Accuracy(
                metrics,
                self._row_count,
                self._task.name,
                self._task.primary,
                self._task.higher_is_better,
                settings.get(name) or SessionSettings(),
                find_doubts(meter),
            )
        agreement = {name: comparison.result() for name, comparison in self._comparisons.items()}
        intervals: dict[str, tuple[float, float]] = {}
        # Both meters have seen the same rows, so the losses of single rows are paired.
        if self._task is not None and self._reference is not None:
            measured = {n: measure_rows(m, self._row_count, accuracy[n].metrics) for n, m in self._meters.items()}
            reference = measured[self._reference]
            for name in agreement:
                candidate = measured[name]
                if reference is None or candidate is None:
                    continue
                interval = loss_interval(self._task, reference, candidate, self._row_count)
                if interval is not None:
                    intervals[name] = interval
        # Most outputs do not resemble an input and have no margin.
        margins = {name: margin for name, sums in self._baselines.items() if (margin := sums.result()) is not None}
        return Evaluation(
            MappingProxyType(accuracy),
            MappingProxyType(agreement),
            self._row_count,
            MappingProxyType(intervals),
            MappingProxyType(margins),
            MappingProxyType(self._operating_points()),
        )

    def _operating_points(self) -> dict[str, OperatingPoint]:
        """Return what each model finds at the task's threshold, if the task's meters tell scores."""
        threshold = getattr(self._task, "threshold", None)
        if threshold is None or self._reference is None:
            return {}
        scored = {name: meter.scored() for name, meter in self._meters.items() if hasattr(meter, "scored")}
        reference = scored.pop(self._reference, None)
        labelled = getattr(self._task, "labelled", True)
        return {
            name: find_operating_point(reference, candidate, threshold, labelled=labelled)
            for name, candidate in scored.items()
            if reference is not None and candidate is not None
        }


def compare_sessions(
    reference: Session,
    candidate: Session,
    samples: Samples,
    progress: Progress = SILENT,
    *,
    count: int | None = None,
    basis: Basis = EVERYTHING,
) -> Agreement:
    """Return the agreement of the candidate with the reference, over at most `count` samples.

    For the errors, see `evaluate_sessions`.
    """
    sessions = {"reference": reference, "candidate": candidate}
    evaluation = evaluate_sessions(
        sessions, samples, reference="reference", progress=progress, count=count, basis=basis
    )
    return evaluation.agreement["candidate"]


def evaluate_many(
    sessions: Mapping[str, Session],
    samples: Samples,
    task: Task,
    *,
    settings: Mapping[str, SessionSettings] | None = None,
    progress: Progress = SILENT,
    count: int | None = None,
) -> dict[str, Accuracy]:
    """Return the accuracy of several open sessions on the same samples. Each sample is decoded only once.

    For the errors, see `evaluate_sessions`.
    """
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
    """Return the accuracy of a model file, a bundle, a serialized model or an open session.

    Args:
        model: the model; a bundle runs with its own options.
        samples: labelled samples: `edgeq.Data`, or anything else that `edgeq.open_samples` accepts or returns. An open
            session does not contain its model's signature, so it needs samples that `edgeq.open_samples` returned.
        task: a task, or the name of a task that needs no options; `edgeq.make_task` makes a task with options.
        settings: settings with which the model is opened. For an open session, they are only recorded.
        count: maximum number of samples.

    Raises:
        UsageError: the task is unknown, `model` is not a model, or `model` is an open session and the samples are not
            opened yet.
        ModelError, BundleError, RuntimeUnavailableError: the model cannot be opened.
        DataError, CheckFailedError: for the same reasons as `evaluate_sessions`.
    """
    if task is None:  # Type hints do not prevent a call with an invalid argument.
        raise UsageError("nothing to measure", 'Give a task, such as "classification"')
    resolved_task = as_task(task)
    with ExitStack() as stack:
        name, session_settings = "the model", settings or SessionSettings()
        signature, preprocess, model_path = None, None, None
        # A serialized model has no folder, so no preprocess.toml can be next to it.
        if isinstance(model, bytes):
            session = open_session(model, session_settings)
            signature = None if isinstance(samples, Samples) else unchecked_signature(model, Path(name))
        # What is neither a path nor a session goes this way too, because `path_of` refuses it with a useful message.
        elif isinstance(model, (str, os.PathLike)) or not hasattr(model, "get_outputs"):
            loaded = stack.enter_context(open_model(path_of(model), session_settings))
            name, session_settings, session = loaded.name, loaded.settings, loaded.session
            signature, preprocess = loaded.signature, loaded.preprocess
            # A bundle contains its own preprocessing.
            model_path = loaded.path if loaded.variant is None else None
        else:
            session = model
        if not isinstance(samples, Samples):
            if signature is None:
                raise UsageError(
                    "samples cannot be opened for an open session: its signature is not known",
                    "Give the model's path instead, or samples that edgeq.open_samples returned",
                )
            samples = open_samples(samples, signature, preprocess=preprocess, model=model_path, progress=progress)
        accuracies = evaluate_many(
            {name: session}, samples, resolved_task, settings={name: session_settings}, progress=progress, count=count
        )
    return accuracies[name]
