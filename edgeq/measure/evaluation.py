"""`edgeq eval` as a function: a model or bundle, data, a task, perhaps a reference, to figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgeq_device.engines import FLOAT

from edgeq.data.samples import open_samples
from edgeq.distributed.workers import Workers, open_workers
from edgeq.engines import choose_engine, described
from edgeq.errors import UsageError
from edgeq.measure.accuracy import Accuracy, evaluate_sessions
from edgeq.measure.agreement import Agreement
from edgeq.measure.coverage import Coverage, measure_coverage
from edgeq.measure.loaded_model import LoadedModel, Opener, open_model, refuse_ignored
from edgeq.measure.on_workers import ModelAt, evaluate_on
from edgeq.measure.task import TaskOptions, make_task, split_task_options
from edgeq.progress import SILENT, Progress
from edgeq.session import SessionSettings, given_options
from edgeq.user_code import names_function


@dataclass(frozen=True)
class EvalRequest:
    """What to evaluate.

    Attributes:
        model: model file or bundle.
        data: as `edgeq.data.samples.open_samples` takes it.
        task: name of a task, or "path.py:factory"; None with a reference measures agreement only.
        options: of the task.
        reference: a second model or bundle, run on the same samples.
        variant: of a bundle; None takes the one that fits this machine.
        preprocess: None takes the bundle's, or none.
        labels, count, start, stride: as `open_samples` takes them.
        settings: for model files; a bundle brings its own. A reference runs in onnxruntime's own kernels.
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


def request_from_options(given: Mapping[str, Any]) -> EvalRequest:
    """A request from flat options: the fields of `EvalRequest`, those of tasks (`split_task_options`), `threads`,
    `optimization`, `session_options` (each "key=value"), and `engine` as `choose_engine` takes it."""
    options, remaining = split_task_options(given)
    settings = SessionSettings(
        config=given_options(remaining.pop("session_options")),
        intra_op_threads=remaining.pop("threads"),
        optimization=remaining.pop("optimization"),
    )
    if engine := remaining.pop("engine", None):
        choice = choose_engine(engine)
        settings = dataclasses.replace(settings, engine=choice.engine, precision=choice.precision)
    return EvalRequest(**remaining, options=options, settings=settings)


@dataclass(frozen=True)
class EvalResult:
    """What was found. `accuracy` and the reference's are None without a task, `agreement` without a reference;
    `coverage` is of a plug-in engine's own execution graph, else None."""

    request: EvalRequest
    variant: str | None
    settings: SessionSettings
    count: int
    accuracy: Accuracy | None
    reference_accuracy: Accuracy | None
    reference_variant: str | None
    agreement: Agreement | None
    coverage: Coverage | None = None

    @property
    def loss(self) -> float | None:
        """How much worse than the reference, in the primary metric's unit."""
        if self.accuracy is None or self.reference_accuracy is None:
            return None
        return self.accuracy.loss_against(self.reference_accuracy)

    def __record__(self) -> dict[str, Any]:
        """Plain JSON values; every key is always there."""
        accuracy, reference = self.accuracy, self.reference_accuracy
        return {
            "model": str(self.request.model),
            "variant": self.variant,
            "data": str(self.request.data),
            "count": self.count,
            "task": accuracy.task if accuracy else None,
            "primary": accuracy.primary if accuracy else None,
            "higher_is_better": accuracy.higher_is_better if accuracy else None,
            "metrics": dict(accuracy.metrics) if accuracy else {},
            "options": {name: _plain(value) for name, value in self.request.options.given().items()},
            "settings": self.settings,
            "coverage": self.coverage,
            "reference": {
                "model": str(self.request.reference),
                "variant": self.reference_variant,
                "metrics": dict(reference.metrics) if reference else {},
                "loss": self.loss,
                "agreement": self.agreement,
            }
            if self.agreement
            else None,
        }


