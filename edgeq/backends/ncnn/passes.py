"""Bring a network into the form of the file: one reader for each blob, and integers between int8 layers."""

from __future__ import annotations

import dataclasses

from edgeq.backends.ncnn.network import Blob, BlobPort, NcnnNetwork, ParamLayer

# ncnn's other int8 layer, InnerProduct, neither returns integers nor takes an input that is rounded already.
_REQUANTIZING = ("Convolution", "ConvolutionDepthWise")
_SCALE_TERM, _RETURNS_INTEGERS = 8, 100


def with_integers_between(network: NcnnNetwork) -> NcnnNetwork:
    """Return the network with layers that round their output for the next layer. Every reader of such a layer must be
    an int8 convolution with the same factor. The results are the same to the bit.
    """
    outputs = {port.blob for port in network.outputs}
    layers = []
    for layer in network.layers:
        readers = network.readers(layer.outputs[0])
        factors = {reader.scales.input if reader.scales else None for reader in readers}
        rounds = layer.scales is not None and layer.kind in _REQUANTIZING and not outputs.intersection(layer.outputs)
        if rounds and len(factors) == 1 and None not in factors and all(r.kind in _REQUANTIZING for r in readers):
            term = layer.settings[_SCALE_TERM]
            assert layer.scales is not None
            assert isinstance(term, int)
            layer = dataclasses.replace(
                layer,
                scales=dataclasses.replace(layer.scales, output=factors.pop()),
                settings={**layer.settings, _SCALE_TERM: term + _RETURNS_INTEGERS},
            )
        layers.append(layer)
    return dataclasses.replace(network, layers=tuple(layers))


def with_splits(network: NcnnNetwork) -> NcnnNetwork:
    """Return the network with a Split behind every blob that is read more than once. An output counts as a reader."""
    counts: dict[Blob, int] = {}
    ports = {port.blob for port in network.outputs}
    for blob in [b for layer in network.layers for b in layer.inputs] + sorted(ports, key=lambda b: b.name):
        counts[blob] = counts.get(blob, 0) + 1
    copies: dict[Blob, list[Blob]] = {}

    def take(blob: Blob) -> Blob:
        """Return the next copy of a blob."""
        return copies[blob].pop(0) if blob in copies else blob

    layers: list[ParamLayer] = []
    for layer in network.layers:
        layers.append(dataclasses.replace(layer, inputs=tuple(take(blob) for blob in layer.inputs)))
        for blob in layer.outputs:
            if counts.get(blob, 0) > 1:
                copies[blob] = [Blob(f"{blob.name}/copy{i}", blob.dims) for i in range(counts[blob])]
                layers.append(ParamLayer("Split", f"{blob.name}/split", (blob,), tuple(copies[blob]), node=layer.node))
    renamed = {blob: take(blob) for blob in sorted(ports, key=lambda b: b.name)}
    outputs = tuple(BlobPort(p.name, renamed[p.blob], p.shape) for p in network.outputs)
    return NcnnNetwork(network.inputs, outputs, tuple(layers))
