"""Store tensors after a relu minus a constant, so that they use all 256 integers although zero points are 0.

Values that are never negative would normally use only half of the signed integers. Between layers with weights and
without padding, the tensor can be stored minus a constant:

    relu(x) is stored as x - 128 s, s = largest / 255    saturation at -128 does the work of the relu (or Clip from 0)
    the layer before adds -128 s to its bias; the layers that read the tensor add 128 Σ w: no extra operations

The steps are then half as large. In such a tensor, a zero of padding would mean 128 s, so tensors that a layer with
padding reads are not shifted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from edgeq.backends.systolic import program as steps
from edgeq.backends.systolic.program import Layer, Network, Weighted
from edgeq.calibration.ranges import Range

# The lowest int8 stands for zero.
OFFSET = 128
# Steps between the lowest and the largest int8.
_STEPS = 255
_SUFFIX = "/offset"


def with_offsets(
    network: Network, scales: Mapping[str, float], ranges: Mapping[str, Range], *, powers_of_two: bool
) -> tuple[Network, dict[str, float]]:
    """Subtract 128 steps from tensors after a relu before they are stored, if possible. The steps are then half as
    large. Return the network and its scales.

    Args:
        ranges: the ranges from which the scales were chosen. A tensor whose range must be kept is not shifted.
    """
    readers = network.readers
    layers: dict[str, Any] = {layer.name: layer for layer in network.layers}
    shapes, dtypes, changed, shifted = dict(network.shapes), dict(network.dtypes), dict(scales), {}
    for layer in network.layers:
        clamp = _relu_behind(layer, network, readers) if isinstance(layer, Weighted) else None
        if not isinstance(layer, Weighted) or clamp is None:
            continue
        origin = clamp.output
        # The old scale covers the range with 127 steps.
        step = scales[origin] * 127 / _STEPS
        # Rounded up, so that the largest value still fits.
        step = 2.0 ** math.ceil(math.log2(step)) if powers_of_two else float(np.float32(step))
        # Saturation replaces the Clip only if the Clip's upper bound is not below the largest value that can be stored.
        cut = isinstance(clamp, steps.Clamp) and clamp.high < _STEPS * step * (1 - 1e-6)
        keeps_range = origin in network.outputs or any(
            ranges[n].fixed_step for n in (layer.output, origin) if n in ranges
        )
        # All readers must absorb the offset, or the tensor would have to exist twice.
        if keeps_range or cut or not readers.get(origin) or not all(map(_absorbs, readers[origin])):
            continue
        name = f"{origin}{_SUFFIX}"
        sources = layer.sources if clamp is layer else (*layer.sources, *clamp.sources)
        bias = layers[layer.name].bias - OFFSET * step
        layers[layer.name] = replace(layers[layer.name], output=name, bias=bias, relu=False, sources=sources)
        if clamp is not layer:
            # Saturation does its work now.
            del layers[clamp.name]
        for reader in readers[origin]:
            layers[reader.name] = replace(layers[reader.name], input=name)
        shapes[name], dtypes[name], changed[name], shifted[name] = shapes[origin], dtypes[origin], step, origin
    remaining = tuple(layers[layer.name] for layer in network.layers if layer.name in layers)
    return replace(network, layers=remaining, shapes=shapes, dtypes=dtypes, shifted=shifted), changed


def _relu_behind(
    layer: Weighted, network: Network, readers: Mapping[str, list[Layer]]
) -> Weighted | steps.Clamp | None:
    """Return the layer that applies the relu: `layer` itself, or a Clip from 0 that is its only reader; None if neither
    does.
    """
    if layer.relu:
        return layer
    behind = readers.get(layer.output, [])
    alone = len(behind) == 1 and layer.output not in network.outputs
    return next((r for r in behind if alone and isinstance(r, steps.Clamp) and r.low == 0), None)


def _absorbs(layer: Layer) -> bool:
    """Return whether a layer can absorb an offset of its input in its bias."""
    return isinstance(layer, steps.Fc) or (isinstance(layer, steps.Conv) and not any(layer.pads))
