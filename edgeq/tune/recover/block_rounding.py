"""Weights in blocks (MatMulNBits) rounded again, for the least expected error of each product's output.

Every block is fitted anew first, each weight counting by the mean square of the input that it meets; then the integers
are rounded in one go (`rounding`), the scales of the blocks staying. Of the file's own blocks and these two, each
output keeps what its expected error is least with.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from edgeq.backends.base import described
from edgeq.data.samples import Samples
from edgeq.model.load import read_model, save_model
from edgeq.quantize.block_weights import (
    BlockWeights,
    choose_compute,
    find_blocks,
    fit_blocks,
    read_blocks,
    store_blocks,
)
from edgeq.quantize.weight_only import damped, round_rows, squared
from edgeq.tune.recover.base import State
from edgeq.tune.recover.layers import Floats, Weights, find_layers
from edgeq.tune.recover.moments import layer_moments
from edgeq.util.display import Progress


def round_blocks(name: str, state: State, samples: Samples, workdir: Path, progress: Progress) -> State:
    """The state with the products of its artifact rounded anew, and a note that begins with `name`.

    Raises:
        DataError: ONNX Runtime refuses a sample.
    """
    assert state.artifact is not None
    floats = Weights(state.prepared.model)
    model = read_model(state.artifact.model)
    ir.external_data.load_to_model(model)  # what is saved may take the place of what was read
    products = find_blocks(model)
    layers = [layer for layer in find_layers(state.prepared.model) if layer.name in products]
    store = workdir.parent / f"moments-{state.prepared.digest}"
    gains = []
    for layer, moments in layer_moments(state.prepared, layers, samples, store=store, progress=progress):
        moment = moments.covariance + moments.mean[:, :, None] * moments.mean[:, None, :]
        rows = floats.rows(layer)
        gains.append(_round(products[layer.name], rows, damped(moment, 0.0)))
    if not gains:
        return state.note(f"{name}: no product has weights in blocks of its own")
    artifact = replace(state.artifact, model=workdir / state.artifact.model.name)
    if state.scheme.float_compute is None:  # less noise of weights, so that int8 activations count for more
        artifact = described(artifact, choose_compute(model, state.prepared, samples))
    save_model(model, artifact.model)
    better = float(np.median(gains))
    return state.replace(artifact=artifact).note(
        f"{name}: {len(gains)} products in blocks, the error that weights cause falls by {better:.1f} dB (median)"
    )


def _round(product: ir.Node, rows: Floats, metric: Floats) -> float:
    """Round one product in place; by how many decibels its expected squared error falls.

    Args:
        rows: float64 [1, n, k], the float weights.
        metric: float64 [1, k, k], the second moment of its input.
    """
    own = read_blocks(product)
    importance = np.diagonal(metric[0]).astype(np.float32)
    matrix = np.ascontiguousarray(rows[0].T, np.float32)
    size = own.integers.shape[-1]
    fitted = fit_blocks(matrix, own.bits, size, symmetric=own.symmetric, importance=importance)
    low, high = fitted.limits
    rounded = fitted.with_differences(
        round_rows(rows, metric, low[None], high[None], scale=fitted.steps.astype(np.float64)[None])[0]
    )
    tried = (own, fitted, rounded)
    errors = np.array([squared(rows - b.matrix().T.astype(np.float64), metric)[0] for b in tried])
    best = errors.argmin(0)
    store_blocks(product, _joined(tried, best))
    before, after = float(errors[0].sum()), float(errors.min(0).sum())
    return 10 * np.log10(before / after) if before > 0 and after > 0 else 0.0


def _joined(tried: tuple[BlockWeights, ...], best: np.ndarray) -> BlockWeights:
    """Output by output, the blocks that `best` names."""
    outputs = np.arange(len(best))
    return replace(
        tried[0],
        integers=np.stack([b.integers for b in tried])[best, outputs],
        scales=np.stack([b.scales for b in tried])[best, outputs],
        zero_points=np.stack([b.zero_points for b in tried])[best, outputs],
    )
