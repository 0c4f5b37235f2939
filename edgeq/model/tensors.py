"""Find the tensors in ONNX files, and check that they have the correct size."""

from __future__ import annotations

import math
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

import onnx
import onnx_ir as ir
from edgeq_device.model.onnxfile import ELEMENT_BITS
from edgeq_device.system.budget import read_largest_sample
from edgeq_device.system.files import open_file

from edgeq.errors import ModelError
from edgeq.model.convert import inner_graphs
from edgeq.model.graph import every_node

DAMAGED = "The file is damaged or was tampered with; export or download it again"


@dataclass(frozen=True)
class ExternalSpan:
    """Locate the bytes of one external tensor.

    Attributes:
        file: absolute path, checked to be inside the model's folder. If the model is a link, the folder of the link's
            target is allowed too.
        location: the path in the model, relative to the model's folder.
        offset, length: position and number of the bytes, checked to be inside the file.
    """

    file: Path
    location: str
    offset: int
    length: int

    def read_bytes(self) -> bytes:
        """Return the tensor's bytes."""
        with open_file(self.file) as stream:
            stream.seek(self.offset)
            return stream.read(self.length)


def iter_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield `graph` and the graphs of its If, Loop and Scan nodes, in depth-first order."""
    yield graph
    yield from inner_graphs(graph.node)


def iter_nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Yield every node of a model: those of the main graph, of subgraphs and of the model's functions."""
    for graph in iter_graphs(model.graph):
        yield from graph.node
    for function in model.functions:
        yield from function.node
        for graph in inner_graphs(function.node):
            yield from graph.node


