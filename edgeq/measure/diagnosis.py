"""`edgeq debug` as a function: a float model, its quantized form and samples, to the layers that cause the error."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from edgeq.data.samples import open_samples
from edgeq.display import Page
from edgeq.engines import EngineChoice
from edgeq.errors import UsageError
from edgeq.graph.index import GraphIndex
from edgeq.measure.agreement import Agreement, compare_many
from edgeq.measure.engine_layers import EngineLayer, compare_engine
from edgeq.measure.error_attribution import attribute_error
from edgeq.measure.error_sources import ErrorSource, LayerNoise, layer_noise, nodes_to_exclude
from edgeq.measure.instrument import instrumented_session
from edgeq.measure.layer_runs import MEMORY
from edgeq.measure.layers import LayerComparison, compare_layers
from edgeq.measure.loaded_model import LoadedModel, open_model, refuse_ignored
from edgeq.measure.reference import ORDER, find_reference
from edgeq.model.load import is_quantized
from edgeq.progress import SILENT, Progress
from edgeq.records import plain
from edgeq.session import SessionSettings, open_session

if TYPE_CHECKING:
    from edgeq.data.samples import Samples

Verdict = Literal["healthy", "noisy", "poor"]

SAMPLES = 32
"""Samples by default: sums over all elements of a tensor settle after a few."""

# A hundredth, and a tenth, of the outputs' power is noise.
_HEALTHY_DB, _POOR_DB = 20.0, 10.0
# Fusing changes roundings; what costs more than this changes the outputs.
_OPTIMISER_LOSS_DB = 3.0
_DISABLED = "optimization.disable_specified_optimizers"
_REQUANTIZER = "WeightBiasQuantization"
_LISTED = 3


@dataclass(frozen=True)
class DebugRequest:
    """What to look at.

    Attributes:
        float_model: the float32 model file.
        quantized: its quantized model file, or a bundle.
        variant: of a bundle; None takes the one that fits this machine.
        data, preprocess, count, start, stride: as `open_samples` takes them.
        worst: error sources to name at most.
        settings: of the quantized model's session, where it is a file; a bundle brings its own.
        memory: bytes that tensors may take at once; None for the default.
        engine: whose tensors are held against those of onnxruntime's CPU kernels, too.
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
    engine: EngineChoice | None = None


_VERDICTS: Mapping[Verdict, str] = {
    "healthy": "the outputs follow float32 closely, and nothing needs to be mended",
    "noisy": "the outputs follow float32, with noise; measure the task's metric with `edgeq eval`",
    "poor": "the outputs do not follow float32; keep the layers named in float, or see `edgeq tune`",
}


