"""Weight ranges that keep every sum of two products within 16 bits, as narrow as that allows.

`reduce_range` gives up one of eight bits of every weight, because any two neighbours could both be large and of one
sign. Few are. Here only the output channels that hold such a pair get a larger scale, and only by as much as their
worst pair needs: a channel whose worst pair adds up to 140 has its scale multiplied by about 140 / 128, which is a
tenth of a bit. The kernels are the same, so it costs no time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.errors import UsageError
from edgeq.model.graph import constant, node_input
from edgeq.model.operators import OPERATORS, channel_axis, is_depthwise
from edgeq.model.prepare import PreparedModel
from edgeq.model.saturation import PAIR_LIMIT, conv_rows, pair_sums, possible_sums, saturation_table
from edgeq.scheme import Scheme

_LEVEL = 127
# Float operator → the one with integer weights and outputs that it becomes.
_INTEGER_FORM = {row.float_form: name for name, row in OPERATORS.items() if row.weights and row.integer_output}
_MOST_STEPS = 64
# What is fitted to samples bears sums that are so much larger than theirs.
_MARGIN = 1.1


def check_fit(scheme: Scheme) -> None:
    """Refuse what cannot be combined with `fit_pairs`.

    Raises:
        UsageError: names the field.
    """
    if scheme.mode != "static" or scheme.format != "QDQ":
        raise UsageError("fit_pairs is for static QDQ quantization", "Use --reduce-range, or --format QDQ")
    if scheme.weight_type != "int8" or not scheme.weight_symmetric:
        raise UsageError("fit_pairs is for symmetric int8 weights", "Leave it out: other weights do not need it")
    if scheme.fit_seen and not scheme.fit_pairs:
        raise UsageError("fit_seen is a way of fit_pairs", "Set both")
    if scheme.reduce_range:
        raise UsageError("fit_pairs and reduce_range exclude each other", "Give one of them")


def fitted_bounds(
    prepared: PreparedModel, scheme: Scheme, reach: Mapping[str, NDArray[np.float64]] | None = None
) -> dict[str, NDArray[np.float32]]:
    """Return weight → the magnitudes that its largest integers stand for, per output channel or one, for the weights
    that need more than their own.

    Args:
        reach: per output channel of a node, how large its sums become beside samples (`Backend.fitting`); nodes that
            are not in it bear any input.
    """
    found: dict[str, tuple[NDArray[np.float32], int, NDArray[np.float32]]] = {}
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
        if reach is not None and (seen := reach.get(str(node.name))) is not None and len(seen) == len(factors):
            wanted = np.maximum(seen * _MARGIN * (seen > 0), 1).astype(np.float32)
            factors = np.minimum(factors, wanted if scheme.per_channel else wanted.max(initial=1))
        name = str(value.name)
        if name in found:
            factors = np.maximum(found[name][2], factors)
        found[name] = (weight, axis, factors)
    return {
        name: _bounds(weight, axis, factors, scheme.per_channel)
        for name, (weight, axis, factors) in found.items()
        if (factors > 1).any()
    }


def fit_factors(
    rows: NDArray[np.float32],
    *,
    per_channel: bool = True,
    sums: Callable[[NDArray[Any]], NDArray[Any]] = pair_sums,
) -> NDArray[np.float32]:
    """By what each row's scale (largest magnitude / 127) must grow for no pair along it to exceed `PAIR_LIMIT`.

    Args:
        rows: [N, K] float weights in the kernel's order.
        per_channel: False gives every row the same scale and so the same factor.
        sums: the pairs of rows, as `edgeq.model.saturation.pair_sums` has them.
    """
    largest = np.abs(rows).max(axis=1)
    if not per_channel:
        largest = np.full_like(largest, largest.max(initial=0))
    factors = np.ones(len(rows), np.float32)
    left = np.flatnonzero(largest > 0)
    for _ in range(_MOST_STEPS):
        worst = _worst_pairs(rows[left], largest[left] * factors[left], sums)
        if not per_channel:
            worst = np.full_like(worst, worst.max(initial=0))
        left, worst = left[worst > PAIR_LIMIT], worst[worst > PAIR_LIMIT]
        if not left.size:
            break
        # Rounding may leave a pair one above the limit: a little further then.
        factors[left] *= np.maximum(worst / np.float32(PAIR_LIMIT), np.float32(1.002))
    return factors


def _worst_pairs(
    rows: NDArray[np.float32], limits: NDArray[np.float32], sums: Callable[[NDArray[Any]], NDArray[Any]]
) -> NDArray[np.float32]:
    """The largest pair of each row in integers, where `limits` are the weights that become 127."""
    scale = (limits / _LEVEL).astype(np.float32)
    worst: NDArray[np.float32] = sums(np.rint(rows / scale[:, None])).max(axis=1, initial=0)
    return worst


def _is_suspect(node: ir.Node) -> bool:
    # Signed activations become unsigned where only such a kernel exists.
    table = saturation_table()
    return node.op_type in _INTEGER_FORM and table.path(_INTEGER_FORM[node.op_type], "uint8", "int8") is not None


def _bounds(weight: NDArray[Any], axis: int, factors: NDArray[np.float32], per_channel: bool) -> NDArray[np.float32]:
    if not per_channel:
        return np.asarray(np.abs(weight).max() * factors.max(), np.float32)
    others = tuple(a for a in range(weight.ndim) if a != axis)
    return np.asarray(np.abs(weight).max(axis=others) * factors, np.float32)
