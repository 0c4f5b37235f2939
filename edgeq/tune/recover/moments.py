"""First and second moments of the inputs of layers, from one float pass over a few samples.

They determine what an error in the weights does to a layer's output: with dW the error, the output is off by dW x, on
average dW E[x], with the covariance dW Cov[x] dW'."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.calibrate.sampled_values import spread, tensor_values
from edgeq.data.records import Sample
from edgeq.data.samples import Samples
from edgeq.model.load import partitions
from edgeq.model.prepare import PreparedModel
from edgeq.tune.recover.layers import Floats, Layer
from edgeq.tune.recover.nonlinear import Function
from edgeq.util.display import SILENT, Progress

MEMORY = 2**29
"""Bytes that moments may take at once; more layers take several passes."""
LARGEST = 2**26
"""Entries of a layer's second moment (groups x taps^2). A layer with more is left out: half a gigabyte."""
_SAMPLES = 32  # at most, spread over all there are
_PATCHES_PER_TAP = 4
_FEWEST, _MOST = 512, 8192
_STORED = 2**23
_HELD = 2**20
"""Bytes of patches of a layer that are collected before they are multiplied."""


@dataclass(frozen=True, eq=False)
class Moments:
    """Of the patches that a layer reads.

    Attributes:
        count: patches seen.
        mean: float64 [groups, taps].
        covariance: float64 [groups, taps, taps].
    """

    count: int
    mean: Floats
    covariance: Floats


def layer_moments(
    prepared: PreparedModel,
    layers: Sequence[Layer],
    samples: Samples,
    *,
    memory: int = MEMORY,
    store: Path | None = None,
    progress: Progress = SILENT,
) -> Iterator[tuple[Layer, Moments]]:
    """The moments of each layer's patches, layer by layer; layers that share their input share its computation.

    Positions are drawn at random with a fixed seed, about four patches for each tap over all samples.

    Args:
        prepared: the float model that the layers belong to.
        memory: bytes for the moments of one pass.
        store: a folder where moments of this model on these samples are kept, unless they are very large; those found
            there are not computed again.

    Raises:
        DataError: ONNX Runtime refuses a sample.
    """
    if store is not None:
        store.mkdir(exist_ok=True)
        kept = [layer for layer in layers if _file(store, layer).exists()]
        for layer in kept:
            yield layer, _load(_file(store, layer))
        layers = [layer for layer in layers if layer not in kept]
    if not layers:
        return
    fitting = [layer for layer in layers if layer.groups * layer.taps**2 <= LARGEST]
    parts = list(partitions(((layer, 8 * layer.groups * layer.taps**2) for layer in fitting), memory))
    total = min(_SAMPLES, len(samples))
    with progress.stage("moments of the layers' inputs", len(parts) * total) as advance:
        for partition in parts:
            sums = {layer.name: _Sums(layer) for layer in partition}
            sources = [layer.source for layer in partition]
            for number, values in enumerate(tensor_values(prepared, sources, spread(samples, _SAMPLES))):
                for layer in partition:
                    random = np.random.default_rng([number, layer.taps])
                    sums[layer.name].add(values[layer.source], total, random)
                advance(1)
            for layer in partition:
                found = sums.pop(layer.name).moments()
                if store is not None and found.covariance.nbytes <= _STORED:
                    np.savez(_file(store, layer), count=found.count, mean=found.mean, covariance=found.covariance)
                yield layer, found


class _Sums:
    """Sums over patches. Patches of several samples are multiplied at once: one large product instead of many small.

    The sums are of patches less the mean of the first ones: taken off at the end, a mean far from zero would cost the
    covariance its digits.
    """

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self._count = 0
        self._held: list[NDArray[np.float32]] = []
        self._origin: NDArray[np.float32] | None = None
        self._first = np.zeros((layer.groups, layer.taps))
        self._second = np.zeros((layer.groups, layer.taps, layer.taps))

    def add(self, values: NDArray[Any], samples: int, random: np.random.Generator) -> None:
        """Add patches of one of `samples` values of the layer's input, drawn by `random`."""
        wanted = min(max(_PATCHES_PER_TAP * self._layer.taps, _FEWEST), _MOST)
        self._held.append(self._layer.patches(values, -(-wanted // samples), random))
        if sum(patches.nbytes for patches in self._held) > _HELD:
            self._multiply()

    def _multiply(self) -> None:
        if self._held:
            patches = np.concatenate(self._held, axis=1)
            self._held.clear()
            if self._origin is None:
                self._origin = patches.mean(1, keepdims=True)
            patches = patches - self._origin
            self._count += patches.shape[1]
            self._first += patches.sum(1, dtype=np.float64)
            self._second += patches.transpose(0, 2, 1) @ patches

    def moments(self) -> Moments:
        """Of all patches so far; there must be some."""
        self._multiply()
        assert self._origin is not None, "no sample was added"
        mean = self._first / self._count
        covariance = self._second / self._count - mean[:, :, None] * mean[:, None, :]
        return Moments(self._count, mean + self._origin[:, 0], covariance)


def _file(store: Path, layer: Layer) -> Path:
    return store / (hashlib.sha256(layer.name.encode()).hexdigest() + ".npz")


def _load(path: Path) -> Moments:
    with np.load(path, allow_pickle=False) as arrays:
        return Moments(int(arrays["count"]), arrays["mean"], arrays["covariance"])


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
    files = (
        {name: _file_of_output_means(store, prepared, view) for name, view in views.items()}
        if store is not None
        else {}
    )
    found = {name: _load_of_output_means(file) for name, file in files.items() if file.exists()}
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


def _file_of_output_means(store: Path, prepared: PreparedModel, view: OutputView) -> Path:
    text = repr((prepared.digest, view.layer.name, view.limits))
    return store / f"means-{hashlib.sha256(text.encode()).hexdigest()}.npz"


def _load_of_output_means(path: Path) -> tuple[Floats, int]:
    with np.load(path, allow_pickle=False) as arrays:
        return arrays["means"], int(arrays["largest"])
