"""Round weights in blocks (MatMulNBits) again, for the least error of a product, not of each weight.

First, every block is fitted anew, with each weight's error weighted by the mean square of the input that the weight
multiplies. Then the integers are rounded in one pass (`edgeq.quantization.gptq`), with the scales of the blocks
unchanged. Each output gets the blocks with the least expected error: the file's own, the fitted or the rounded ones.
One float pass over a few samples measures the second moments of the products' inputs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

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
from edgeq.tuning.recover.patch_moments import PatchMoments, PatchSums
from edgeq.util.display import SILENT, Progress

MEMORY = 2**29
"""Bytes that moments may take at once. If not all layers fit, the rest need further passes."""
LARGEST = 2**26
"""Limit of entries in a layer's second moment (groups x taps^2): half a gigabyte. Larger layers are skipped."""
_SAMPLES = 32  # the largest number of samples, spread evenly over all samples
_MAX_STORED_BYTES = 2**23


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
            sums = {layer.name: PatchSums(layer) for layer in partition}
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


def _moments_file(store: Path, layer: WeightedLayer) -> Path:
    return store / (hashlib.sha256(layer.name.encode()).hexdigest() + ".npz")


def _load_moments(path: Path) -> PatchMoments:
    with np.load(path, allow_pickle=False) as arrays:
        return PatchMoments(int(arrays["count"]), arrays["mean"], arrays["covariance"])


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


@dataclass(frozen=True)
class WeightRounding(Recovery):
    """Round weights in blocks again. The nodes do not change."""

    name: str = "weight-rounding"
    title: str = "weights in blocks rounded for the least error of each product"
    stage: Stage = "artifact"
    free: bool = True
    order = 80
    modes = ("weight-only",)

    def apply(self, state: RecoveryState, samples: Samples, workdir: Path, progress: Progress) -> RecoveryState:
        """Round the weights of `state` again.

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
            rows = floats.rows(layer)
            gains.append(_round_product(products[layer.name], rows, damp(moments.second, 0.0)))
        if not gains:
            return state.note(f"{self.name}: no product has weights in blocks of its own")
        artifact = replace(state.artifact, model=workdir / state.artifact.model.name)
        # The weights have less noise, so the noise of int8 activations matters more.
        if state.scheme.float_compute is None:
            artifact = with_compute(artifact, choose_compute(model, state.prepared, samples))
        save_model(model, artifact.model)
        return state.replace(artifact=artifact).note(
            f"{self.name}: {len(gains)} products in blocks, the error that weights cause falls by "
            f"{float(np.median(gains)):.1f} dB (median)"
        )


RECOVERY = WeightRounding()