def iter_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield every tensor of a model at any depth: initializers, tensor attributes, and the parts of sparse tensors."""
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
    """Yield every sparse tensor of a model at any depth: initializers and attributes."""
    for graph in all_graphs(model):
        yield from graph.sparse_initializer
    for node in iter_nodes(model):
        for attribute in node.attribute:
            if attribute.HasField("sparse_tensor"):
                yield attribute.sparse_tensor
            yield from attribute.sparse_tensors


def is_external(tensor: onnx.TensorProto) -> bool:
    """Return whether the data of a tensor is in another file."""
    return bool(tensor.data_location == onnx.TensorProto.EXTERNAL)


def tensor_bytes(tensor: onnx.TensorProto) -> int:
    """Return the size in bytes that follows from dtype and dims, without allocating memory. For strings, return the
    size of the texts.
    """
    if tensor.data_type == onnx.TensorProto.STRING:
        return sum(len(s) for s in tensor.string_data)
    # Types such as int4 do not fill bytes, so bits are rounded up to whole bytes.
    elements: int = math.prod(tensor.dims)
    return (elements * ELEMENT_BITS.get(tensor.data_type, 0) + 7) // 8


def weight_bytes(model: ir.Model) -> int:
    """Return the size in bytes of all initializers and tensor attributes, including those in bodies."""
    return sum(int(tensor.nbytes) for tensor in weight_tensors(model))


def weight_tensors(model: ir.Model) -> Iterator[ir.TensorProtocol]:
    """Yield all initializers and tensor attributes, including those in bodies and functions."""
    for graph in model.graphs():
        yield from (value.const_value for value in graph.initializers.values() if value.const_value is not None)
    for node in every_node(model):
        yield from (a.as_tensor() for a in node.attributes.values() if a.type is ir.AttributeType.TENSOR)


def check_tensor(tensor: onnx.TensorProto, path: Path) -> None:
    """Refuse a tensor with an unknown dtype, or with data whose length does not match its dims.

    Args:
        path: the model file, for the message.

    Raises:
        ModelError: the tensor is damaged.
    """
    name = tensor.name or "(unnamed)"
    if tensor.data_type != onnx.TensorProto.STRING and tensor.data_type not in ELEMENT_BITS:
        raise ModelError(f"{path}: tensor {name!r} has the unknown data type {tensor.data_type}", DAMAGED)
    # Two negative sizes would have a positive product, and pass the comparison below.
    if any(d < 0 for d in tensor.dims):
        raise ModelError(f"{path}: tensor {name!r} has a negative dimension {list(tensor.dims)}", DAMAGED)
    # `external_span` checks these against their files.
    if is_external(tensor):
        return
    expected, actual = _sizes_of(tensor)
    if expected != actual:
        raise ModelError(
            f"{path}: tensor {name!r} of shape {list(tensor.dims)} needs {expected} values and has {actual}", DAMAGED
        )


def check_sparse_tensor(sparse: onnx.SparseTensorProto, path: Path) -> None:
    """Refuse a sparse tensor that would be far too large in dense form. The limit is the budget's `sample` plus a
    hundred times the size of the tensor's values in bytes.

    Raises:
        ModelError: the dense tensor would be too large.
    """
    values = tensor_bytes(sparse.values)
    element_bytes = max(1, ELEMENT_BITS.get(sparse.values.data_type, 0) // 8)
    if any(d < 0 for d in sparse.dims) or math.prod(sparse.dims) * element_bytes > read_largest_sample() + 100 * values:
        raise ModelError(
            f"{path}: sparse tensor {sparse.values.name!r} has the shape {list(sparse.dims)[:16]}",
            "Export dense weights",
        )


def check_external(tensors: Iterable[onnx.TensorProto], path: Path) -> int:
    """Check all external tensors and return their total size in bytes.

    Raises:
        ModelError: a tensor fails `external_span`, or too many tensors share the same bytes. The total size of the
            tensors may be at most the budget's `sample` plus twice the size of the files.
    """
    spans = [external_span(tensor, path) for tensor in tensors]
    total = sum(span.length for span in spans)
    file_bytes = sum(file.stat().st_size for file in {span.file for span in spans})
    # Tied tensors may share bytes. Many tensors over the same bytes would only use up memory.
    if total > 2 * file_bytes + read_largest_sample():
        raise ModelError(f"{path}: its external tensors have {total} bytes, but their files only {file_bytes}", DAMAGED)
    return total


def external_span(tensor: onnx.TensorProto, model_path: Path, folder: Path | None = None) -> ExternalSpan:
    """Check one external tensor and return the location of its bytes. The bytes are not read.

    Args:
        folder: folder of external data; None for the model's folder. If `model_path` is a link, the folder of the
            link's target is allowed too, because some caches store files by their hashes. ONNX Runtime has the same
            rule.

    Raises:
        ModelError: the location is absolute, leaves the allowed folders (directly or through a symbolic link), does not
            exist or is not a regular file; or the offset and length do not fit the file or the tensor.
    """
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    subject = f"{model_path}: external tensor {tensor.name!r}"
    allowed = [model_path.parent if folder is None else folder]
    # Caches such as those of model hubs store files by hash, and link to them by name.
    if folder in (None, model_path.parent) and model_path.is_symlink():
        allowed.append(model_path.resolve().parent)
    file = _find_contained(location, allowed, subject)
    size = file.stat().st_size
    offset = _number(entries.get("offset", "0"), "offset", subject)
    expected = tensor_bytes(tensor)
    length = _number(entries.get("length", str(expected)), "length", subject)
    if length != expected:
        raise ModelError(f"{subject} has {length} bytes where its shape and type need {expected}", DAMAGED)
    if offset + length > size:
        raise ModelError(
            f"{subject} needs bytes {offset} to {offset + length} of {location}, which has {size}",
            "The data file is truncated or belongs to another model; copy both files again",
        )
    return ExternalSpan(file, location, offset, length)


def _find_contained(location: str, allowed: Sequence[Path], subject: str) -> Path:
    """Return the file at `location` in the first of the folders `allowed`. The file's real path must be inside one of
    these folders.
    """
    fix = "External data must be in the model's folder or below; put it there and export again"
    # The operating system would end the path at a zero byte.
    if not location or "\0" in location:
        raise ModelError(f"{subject} names no data file", DAMAGED)
    # A model may travel to another system, so the absolute paths of every system are refused.
    windows = PureWindowsPath(location)
    if PurePosixPath(location).is_absolute() or windows.drive or windows.root:
        raise ModelError(f"{subject} has the absolute location {location!r}", fix)
    if ".." in windows.parts or ".." in PurePosixPath(location).parts:
        raise ModelError(f"{subject} has the location {location!r}, which leaves the model's folder", fix)
    # Links are resolved before the comparison, because a link inside the folder may lead out of it.
    folders = [folder.resolve() for folder in allowed]
    named = folders[0] / location
    try:
        file = named.resolve()
        mode = file.stat().st_mode
    except (OSError, RuntimeError) as error:
        raise ModelError(
            f"{subject} needs {location!r}, which cannot be read: {error}", "Copy the data file next to the model"
        ) from error
    if not any(file.is_relative_to(folder) for folder in folders):
        raise ModelError(f"{subject} follows the symbolic link {location!r} out of the model's folder", fix)
    # Reading a pipe or a device might never end.
    if not stat.S_ISREG(mode):
        raise ModelError(f"{subject} has the location {location!r}, which is not a regular file", fix)
    return file


def _number(text: str, field: str, subject: str) -> int:
    # `int` accepts other digits, signs and underscores, and takes long for long texts. 19 digits suffice for any file.
    if not (text.isascii() and text.isdigit() and len(text) <= 19):
        raise ModelError(f"{subject} has the {field} {text[:40]!r}", DAMAGED)
    return int(text)


def _sizes_of(tensor: onnx.TensorProto) -> tuple[int, int]:
    """Return the expected and the present size of a tensor's data. The unit is bytes for raw data, and elements for
    data in a typed field.
    """
    elements = math.prod(tensor.dims)
    data_type = tensor.data_type
    # Texts have no fixed size, so only their number can be compared.
    if data_type == onnx.TensorProto.STRING:
        return elements, len(tensor.string_data)
    if tensor.HasField("raw_data"):
        return tensor_bytes(tensor), len(tensor.raw_data)
    bits = ELEMENT_BITS.get(data_type, 0)
    # Typed fields store the real and the imaginary part of a number as two elements.
    if data_type in (onnx.TensorProto.COMPLEX64, onnx.TensorProto.COMPLEX128):
        elements *= 2
    elif bits < 8:  # Packed types store several elements in a byte, and each int32 contains one byte.
        elements = (elements * bits + 7) // 8
    fields = (tensor.float_data, tensor.int32_data, tensor.int64_data, tensor.double_data, tensor.uint64_data)
    return elements, sum(len(f) for f in fields)


def all_graphs(model: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    """Yield the main graph, and every graph inside one of its nodes or inside a function."""
    yield from iter_graphs(model.graph)
    for function in model.functions:
        yield from inner_graphs(function.node)


# Attribute → number of axes of the resulting tensor.
_STRINGS = {"value_string": 0, "value_strings": 1}


def settle_constants(model: onnx.ModelProto, path: Path) -> None:
    """Keep only the first attribute of each Constant node, and turn string attributes into tensors, in place. onnx_ir
    would read string attributes as ASCII.

    Args:
        path: the model file, for the message.

    Raises:
        ModelError: a Constant has no value.
    """
    for node in iter_nodes(model):
        if node.op_type != "Constant" or node.domain not in ("", "ai.onnx"):
            continue
        if not node.attribute:
            name = node.name or next(iter(node.output), "")
            raise ModelError(f"{path}: Constant {name!r} has no value", "Export the model again")
        # Which of several values would count is not defined, so edgeq keeps the first for all readers.
        del node.attribute[1:]
        (value,) = node.attribute
        if value.name in _STRINGS and not value.ref_attr_name:
            texts = [*value.strings] if _STRINGS[value.name] else [value.s]
            tensor = onnx.TensorProto(data_type=onnx.TensorProto.STRING, string_data=texts)
            tensor.dims.extend([len(texts)] * _STRINGS[value.name])
            value.CopyFrom(onnx.AttributeProto(name="value", type=onnx.AttributeProto.TENSOR, t=tensor))
