"""Describe a model in the form of ncnn's files: layers in execution order, which read and write blobs.

A blob has no batch axis. Its sizes are in C order, so an image is (channels, rows, columns).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

Setting = int | float | tuple[int, ...] | tuple[float, ...]
"""Value of one numbered parameter of a layer."""


@dataclass(frozen=True)
class Blob:
    """Describe a tensor between layers by its unique name and its sizes: one to four, without the batch."""

    name: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return prod(self.dims)


@dataclass(frozen=True, eq=False)
class LayerScales:
    """Hold the factors of an int8 layer: integer = round(number * factor).

    Attributes:
        weights: float32, a factor for each output channel.
        input: factor of the layer's input.
        output: factor of the next layer's input if the layer returns these integers; None if it returns floats.
    """

    weights: NDArray[np.float32]
    input: np.float32
    output: np.float32 | None = None


@dataclass(frozen=True, eq=False)
class ParamLayer:
    """Describe one layer.

    Attributes:
        settings: parameters, keyed by their numbers in ncnn's documentation of the layer.
        weights: arrays that ncnn reads with a type tag: float32 or int8.
        vectors: float32 arrays that ncnn reads without a tag, such as a bias. They come after the weights, except in
            layers for which `interleaved` holds all arrays in their order.
        interleaved: pairs (array, whether it has a tag), for layers that mix both kinds.
        scales: factors of an int8 layer.
        node: name of the ONNX node that the layer is part of.
    """

    kind: str
    name: str
    inputs: tuple[Blob, ...]
    outputs: tuple[Blob, ...]
    settings: Mapping[int, Setting] = field(default_factory=dict)
    weights: tuple[NDArray[Any], ...] = ()
    vectors: tuple[NDArray[np.float32], ...] = ()
    interleaved: tuple[tuple[NDArray[Any], bool], ...] = ()
    scales: LayerScales | None = None
    node: str = ""


@dataclass(frozen=True)
class BlobPort:
    """Describe an input or output of the network, which represents an input or output of the ONNX model.

    Attributes:
        name: the ONNX name.
        blob: the blob that has the data.
        shape: sizes in the ONNX model, with the batch; names for sizes that the model leaves open.
    """

    name: str
    blob: Blob
    shape: tuple[int | str | None, ...]


@dataclass(frozen=True)
class NcnnNetwork:
    """Hold a whole model as layers. A blob may have several readers, which the file does not allow."""

    inputs: tuple[BlobPort, ...]
    outputs: tuple[BlobPort, ...]
    layers: tuple[ParamLayer, ...]

    def readers(self, blob: Blob) -> tuple[ParamLayer, ...]:
        """Return the layers that read a blob, in execution order."""
        return tuple(layer for layer in self.layers if blob in layer.inputs)

    def without_unused(self) -> NcnnNetwork:
        """Return the network without the layers whose results nothing reads."""
        live = {port.blob for port in self.outputs}
        live_layers: list[ParamLayer] = []
        # From the end, so that one pass finds everything that the outputs depend on.
        for layer in reversed(self.layers):
            if live.intersection(layer.outputs):
                live_layers.append(layer)
                live.update(layer.inputs)
        return NcnnNetwork(self.inputs, self.outputs, tuple(reversed(live_layers)))
