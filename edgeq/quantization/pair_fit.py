"""Choose weight ranges that keep every sum of two products within 16 bits, and that are no wider than this requires.

`reduce_range` gives up one of the eight bits of every weight, because any two neighbours could both be large and have
the same sign. Few pairs are that large. So edgeq enlarges the scale only of the output channels that contain such a
pair, and only as much as their worst pair requires. If the worst pair of a channel adds up to 140, the scale is
multiplied by about 1.1 (140 / 128), which costs a tenth of a bit. The kernels stay the same, so this takes no extra
time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.errors import UsageError
from edgeq.model.graph import (
    OPERATORS,
    channel_axis,
    constant,
    is_depthwise,
    node_input,
)
from edgeq.model.prepare import PreparedModel
from edgeq.model.saturation import PAIR_LIMIT, conv_rows, pair_sums, possible_sums, saturation_table
from edgeq.scheme import Scheme

_LEVEL = 127
# Float operator → the operator with integer weights and outputs that replaces it.
_INTEGER_FORM = {row.float_form: name for name, row in OPERATORS.items() if row.weights and row.integer_output}
_MAX_STEPS = 64
# Factor by which later sums may exceed the sums on samples, for weights that are fitted to samples.
_MARGIN = 1.1


def check_fit(scheme: Scheme) -> None:
    """Refuse options that cannot be combined with `fit_pairs`.

    Raises:
        UsageError: another option is set that `fit_pairs` excludes; the message names the field of that option.
    """
    if scheme.mode != "static" or scheme.format != "QDQ":
        raise UsageError("fit_pairs is for static QDQ quantization", "Use ⟨reduce_range=True⟩, or ⟨format⟩ QDQ")
    if scheme.weight_type != "int8" or not scheme.weight_symmetric:
        raise UsageError("fit_pairs is for symmetric int8 weights", "Leave it out: other weights do not need it")
    if scheme.fit_seen and not scheme.fit_pairs:
        raise UsageError("fit_seen needs fit_pairs", "Set both")
    if scheme.reduce_range:
        raise UsageError("fit_pairs and reduce_range exclude each other", "Give one of them")


def fitted_bounds(
    prepared: PreparedModel, scheme: Scheme, reach: Mapping[str, NDArray[np.float64]] | None = None
) -> dict[str, NDArray[np.float32]]:
    """Return the bounds of the weights whose range must be wider than their values. A bound is the magnitude that the
    largest integer represents.

    A weight has one bound for each output channel, or one for all channels.

    Args:
        reach: node → largest sum of two products on samples, for each output channel, as a share of the largest number
            in 16 bits (`Backend.fitting`). Nodes without an entry are fitted to any input.
    """
    fits: dict[str, tuple[NDArray[np.float32], int, NDArray[np.float32]]] = {}
    for node in prepared.model.graph:
        value = node_input(node, 1) if _is_suspect(node) and node.name not in scheme.exclude else None
        weight = constant(value)
        if value is None or weight is None or weight.dtype != np.float32 or weight.ndim < 2:
            continue
        if node.op_type == "Conv" and is_depthwise(node, weight.shape):
            continue
        axis = channel_axis(node) % weight.ndim
        rows = conv_rows(weight) if node.op_type == "Conv" else np.moveaxis(weight, axis, 0)
        rows = rows.reshape(len(rows), -1)
        sums = partial(possible_sums, channels=weight.shape[1] if node.op_type == "Conv" else 0)
        factors = fit_factors(rows, per_channel=scheme.per_channel, sums=sums)
        if (
            reach is not None
            and (sample_reach := reach.get(str(node.name))) is not None
            and len(sample_reach) == len(factors)
        ):
            sample_factors = np.maximum(sample_reach * _MARGIN * (sample_reach > 0), 1).astype(np.float32)
            factors = np.minimum(factors, sample_factors if scheme.per_channel else sample_factors.max(initial=1))
        name = str(value.name)
        if name in fits:
            factors = np.maximum(fits[name][2], factors)
        fits[name] = (weight, axis, factors)
    return {
        name: _bounds(weight, axis, factors, scheme.per_channel)
        for name, (weight, axis, factors) in fits.items()
        if (factors > 1).any()
    }


def fit_factors(
    rows: NDArray[np.float32],
    *,
    per_channel: bool = True,
    sums: Callable[[NDArray[Any]], NDArray[Any]] = pair_sums,
) -> NDArray[np.float32]:
    """Return, for each row, the factor by which its scale (largest magnitude / 127) must grow so that no pair in the
    row exceeds `PAIR_LIMIT`.

    Args:
        rows: float weights in the kernel's order, [N, K].
        per_channel: whether each row has its own scale. If not, all rows have the same scale and the same factor.
        sums: function that returns the sums of pairs in rows, like `edgeq.model.saturation.pair_sums`.
    """
    largest = np.abs(rows).max(axis=1)
    if not per_channel:
        largest = np.full_like(largest, largest.max(initial=0))
    factors = np.ones(len(rows), np.float32)
    open_rows = np.flatnonzero(largest > 0)
    for _ in range(_MAX_STEPS):
        worst = _worst_pairs(rows[open_rows], largest[open_rows] * factors[open_rows], sums)
        if not per_channel:
            worst = np.full_like(worst, worst.max(initial=0))
        open_rows, worst = open_rows[worst > PAIR_LIMIT], worst[worst > PAIR_LIMIT]
        if not open_rows.size:
            break
        # Because of rounding, a pair may stay one above the limit. So the factor always grows at least a little.
        factors[open_rows] *= np.maximum(worst / np.float32(PAIR_LIMIT), np.float32(1.002))
    return factors


def _worst_pairs(
    rows: NDArray[np.float32], limits: NDArray[np.float32], sums: Callable[[NDArray[Any]], NDArray[Any]]
) -> NDArray[np.float32]:
    """Return the largest sum of a pair in each row, in integers, if a weight of magnitude `limits` becomes 127."""
    scale = (limits / _LEVEL).astype(np.float32)
    worst: NDArray[np.float32] = sums(np.rint(rows / scale[:, None])).max(axis=1, initial=0)
    return worst


def _is_suspect(node: ir.Node) -> bool:
    # Signed activations become unsigned if there is only an unsigned kernel.
    table = saturation_table()
    return node.op_type in _INTEGER_FORM and table.path(_INTEGER_FORM[node.op_type], "uint8", "int8") is not None


def _bounds(weight: NDArray[Any], axis: int, factors: NDArray[np.float32], per_channel: bool) -> NDArray[np.float32]:
    if not per_channel:
        return np.asarray(np.abs(weight).max() * factors.max(), np.float32)
    reduced_axes = tuple(a for a in range(weight.ndim) if a != axis)
    return np.asarray(np.abs(weight).max(axis=reduced_axes) * factors, np.float32)
