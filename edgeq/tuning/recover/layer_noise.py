"""Measure the noise that each unit of a float model causes at the outputs of the quantized model.

The noise comes from one pass over a few samples, by the method of `edgeq.measure.layers`. Every layer of the quantized
model gets the float model's tensors as inputs, so that only its own error remains. Gradients at the outputs then tell
how much this error changes them (`edgeq.measure.sensitivity`). Powers of independent errors add up, so a unit's noise
is also the gain of keeping it in float. The alternatives are a build for each unit that is left out of quantization,
or a run of the float model for each unit with its errors added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from edgeq.backends.base import Artifact
from edgeq.data.samples import Samples
from edgeq.measure.inference import Outputs
from edgeq.measure.layers import MEMORY, LayerPair
from edgeq.measure.sensitivity import ProbeOptions
from edgeq.model.graph import GraphIndex
from edgeq.model.load import read_unchecked
from edgeq.model.prepare import PreparedModel
from edgeq.tuning.float_layers import RankedLayer
from edgeq.tuning.recover.units import find_units
from edgeq.util.heap import return_freed_memory

# Outputs with at least this many rows are compared by column, because a column may be a coordinate or a score.
_ROWS = 64
# If an element is not finite although the float model's element is, it counts as this many times the signal. No
# rounding error is as large.
_NOT_FINITE = 100.0


def rank_layers(
    prepared: PreparedModel,
    artifact: Artifact,
    samples: Samples,
    *,
    memory: int = MEMORY,
    **options: Unpack[ProbeOptions],
) -> tuple[RankedLayer, ...]:
    """Rank units of the float model by the noise that they cause in the quantized model, the noisiest first.

    Args:
        prepared: the float model that `artifact` was made from; the artifact may have any format.
        memory: bytes that fetched tensors may take at once.
        options: what counts at the outputs, and how many samples and directions to use; see `follow_gradients`.

    Raises:
        DataError: a model refuses a sample.
    """
    settings = artifact.proof_settings()
    source, quantized = GraphIndex(prepared.model), GraphIndex(read_unchecked(artifact.proof_model))
    pair = LayerPair(source, quantized, settings=settings, memory=memory)
    matched = {match.name for match in pair.matches}
    noise = pair.output_noise(samples, **options)
    return_freed_memory()
    units = [unit for unit in find_units(prepared.model) if not matched.isdisjoint(unit.tensors)]
    ranked = [RankedLayer(u.name, u.nodes, sum(noise.get(tensor, 0.0) for tensor in u.tensors)) for u in units]
    return tuple(sorted(ranked, key=lambda r: -r.noise))


@dataclass
class ColumnNoise:
    """Measure the noise power of outputs relative to their signal power. In a table, each column is measured
    separately, so that boxes and scores have the same weight.
    """

    _noise: dict[str, list[NDArray[np.float64]]] = field(default_factory=dict)
    _signal: dict[str, list[NDArray[np.float64]]] = field(default_factory=dict)
    _limit: float = 1.0

    def update(self, reference: Outputs, candidate: Outputs) -> None:
        """Add one sample's outputs. Elements that are not finite in the reference are left out."""
        for name, reference_array in reference.items():
            if reference_array.dtype.kind not in "biuf":
                continue
            signal, changed = np.asarray(reference_array, np.float64), np.asarray(candidate[name], np.float64)
            # If the size of an output depends on values and has changed, the output counts as entirely wrong.
            with np.errstate(invalid="ignore"):
                noise = changed - signal if changed.shape == signal.shape else signal
            finite = np.isfinite(signal)
            if not np.isfinite(noise[finite]).all():
                self._limit = np.inf
            noise = np.where(np.isfinite(noise), noise, _NOT_FINITE * signal)
            self._noise.setdefault(name, []).append(column_powers(np.where(finite, noise, 0.0)))
            self._signal.setdefault(name, []).append(column_powers(np.where(finite, signal, 0.0)))

    @property
    def noise(self) -> float:
        """Return noise power over signal power, averaged over the columns of each output and then over the outputs. It
        is at most 1 if all values are finite.
        """
        shares = []
        for name in self._signal:
            noise, signal = (_add_up(parts[name]) for parts in (self._noise, self._signal))
            if np.any(signal > 0):
                # If noise exceeds the signal, count it as equal to the signal. Otherwise it would hide the noise of the
                # other columns.
                shares.append(float(np.mean(np.minimum(noise[signal > 0] / signal[signal > 0], self._limit))))
        return float(np.mean(shares)) if shares else 0.0


def column_powers(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sum of squares of an output. If the output has many rows, return one sum for each column, because a
    column may be a coordinate or a score.
    """
    squares = values**2
    if values.ndim > 1 and values.size // max(1, values.shape[-1]) >= _ROWS:
        return np.asarray(squares.reshape(-1, values.shape[-1]).sum(0))
    return np.asarray(squares.sum()).reshape(1)


def _add_up(parts: Sequence[NDArray[Any]]) -> NDArray[np.float64]:
    """Add up sums over samples. If their shapes differ, add up their columns first."""
    if len({part.shape for part in parts}) > 1:
        parts = [part.sum(keepdims=True) for part in parts]
    return np.asarray(np.sum(parts, axis=0), np.float64)