def run_evaluation(
    request: EvalRequest,
    *,
    opener: Opener | None = None,
    workers: int | str | Workers | None = None,
    progress: Progress = SILENT,
) -> EvalResult:
    """Open everything, run every sample once, and measure.

    Args:
        opener: where the model runs; None is this machine, where a reference always does.
        workers: a number of processes to share the samples among, the address of a Dask scheduler, or what
            `edgeq.distributed.workers.open_workers` gave. Without `opener`.

    Raises:
        UsageError: neither a task nor a reference, or an option that makes no sense.
        EdgeqError: whatever is wrong with the model, the bundle or the data.
    """
    if request.task is None and request.reference is None:
        raise UsageError("nothing to measure", "Give a --task for labelled data, or a --reference to compare with")
    task = make_task(request.task, request.options) if request.task is not None else None
    if task is None and request.options.given():
        raise UsageError("task options without a task", "Give a --task")
    refuse_ignored(request.settings, *(path for path in (request.model, request.reference) if path is not None))
    with ExitStack() as stack:
        pool = stack.enter_context(open_workers(workers))  # they start while the model is opened
        loaded = stack.enter_context(
            open_model(request.model, request.settings, variant=request.variant, opener=opener)
        )
        loaded_models, given = {"model": loaded}, {"model": request.settings}
        if request.reference is not None:
            given["reference"] = dataclasses.replace(request.settings, engine=None, precision=FLOAT)
            loaded_models["reference"] = stack.enter_context(open_model(request.reference, given["reference"]))
            _check_same_inputs(loaded, loaded_models["reference"])
        preprocess = request.preprocess if request.preprocess is not None else loaded.preprocess
        samples = open_samples(
            request.data,
            loaded.signature,
            preprocess=preprocess,
            labels=request.labels,
            count=request.count,
            start=request.start,
            stride=request.stride,
            model=request.model if loaded.variant is None else None,
            progress=progress,
        )
        settings = {key: s.settings for key, s in loaded_models.items()}
        compared = "reference" if request.reference is not None else None
        if pool is None:
            sessions = {key: s.session for key, s in loaded_models.items()}
            found = evaluate_sessions(
                sessions, samples, task=task, reference=compared, settings=settings, progress=progress
            )
        else:
            own = request.task is not None and names_function(request.task)
            found = evaluate_on(
                pool,
                {key: ModelAt(s.path, given[key], s.variant) for key, s in loaded_models.items()},
                samples,
                task=task,
                made_of=(str(request.task), request.options) if own else None,
                reference=compared,
                settings=settings,
                progress=progress,
            )
        coverage = _coverage(loaded, next(iter(samples)).inputs) if opener is None else None
    reference = loaded_models.get("reference")
    return EvalResult(
        request=request,
        variant=loaded.variant,
        settings=loaded.settings,
        count=found.count,
        accuracy=found.accuracy.get("model"),
        reference_accuracy=found.accuracy.get("reference"),
        reference_variant=reference.variant if reference else None,
        agreement=found.agreement.get("model"),
        coverage=coverage,
    )


def _coverage(loaded: LoadedModel, feed: Mapping[str, Any]) -> Coverage | None:
    """What of a model runs in which precision, where a plug-in runs it."""
    if described(loaded.settings.engine) is None:
        return None
    return measure_coverage(loaded.model, loaded.settings, feed, loaded.graph, lambda name, op_type: "")


def _check_same_inputs(loaded: LoadedModel, reference: LoadedModel) -> None:
    names: Mapping[str, list[str]] = {s.name: sorted(i.name for i in s.signature.inputs) for s in (loaded, reference)}
    if len({tuple(inputs) for inputs in names.values()}) > 1:
        listed = "; ".join(f"{name} takes {', '.join(inputs)}" for name, inputs in names.items())
        raise UsageError(f"the models' inputs differ: {listed}", "Compare models with the same inputs")


def _plain(value: object) -> Any:
    return str(value) if isinstance(value, Path) else value
