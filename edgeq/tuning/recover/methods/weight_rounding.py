"""Round weights again, for the least error of a layer's output, not of each weight.

Rounding each weight to the nearest integer is best only if inputs are uncorrelated. `edgeq.quantization.gptq`
describes the better method, in which H is the second moment of the inputs. If the layer has a bias, this module uses
the covariance of the inputs as H, because the mean of the error, dW E[x], goes into the bias. The rounding of the input
adds step^2 / 12 to the diagonal of H, because it is an independent error in each tap.

One float pass over a few samples measures the first and second moments of the inputs of layers. These moments determine
how an error in the weights affects a layer's output. An error dW of the weights changes the output by dW x, which has
the mean dW E[x] and the covariance dW Cov[x] dW'.

Weights in blocks (MatMulNBits) are also rounded again. First, every block is fitted anew, with each weight's error
weighted by the mean square of the input that the weight multiplies. Then the integers are rounded in one pass, with the
scales of the blocks unchanged. Each output gets the blocks with the least expected error: the file's own, the fitted or
the rounded ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.backends.base import with_compute
from edgeq.calibration.sampled_values import real_rows, spread, tensor_values
from edgeq.data.samples import Samples
from edgeq.model.load import read_model, save_model
from edgeq.model.memory import partitions
from edgeq.model.prepare import PreparedModel
from edgeq.quantization.block_compute import choose_compute
from edgeq.quantization.block_products import find_blocks, read_blocks, store_blocks
from edgeq.quantization.block_weights import BlockWeights, fit_blocks
from edgeq.quantization.gptq import damp, round_rows, squared_errors
from edgeq.tuning.recover.base import Recovery, RecoveryState, Stage
from edgeq.tuning.recover.layers import Floats, WeightedLayer, Weights, find_layers
from edgeq.tuning.recover.quantized_file import IntegerLayer, QuantizedFile
from edgeq.util.display import SILENT, Progress

MEMORY = 2**29
"""Bytes that moments may take at once. If not all layers fit, the rest need further passes."""
LARGEST = 2**26
"""Limit of entries in a layer's second moment (groups x taps^2): half a gigabyte. Larger layers are skipped."""
_SAMPLES = 32  # the largest number of samples, spread evenly over all samples
# Fewer patches than taps would make the covariance singular.
_PATCHES_PER_TAP = 4
_MIN_PATCHES, _MAX_PATCHES = 512, 8192
_MAX_STORED_BYTES = 2**23
_PENDING_BYTES = 2**20
"""Bytes of a layer's patches to collect before multiplying them."""


@dataclass(frozen=True, eq=False)
class PatchMoments:
    """Hold moments of the patches that a layer reads.

    Attributes:
        count: number of patches seen.
        mean: float64 [groups, taps].
        covariance: float64 [groups, taps, taps].
    """

    count: int
    mean: Floats
    covariance: Floats


