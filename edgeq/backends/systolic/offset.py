"""Tensors behind a relu on all 256 integers, though zero points are 0.

What is never negative uses half of the signed integers. Between layers with weights and no padding, the tensor less a
constant can be stored in its place:

    relu(x) is stored as x - 128 s, s = largest / 255    saturation at -128 is the relu, or the Clip from 0
    the layer before adds -128 s to its bias, those that read it 128 Σ w of their integers: no operation more

The steps are half as large. Padding with zeros would stand for 128 s, so a layer with padding reads it as it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from edgeq.backends.systolic.network import ClampLayer, ConvLayer, FcLayer, Layer, Network, readers
from edgeq.calibrate.ranges import Range

OFFSET = 128
_STEPS = 255
_SUFFIX = "/offset"


@dataclass(frozen=True)
class Shifted:
    """Attributes:
    scales: of every integer tensor.
    origins: by name of the tensor that is stored less 128 steps, the float model's.
    """

    network: Network
    scales: Mapping[str, float]
    origins: Mapping[str, str]


def with_offsets(
    network: Network, scales: Mapping[str, float], ranges: Mapping[str, Range], *, powers_of_two: bool
) -> Shifted:
    """Return the network with tensors behind a relu stored less 128 steps of half the size, where they can be.

    Args:
        ranges: that the scales were chosen by; steps that have to stay do.
    """
    read = readers(network.layers)
    layers: dict[str, Layer] = {layer.name: layer for layer in network.layers}
    shapes, dtypes, changed, origins = dict(network.shapes), dict(network.dtypes), dict(scales), {}
    for layer in network.layers:
        clamp = _relu_behind(layer, network, read) if isinstance(layer, ConvLayer | FcLayer) else None
        if not isinstance(layer, ConvLayer | FcLayer) or clamp is None:
            continue
        origin = clamp.output
        step = scales[origin] * 127 / _STEPS
        step = 2.0 ** math.ceil(math.log2(step)) if powers_of_two else float(np.float32(step))
        # What a Clip cuts off above has to be what saturation cuts off.
        cut = isinstance(clamp, ClampLayer) and clamp.high < _STEPS * step * (1 - 1e-6)
        kept = origin in network.outputs or any(ranges[n].kept for n in (layer.output, origin) if n in ranges)
        if kept or cut or not read.get(origin) or not all(map(_absorbs, read[origin])):
            continue
        name = f"{origin}{_SUFFIX}"
        sources = layer.sources if clamp is layer else (*layer.sources, *clamp.sources)
        maker = layers[layer.name]
        assert isinstance(maker, ConvLayer | FcLayer)
        bias = maker.bias - OFFSET * step
        layers[layer.name] = replace(maker, output=name, bias=bias, relu=False, sources=sources)
        if clamp is not layer:
            del layers[clamp.name]
        for reader in read[origin]:
            own = layers[reader.name]
            assert isinstance(own, ConvLayer | FcLayer)
            layers[reader.name] = replace(own, input=name, input_offset=OFFSET)
        shapes[name], dtypes[name], changed[name], origins[name] = shapes[origin], dtypes[origin], step, origin
    remaining = tuple(layers[layer.name] for layer in network.layers if layer.name in layers)
    return Shifted(replace(network, layers=remaining, shapes=shapes, dtypes=dtypes), changed, origins)


def _relu_behind(
    layer: ConvLayer | FcLayer, network: Network, read: Mapping[str, list[Layer]]
) -> ConvLayer | FcLayer | ClampLayer | None:
    """Return the layer itself where it ends in a relu, or the Clip from 0 that alone reads it; None without either."""
    if layer.relu:
        return layer
    behind = read.get(layer.output, [])
    alone = len(behind) == 1 and layer.output not in network.outputs
    return next((r for r in behind if alone and isinstance(r, ClampLayer) and r.low == 0), None)


def _absorbs(layer: Layer) -> bool:
    """Return whether a layer can take an offset of what it reads into its bias."""
    return isinstance(layer, FcLayer) or (isinstance(layer, ConvLayer) and not any(layer.pads))
