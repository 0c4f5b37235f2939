"""Read .ncnn files, which contain the two files of an ncnn model and a description of its inputs and outputs.

A .ncnn file is a zip whose members are not compressed: model.param (the layers, as text), model.bin (the weights) and
edgeq.json. ncnn itself has no format that is a single file. The content is untrusted: ncnn allocates memory for the
sizes in model.param before it reads the weights, so they are compared with the size of model.bin first.
"""

from __future__ import annotations

import io
import zipfile
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Tuple

from edgeq_device.errors import BundleError
from edgeq_device.system.plainjson import parse_json

PARAM, WEIGHTS, SIGNATURE = "model.param", "model.bin", "edgeq.json"
"""Names of the members of a .ncnn file."""
MOST_TEXT_BYTES = 1 << 24
"""Size of the largest model.param that is read."""
_MOST_SIGNATURE_BYTES = 1 << 20
# The first line of every model.param.
_MAGIC = "7767517"
# ncnn reads type and names into 256 bytes each.
_MOST_NAME = 255
# Parameters with the number of outputs, which is also that of biases, and with the number of weights.
_OUTPUTS = "0"
_WEIGHT_COUNTS: Mapping[str, str] = {
    "Convolution": "6",
    "ConvolutionDepthWise": "6",
    "Deconvolution": "6",
    "DeconvolutionDepthWise": "6",
    "InnerProduct": "2",
}
# The parameter that is not 0 if a layer computes on integers.
_INT8_PARAMETERS: Mapping[str, str] = {
    "Convolution": "8",
    "ConvolutionDepthWise": "8",
    "InnerProduct": "8",
    "Gemm": "18",
    "MultiHeadAttention": "18",
}


@dataclass(frozen=True)
class NcnnLayer:
    """Describe one line of model.param: the layer's type and name, its output blobs, and its parameters as texts."""

    type: str
    name: str
    outputs: Tuple[str, ...]
    parameters: Mapping[str, str]

    @property
    def int8(self) -> bool:
        """Return whether the layer computes on integers."""
        return self.parameters.get(_INT8_PARAMETERS.get(self.type, ""), "0") not in ("", "0")


@dataclass(frozen=True)
class NcnnFile:
    """Hold the content of a .ncnn file.

    Attributes:
        param, weights: the two files of the model.
        signature: see `read_signature`.
    """

    param: bytes
    weights: bytes
    signature: Mapping[str, Any]


def read_ncnn(content: bytes, context: str) -> NcnnFile:
    """Read a .ncnn file without unpacking it to a folder.

    Raises:
        BundleError: the file is damaged, or has other members than a .ncnn file.
    """
    members = _read_members(content, context, (PARAM, WEIGHTS, SIGNATURE))
    return NcnnFile(members[PARAM], members[WEIGHTS], _parse_signature(members[SIGNATURE], context))


def read_signature(content: bytes, context: str) -> Dict[str, Any]:
    """Return the description of the model's inputs and outputs in a .ncnn file, and its options.

    The lists "inputs" and "outputs" have entries with "name", "type" and "shape" as in onnxruntime, "sizes" (the shape
    with one sample), and "blob", the name of ncnn's array, which has no axis of samples. "options" has values of ncnn's
    class Option.

    Raises:
        BundleError: the file is damaged, or has other members than a .ncnn file.
    """
    return _parse_signature(_read_members(content, context, (SIGNATURE,))[SIGNATURE], context)


def _parse_signature(text: bytes, context: str) -> Dict[str, Any]:
    if len(text) > _MOST_SIGNATURE_BYTES:
        raise BundleError(f"{context}: {SIGNATURE} is larger than {_MOST_SIGNATURE_BYTES} bytes")
    signature = parse_json(text, f"{context}: {SIGNATURE}")
    for key in ("inputs", "outputs"):
        entries = signature.get(key)
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise BundleError(f"{context}: {key} in {SIGNATURE} is not a list of tables")
    return signature


def _read_members(content: bytes, context: str, names: Tuple[str, ...]) -> Dict[str, bytes]:
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = archive.infolist()
            if sorted(entry.orig_filename for entry in entries) != sorted((PARAM, WEIGHTS, SIGNATURE)):
                raise BundleError(f"{context} does not consist of {PARAM}, {WEIGHTS} and {SIGNATURE}")
            # Members that are not compressed cannot grow, so the file itself limits the memory.
            if any(e.compress_type != zipfile.ZIP_STORED or e.file_size > len(content) for e in entries):
                raise BundleError(f"{context}: its members are compressed, or larger than the file")
            return {name: archive.read(name) for name in names}
    except BundleError:
        raise
    except Exception as error:  # a damaged zip raises BadZipFile, struct.error, EOFError, RuntimeError ...
        raise BundleError(f"{context} is damaged ({' '.join(str(error).split())})") from error


def list_layers(file: NcnnFile, context: str) -> List[NcnnLayer]:
    """Return the layers in model.param.

    Raises:
        BundleError: model.param does not have ncnn's form, or a layer claims more weights than model.bin can contain.
    """
    if len(file.param) > MOST_TEXT_BYTES:
        raise BundleError(f"{context}: {PARAM} is larger than {MOST_TEXT_BYTES} bytes")
    try:
        lines = file.param.decode("ascii").splitlines()
        layer_count, blob_count = map(int, lines[1].split())
        layers = [_parse_layer(line.split()) for line in lines[2:] if line.strip()]
    except (ValueError, IndexError) as error:
        raise BundleError(f"{context}: {PARAM} does not have ncnn's form") from error
    blobs = sum(len(layer.outputs) for layer in layers)
    if lines[0].strip() != _MAGIC or (layer_count, blob_count) != (len(layers), blobs):
        raise BundleError(f"{context}: {PARAM} states other numbers of layers or blobs than it has")
    for layer in layers:
        if not _fits(layer, len(file.weights)):
            raise BundleError(f"{context}: layer {layer.name!r} claims more weights than {WEIGHTS} contains")
    return layers


def _parse_layer(words: List[str]) -> NcnnLayer:
    inputs, outputs = int(words[2]), int(words[3])
    end = 4 + inputs + outputs
    if min(inputs, outputs) < 0 or end > len(words) or any(len(word) > _MOST_NAME for word in words[:end]):
        raise ValueError(words[0])
    parameters = dict(word.split("=", 1) for word in words[end:])
    return NcnnLayer(words[0], words[1], tuple(words[4 + inputs : end]), parameters)


def _fits(layer: NcnnLayer, most: int) -> bool:
    """Return whether a layer's weights and biases take no more than `most` bytes. A weight takes at least one byte."""
    key = _WEIGHT_COUNTS.get(layer.type)
    if key is None:
        return True
    try:
        counts = [int(layer.parameters.get(name, "0")) for name in (key, _OUTPUTS)]
    except ValueError:
        return False
    return all(0 <= count <= most for count in counts)
