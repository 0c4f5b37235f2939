"""Choose the scale of each tensor of a network from its calibrated range."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from edgeq.backends.systolic import program as steps
from edgeq.backends.systolic.program import Network, step_inputs, step_outputs
from edgeq.calibration.ranges import Range
from edgeq.errors import CalibrationError

# A tensor whose values stay below this is all zero up to rounding.
_NOTHING = 1e-8


def activation_scales(network: Network, ranges: Mapping[str, Range], *, powers_of_two: bool) -> dict[str, float]:
    """Return the float32 scale of each tensor: its largest magnitude / 127, or 1 if all its values are zero.

    - Layers that pass integers on (pooling, clamps, concatenation, data movement) share one scale between inputs and
      outputs. The scale covers only the tensors that layers of other kinds read, so values that are clipped or pooled
      away do not widen the range.
    - The scale of a sum is at least that of both operands. Otherwise an operand would saturate before it is added. An
      operand that is all zero takes the scale of the sum.
    - On an array that shifts, all scales are powers of two, and so are their quotients.

    Raises:
        CalibrationError: a tensor has no range.
    """
    groups = _groups(network)
    used = _used(network)
    # A clamp's bounds may be tighter than its calibrated range.
    clamps = {layer.output: max(-layer.low, layer.high) for layer in network.layers if isinstance(layer, steps.Clamp)}
    scales: dict[str, float] = {}
    empty: set[str] = set()
    for members in {id(g): g for g in groups.values()}.values():
        ranged = [name for name in members if name in ranges]
        deciding = [name for name in ranged if name in used] or ranged
        if not deciding:
            raise CalibrationError(
                f"tensor {members[0]!r} has no calibrated range", "Calibrate this model again, with all its tensors"
            )
        bound = max(min(ranges[name].bound, clamps.get(name, math.inf)) for name in deciding)
        scale = float(np.float32(bound / steps.LARGEST))
        if bound <= _NOTHING:
            empty.update(members)
            scale = 1.0
        elif powers_of_two:
            scale = 2.0 ** math.ceil(math.log2(bound / steps.LARGEST))
        scales.update(dict.fromkeys(members, scale))
    additions = [layer for layer in network.layers if isinstance(layer, steps.ResidualAdd)]
    changed = True
    # A sum may be an operand of another, so a larger scale spreads until nothing changes.
    while changed:
        changed = False
        for layer in additions:
            operand_scale = max((scales[name] for name in (layer.left, layer.right) if name not in empty), default=0.0)
            if scales[layer.output] < operand_scale:
                scales.update(dict.fromkeys(groups[layer.output], operand_scale))
                empty.difference_update(groups[layer.output])
                changed = True
    # Start with the last sums: a sum that is all zero must have the scale of its reader before its operands get the
    # same scale.
    widest = dict.fromkeys(empty, math.inf)
    for layer in reversed(additions):
        for name in {layer.left, layer.right} & empty:
            widest[name] = min(widest[name], scales[layer.output])
            scales.update(dict.fromkeys(groups[name], widest[name]))
    return scales


def _groups(network: Network) -> dict[str, list[str]]:
    """Return, for each tensor, the list of all tensors that share its scale, itself included. All of them get the same
    list object.
    """
    groups: dict[str, list[str]] = {name: [name] for name in sorted(network.integers)}
    for layer in network.layers:
        if not isinstance(layer, steps.SAME_SCALE):
            continue
        anchor, *tied = (*step_outputs(layer), *step_inputs(layer))
        for name in tied:
            if groups[anchor] is not groups[name]:
                joined = groups[anchor] + groups[name]
                groups.update(dict.fromkeys(joined, joined))
    return groups


def _used(network: Network) -> set[str]:
    """Return the outputs, the tensors that nothing reads, and the tensors that a layer outside `SAME_SCALE` reads."""
    readers = network.readers
    return {
        name
        for name in network.integers
        if name in network.outputs
        or not readers[name]
        or any(not isinstance(r, steps.SAME_SCALE) for r in readers[name])
    }