def measure_moments(
    prepared: PreparedModel,
    layers: Sequence[WeightedLayer],
    samples: Samples,
    *,
    memory: int = MEMORY,
    store: Path | None = None,
    progress: Progress = SILENT,
) -> Iterator[tuple[WeightedLayer, PatchMoments]]:
    """Yield each layer with the moments of its patches. An input that several layers read is computed only once.

    Positions are drawn at random with a fixed seed, about four patches for each tap over all samples.

    Args:
        prepared: the float model that the layers belong to.
        memory: bytes for the moments of one pass.
        store: a folder that keeps moments of this model on these samples, unless the moments are very large. Moments
            found there are not computed again.

    Raises:
        DataError: ONNX Runtime refuses a sample.
    """
    if store is not None:
        store.mkdir(exist_ok=True)
        stored = [layer for layer in layers if _moments_file(store, layer).exists()]
        for layer in stored:
            yield layer, _load_moments(_moments_file(store, layer))
        layers = [layer for layer in layers if layer not in stored]
    if not layers:
        return
    # The moments of a larger layer alone would exceed the memory of a pass.
    fitting = [layer for layer in layers if layer.groups * layer.taps**2 <= LARGEST]
    parts = list(partitions(((layer, 8 * layer.groups * layer.taps**2) for layer in fitting), memory))
    total = min(_SAMPLES, len(samples))
    with progress.stage("moments of the layers' inputs", len(parts) * total) as advance:
        for partition in parts:
            sums = {layer.name: _PatchSums(layer) for layer in partition}
            sources = [layer.source for layer in partition]
            for number, values in enumerate(tensor_values(prepared, sources, spread(samples, _SAMPLES))):
                for layer in partition:
                    # Seed by the sample and the layer's size, so that the order of the passes decides nothing.
                    random = np.random.default_rng([number, layer.taps])
                    source = values[layer.source]
                    if layer.op_type != "Conv":
                        source = real_rows(prepared.graph, layer.source, values, -1)
                    sums[layer.name].add(source, total, random)
                advance(1)
            for layer in partition:
                moments = sums.pop(layer.name).moments()
                # Very large moments would fill the folder.
                if store is not None and moments.covariance.nbytes <= _MAX_STORED_BYTES:
                    np.savez(
                        _moments_file(store, layer),
                        count=moments.count,
                        mean=moments.mean,
                        covariance=moments.covariance,
                    )
                yield layer, moments


