"""Implement `edgeq.debug`: compare a float model and its quantized form, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from edgeq_device.engines.catalog import engine_of_file
from edgeq_device.measure.basis import Basis
from edgeq_device.system.places import scratch_folder

from edgeq.data.open_source import Data, as_data
from edgeq.data.samples import SampleOptions, Samples, spread_over
from edgeq.errors import UsageError
from edgeq.measure.accuracy import Accuracy, Evaluation, evaluate_sessions
from edgeq.measure.agreement import HEALTHY_DB, Agreement, Closeness, closeness
from edgeq.measure.answer_task import FloatAnswers
from edgeq.measure.basis import sampled_basis
from edgeq.measure.engine_differences import EngineDifference, compare_engine
from edgeq.measure.error_sources import ErrorSource, list_excluded_nodes, list_node_sets
from edgeq.measure.exclusions import ANSWERED_SAMPLES, Exclusion, find_exclusions
from edgeq.measure.exclusions import SAMPLES as FEW
from edgeq.measure.layer_noise import LayerNoise
from edgeq.measure.layers import MEMORY, LayerComparison, LayerPair, instrumented_session
from edgeq.measure.loaded_head import judge_by_answers
from edgeq.measure.loaded_model import LoadedModel, open_model, refuse_ignored
from edgeq.measure.preprocess_search import open_or_search
from edgeq.measure.reference import ORDER, find_reference
from edgeq.model.graph import GraphIndex
from edgeq.model.load import is_quantized
from edgeq.run.engines import EngineChoice, as_engine
from edgeq.run.session import SessionSettings, open_session
from edgeq.util.display import SILENT, Page, Progress
from edgeq.util.numbers import share
from edgeq.util.paths import path_of
from edgeq.util.records import marked

SAMPLES = 32
"""Default number of samples. Sums over all elements of a tensor become stable after a few samples."""
# Fusions change how results are rounded. A loss of more decibels than this means that they also changed the outputs.
_OPTIMISER_LOSS_DB = 3.0
# The session option that switches optimisers off, and the one optimiser that is known to lose accuracy.
_DISABLED = "optimization.disable_specified_optimizers"
_REQUANTIZER = "WeightBiasQuantization"
# A warning names this many weights. The record contains all of them.
_LISTED = 3
_VERDICTS: Mapping[Closeness, str] = {
    "healthy": "the outputs follow float32 closely; there is nothing to fix",
    "noisy": "the outputs follow float32, with noise; measure the task's metric with `edgeq eval`",
    "poor": "the outputs do not follow float32; keep the nodes that help in float, or see `edgeq tune`",
}


@dataclass(frozen=True)
class Diagnosis(Page):
    """Hold the result of `edgeq.debug`.

    Attributes:
        float_model, quantized, data: arguments of `edgeq.debug`.
        variant: variant of a bundle; None for a model file.
        settings: session settings of the quantized model.
        worst: maximum number of error sources to name.
        prepared: whether the float model had to be prepared (`edgeq.model.prepare`) to match.
        comparison: comparison of the weights and activations, on the graph as written.
        optimised: agreement of the outputs in the session that ships.
        written: agreement of the outputs without graph optimisation.
        notes, warnings: sentences for the user.
        exclusions: sets of nodes that, as measured, improve the outputs when they stay in float, the best first. Empty
            if the outputs are healthy, because edgeq then does not search.
        answers: share of the float model's answers that the session that ships gives again; None if the outputs' noise
            decides.
        answers_level: how closely the answers follow the float model's; None like `answers`.
        engine: comparison of the quantized activations in the engine `engine_name`; empty if no engine was compared.
    """

    float_model: Path
    quantized: Path
    data: Any
    variant: str | None
    settings: SessionSettings
    worst: int
    prepared: bool
    comparison: LayerComparison
    error_sources: tuple[ErrorSource, ...]
    optimised: Agreement
    written: Agreement
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    exclusions: tuple[Exclusion, ...] = ()
    engine: tuple[EngineDifference, ...] = ()
    engine_name: str = ""
    answers: Accuracy | None = None
    answers_level: Closeness | None = None

    @property
    def verdict(self) -> Closeness:
        """Return "healthy", "noisy" or "poor". The answers in the session that ships decide, if they are known, or else
        the worst output or slice.
        """
        return self.answers_level or closeness(self.optimised)

    @property
    def verdict_text(self) -> str:
        """Return the verdict as a sentence."""
        if self.answers is not None:
            figure = f"{share(self.answers.value)} of float32's answers are given again"
            return f"{self.verdict}: {_VERDICTS[self.verdict]} ({figure})"
        worst = self.optimised.worst
        # An output that was never compared has no level, and must not be passed over.
        missing = [output.name for output in self.optimised.outputs if output.mismatched and not output.compared]
        if missing or worst is None:
            figure = f"output {missing[0]!r} could not be compared" if missing else "no output could be compared"
        else:
            location = next((f", {part.location}" for part in worst.slices if part.least_db == worst.least_db), "")
            part = f" in output {worst.name!r}{location}" if worst.least_db < worst.sqnr_db else ""
            figure = f"{worst.least_db:.1f} dB SQNR{part}"
        return f"{self.verdict}: {_VERDICTS[self.verdict]} ({figure})"

    @property
    def noise(self) -> tuple[LayerNoise, ...]:
        """Return the noise of the layers that compute the activations, in the order of the comparison."""
        return tuple(activation.noise for activation in self.comparison.activations)

    @property
    def effects(self) -> dict[str, Agreement]:
        """Return tensor → agreement of the float model's outputs if only the error of the layer that computes this
        tensor is added.

        Only layers that may cause the error are included.
        """
        return {a.name: a.effect for a in self.comparison.activations if a.effect is not None}

    @property
    def exclude(self) -> tuple[str, ...]:
        """Return the nodes to keep in float so that all error sources disappear."""
        return list_excluded_nodes(self.error_sources)

    def __brief__(self) -> dict[str, Any]:
        models = {"float_model": self.float_model, "quantized": self.quantized}
        sources = {"error_sources": self.error_sources, "exclude": self.exclude, "helps": self.exclusions[:1]}
        agreement = {
            "verdict": self.verdict_text,
            "sqnr_db": self.optimised.sqnr_db,
            "as_written_db": self.written.sqnr_db,
        }
        return {**models, **agreement, **sources, "samples": self.comparison.samples, "warnings": self.warnings}

    def __page__(self) -> dict[str, Any]:
        facts = {"samples": self.comparison.samples, "warnings": list(self.warnings)}
        variant = {"agreement": marked(self.optimised), "layers": marked(self), **facts}
        return {"name": self.quantized.name, "variants": {"int8": variant}, "notes": list(self.notes)}

    def __record__(self) -> dict[str, Any]:
        """Return plain JSON values. Every key is always present."""
        return {
            "float_model": str(self.float_model),
            "quantized_model": str(self.quantized),
            "variant": self.variant,
            "data": str(self.data),
            "samples": self.comparison.samples,
            "prepared": self.prepared,
            "verdict": self.verdict,
            "verdict_text": self.verdict_text,
            "outputs": {"optimised": self.optimised, "as_written": self.written},
            "answers": self.answers,
            "error_sources": self.error_sources,
            "exclude": self.exclude,
            "exclusions": self.exclusions,
            "weights": self.comparison.weights,
            "activations": self.comparison.activations,
            "engine": self.engine,
            "notes": self.notes,
            "warnings": self.warnings,
        }


def debug(
    float_model: Path | str,
    quantized: Path | str,
    data: Any,
    *,
    worst: int = 10,
    variant: str | None = None,
    session_options: Mapping[str, str] | None = None,
    threads: int = 0,
    memory: int | None = None,
    engine: EngineChoice | str = "",
    progress: Progress = SILENT,
    **selection: Unpack[SampleOptions],
) -> Diagnosis:
    """Compare a quantized model with its float model, and name the layers that lose the accuracy.

    Only sums are stored. For the individual steps (matching and comparing weights and activations, adding inner tensors
    to the outputs of a model), see the functions of `edgeq.measure.layers`.

    Args:
        float_model: the float32 model.
        quantized: the quantized model, a file or a bundle.
        data: samples, in any form that `edgeq.open_samples` accepts.
        preprocess: preprocessing of the samples; a bundle contains its own.
        count: maximum number of samples, by default 32; None uses all.
        start, stride: number of samples to skip at the start, and distance between the samples after that.
        worst: maximum number of error sources to name.
        variant: variant of a bundle; None uses the one that fits this machine.
        session_options: session options that the quantized file needs; a bundle has its own.
        threads: number of threads within an operator; 0 for one thread per core.
        memory: limit in bytes for tensors in memory; a lower limit means more passes. None means 512 MiB.
        engine: a plug-in such as "qnn". Its tensors are also compared with those of onnxruntime's CPU kernels.

    Raises:
        UsageError: the models are not a float model and its quantized form.
        EdgeqError: an error in a model, the bundle or the data.
    """
    float_model, quantized = path_of(float_model, "float model"), path_of(quantized, "quantized model")
    choice, preprocess = as_engine(engine) if engine else None, selection.get("preprocess")
    settings = SessionSettings(config=dict(session_options or {}), intra_op_threads=threads)
    # Options without an effect are refused before any model is opened.
    refuse_ignored(settings, quantized)
    with (
        open_model(quantized, settings, variant=variant) as loaded,
        scratch_folder("edgeq-debug-") as workdir,
    ):
        file_engine = engine_of_file(loaded.model.name)
        # A compiled file contains no graph whose tensors could become outputs.
        if file_engine is not None:
            fix = "Name a variant that onnxruntime runs with ⟨variant⟩, or the Q/DQ model that it was made from"
            raise UsageError(f"{loaded.name} is a {file_engine.suffix} file: its layers cannot be compared", fix)
        if not is_quantized(loaded.graph):
            raise UsageError(f"{loaded.name} contains no quantized operator", ORDER)
        graph = GraphIndex(loaded.graph)
        reference = find_reference(float_model, graph, loaded.name, Path(workdir), progress)
        samples = open_or_search(
            as_data(data) or Data(data),
            loaded.signature,
            session=lambda: open_session(reference.path),
            preprocess=preprocess if preprocess is not None else loaded.preprocess,
            count=selection.get("count", SAMPLES),
            start=selection.get("start", 0),
            stride=selection.get("stride", 1),
            model=float_model,
            progress=progress,
        )
        pair = LayerPair(reference.graph, graph, settings=loaded.settings, memory=memory or MEMORY, progress=progress)
        # Layers are compared on the graph as written, because fusions would remove the tensors between them.
        comparison = pair.compare(samples)
        # The float model alone decides which elements count, so all sessions below have one basis.
        with progress.stage("Opening the float model"):
            basis = sampled_basis(reference.graph, open_session(reference.path), samples)
            task, answered = judge_by_answers(
                loaded, samples, reference=open_session(reference.path), path=float_model, progress=progress
            )
        outputs, answers = _compare_outputs(reference.path, loaded, answered, basis, task, progress)
        comparison, error_sources = pair.attribute_error(comparison, outputs["written"], samples, limit=worst)
        exclusions: tuple[Exclusion, ...] = ()
        # The search runs dozens of models, so it starts only if there is something to gain.
        answers_level = task.level(answers.value) if task is not None and answers is not None else None
        if (answers_level or closeness(outputs["optimised"])) != "healthy":
            subset = spread_over(answered, FEW if task is None else ANSWERED_SAMPLES)
            exclusions = find_exclusions(
                pair, list_node_sets(error_sources, comparison.activations, worst), subset, basis, task
            )
        layers: tuple[EngineDifference, ...] = ()
        if choice is not None:
            layers = compare_engine(loaded.graph, samples, choice, Path(workdir), limit=worst, progress=progress)
    return Diagnosis(
        float_model=float_model,
        quantized=quantized,
        data=data,
        variant=loaded.variant,
        settings=loaded.settings,
        worst=worst,
        prepared=reference.prepared,
        comparison=comparison,
        error_sources=error_sources,
        optimised=outputs["optimised"],
        written=outputs["written"],
        exclusions=exclusions,
        notes=reference.notes,
        warnings=_find_warnings(outputs, comparison, answers),
        engine=layers,
        engine_name=choice.name if choice is not None else "",
        answers=answers,
        answers_level=answers_level,
    )


def _compare_outputs(
    float_model: Path,
    loaded: LoadedModel,
    samples: Samples,
    basis: Basis,
    task: FloatAnswers | None,
    progress: Progress,
) -> tuple[dict[str, Agreement], Accuracy | None]:
    """Compare the quantized model's outputs with the float model's, once as shipped and once without graph
    optimisation. Also return the accuracy of the answers as shipped.

    If the optimisation loses accuracy, also compare outputs that are computed without the one optimiser that is known
    to cause such a loss.
    """
    settings = loaded.settings
    # The float model runs on the CPU's own kernels, whatever runs the quantized model.
    reference = open_session(float_model, SessionSettings(intra_op_threads=settings.intra_op_threads))

    def compare(**sessions: Any) -> Evaluation:
        """Compare sessions with the float model."""
        every = {"reference": reference, **sessions}
        return evaluate_sessions(every, samples, task=task, reference="reference", basis=basis, progress=progress)

    unfused_session = instrumented_session(loaded.graph, optimization="none", settings=settings)
    evaluation = compare(optimised=loaded.session, written=unfused_session)
    agreements = dict(evaluation.agreement)
    disabled = settings.config.get(_DISABLED, "")
    if _optimiser_loss(agreements) > _OPTIMISER_LOSS_DB and _REQUANTIZER not in disabled:
        config = {**settings.config, _DISABLED: ";".join(filter(None, [disabled, _REQUANTIZER]))}
        # One more session shows whether this optimiser alone explains the loss.
        without = replace(settings, config=config)
        unoptimised = instrumented_session(loaded.graph, optimization=settings.optimization, settings=without)
        agreements |= compare(without=unoptimised).agreement
    return agreements, evaluation.accuracy.get("optimised")


def _optimiser_loss(outputs: Mapping[str, Agreement]) -> float:
    """Return how many decibels the optimiser loses, or NaN if both outputs are exact."""
    return outputs["written"].sqnr_db - outputs["optimised"].sqnr_db


def optimiser_warning(outputs: Mapping[str, Agreement]) -> str | None:
    """Return a warning if the outputs of the optimised session differ from those of the graph as written. Otherwise
    return None.
    """
    # Written so that NaN, the difference of two infinities, gives no warning.
    if not abs(_optimiser_loss(outputs)) > _OPTIMISER_LOSS_DB:
        return None
    optimised, as_written = outputs["optimised"].sqnr_db, outputs["written"].sqnr_db
    text = (
        f"the outputs have {optimised:.1f} dB SQNR in the optimised session, but {as_written:.1f} dB in the graph as "
        "written: the figures of the layers are from the graph as written"
    )
    without = outputs.get("without")
    if without is not None and without.sqnr_db > optimised + _OPTIMISER_LOSS_DB:
        text += f"; with the session option {_DISABLED}={_REQUANTIZER} the outputs have {without.sqnr_db:.1f} dB"
    return text


def _find_warnings(
    outputs: Mapping[str, Agreement], comparison: LayerComparison, answers: Accuracy | None
) -> tuple[str, ...]:
    warnings = [warning for warning in [optimiser_warning(outputs)] if warning is not None]
    worst = outputs["optimised"].worst
    if answers is None and worst is not None and worst.level_note and worst.least_db < HEALTHY_DB:
        warnings.append(worst.level_note)
    changed = [weight.name for weight in comparison.weights if weight.changed]
    if changed:
        warnings.append(
            f"{len(changed)} weights differ by more than rounding ({', '.join(changed[:_LISTED])}): they were changed "
            "before they were quantized, by folding or equalization; compare with the float model that has the changed "
            "weights"
        )
    warnings.extend(outputs["optimised"].mismatch_notes())
    broken = [a.name for a in comparison.activations if a.accumulated.nonfinite]
    if broken:
        warnings.append(f"{len(broken)} tensors contain NaN or infinities in only one model, first {broken[0]}")
    return tuple(warnings)
