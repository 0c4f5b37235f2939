"""Means of layers' outputs, channel by channel, as what follows them sees them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.calibrate.sampled_values import tensor_values
from edgeq.data.samples import Sample
from edgeq.model.prepare import PreparedModel
from edgeq.tune.recover.elementwise import Function
from edgeq.tune.recover.layers import Floats, Layer

# Positions of a sample that are evaluated.
_POSITIONS = 4096


@dataclass(frozen=True, eq=False)
class OutputView:
    """What is compared of a layer's output: some positions, clipped to its integer range, behind its activation.

    Attributes:
        function: what follows element by element.
        limits: ends of the integer range.
    """

    layer: Layer
    function: Function
    limits: tuple[float, float]

    def table(self, value: NDArray[Any]) -> NDArray[np.float32]:
        """Some positions, the same in every tensor of this shape: float32 [positions, channels]."""
        axis = self.layer.channel_axis % value.ndim
        table = np.moveaxis(value, axis, -1).reshape(-1, value.shape[axis])
        if len(table) > _POSITIONS:
            # At random, since every so-many-th position may be one column of the image.
            table = table[np.random.default_rng(0).integers(0, len(table), _POSITIONS)]
        low, high = (np.float32(limit) for limit in self.limits)
        return np.asarray(np.clip(table, low, high), np.float32)

    def means(self, table: NDArray[np.float32]) -> Floats:
        """float64 [ends, channels]: the mean behind the activation function."""
        with np.errstate(invalid="ignore"):
            found = self.function(table).reshape(-1, *table.shape)
            return np.asarray(np.add.reduce(found, axis=1, dtype=np.float64) / len(table), np.float64)


def float_means(
    prepared: PreparedModel, views: Mapping[str, OutputView], samples: Sequence[Sample], *, store: Path | None = None
) -> tuple[Mapping[str, Floats], int]:
    """Means of each layer in the float model, by the layer's name.

    Args:
        store: a folder where they are kept for further calls with the same samples, as in a search that builds one
            float model in many forms.

    Returns:
        (float64 [samples, ends, channels] of each, bytes of the largest output).
    """
    files = {name: _file(store, prepared, view) for name, view in views.items()} if store is not None else {}
    found = {name: _load(file) for name, file in files.items() if file.exists()}
    missing = {name: view for name, view in views.items() if name not in found}
    for name, (means, largest) in _computed(prepared, missing, samples).items():
        found[name] = means, largest
        if store is not None:
            np.savez(files[name], means=means, largest=largest)
    return {name: means for name, (means, _) in found.items()}, max(
        (largest for _, largest in found.values()), default=1
    )


def _computed(
    prepared: PreparedModel, views: Mapping[str, OutputView], samples: Sequence[Sample]
) -> dict[str, tuple[Floats, int]]:
    """(means, bytes of an output) of each layer."""
    if not views:
        return {}
    means: dict[str, list[Floats]] = {name: [] for name in views}
    largest = dict.fromkeys(views, 1)
    for values in tensor_values(prepared, [view.layer.output for view in views.values()], samples):
        for name, view in views.items():
            value = values[view.layer.output]
            means[name].append(view.means(view.table(value)))
            largest[name] = max(largest[name], value.nbytes)
    return {name: (np.stack(rows), largest[name]) for name, rows in means.items()}


def _file(store: Path, prepared: PreparedModel, view: OutputView) -> Path:
    text = repr((prepared.digest, view.layer.name, view.limits))
    return store / f"means-{hashlib.sha256(text.encode()).hexdigest()}.npz"


def _load(path: Path) -> tuple[Floats, int]:
    with np.load(path, allow_pickle=False) as arrays:
        return arrays["means"], int(arrays["largest"])