@dataclass(frozen=True)
class Diagnosis(Page):
    """What was found.

    Attributes:
        prepared: whether the float model had to be prepared (`edgeq.model.prepare`) to match.
        comparison: weights and activations, on the graph as written.
        noise: what each activation's layer adds itself, in the same order.
        effects: the float model's outputs with the error of one layer alone, for the layers that may cause the error.
        optimised: the model's outputs in the session that ships; `written`: without graph optimisation.
        notes, warnings: one sentence each.
        engine: the quantized activations in the engine that the request names.
    """

    request: DebugRequest
    variant: str | None
    prepared: bool
    comparison: LayerComparison
    noise: tuple[LayerNoise, ...]
    effects: Mapping[str, Agreement]
    error_sources: tuple[ErrorSource, ...]
    optimised: Agreement
    written: Agreement
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    engine: tuple[EngineLayer, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """ "healthy", "noisy" or "poor", by the outputs of the session that ships."""
        if not self.optimised.sqnr_db >= _POOR_DB or any(o.nonfinite for o in self.optimised.outputs):
            return "poor"
        return "healthy" if self.optimised.sqnr_db >= _HEALTHY_DB else "noisy"

    @property
    def verdict_text(self) -> str:
        """The verdict as a sentence."""
        return f"{self.verdict}: {_VERDICTS[self.verdict]} ({self.optimised.sqnr_db:.1f} dB SQNR)"

    @property
    def exclude(self) -> tuple[str, ...]:
        """Nodes that would keep all error sources in float."""
        return nodes_to_exclude(self.error_sources)

    def __brief__(self) -> dict[str, Any]:
        models = {"float_model": self.request.float_model, "quantized": self.request.quantized}
        sources = {"error_sources": self.error_sources, "exclude": self.exclude}
        agreement = {
            "verdict": self.verdict_text,
            "sqnr_db": self.optimised.sqnr_db,
            "as_written_db": self.written.sqnr_db,
        }
        return {**models, **agreement, **sources, "samples": self.comparison.count, "warnings": self.warnings}

    def __page__(self) -> dict[str, Any]:
        shown = {"samples": self.comparison.count, "warnings": list(self.warnings)}
        variant = {"agreement": plain(self.optimised), "layers": plain(self), **shown}
        return {"name": self.request.quantized.name, "variants": {"int8": variant}, "notes": list(self.notes)}

    def __record__(self) -> dict[str, Any]:
        """Plain JSON values; every key is always there."""
        compared = plain(self.comparison)
        for activation, noise in zip(compared["activations"], self.noise, strict=True):
            effect = self.effects.get(noise.name)
            activation["noise"] = noise
            activation["output_sqnr_db"] = None if effect is None else effect.sqnr_db
        return {
            "float_model": str(self.request.float_model),
            "quantized_model": str(self.request.quantized),
            "variant": self.variant,
            "data": str(self.request.data),
            "count": self.comparison.count,
            "prepared": self.prepared,
            "verdict": self.verdict,
            "verdict_text": self.verdict_text,
            "outputs": {"optimised": self.optimised, "as_written": self.written},
            "culprits": self.error_sources,
            "exclude": self.exclude,
            "weights": compared["weights"],
            "activations": compared["activations"],
            "engine": self.engine,
            "notes": self.notes,
            "warnings": self.warnings,
        }


def diagnose(request: DebugRequest, *, progress: Progress = SILENT) -> Diagnosis:
    """Match the two models, run them over the samples, and name the layers that add the noise.

    Raises:
        UsageError: the models are not a float model and a quantized form of it.
        EdgeqError: whatever is wrong with a model, the bundle or the data.
    """
    refuse_ignored(request.settings, request.quantized)
    with (
        open_model(request.quantized, request.settings, variant=request.variant) as loaded,
        tempfile.TemporaryDirectory(prefix="edgeq-debug-") as workdir,
    ):
        if not is_quantized(loaded.graph):
            raise UsageError(f"{loaded.name} holds no quantized operator", ORDER)
        quantized = GraphIndex(loaded.graph)
        reference = find_reference(request.float_model, quantized, loaded.name, Path(workdir), progress)
        samples = open_samples(
            request.data,
            loaded.signature,
            preprocess=request.preprocess if request.preprocess is not None else loaded.preprocess,
            count=request.count,
            start=request.start,
            stride=request.stride,
            model=request.float_model,
            progress=progress,
        )
        settings, memory = loaded.settings, request.memory or MEMORY
        comparison = compare_layers(
            reference.graph, quantized, samples, settings=settings, memory=memory, progress=progress
        )
        outputs = _outputs(reference.path, loaded, samples, progress)
        effects, error_sources = attribute_error(
            reference.graph,
            quantized,
            comparison,
            outputs["written"],
            samples,
            most=request.worst,
            settings=settings,
            memory=memory,
            progress=progress,
        )
        engine: tuple[EngineLayer, ...] = ()
        if request.engine is not None:
            engine = compare_engine(
                loaded.graph, samples, request.engine, Path(workdir), most=request.worst, progress=progress
            )
    return Diagnosis(
        request=request,
        variant=loaded.variant,
        prepared=reference.prepared,
        comparison=comparison,
        noise=layer_noise(comparison.activations),
        effects=effects,
        error_sources=error_sources,
        optimised=outputs["optimised"],
        written=outputs["written"],
        notes=reference.notes,
        warnings=_warnings(outputs, comparison),
        engine=engine,
    )


def _outputs(float_model: Path, loaded: LoadedModel, samples: Samples, progress: Progress) -> dict[str, Agreement]:
    """The outputs against the float model's: as shipped, without graph optimisation and, where that makes a difference,
    without the optimiser that is known to."""
    plain = dataclasses.replace(loaded.settings, optimization="none")
    reference = open_session(float_model, SessionSettings(intra_op_threads=plain.intra_op_threads))
    sessions = {
        "optimised": loaded.session,
        "written": instrumented_session(loaded.graph, optimization="none", settings=plain),
    }
    found = compare_many(reference, sessions, samples, progress)
    disabled = loaded.settings.config.get(_DISABLED, "")
    if _loss(found) > _OPTIMISER_LOSS_DB and _REQUANTIZER not in disabled:
        config = {**loaded.settings.config, _DISABLED: ";".join(filter(None, [disabled, _REQUANTIZER]))}
        without = dataclasses.replace(loaded.settings, config=config)
        session = instrumented_session(loaded.graph, optimization=without.optimization, settings=without)
        found |= compare_many(reference, {"without": session}, samples, progress)
    return found


def _loss(outputs: Mapping[str, Agreement]) -> float:
    """Decibels that the optimiser costs; NaN where both are exact."""
    return outputs["written"].sqnr_db - outputs["optimised"].sqnr_db


def optimiser_warning(outputs: Mapping[str, Agreement]) -> str | None:
    """A warning where the outputs of the optimised session are not those of the graph as written; else None."""
    if not abs(_loss(outputs)) > _OPTIMISER_LOSS_DB:
        return None
    optimised, written = outputs["optimised"].sqnr_db, outputs["written"].sqnr_db
    text = (
        f"the outputs of the optimised session have {optimised:.1f} dB SQNR, of the graph as written {written:.1f} dB: "
        "the figures by layer are those of the graph as written"
    )
    without = outputs.get("without")
    if without is not None and without.sqnr_db > optimised + _OPTIMISER_LOSS_DB:
        text += f"; with the session option {_DISABLED}={_REQUANTIZER} it is {without.sqnr_db:.1f} dB"
    return text


def _warnings(outputs: Mapping[str, Agreement], comparison: LayerComparison) -> tuple[str, ...]:
    found = [warning for warning in [optimiser_warning(outputs)] if warning is not None]
    changed = [weight.name for weight in comparison.weights if weight.changed]
    if changed:
        found.append(
            f"{len(changed)} weights differ by more than rounding ({', '.join(changed[:_LISTED])}): they were changed "
            "before they were quantized, by folding or equalization; compare with the float model that has them so"
        )
    broken = [a.name for a in comparison.activations if a.accumulated.nonfinite]
    if broken:
        found.append(f"{len(broken)} tensors hold NaN or infinities in one model only, first {broken[0]}")
    return tuple(found)
