"""The scale of every integer tensor, from calibrated ranges and what the array can do."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from edgeq.backends.systolic.network import (
    SAME_SCALE,
    AddLayer,
    ClampLayer,
    Network,
    integer_tensors,
    layer_inputs,
    layer_outputs,
    readers,
)
from edgeq.calibrate.ranges import Range
from edgeq.errors import CalibrationError

LARGEST = 127
_NOTHING = 1e-8


def activation_scales(network: Network, ranges: Mapping[str, Range], *, powers_of_two: bool) -> dict[str, float]:
    """Scale by tensor, float32 values; largest magnitude / 127, or 1 where there is nothing.

    - Inputs and outputs of layers that pass integers on (pooling, clamps, concatenation, data movement) share the scale
      of those tensors that other layers read: what is clipped or pooled away does not widen the range.
    - The scale of a sum is at least that of both operands, or an operand would saturate before it is added. An operand
      in which there is nothing has that of the sum.
    - On an array that shifts, all scales are powers of two, so that their quotients are.

    Raises:
        CalibrationError: no range for a tensor.
    """
    groups = _groups(network)
    used = _used(network)
    clamps = {layer.output: max(-layer.low, layer.high) for layer in network.layers if isinstance(layer, ClampLayer)}
    scales: dict[str, float] = {}
    empty: set[str] = set()
    for members in {id(g): g for g in groups.values()}.values():
        known = [name for name in members if name in ranges]
        chosen = [name for name in known if name in used] or known
        if not chosen:
            raise CalibrationError(
                f"tensor {members[0]!r} has no calibrated range", "Calibrate this model again, with all its tensors"
            )
        bound = max(min(ranges[name].bound, clamps.get(name, math.inf)) for name in chosen)
        if bound <= _NOTHING:
            empty.update(members)
        scale = _scale(bound, powers_of_two)
        scales.update(dict.fromkeys(members, scale))
    additions = [layer for layer in network.layers if isinstance(layer, AddLayer)]
    changed = True
    while changed:
        changed = False
        for layer in additions:
            least = max((scales[name] for name in (layer.left, layer.right) if name not in empty), default=0.0)
            if scales[layer.output] < least:
                scales.update(dict.fromkeys(groups[layer.output], least))
                empty.difference_update(groups[layer.output])
                changed = True
    # The last sums first: an empty one takes the scale of the sum that reads it before its own operands do.
    widest = dict.fromkeys(empty, math.inf)
    for layer in reversed(additions):
        for name in {layer.left, layer.right} & empty:
            widest[name] = min(widest[name], scales[layer.output])
            scales.update(dict.fromkeys(groups[name], widest[name]))
    return scales


def _scale(bound: float, powers_of_two: bool) -> float:
    if bound <= _NOTHING:
        return 1.0
    if powers_of_two:
        return float(2.0 ** math.ceil(math.log2(bound / LARGEST)))
    return float(np.float32(bound / LARGEST))


def _groups(network: Network) -> dict[str, list[str]]:
    """Tensor → all tensors of its scale, itself among them; one list object a group."""
    groups: dict[str, list[str]] = {name: [name] for name in sorted(integer_tensors(network))}
    for layer in network.layers:
        if not isinstance(layer, SAME_SCALE):
            continue
        first, *others = (*layer_outputs(layer), *layer_inputs(layer))
        for other in others:
            if groups[first] is not groups[other]:
                joined = groups[first] + groups[other]
                groups.update(dict.fromkeys(joined, joined))
    return groups


def _used(network: Network) -> set[str]:
    """Tensors that something other than `SAME_SCALE` layers reads."""
    read = readers(network.layers)
    return {
        name
        for name in integer_tensors(network)
        if name in network.outputs or not read[name] or any(not isinstance(r, SAME_SCALE) for r in read[name])
    }
