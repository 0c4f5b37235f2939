"""Implement `edgeq eval` as a function: measure a model or bundle on data, against labels, against a reference, or
both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgeq_device.engines.catalog import FLOAT
from edgeq_device.measure.basis import EVERYTHING

from edgeq.data.open_source import Data, as_data, in_role
from edgeq.distributed.workers import Workers, open_workers
from edgeq.errors import UsageError
from edgeq.measure.accuracy import Accuracy, evaluate_sessions
from edgeq.measure.agreement import Agreement
from edgeq.measure.answer_metric import AnswerMetric, with_head
from edgeq.measure.basis import sampled_basis
from edgeq.measure.coverage import Coverage, measure_coverage
from edgeq.measure.find_task import ANNOTATED, find_annotations, find_classification, find_detection, infer_task_name
from edgeq.measure.loaded_head import find_loaded_head, judge_by_answers
from edgeq.measure.loaded_model import LoadedModel, Opener, open_model, refuse_ignored
from edgeq.measure.preprocess_search import open_or_search
from edgeq.measure.settle import settle
from edgeq.measure.shared_evaluation import ModelAt, evaluate_on
from edgeq.measure.task import TaskOptions, make_task, split_task_options
from edgeq.model.graph import GraphIndex
from edgeq.run.engines import choose_engine, find_description
from edgeq.run.session import SessionSettings, parse_session_options
from edgeq.util.display import SILENT, Progress
from edgeq.util.user_code import names_function


@dataclass(frozen=True)
class EvalRequest:
    """Describe a model to evaluate, and the data.

    Attributes:
        model: model file or bundle.
        data: samples, in any form that `edgeq.data.samples.open_samples` accepts.
        task: name of a task, or "path.py:factory". With None, only the agreement with the reference is measured.
        options: options of the task.
        reference: a second model or bundle, run on the same samples with onnxruntime's own kernels.
        variant: variant of a bundle; None uses the one that fits this machine.
        preprocess: preprocessing of the samples; None uses the bundle's, if any.
        labels, count, start, stride: see `open_samples`.
        settings: session settings for model files; a bundle has its own.
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


def request_from_options(flat_options: Mapping[str, Any]) -> EvalRequest:
    """Return a request for flat options.

    The options are the fields of `EvalRequest`, the options of tasks (`split_task_options`), `threads`, `optimization`,
    `session_options` (each "key=value"), and `engine` in a form that `choose_engine` accepts.
    """
    options, remaining = split_task_options(flat_options)
    settings = SessionSettings(
        config=parse_session_options(remaining.pop("session_options")),
        intra_op_threads=remaining.pop("threads"),
        optimization=remaining.pop("optimization"),
    )
    if engine := remaining.pop("engine", None):
        choice = choose_engine(engine)
        settings = dataclasses.replace(settings, engine=choice.engine, precision=choice.precision)
    return EvalRequest(**remaining, options=options, settings=settings)


