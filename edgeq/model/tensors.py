"""Tensors as ONNX stores them: where they are in a model, how large they should be, and whether they are."""

from __future__ import annotations

import math
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

import numpy as np
import onnx
import onnx_ir as ir
from edgeq_device.arrays import ELEMENT_BITS
from edgeq_device.budget import largest_sample

from edgeq.errors import ModelError
from edgeq.model.edit import Editor, inner_graphs
from edgeq.model.graph import constant_tensor, every_node, node_input

DAMAGED = "The file is damaged or was tampered with; export or download it again"


@dataclass(frozen=True)
class ExternalSpan:
    """Where the bytes of one external tensor lie.

    Attributes:
        file: absolute path, proven to be inside the model's folder or that of the file that the model is a link to.
        location: the path as the model spells it, relative to the model's folder.
        offset, length: bytes, proven to be inside the file.
    """

    file: Path
    location: str
    offset: int
    length: int

    def read(self) -> bytes:
        """The tensor's bytes."""
        with self.file.open("rb") as stream:
            stream.seek(self.offset)
            return stream.read(self.length)


def iter_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """`graph` and, depth first, the graphs of its If, Loop and Scan nodes."""
    yield graph
    yield from inner_graphs(graph.node)


def iter_nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Every node of a model: main graph, subgraphs and model-local functions."""
    for graph in iter_graphs(model.graph):
        yield from graph.node
    for function in model.functions:
        yield from function.node
        for graph in inner_graphs(function.node):
            yield from graph.node


def iter_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor of a model: initializers, tensor attributes and the parts of sparse tensors, wherever nested."""
    for graph in all_graphs(model):
        yield from graph.initializer
    for node in iter_nodes(model):
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
    for sparse in iter_sparse_tensors(model):
        yield from (sparse.values, sparse.indices)


def iter_sparse_tensors(model: onnx.ModelProto) -> Iterator[onnx.SparseTensorProto]:
    """Every sparse tensor of a model: initializers and attributes, wherever nested."""
    for graph in all_graphs(model):
        yield from graph.sparse_initializer
    for node in iter_nodes(model):
        for attribute in node.attribute:
            if attribute.HasField("sparse_tensor"):
                yield attribute.sparse_tensor
            yield from attribute.sparse_tensors


def is_external(tensor: onnx.TensorProto) -> bool:
    """Whether the data of a tensor is in another file."""
    return bool(tensor.data_location == onnx.TensorProto.EXTERNAL)


def tensor_bytes(tensor: onnx.TensorProto) -> int:
    """Size in bytes that dtype and dims announce, computed without allocating; strings count what they hold."""
    if tensor.data_type == onnx.TensorProto.STRING:
        return sum(len(s) for s in tensor.string_data)
    elements: int = math.prod(tensor.dims)
    return (elements * ELEMENT_BITS.get(tensor.data_type, 0) + 7) // 8


def weight_bytes(model: ir.Model) -> int:
    """Bytes of all initializers and of the tensors in attributes, those of bodies included."""
    return sum(int(tensor.nbytes) for tensor in weight_tensors(model))


def weight_tensors(model: ir.Model) -> Iterator[ir.TensorProtocol]:
    """All initializers and the tensors in attributes, those of bodies and functions included."""
    for graph in model.graphs():
        yield from (value.const_value for value in graph.initializers.values() if value.const_value is not None)
    for node in every_node(model):
        yield from (a.as_tensor() for a in node.attributes.values() if a.type is ir.AttributeType.TENSOR)


def check_tensor(tensor: onnx.TensorProto, path: Path) -> None:
    """Refuse a tensor whose dtype is unknown or whose data is not as long as its dims say.

    Args:
        path: the model file, for the message.
    """
    name = tensor.name or "(unnamed)"
    if tensor.data_type != onnx.TensorProto.STRING and tensor.data_type not in ELEMENT_BITS:
        raise ModelError(f"{path}: tensor {name!r} has the unknown data type {tensor.data_type}", DAMAGED)
    if any(d < 0 for d in tensor.dims):
        raise ModelError(f"{path}: tensor {name!r} has a negative dimension {list(tensor.dims)}", DAMAGED)
    if is_external(tensor):
        return
    announced, held = _announced_and_held(tensor)
    if announced != held:
        raise ModelError(
            f"{path}: tensor {name!r} of shape {list(tensor.dims)} needs {announced} values and holds {held}", DAMAGED
        )


