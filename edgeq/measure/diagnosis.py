"""What `edgeq debug` found: how a quantized model follows its float model, and the layers that cause the error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeq.display import Page
from edgeq.measure.agreement import Agreement
from edgeq.measure.closeness import Closeness, closeness
from edgeq.measure.engine_layers import EngineLayer
from edgeq.measure.error_sources import ErrorSource, LayerNoise, nodes_to_exclude
from edgeq.measure.exclusions import Exclusion
from edgeq.measure.layers import LayerComparison
from edgeq.records import plain
from edgeq.session import SessionSettings

_VERDICTS: Mapping[Closeness, str] = {
    "healthy": "the outputs follow float32 closely, and nothing needs to be mended",
    "noisy": "the outputs follow float32, with noise; measure the task's metric with `edgeq eval`",
    "poor": "the outputs do not follow float32; keep the nodes that help in float, or see `edgeq tune`",
}


@dataclass(frozen=True)
class Diagnosis(Page):
    """What was found.

    Attributes:
        float_model, quantized, data: as `edgeq.debug` was given them.
        variant: of a bundle; None for a model file.
        settings: what the quantized model was opened with.
        worst: error sources that are named at most.
        prepared: whether the float model had to be prepared (`edgeq.model.prepare`) to match.
        comparison: weights and activations, on the graph as written.
        noise: what each activation's layer adds itself, in the same order.
        effects: the float model's outputs with the error of one layer alone, for the layers that may cause the error.
        optimised: the model's outputs in the session that ships; `written`: without graph optimisation.
        notes, warnings: one sentence each.
        exclusions: nodes that help when they stay in float, as it was computed, the best first; looked for where the
            outputs are not healthy.
        engine: the quantized activations in the engine `engine_name`, if one was to be compared.
    """

    float_model: Path
    quantized: Path
    data: Any
    variant: str | None
    settings: SessionSettings
    worst: int
    prepared: bool
    comparison: LayerComparison
    noise: tuple[LayerNoise, ...]
    effects: Mapping[str, Agreement]
    error_sources: tuple[ErrorSource, ...]
    optimised: Agreement
    written: Agreement
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    exclusions: tuple[Exclusion, ...] = ()
    engine: tuple[EngineLayer, ...] = ()
    engine_name: str = ""

    @property
    def verdict(self) -> Closeness:
        """ "healthy", "noisy" or "poor", by the worst output, or slice of one, of the session that ships."""
        return closeness(self.optimised)

    @property
    def verdict_text(self) -> str:
        """The verdict as a sentence."""
        worst = self.optimised.worst
        missing = [output.name for output in self.optimised.outputs if output.mismatched and not output.compared]
        if missing or worst is None:
            figure = f"output {missing[0]!r} could not be compared" if missing else "no output could be compared"
        else:
            part = f" in output {worst.name!r}, {worst.worst_slice.where}" if worst.worst_slice is not None else ""
            figure = f"{worst.least_db:.1f} dB SQNR{part}"
        return f"{self.verdict}: {_VERDICTS[self.verdict]} ({figure})"

    @property
    def exclude(self) -> tuple[str, ...]:
        """Nodes that would keep all error sources in float."""
        return nodes_to_exclude(self.error_sources)

    def __brief__(self) -> dict[str, Any]:
        models = {"float_model": self.float_model, "quantized": self.quantized}
        sources = {"error_sources": self.error_sources, "exclude": self.exclude, "helps": self.exclusions[:1]}
        agreement = {
            "verdict": self.verdict_text,
            "sqnr_db": self.optimised.sqnr_db,
            "as_written_db": self.written.sqnr_db,
        }
        return {**models, **agreement, **sources, "samples": self.comparison.count, "warnings": self.warnings}

    def __page__(self) -> dict[str, Any]:
        shown = {"samples": self.comparison.count, "warnings": list(self.warnings)}
        variant = {"agreement": plain(self.optimised), "layers": plain(self), **shown}
        return {"name": self.quantized.name, "variants": {"int8": variant}, "notes": list(self.notes)}

    def __record__(self) -> dict[str, Any]:
        """Plain JSON values; every key is always there."""
        compared = plain(self.comparison)
        for activation, noise in zip(compared["activations"], self.noise, strict=True):
            effect = self.effects.get(noise.name)
            activation["noise"] = noise
            activation["output_sqnr_db"] = None if effect is None else effect.sqnr_db
        return {
            "float_model": str(self.float_model),
            "quantized_model": str(self.quantized),
            "variant": self.variant,
            "data": str(self.data),
            "count": self.comparison.count,
            "prepared": self.prepared,
            "verdict": self.verdict,
            "verdict_text": self.verdict_text,
            "outputs": {"optimised": self.optimised, "as_written": self.written},
            "culprits": self.error_sources,
            "exclude": self.exclude,
            "exclusions": self.exclusions,
            "weights": compared["weights"],
            "activations": compared["activations"],
            "engine": self.engine,
            "notes": self.notes,
            "warnings": self.warnings,
        }