@dataclass(frozen=True)
class EvalResult:
    """Hold the result of an evaluation.

    `accuracy` and `reference_accuracy` are None without a task. `agreement` is None without a reference. `coverage`
    describes the execution graph of a plug-in engine, and is None for any other model.
    """

    request: EvalRequest
    variant: str | None
    settings: SessionSettings
    samples: int
    accuracy: Accuracy | None
    reference_accuracy: Accuracy | None
    reference_variant: str | None
    agreement: Agreement | None
    coverage: Coverage | None = None

    @property
    def loss(self) -> float | None:
        """Return how much worse the model is than the reference, in the unit of the primary metric. Return None if one
        of the two figures is missing.
        """
        if self.accuracy is None or self.reference_accuracy is None:
            return None
        return self.accuracy.loss_against(self.reference_accuracy)

    def __record__(self) -> dict[str, Any]:
        """Return plain JSON values. Every key is always present."""
        accuracy, reference = self.accuracy, self.reference_accuracy
        return {
            "model": str(self.request.model),
            "variant": self.variant,
            "data": str(self.request.data),
            "samples": self.samples,
            "task": accuracy.task if accuracy else None,
            "primary": accuracy.primary if accuracy else None,
            "higher_is_better": accuracy.higher_is_better if accuracy else None,
            "metrics": dict(accuracy.metrics) if accuracy else {},
            "options": self.request.options.given(),
            "warnings": accuracy.doubts if accuracy else (),
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
    """Open the models and the data, run every sample once, and measure.

    Args:
        opener: object that opens the model on the machine that will run it; None opens it on this machine. A reference
            always runs on this machine.
        workers: a number of processes that share the samples, the address of a Dask scheduler, or the result of
            `edgeq.distributed.workers.open_workers`. It cannot be combined with `opener`.

    Raises:
        UsageError: there is neither a task nor a reference, or an option is invalid.
        EdgeqError: an error in the model, the bundle or the data.
    """
    name, options = infer_task_name(request.task, request.options), request.options
    # Data sets usually keep the annotations next to the images.
    if name in ANNOTATED and options.annotations is None:
        options = dataclasses.replace(options, annotations=find_annotations(request.data))
    task = make_task(name, options) if name is not None else None
    if task is None and options.given():
        raise UsageError("task options without a task", "Give a ⟨task⟩")
    refuse_ignored(request.settings, *(path for path in (request.model, request.reference) if path is not None))
    with ExitStack() as stack:
        pool = stack.enter_context(open_workers(workers))  # Workers start while the model is being opened.
        loaded = stack.enter_context(
            open_model(request.model, request.settings, variant=request.variant, opener=opener)
        )
        loaded_models, model_settings = {"model": loaded}, {"model": request.settings}
        if request.reference is not None:
            # The reference runs on onnxruntime's own kernels, so that errors of the engine show in the difference.
            model_settings["reference"] = dataclasses.replace(request.settings, engine=None, precision=FLOAT)
            loaded_models["reference"] = stack.enter_context(open_model(request.reference, model_settings["reference"]))
            _check_same_inputs(loaded, loaded_models["reference"])
        preprocess = request.preprocess if request.preprocess is not None else loaded.preprocess
        # Labels and preprocessing are judged by the reference if there is one, because it is usually the float model.
        judge = (loaded_models.get("reference") or loaded).session
        if task is None and request.reference is None:
            task = find_detection(Data(request.data), loaded.signature, judge, progress)
        # Samples are opened by the model's signature. The reference has the same inputs.
        samples = open_or_search(
            in_role(as_data(request.data) or Data(request.data), "validation"),
            loaded.signature,
            session=lambda: judge,
            labelled_data=Data(request.data, labels=request.labels, role="validation"),
            task=task,
            preprocess=preprocess,
            labels=request.labels,
            count=request.count,
            start=request.start,
            stride=request.stride,
            model=request.model if loaded.variant is None else None,
            progress=progress,
        )
        if task is None and request.reference is None:
            task = find_classification(samples, judge, progress)
            if task is None:
                fix = "Give a ⟨task⟩ for labelled data, or a ⟨reference⟩ to compare with"
                raise UsageError("nothing to measure: the data have no labels that the model's outputs fit", fix)
        if isinstance(task, AnswerMetric):
            judged = loaded_models.get("reference") or loaded
            task = with_head(task, find_loaded_head(judged, samples, progress=progress))
        if task is None and request.reference is not None:
            # Without labels, the reference's answers are the labels.
            task, samples = judge_by_answers(loaded_models["reference"], samples, progress=progress)
        elif task is not None:
            # Open choices are made once, so that both models are measured with the same ones.
            task = settle(task, judge, samples, progress=progress)
        settings = {key: s.settings for key, s in loaded_models.items()}
        # Without a reference, nothing is compared.
        basis = EVERYTHING
        if request.reference is not None:
            judged_by = loaded_models["reference"]
            basis = sampled_basis(GraphIndex(judged_by.graph), judged_by.session, samples)
        compared = "reference" if request.reference is not None else None
        if pool is None:
            sessions = {key: s.session for key, s in loaded_models.items()}
            evaluation = evaluate_sessions(
                sessions, samples, task=task, reference=compared, settings=settings, basis=basis, progress=progress
            )
        else:
            # A task from a user's file cannot be pickled, so each worker makes it itself.
            is_user_task = name is not None and names_function(name)
            evaluation = evaluate_on(
                pool,
                {key: ModelAt(s.path, model_settings[key], s.variant) for key, s in loaded_models.items()},
                samples,
                task=task,
                made_of=(str(name), options) if is_user_task else None,
                reference=compared,
                settings=settings,
                basis=basis,
                progress=progress,
            )
        coverage = None
        # Only a plug-in engine on this machine shows its execution graph.
        if opener is None and find_description(loaded.settings.engine) is not None:
            feed = next(iter(samples)).inputs
            coverage = measure_coverage(loaded.model, loaded.settings, feed, loaded.graph, lambda name, op_type: "")
    reference = loaded_models.get("reference")
    return EvalResult(
        request=request,
        variant=loaded.variant,
        settings=loaded.settings,
        samples=evaluation.samples,
        accuracy=evaluation.accuracy.get("model"),
        reference_accuracy=evaluation.accuracy.get("reference"),
        reference_variant=reference.variant if reference else None,
        agreement=evaluation.agreement.get("model"),
        coverage=coverage,
    )


def _check_same_inputs(loaded: LoadedModel, reference: LoadedModel) -> None:
    names: Mapping[str, list[str]] = {s.name: sorted(i.name for i in s.signature.inputs) for s in (loaded, reference)}
    if len({tuple(inputs) for inputs in names.values()}) > 1:
        listed = "; ".join(f"{name} takes {', '.join(inputs)}" for name, inputs in names.items())
        raise UsageError(f"the models' inputs differ: {listed}", "Compare models with the same inputs")