def check_sparse_tensor(sparse: onnx.SparseTensorProto, path: Path) -> None:
    """Refuse a sparse tensor that is far larger as a dense one, which runtimes make it: more than the budget's `sample`
    beyond a hundred times its values."""
    values = tensor_bytes(sparse.values)
    one = max(1, ELEMENT_BITS.get(sparse.values.data_type, 0) // 8)
    if any(d < 0 for d in sparse.dims) or math.prod(sparse.dims) * one > largest_sample() + 100 * values:
        raise ModelError(
            f"{path}: sparse tensor {sparse.values.name!r} has the shape {list(sparse.dims)[:16]}",
            "Export dense weights",
        )


def check_external(tensors: Iterable[onnx.TensorProto], path: Path) -> int:
    """The bytes of all external tensors.

    Raises:
        ModelError: one is not where it may be, as `external_span`; or they share so many bytes of their files that they
            would be more than twice as large, and the budget's `sample`, where each is stored by itself.
    """
    spans = [external_span(tensor, path) for tensor in tensors]
    total = sum(span.length for span in spans)
    held = sum(file.stat().st_size for file in {span.file for span in spans})
    if total > 2 * held + largest_sample():
        raise ModelError(f"{path}: its external tensors are {total} bytes of {held} in its files", DAMAGED)
    return total


def external_span(tensor: onnx.TensorProto, model_path: Path, folder: Path | None = None) -> ExternalSpan:
    """Check one external tensor and give the place of its bytes, which are not read.

    Args:
        folder: where external data lie; None: the model's folder, or where `model_path` is a link, the folder of the
            file that it leads to, as caches that keep files by their hashes have it. ONNX Runtime has the same rule.

    Raises:
        ModelError: the location is absolute, leaves those folders (also through a symbolic link), is missing or
            no regular file; or offset and length do not fit the file or the tensor.
    """
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    where = f"{model_path}: external tensor {tensor.name!r}"
    allowed = [model_path.parent if folder is None else folder]
    if folder in (None, model_path.parent) and model_path.is_symlink():
        allowed.append(model_path.resolve().parent)
    file = _contained(location, allowed, where)
    size = file.stat().st_size
    offset = _number(entries.get("offset", "0"), "offset", where)
    expected = tensor_bytes(tensor)
    length = _number(entries.get("length", str(expected)), "length", where)
    if length != expected:
        raise ModelError(f"{where} has {length} bytes where its shape and type need {expected}", DAMAGED)
    if offset + length > size:
        raise ModelError(
            f"{where} needs bytes {offset} to {offset + length} of {location}, which has {size}",
            "The data file is truncated or belongs to another model; copy both files again",
        )
    return ExternalSpan(file, location, offset, length)


def _contained(location: str, allowed: Sequence[Path], where: str) -> Path:
    """The file that `location` names in the first of the folders `allowed`, which lies in one of them."""
    fix = "External data must lie in the model's folder or below; put it there and export again"
    if not location or "\0" in location:
        raise ModelError(f"{where} names no data file", DAMAGED)
    windows = PureWindowsPath(location)
    if PurePosixPath(location).is_absolute() or windows.drive or windows.root:
        raise ModelError(f"{where} has the absolute location {location!r}", fix)
    if ".." in windows.parts or ".." in PurePosixPath(location).parts:
        raise ModelError(f"{where} has the location {location!r}, which leaves the model's folder", fix)
    folders = [folder.resolve() for folder in allowed]
    named = folders[0] / location
    try:
        file = named.resolve()
        mode = file.stat().st_mode
    except (OSError, RuntimeError) as error:
        raise ModelError(
            f"{where} needs {location!r}, which cannot be read: {error}", "Copy the data file next to the model"
        ) from error
    if not any(file.is_relative_to(folder) for folder in folders):
        raise ModelError(f"{where} follows the symbolic link {location!r} out of the model's folder", fix)
    if not stat.S_ISREG(mode):
        raise ModelError(f"{where} has the location {location!r}, which is no regular file", fix)
    return file


def _number(text: str, field: str, where: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 19):
        raise ModelError(f"{where} has the {field} {text[:40]!r}", DAMAGED)
    return int(text)


def _announced_and_held(tensor: onnx.TensorProto) -> tuple[int, int]:
    """(expected, present): bytes for raw data, elements of the typed field otherwise."""
    elements = math.prod(tensor.dims)
    data_type = tensor.data_type
    if data_type == onnx.TensorProto.STRING:
        return elements, len(tensor.string_data)
    if tensor.HasField("raw_data"):
        return tensor_bytes(tensor), len(tensor.raw_data)
    bits = ELEMENT_BITS.get(data_type, 0)
    if data_type in (onnx.TensorProto.COMPLEX64, onnx.TensorProto.COMPLEX128):
        elements *= 2
    elif bits < 8:  # packed, several in a byte, one byte in an int32
        elements = (elements * bits + 7) // 8
    fields = (tensor.float_data, tensor.int32_data, tensor.int64_data, tensor.double_data, tensor.uint64_data)
    return elements, sum(len(f) for f in fields)


def all_graphs(model: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    """The main graph, and every graph inside a node of it or of a function."""
    yield from iter_graphs(model.graph)
    for function in model.functions:
        yield from inner_graphs(function.node)


_STRINGS = {"value_string": 0, "value_strings": 1}
"""Attribute → axes of the tensor that it stands for."""


def settle_constants(model: onnx.ModelProto, path: Path) -> None:
    """Leave each Constant node its first attribute, in place, and make tensors of texts, which onnx_ir reads as ASCII.

    Args:
        path: the model file, for the message.

    Raises:
        ModelError: one has no value.
    """
    for node in iter_nodes(model):
        if node.op_type != "Constant" or node.domain not in ("", "ai.onnx"):
            continue
        if not node.attribute:
            name = node.name or next(iter(node.output), "")
            raise ModelError(f"{path}: Constant {name!r} has no value", "Export the model again")
        del node.attribute[1:]
        (value,) = node.attribute
        if value.name in _STRINGS and not value.ref_attr_name:
            texts = [*value.strings] if _STRINGS[value.name] else [value.s]
            tensor = onnx.TensorProto(data_type=onnx.TensorProto.STRING, string_data=texts)
            tensor.dims.extend([len(texts)] * _STRINGS[value.name])
            value.CopyFrom(onnx.AttributeProto(name="value", type=onnx.AttributeProto.TENSOR, t=tensor))


Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def float_constant(value: ir.Value | None) -> Array | None:
    """The values of a constant of floats, as float64; None for what is computed, and for other types."""
    tensor = constant_tensor(value)
    if tensor is None or not tensor.dtype.is_floating_point():
        return None
    with np.errstate(invalid="ignore"):  # a weight may be a signalling NaN
        return np.asarray(tensor.numpy()).astype(np.float64)


def output_channels(layer: ir.Node, weight: tuple[int, ...]) -> int:
    """How many channels a Conv, ConvTranspose, Gemm or MatMul with a weight of that shape gives."""
    if layer.op_type == "ConvTranspose":
        return weight[1] * int(layer.attributes.get_int("group", 1))
    outputs_first = layer.op_type == "Conv" or layer.attributes.get_int("transB", 0) != 0
    return weight[0 if outputs_first else 1]


def set_parameter(editor: Editor, layer: ir.Node, place: int, values: Array) -> None:
    """Make `values` the weights (`place` 1) or the bias (2) of a layer, in the element type of its weights. What other
    nodes read too is left to them."""
    weight, old = layer.inputs[1], node_input(layer, place)
    assert weight is not None
    assert weight.dtype is not None
    name = f"{old.name}.folded" if old is not None else f"{layer.name}.bias"
    editor.set_input(layer, place, values.astype(weight.dtype.numpy()), name)
