"""Write a network as ncnn's two files, a text of layers and their weights, in one container.

The container is an uncompressed zip with the members `model.param`, `model.bin` and `edgeq.json`. The last one
describes the inputs and outputs of the ONNX model, and the options with which the file must run. docs/reference/ncnn.md
describes all three.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.backends.ncnn.convert import lower
from edgeq.backends.ncnn.dialect import dialect
from edgeq.backends.ncnn.network import BlobPort, NcnnNetwork, ParamLayer, Setting
from edgeq.backends.ncnn.passes import with_integers_between, with_splits
from edgeq.backends.ncnn.winograd import wrapping_layers
from edgeq.model.load import read_model

SUFFIX = ".ncnn"
PARAM, WEIGHTS, DESCRIPTION = "model.param", "model.bin", "edgeq.json"
"""The members of the container."""

_MAGIC = 7767517
# Tags in front of weights: float32, and int8.
_TAGS = {np.dtype(np.float32): 0, np.dtype(np.int8): 0x000D4B38}
_ALIGNMENT = 4
_ARRAY = 23300
# The oldest date that a zip can have, so that equal models make equal files.
_DATE = (1980, 1, 1, 0, 0, 0)


def write_ncnn(model: ir.Model | Path, destination: Path, *, source: Path | None = None) -> NcnnNetwork:
    """Write a float model, or a model with Q/DQ pairs, as one file for ncnn. Return the network that was written.

    Args:
        source: the model's file, for messages.

    Raises:
        ModelError: the format cannot express a node; the message names the node and the reason.
    """
    loaded = read_model(model) if isinstance(model, Path) else model
    label = source or (model if isinstance(model, Path) else destination)
    network = final_form(lower(loaded, label))
    destination.write_bytes(container(network, loaded))
    return network


def final_form(network: NcnnNetwork) -> NcnnNetwork:
    """Return the network as the file has it."""
    return with_splits(with_integers_between(network))


def container(network: NcnnNetwork, model: ir.Model) -> bytes:
    """Return the file with the text, the weights and the description of a network in its final form."""
    members = {
        PARAM: param_text(network).encode(),
        WEIGHTS: weight_bytes(network),
        DESCRIPTION: json.dumps(description(network, model), indent=1).encode(),
    }
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name, _DATE), content)
    return stream.getvalue()


def description(network: NcnnNetwork, model: ir.Model) -> dict[str, Any]:
    """Return the description of the inputs and outputs, and the options, as JSON values."""
    values = {value.name: value for value in (*model.graph.inputs, *model.graph.outputs)}

    def port(port: BlobPort) -> dict[str, Any]:
        """Return one input or output, with the sizes as the model states them."""
        shape = values[port.name].shape if port.name in values else None
        stated = [s if isinstance(s, int) else s.value for s in shape] if shape is not None else list(port.shape)
        named = {"name": port.name, "blob": port.blob.name, "type": "tensor(float)"}
        return {**named, "shape": stated, "sizes": list(port.shape)}

    return {
        "inputs": [port(p) for p in network.inputs],
        "outputs": [port(p) for p in network.outputs],
        "options": options_of(network),
    }


def options_of(network: NcnnNetwork) -> dict[str, bool]:
    """Return the options of ncnn that must be set, so that the file computes what edgeq proved."""
    limit = dialect().winograd
    return {**dialect().options, limit.option: not wrapping_layers(network)}


def param_text(network: NcnnNetwork) -> str:
    """Return the text that describes the layers. Every blob must have at most one reader."""
    lines = [_line(layer) for layer in network.layers]
    blobs = sum(len(layer.outputs) for layer in network.layers)
    return "\n".join([str(_MAGIC), f"{len(lines)} {blobs}", *lines, ""])


def weight_bytes(network: NcnnNetwork) -> bytes:
    """Return the weights of all layers, in the order of the layers."""
    return b"".join(part for layer in network.layers for part in _arrays(layer))


def _line(layer: ParamLayer) -> str:
    blobs = [blob.name for blob in (*layer.inputs, *layer.outputs)]
    settings = [_setting(key, value) for key, value in sorted(layer.settings.items())]
    return " ".join([layer.kind, layer.name, str(len(layer.inputs)), str(len(layer.outputs)), *blobs, *settings])


def _setting(key: int, value: Setting) -> str:
    if isinstance(value, tuple):
        return f"{-(_ARRAY + key)}={','.join([str(len(value)), *map(_number, value)])}"
    return f"{key}={_number(value)}"


def _number(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    # ncnn takes a number for a float only if it has a point or an exponent. Nine digits are exact for float32.
    text = f"{np.float32(value):.9g}"
    return text if "." in text or "e" in text else f"{text}.0"


def _arrays(layer: ParamLayer) -> Iterator[bytes]:
    for array, tagged in layer.interleaved:
        yield _tagged(array) if tagged else _bare(array)
    for array in layer.weights:
        yield _tagged(array)
    for array in layer.vectors:
        yield _bare(array)
    if layer.scales is not None:
        yield _bare(layer.scales.weights)
        yield _bare(np.array([layer.scales.input]))
        if layer.scales.output is not None:
            yield _bare(np.array([layer.scales.output]))


def _tagged(array: NDArray[Any]) -> bytes:
    content = np.ascontiguousarray(array).tobytes()
    tag = _TAGS[array.dtype]
    return tag.to_bytes(4, "little") + content + bytes(-len(content) % _ALIGNMENT)


def _bare(array: NDArray[Any]) -> bytes:
    return np.ascontiguousarray(array, "<f4").tobytes()


def members(path: Path) -> Mapping[str, bytes]:
    """Return the three members of a file that `write_ncnn` wrote."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in (PARAM, WEIGHTS, DESCRIPTION)}
