"""How much each unit's own error changes the outputs, from a few samples and a few sessions.

The method is that of `edgeq.measure.effects`: every layer of the quantized model is fed the float model's tensors, so
that only its own error remains; the float model is run once for each unit with that unit's errors added where they
arise. The change of the outputs is the unit's noise.

Powers of independent errors add up, so the noise of a unit is what keeping it in float gains. Leaving each layer out of
quantization in turn would need a build and a session each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.backends import Artifact
from edgeq.data.samples import Samples
from edgeq.graph.index import GraphIndex
from edgeq.measure.effects import group_effects
from edgeq.measure.inference import Outputs
from edgeq.measure.layer_runs import MEMORY, floats_only
from edgeq.measure.match_activations import match_activations
from edgeq.model.load import read_own
from edgeq.model.prepare import PreparedModel
from edgeq.progress import SILENT, Progress
from edgeq.tune.recover.units import Unit, find_units

SAMPLES = 4
# Outputs with at least so many rows are compared column by column: a column may be a coordinate or a score.
_ROWS = 64
# What is not finite where the float model is counts as so many times the signal: no rounding is as bad.
_NOT_FINITE = 100.0


@dataclass(frozen=True)
class LayerSensitivity:
    """One unit's share of the output noise.

    Attributes:
        unit: of the float model; `unit.nodes` are the names to exclude.
        noise: power of the change at the outputs over the outputs' power, mean over outputs and their columns.
    """

    unit: Unit
    noise: float


def rank_layers(
    prepared: PreparedModel,
    artifact: Artifact,
    samples: Samples,
    *,
    count: int = SAMPLES,
    memory: int = MEMORY,
    progress: Progress = SILENT,
) -> tuple[LayerSensitivity, ...]:
    """Units of the float model by the noise that they cause in the quantized model, the most first.

    Args:
        prepared: the float model that `artifact` was made from, in whatever format.
        count: samples to use, evenly spread.
        memory: bytes that fetched tensors may take at once.

    Raises:
        DataError: a model refuses a sample.
    """
    settings = artifact.proof_settings()
    source, quantized = GraphIndex(prepared.model), GraphIndex(read_own(artifact.proof_model))
    matches = floats_only(source, match_activations(source, quantized), settings)
    matched = {match.name for match in matches}
    units = find_units(prepared.model)
    groups = {unit.name: [tensor for tensor in unit.tensors if tensor in matched] for unit in units}
    found = group_effects(
        source,
        quantized,
        matches,
        {name: tensors for name, tensors in groups.items() if tensors},
        samples,
        Columns,
        count=count,
        settings=settings,
        memory=memory,
        progress=progress,
    )
    ranked = [
        LayerSensitivity(unit, sum(part.noise for part in found.get(unit.name, ())))
        for unit in units
        if groups[unit.name]
    ]
    return tuple(sorted(ranked, key=lambda r: -r.noise))


@dataclass
class Columns:
    """Noise over signal of outputs, each column of a table by itself: a box counts as much as a score."""

    _noise: dict[str, list[NDArray[np.float64]]] = field(default_factory=dict)
    _signal: dict[str, list[NDArray[np.float64]]] = field(default_factory=dict)

    def update(self, reference: Outputs, candidate: Outputs) -> None:
        """Add one sample's outputs; elements that are not finite in the reference are left out."""
        for name, plain in reference.items():
            if plain.dtype.kind not in "biuf":
                continue
            signal, changed = np.asarray(plain, np.float64), np.asarray(candidate[name], np.float64)
            # An output whose size depends on the values and has changed counts as entirely wrong.
            with np.errstate(invalid="ignore"):
                noise = changed - signal if changed.shape == signal.shape else signal
            finite = np.isfinite(signal)
            noise = np.where(np.isfinite(noise), noise, _NOT_FINITE * signal)
            self._noise.setdefault(name, []).append(columns(np.where(finite, noise, 0.0)))
            self._signal.setdefault(name, []).append(columns(np.where(finite, signal, 0.0)))

    @property
    def noise(self) -> float:
        """Mean over outputs of the mean over columns of noise power over signal power."""
        shares = []
        for name in self._signal:
            noise, signal = (_added(parts[name]) for parts in (self._noise, self._signal))
            if np.any(signal > 0):
                shares.append(float(np.mean(noise[signal > 0] / signal[signal > 0])))
        return float(np.mean(shares)) if shares else 0.0


def columns(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sum of squares of an output, by column where it has many rows: a column may be a coordinate or a score."""
    squares = values**2
    if values.ndim > 1 and values.size // max(1, values.shape[-1]) >= _ROWS:
        return np.asarray(squares.reshape(-1, values.shape[-1]).sum(0))
    return np.asarray(squares.sum()).reshape(1)


def _added(parts: Sequence[NDArray[Any]]) -> NDArray[np.float64]:
    """Sums over samples; where their shapes differ, over columns too."""
    if len({part.shape for part in parts}) > 1:
        parts = [part.sum(keepdims=True) for part in parts]
    return np.asarray(np.sum(parts, axis=0), np.float64)
