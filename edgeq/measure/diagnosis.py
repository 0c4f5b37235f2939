"""`edgeq debug` as a function: a float model, its quantized form and samples, to which layers are to blame."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeq.data.samples import open_samples
from edgeq.errors import ModelError, UsageError
from edgeq.measure.agreement import Agreement, compare_many
from edgeq.measure.culprits import Culprit, LayerNoise, find_culprits, layer_noise, nodes_to_exclude
from edgeq.measure.graphs import GraphIndex, read_graph
from edgeq.measure.layers import LayerComparison, compare_layers
from edgeq.measure.match_activations import match_activations
from edgeq.measure.match_weights import compare_weights, count_quantized_weights, match_weights
from edgeq.measure.observe import observing_session
from edgeq.measure.subject import Subject, open_subject
from edgeq.model.load import is_quantized
from edgeq.model.prepare import prepare_model
from edgeq.progress import SILENT, Progress
from edgeq.session import SessionSettings, open_session

if TYPE_CHECKING:
    from edgeq.data.samples import Samples

SAMPLES = 32
"""Samples by default: sums over all elements of a tensor settle after a few."""

# Fusing changes roundings; what costs more than this is another answer.
_OPTIMISER_LOSS_DB = 3.0
_DISABLED = "optimization.disable_specified_optimizers"
_REQUANTIZER = "WeightBiasQuantization"
_LISTED = 3
_ORDER = "Give the float model first, then its int8 form"


@dataclass(frozen=True)
class DebugQuestion:
    """What to look at.

    Attributes:
        float_model: the float32 model file.
        quantized: its quantized model file, or a bundle.
        variant: of a bundle; None takes the one that fits this machine.
        data, preprocess, count, start, stride: as `open_samples` takes them.
        worst: culprits to name at most.
        settings: of the quantized model's session, where it is a file; a bundle brings its own.
        memory: bytes that tensors may take at once; None for the default.
    """

    float_model: Path
    quantized: Path
    data: Any
    variant: str | None = None
    preprocess: Any = None
    count: int | None = SAMPLES
    start: int = 0
    stride: int = 1
    worst: int = 10
    settings: SessionSettings = field(default_factory=SessionSettings)
    memory: int | None = None


def debug_question(given: Mapping[str, Any]) -> DebugQuestion:
    """A question from flat options: the fields of `DebugQuestion` but `settings`, for which `threads` and
    `session_options` (each "key=value") are given."""
    rest = dict(given)
    pairs = [option.partition("=") for option in rest.pop("session_options")]
    wrong = next((key for key, equals, _ in pairs if not (key and equals)), None)
    if wrong is not None:
        raise UsageError(f"--session-option {wrong!r} has no value", "Write KEY=VALUE")
    config = {key: value for key, _, value in pairs}
    settings = SessionSettings(config=config, intra_op_threads=rest.pop("threads"))
    return DebugQuestion(**rest, settings=settings)


@dataclass(frozen=True)
class Diagnosis:
    """What was found.

    Attributes:
        prepared: whether the float model had to be prepared (`edgeq.model.prepare`) to match.
        comparison: weights and activations, on the graph as written.
        noise: what each activation's layer adds, in the same order.
        optimised: the model's outputs in the session that ships; `written`: without graph optimisation.
        notes, warnings: one sentence each.
    """

    question: DebugQuestion
    variant: str | None
    prepared: bool
    comparison: LayerComparison
    noise: tuple[LayerNoise, ...]
    culprits: tuple[Culprit, ...]
    optimised: Agreement
    written: Agreement
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def exclude(self) -> tuple[str, ...]:
        """Nodes that would keep all culprits in float."""
        return nodes_to_exclude(self.culprits)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; every key is always there."""
        plain = self.comparison.to_dict()
        for activation, noise in zip(plain["activations"], self.noise, strict=True):
            activation["noise"] = {"weights": noise.weights, "range": noise.range, "inputs": noise.inputs}
        return {
            "float_model": str(self.question.float_model),
            "quantized_model": str(self.question.quantized),
            "variant": self.variant,
            "data": str(self.question.data),
            "count": self.comparison.count,
            "prepared": self.prepared,
            "outputs": {"optimised": self.optimised.to_dict(), "as_written": self.written.to_dict()},
            "culprits": [culprit.to_dict() for culprit in self.culprits],
            "exclude": list(self.exclude),
            "weights": plain["weights"],
            "activations": plain["activations"],
            "notes": list(self.notes),
            "warnings": list(self.warnings),
        }


def diagnose(question: DebugQuestion, *, progress: Progress = SILENT) -> Diagnosis:
    """Match the two models, run them over the samples, and name the layers that add the noise.

    Raises:
        UsageError: the models are not a float model and a quantized form of it.
        EdgeqError: whatever is wrong with a model, the bundle or the data.
    """
    with (
        open_subject(question.quantized, question.settings, variant=question.variant) as subject,
        tempfile.TemporaryDirectory(prefix="edgeq-debug-") as workdir,
    ):
        quantized = _quantized_graph(subject)
        reference = _reference(question, quantized, Path(workdir), progress)
        samples = open_samples(
            question.data,
            subject.signature,
            preprocess=question.preprocess if question.preprocess is not None else subject.preprocess,
            count=question.count,
            start=question.start,
            stride=question.stride,
            model=question.float_model,
            progress=progress,
        )
        memory = {} if question.memory is None else {"memory": question.memory}
        comparison = compare_layers(
            reference.graph, quantized, samples, settings=subject.settings, progress=progress, **memory
        )
        outputs = _outputs(reference.graph.path, subject, quantized, samples, progress)
    culprits = find_culprits(comparison.activations, comparison.weights, question.worst)
    return Diagnosis(
        question=question,
        variant=subject.variant,
        prepared=reference.prepared,
        comparison=comparison,
        noise=layer_noise(comparison.activations),
        culprits=culprits,
        optimised=outputs["optimised"],
        written=outputs["written"],
        notes=reference.notes,
        warnings=_warnings(outputs, comparison),
    )


