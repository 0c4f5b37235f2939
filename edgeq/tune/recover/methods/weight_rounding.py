"""Weights rounded again, for the least error of a layer's output instead of each weight's.

Rounding each weight to the nearest integer is best only where inputs are uncorrelated (`edgeq.quantize.weight_only`).
For a layer with a bias, H is the covariance alone: the mean of the error, dW E[x], goes into the bias. The rounding of
the input adds step^2 / 12 to the diagonal of H, since it is an error of its own in each tap.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeq.data.samples import Samples
from edgeq.quantize.weight_only import damped, round_rows, squared
from edgeq.tune.recover.artifact import IntegerLayer, QuantizedFile
from edgeq.tune.recover.base import Recovery, Stage, State
from edgeq.tune.recover.block_rounding import round_blocks
from edgeq.tune.recover.layers import Floats, Weights, find_layers
from edgeq.tune.recover.moments import Moments, layer_moments
from edgeq.util.display import Progress

_KEPT = 2**22
"""Weights of a layer up to which the result is kept."""


@dataclass(frozen=True)
class WeightRounding(Recovery):
    """The recovery: re-rounded weights, their mean error in the bias. The nodes stay as they are."""

    name: str = "weight-rounding"
    title: str = "weights rounded for the least error of each layer's output"
    stage: Stage = "artifact"
    free: bool = True
    order = 70
    modes = ("static", "weight-only")

    def apply(self, state: State, samples: Samples, workdir: Path, progress: Progress) -> State:
        """Raises:
        EdgeqError: as `layer_moments`.
        """
        assert state.artifact is not None
        if state.scheme.mode == "weight-only":
            return round_blocks(self.name, state, samples, workdir, progress)
        floats = Weights(state.prepared.model)
        file = QuantizedFile.read(state.artifact.model)
        found = file.integer_layers(find_layers(state.prepared.model))
        integers = {integer.layer.name: integer for integer in found if not integer.shared}
        limits = weight_limits(state.scheme.weight_type, state.scheme.reduce_range)
        gains = []
        layers = [integer.layer for integer in integers.values()]
        store = workdir.parent / f"moments-{state.prepared.digest}"
        for layer, moments in layer_moments(state.prepared, layers, samples, store=store, progress=progress):
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
    moments: Moments,
    limits: tuple[int, int],
    *,
    store: Path | None = None,
) -> float:
    """Round one layer of `file` anew and put the mean of the remaining error into its bias, in place.

    Args:
        floats: of the float model.
        limits: smallest and largest integer of the weight type, before the zero point is subtracted.
        store: an existing folder where what was rounded is kept, for the next build in which the layer is the same.

    Returns:
        By how many decibels the expected squared error of the output falls.
    """
    layer = integer.layer
    rows = floats.rows(layer)
    scale = integer.per_row(integer.params.scale)
    zero = integer.per_row(integer.params.zero_point)
    old = file.weight(integer)
    mean = moments.mean[:, None, :]
    shape = moments.covariance if integer.bias is not None else moments.covariance + mean.transpose(0, 2, 1) * mean
    metric = damped(shape, integer.input_scale)
    new = _kept_or_rounded(rows / scale, metric, limits[0] - zero, limits[1] - zero, store)
    before, after = (squared(rows - scale * q, metric) for q in (old, new))
    chosen = np.where((after < before)[:, :, None], new, old)
    file.set_weight(integer, chosen)
    remaining = ((rows - scale * chosen) * mean).sum(2).ravel()
    if integer.bias is not None:
        # From the float bias, not on top of what the file has: applying this twice changes nothing.
        wanted = floats.array(layer.bias).ravel() if layer.bias else 0.0
        file.add_to_bias(integer, wanted + remaining - file.bias(integer))
        lost = squared(rows - scale * old, metric) + (((rows - scale * old) * mean).sum(2)) ** 2
    else:
        lost = before
    total, left = float(lost.sum()), float(np.minimum(before, after).sum())
    return 10 * np.log10(total / left) if left > 0 and total > 0 else 0.0


def _kept_or_rounded(
    rows: Floats, metric: Floats, low: NDArray[np.int64], high: NDArray[np.int64], store: Path | None
) -> NDArray[np.int64]:
    """`round_rows`, or what it gave for the same arguments before."""
    if store is None or rows.size > _KEPT:
        return round_rows(rows, metric, low, high)
    digest = hashlib.sha256(repr(rows.shape).encode())
    for array in (rows, metric, low, high):
        digest.update(np.ascontiguousarray(array).tobytes())
    kept = store / f"rounded-{digest.hexdigest()}.npy"
    if not kept.exists():
        np.save(kept, round_rows(rows, metric, low, high).astype(np.int16), allow_pickle=False)
    return np.asarray(np.load(kept, allow_pickle=False), np.int64)


def weight_limits(weight_type: str, reduce_range: bool) -> tuple[int, int]:
    """Smallest and largest integer that ONNX Runtime's quantizer uses for weights of "int8" or "uint8".

    Args:
        reduce_range: whether weights have 7 bits.
    """
    if weight_type == "int8":
        return (-64, 64) if reduce_range else (-127, 127)
    return (0, 127) if reduce_range else (0, 255)


RECOVERY = WeightRounding()