class _PatchSums:
    """Hold sums over patches. Patches of several samples are multiplied at once: one large product instead of many
    small ones.

    The mean of the first patches is subtracted from all patches. If a mean far from zero were subtracted only at the
    end, the covariance would lose precision.
    """

    def __init__(self, layer: WeightedLayer) -> None:
        self._layer = layer
        self._count = 0
        self._pending: list[NDArray[np.float32]] = []
        self._origin: NDArray[np.float32] | None = None
        self._sum = np.zeros((layer.groups, layer.taps))
        self._sum_of_products = np.zeros((layer.groups, layer.taps, layer.taps))

    def add(self, values: NDArray[Any], samples: int, random: np.random.Generator) -> None:
        """Add patches of the layer's input in one of `samples` samples. The patches are drawn by `random`."""
        patch_count = min(max(_PATCHES_PER_TAP * self._layer.taps, _MIN_PATCHES), _MAX_PATCHES)
        self._pending.append(self._layer.patches(values, -(-patch_count // samples), random))
        if sum(patches.nbytes for patches in self._pending) > _PENDING_BYTES:
            self._multiply()

    def _multiply(self) -> None:
        if self._pending:
            patches = np.concatenate(self._pending, axis=1)
            self._pending.clear()
            if self._origin is None:
                self._origin = patches.mean(1, keepdims=True)
            patches = patches - self._origin
            self._count += patches.shape[1]
            self._sum += patches.sum(1, dtype=np.float64)
            self._sum_of_products += patches.transpose(0, 2, 1) @ patches

    def moments(self) -> PatchMoments:
        """Return the moments of all patches so far. At least one sample must have been added."""
        self._multiply()
        assert self._origin is not None, "no sample was added"
        mean = self._sum / self._count
        covariance = self._sum_of_products / self._count - mean[:, :, None] * mean[:, None, :]
        return PatchMoments(self._count, mean + self._origin[:, 0], covariance)


def _moments_file(store: Path, layer: WeightedLayer) -> Path:
    return store / (hashlib.sha256(layer.name.encode()).hexdigest() + ".npz")


def _load_moments(path: Path) -> PatchMoments:
    with np.load(path, allow_pickle=False) as arrays:
        return PatchMoments(int(arrays["count"]), arrays["mean"], arrays["covariance"])


def round_blocks(name: str, state: RecoveryState, samples: Samples, workdir: Path, progress: Progress) -> RecoveryState:
    """Return the state after the products of its artifact are rounded again, with a note that begins with `name`.

    Raises:
        DataError: ONNX Runtime refuses a sample.
    """
    assert state.artifact is not None
    floats = Weights(state.prepared.model)
    model = read_model(state.artifact.model)
    ir.external_data.load_to_model(model)  # the file to be saved may replace the one that was read
    products = find_blocks(model)
    layers = [layer for layer in find_layers(state.prepared.model) if layer.name in products]
    store = workdir.parent / f"moments-{state.prepared.digest}"
    gains = []
    for layer, moments in measure_moments(state.prepared, layers, samples, store=store, progress=progress):
        moment = moments.covariance + moments.mean[:, :, None] * moments.mean[:, None, :]
        rows = floats.rows(layer)
        gains.append(_round_product(products[layer.name], rows, damp(moment, 0.0)))
    if not gains:
        return state.note(f"{name}: no product has weights in blocks of its own")
    artifact = replace(state.artifact, model=workdir / state.artifact.model.name)
    if state.scheme.float_compute is None:  # the weights have less noise, so the noise of int8 activations matters more
        artifact = with_compute(artifact, choose_compute(model, state.prepared, samples))
    save_model(model, artifact.model)
    better = float(np.median(gains))
    return state.replace(artifact=artifact).note(
        f"{name}: {len(gains)} products in blocks, the error that weights cause falls by {better:.1f} dB (median)"
    )


def _round_product(product: ir.Node, rows: Floats, metric: Floats) -> float:
    """Round the weights of one product again, in place. Return the decibels by which the expected squared error of the
    product falls.

    Args:
        rows: float64 [1, n, k], the float weights.
        metric: float64 [1, k, k], the second moment of the product's input.
    """
    stored = read_blocks(product)
    importance = np.diagonal(metric[0]).astype(np.float32)
    matrix = np.ascontiguousarray(rows[0].T, np.float32)
    size = stored.integers.shape[-1]
    fitted = fit_blocks(matrix, stored.bits, size, symmetric=stored.symmetric, importance=importance)
    low, high = fitted.limits
    rounded = fitted.with_differences(
        round_rows(rows, metric, low[None], high[None], scale=fitted.steps.astype(np.float64)[None])[0]
    )
    choices = (stored, fitted, rounded)
    # Each output keeps what it has if neither alternative is better, so the method never does harm.
    errors = np.array([squared_errors(rows - b.matrix().T.astype(np.float64), metric)[0] for b in choices])
    best = errors.argmin(0)
    store_blocks(product, _join_blocks(choices, best))
    old_error, new_error = float(errors[0].sum()), float(errors.min(0).sum())
    return 10 * np.log10(old_error / new_error) if old_error > 0 and new_error > 0 else 0.0


def _join_blocks(choices: tuple[BlockWeights, ...], best: np.ndarray) -> BlockWeights:
    """Return blocks that are put together from `choices`. For each output, `best` is the index in `choices` of the
    blocks to use.
    """
    outputs = np.arange(len(best))
    return replace(
        choices[0],
        integers=np.stack([b.integers for b in choices])[best, outputs],
        scales=np.stack([b.scales for b in choices])[best, outputs],
        zero_points=np.stack([b.zero_points for b in choices])[best, outputs],
    )


_MAX_STORED_WEIGHTS = 2**22
"""Results are kept only for layers with at most this many weights."""


@dataclass(frozen=True)
class WeightRounding(Recovery):
    """Round weights again, with their mean error in the bias. The nodes do not change."""

    name: str = "weight-rounding"
    title: str = "weights rounded for the least error of each layer's output"
    stage: Stage = "artifact"
    free: bool = True
    order = 70
    modes = ("static", "weight-only")

    def apply(self, state: RecoveryState, samples: Samples, workdir: Path, progress: Progress) -> RecoveryState:
        """Round the weights of `state` again.

        Raises:
            EdgeqError: for the same reasons as in `measure_moments`.
        """
        assert state.artifact is not None
        if state.scheme.mode == "weight-only":
            return round_blocks(self.name, state, samples, workdir, progress)
        floats = Weights(state.prepared.model)
        file = QuantizedFile.load(state.artifact.model)
        integer_layers = file.integer_layers(find_layers(state.prepared.model))
        integers = {integer.layer.name: integer for integer in integer_layers if not integer.has_other_readers}
        limits = weight_limits(state.scheme.weight_type, state.scheme.reduce_range)
        gains = []
        layers = [integer.layer for integer in integers.values()]
        store = workdir.parent / f"moments-{state.prepared.digest}"
        for layer, moments in measure_moments(state.prepared, layers, samples, store=store, progress=progress):
            gains.append(round_layer(file, integers[layer.name], floats, moments, limits, store=store))
        if not gains:
            return state.note(f"{self.name}: no layer has integer weights of its own")
        path = workdir / state.artifact.model.name
        file.save(path)
        better = float(np.median(gains))
        artifact = replace(state.artifact, model=path)
        return state.replace(artifact=artifact).note(
            f"{self.name}: {len(gains)} layers, the error that weights cause falls by {better:.1f} dB (median)"
        )


def round_layer(
    file: QuantizedFile,
    integer: IntegerLayer,
    floats: Weights,
    moments: PatchMoments,
    limits: tuple[int, int],
    *,
    store: Path | None = None,
) -> float:
    """Round the weights of one layer of `file` again, and add the mean of the remaining error to its bias, in place.

    Args:
        floats: weights of the float model.
        limits: smallest and largest integer of the weight type, before the zero point is subtracted.
        store: an existing folder that keeps the rounded weights for later builds with the same layer.

    Returns:
        The decibels by which the expected squared error of the output falls.
    """
    layer = integer.layer
    rows = floats.rows(layer)
    scale = integer.per_row(integer.params.scale)
    zero = integer.per_row(integer.params.zero_point)
    old = file.weight(integer)
    mean = moments.mean[:, None, :]
    # Without a bias, the mean error stays in the output, so it counts as error as well.
    shape = moments.covariance if integer.bias is not None else moments.covariance + mean.transpose(0, 2, 1) * mean
    metric = damp(shape, integer.input_scale)
    new = _load_or_round(rows / scale, metric, limits[0] - zero, limits[1] - zero, store)
    old_error, new_error = (squared_errors(rows - scale * q, metric) for q in (old, new))
    integers = np.where((new_error < old_error)[:, :, None], new, old)
    file.set_weight(integer, integers)
    remaining = ((rows - scale * integers) * mean).sum(2).ravel()
    if integer.bias is not None:
        # Start from the float bias, not from the file's bias, so that applying the method twice has the same result as
        # once.
        target_bias = floats.array(layer.bias).ravel() if layer.bias else 0.0
        file.add_to_bias(integer, target_bias + remaining - file.bias(integer))
        lost = squared_errors(rows - scale * old, metric) + (((rows - scale * old) * mean).sum(2)) ** 2
    else:
        lost = old_error
    total_error, remaining_error = float(lost.sum()), float(np.minimum(old_error, new_error).sum())
    return 10 * np.log10(total_error / remaining_error) if remaining_error > 0 and total_error > 0 else 0.0


def _load_or_round(
    rows: Floats, metric: Floats, low: NDArray[np.int64], high: NDArray[np.int64], store: Path | None
) -> NDArray[np.int64]:
    """Return the result of `round_rows`. If an earlier call had the same arguments, its stored result is returned."""
    if store is None or rows.size > _MAX_STORED_WEIGHTS:
        return round_rows(rows, metric, low, high)
    digest = hashlib.sha256(repr(rows.shape).encode())
    for array in (rows, metric, low, high):
        digest.update(np.ascontiguousarray(array).tobytes())
    path = store / f"rounded-{digest.hexdigest()}.npy"
    if not path.exists():
        np.save(path, round_rows(rows, metric, low, high).astype(np.int16), allow_pickle=False)
    return np.asarray(np.load(path, allow_pickle=False), np.int64)


def weight_limits(weight_type: str, reduce_range: bool) -> tuple[int, int]:
    """Return the smallest and the largest integer that ONNX Runtime's quantizer uses for weights of "int8" or "uint8".

    Args:
        reduce_range: whether weights have 7 bits.
    """
    if weight_type == "int8":
        return (-64, 64) if reduce_range else (-127, 127)
    return (0, 127) if reduce_range else (0, 255)


RECOVERY = WeightRounding()