@dataclass(frozen=True)
class _Reference:
    graph: GraphIndex
    prepared: bool
    notes: tuple[str, ...] = ()


def _quantized_graph(subject: Subject) -> GraphIndex:
    import onnx
    from edgeq_device.variants import EXTERNAL_FOLDER

    folder = subject.settings.config.get(EXTERNAL_FOLDER)
    if folder is None:
        graph = read_graph(subject.model)
    else:  # the bundle's files were checked when it was opened
        graph = GraphIndex(onnx.load(subject.model, load_external_data=False), Path(folder) / subject.model.name)
    if not is_quantized(graph.model):
        raise UsageError(
            f"{subject.name} holds no quantized operator", "Give the float model first, then its int8 form"
        )
    return graph


def _reference(question: DebugQuestion, quantized: GraphIndex, workdir: Path, progress: Progress) -> _Reference:
    """The float model as given or, where that explains more of the quantized one, as edgeq prepares it."""
    given = read_graph(question.float_model)
    if is_quantized(given.model):
        raise UsageError(f"{question.float_model} is quantized", _ORDER)
    missing = sorted(set(quantized.inputs) - set(given.inputs))
    if missing:
        raise UsageError(
            f"{question.float_model} has no input {missing[0]!r}, which {question.quantized} takes",
            "Give the float model that it was made from",
        )
    fit = _fit(given, quantized)
    names = [node.name for node in given.model.graph.node]
    whole = fit.weights == count_quantized_weights(quantized)
    if whole and all(names) and len(set(names)) == len(names):
        return _Reference(given, prepared=False)
    try:
        prepared = read_graph(prepare_model(question.float_model, workdir, progress=progress).path)
    except ModelError as error:
        return _Reference(given, prepared=False, notes=(f"the float model is taken as it is: {error.problem}",))
    better = _fit(prepared, quantized)
    if (better.weights, better.activations) < (fit.weights, fit.activations):
        return _Reference(given, prepared=False)
    if not better.activations:
        raise UsageError(
            f"{question.quantized} has no activation of {question.float_model}, prepared or not",
            "Give the float model that it was made from",
        )
    note = f"{question.float_model} was compared as `edgeq quantize` prepares it"
    if better.weights > fit.weights:
        note += f": {better.weights} quantized weights match then, {fit.weights} as it is"
    return _Reference(prepared, prepared=True, notes=(note,))


@dataclass(frozen=True)
class _Fit:
    """Quantized weights that are rounded weights of a float model, and activations that both have."""

    weights: int
    activations: int


def _fit(graph: GraphIndex, quantized: GraphIndex) -> _Fit:
    weights = compare_weights(graph, quantized, match_weights(graph, quantized))
    return _Fit(sum(not w.changed for w in weights), len(match_activations(graph, quantized)))


def _outputs(
    float_model: Path, subject: Subject, quantized: GraphIndex, samples: Samples, progress: Progress
) -> dict[str, Agreement]:
    """The outputs against the float model's: as shipped, without graph optimisation and, where that makes a difference,
    without the optimiser that is known to."""
    plain = dataclasses.replace(subject.settings, optimization="none")
    reference = open_session(float_model, SessionSettings(intra_op_threads=plain.intra_op_threads))
    sessions = {
        "optimised": subject.session,
        "written": observing_session(quantized.model, quantized, optimization="none", settings=plain),
    }
    found = compare_many(reference, sessions, samples, progress)
    disabled = subject.settings.config.get(_DISABLED, "")
    if _loss(found) > _OPTIMISER_LOSS_DB and _REQUANTIZER not in disabled:
        config = {**subject.settings.config, _DISABLED: ";".join(filter(None, [disabled, _REQUANTIZER]))}
        without = dataclasses.replace(subject.settings, config=config)
        session = observing_session(quantized.model, quantized, optimization=without.optimization, settings=without)
        found |= compare_many(reference, {"without": session}, samples, progress)
    return found


def _loss(outputs: Mapping[str, Agreement]) -> float:
    """Decibels that the optimiser costs; NaN where both are exact."""
    return outputs["written"].sqnr_db - outputs["optimised"].sqnr_db


def _warnings(outputs: Mapping[str, Agreement], comparison: LayerComparison) -> tuple[str, ...]:
    found = []
    if abs(_loss(outputs)) > _OPTIMISER_LOSS_DB:
        optimised, written = outputs["optimised"].sqnr_db, outputs["written"].sqnr_db
        text = (
            f"the optimised session answers with {optimised:.1f} dB SQNR, the graph as written with {written:.1f} dB: "
            "the figures by layer are those of the graph as written"
        )
        without = outputs.get("without")
        if without is not None and without.sqnr_db > optimised + _OPTIMISER_LOSS_DB:
            text += f"; with the session option {_DISABLED}={_REQUANTIZER} it is {without.sqnr_db:.1f} dB"
        found.append(text)
    changed = [weight.name for weight in comparison.weights if weight.changed]
    if changed:
        found.append(
            f"{len(changed)} weights differ by more than rounding ({', '.join(changed[:_LISTED])}): they were folded or "
            "equalized before they were quantized; compare with the float model that has them so"
        )
    broken = [a.name for a in comparison.activations if a.accumulated.nonfinite]
    if broken:
        found.append(f"{len(broken)} tensors hold NaN or infinities in one model only, first {broken[0]}")
    return tuple(found)
