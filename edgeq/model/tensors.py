"""Find the tensors in ONNX files, and check that they have the correct size."""

from __future__ import annotations

import math
import stat
import string
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, Any

import numpy as np
import onnx
import onnx_ir as ir
from edgeq_device.bundle.onnxfile import ELEMENT_BITS
from edgeq_device.system.budget import largest_sample
from edgeq_device.system.files import open_file, read_file

from edgeq.errors import ModelError, UsageError
from edgeq.model.clean import BUNDLES_GO, is_archived_bundle, likely_cause
from edgeq.model.edit import Editor, inner_graphs, to_proto
from edgeq.model.graph import constant_tensor, every_node, node_input
from edgeq.util.placement import is_interrupted

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

    def read(self) -> bytes:
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
    if any(d < 0 for d in tensor.dims):
        raise ModelError(f"{path}: tensor {name!r} has a negative dimension {list(tensor.dims)}", DAMAGED)
    if is_external(tensor):
        return
    announced, held = _announced_and_held(tensor)
    if announced != held:
        raise ModelError(
            f"{path}: tensor {name!r} of shape {list(tensor.dims)} needs {announced} values and has {held}", DAMAGED
        )


def check_sparse_tensor(sparse: onnx.SparseTensorProto, path: Path) -> None:
    """Refuse a sparse tensor that would be far too large in dense form. The limit is the budget's `sample` plus a
    hundred times the size of the tensor's values in bytes.

    Raises:
        ModelError: the dense tensor would be too large.
    """
    values = tensor_bytes(sparse.values)
    one = max(1, ELEMENT_BITS.get(sparse.values.data_type, 0) // 8)
    if any(d < 0 for d in sparse.dims) or math.prod(sparse.dims) * one > largest_sample() + 100 * values:
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
    held = sum(file.stat().st_size for file in {span.file for span in spans})
    if total > 2 * held + largest_sample():
        raise ModelError(f"{path}: its external tensors have {total} bytes, but their files only {held}", DAMAGED)
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
    """Return the file at `location` in the first of the folders `allowed`. The file's real path must be inside one of
    these folders.
    """
    fix = "External data must be in the model's folder or below; put it there and export again"
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
        raise ModelError(f"{where} has the location {location!r}, which is not a regular file", fix)
    return file


def _number(text: str, field: str, where: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 19):
        raise ModelError(f"{where} has the {field} {text[:40]!r}", DAMAGED)
    return int(text)


def _announced_and_held(tensor: onnx.TensorProto) -> tuple[int, int]:
    """Return the expected and the present size of a tensor's data. The unit is bytes for raw data, and elements for
    data in a typed field.
    """
    elements = math.prod(tensor.dims)
    data_type = tensor.data_type
    if data_type == onnx.TensorProto.STRING:
        return elements, len(tensor.string_data)
    if tensor.HasField("raw_data"):
        return tensor_bytes(tensor), len(tensor.raw_data)
    bits = ELEMENT_BITS.get(data_type, 0)
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


_STRINGS = {"value_string": 0, "value_strings": 1}
"""Attribute → number of axes of the resulting tensor."""


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
        del node.attribute[1:]
        (value,) = node.attribute
        if value.name in _STRINGS and not value.ref_attr_name:
            texts = [*value.strings] if _STRINGS[value.name] else [value.s]
            tensor = onnx.TensorProto(data_type=onnx.TensorProto.STRING, string_data=texts)
            tensor.dims.extend([len(texts)] * _STRINGS[value.name])
            value.CopyFrom(onnx.AttributeProto(name="value", type=onnx.AttributeProto.TENSOR, t=tensor))


Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def float_constant(value: ir.Value | None) -> Array | None:
    """Return the values of a float constant as float64. Return None for computed values and for constants of other
    types.
    """
    tensor = constant_tensor(value)
    if tensor is None or not tensor.dtype.is_floating_point():
        return None
    with np.errstate(invalid="ignore"):  # A weight may be a signalling NaN.
        return np.asarray(tensor.numpy()).astype(np.float64)


def output_channels(layer: ir.Node, weight: tuple[int, ...]) -> int:
    """Return the number of output channels of a Conv, ConvTranspose, Gemm or MatMul whose weight has this shape."""
    if layer.op_type == "ConvTranspose":
        return weight[1] * int(layer.attributes.get_int("group", 1))
    outputs_first = layer.op_type == "Conv" or layer.attributes.get_int("transB", 0) != 0
    return weight[0 if outputs_first else 1]


def set_parameter(editor: Editor, layer: ir.Node, place: int, values: Array) -> None:
    """Make `values` the weights (`place` 1) or the bias (2) of a layer, with the element type of its weights. If other
    nodes read the old tensor, it does not change for them.
    """
    weight, old = layer.inputs[1], node_input(layer, place)
    assert weight is not None
    assert weight.dtype is not None
    name = f"{old.name}.folded" if old is not None else f"{layer.name}.bias"
    editor.set_input(layer, place, values.astype(weight.dtype.numpy()), name)


KEPT_BYTES = 1024
"""Size of the largest tensor, in bytes, that a skeleton keeps. Such a tensor may be a shape, axes or a scale that shape
inference and conversion read."""


def skeleton(model: ir.Model) -> onnx.ModelProto:
    """Return the protobuf of `model` without the large and the external initializers of the main graph. These become
    graph inputs of the same type and shape. Initializers of bodies stay, because a body cannot get additional inputs.
    """
    graph = model.graph
    large = {name for name, value in graph.initializers.items() if _is_large(value.const_value)}
    values = graph.initializers.values()
    # A view takes a third of the time of a copy, which matters for models with many nodes.
    view = ir.GraphView(
        [*graph.inputs, *(v for v in values if v.name in large and not v.is_graph_input())],
        graph.outputs,
        nodes=graph,
        initializers=[v for v in values if v.name not in large],
        doc_string=graph.doc_string,
        opset_imports=graph.opset_imports,
        name=graph.name,
        metadata_props=graph.metadata_props,
    )
    bare = ir.Model(
        view,  # type: ignore[arg-type]
        ir_version=model.ir_version,
        producer_name=model.producer_name,
        producer_version=model.producer_version,
        domain=model.domain,
        model_version=model.model_version,
        doc_string=model.doc_string,
        functions=tuple(model.functions.values()),
        metadata_props=model.metadata_props,
    )
    return to_proto(bare)


def _is_large(tensor: ir.TensorProtocol | None) -> bool:
    return tensor is not None and (isinstance(tensor, ir.ExternalTensor) or tensor.nbytes > KEPT_BYTES)


def proto_skeleton(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the `skeleton` of a protobuf. The protobuf need not have been checked."""
    copy = without_initializers(model)
    inputs = {i.name for i in model.graph.input}
    for tensor in model.graph.initializer:
        if is_external(tensor) or tensor_bytes(tensor) > KEPT_BYTES:
            if tensor.name not in inputs:
                copy.graph.input.append(
                    onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
                )
        else:
            copy.graph.initializer.add().CopyFrom(tensor)
    return copy


def without_initializers(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a model without the initializers of its main graph."""
    copy = onnx.ModelProto()
    for field, value in model.ListFields():
        if field.name != "graph":
            _assign(copy, field.name, value)
    for field, value in model.graph.ListFields():
        if field.name != "initializer":
            _assign(copy.graph, field.name, value)
    return copy


def shaped_skeleton(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return `proto_skeleton` with a shape on every input and output. onnx's checker requires a shape. ONNX Runtime
    does not, and many exporters leave it out.
    """
    bare = proto_skeleton(model)
    for value in [*bare.graph.input, *bare.graph.output]:
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.shape.SetInParent()
    return bare


def reattach(bare: onnx.ModelProto, model: ir.Model) -> ir.Model:
    """Return the model of `bare` with the weights of `model`. `bare` is a skeleton of `model` that may have been
    changed.
    """
    whole = ir.serde.deserialize_model(bare)
    inputs = {value.name: value for value in whole.graph.inputs}
    wanted = {value.name for value in model.graph.inputs}
    for name, old in model.graph.initializers.items():
        if name in whole.graph.initializers:
            continue
        value = inputs[name]
        value.const_value = old.const_value
        if name not in wanted:
            whole.graph.inputs.remove(value)
        whole.graph.register_initializer(value)
    return whole


def _assign(message: object, name: str, value: object) -> None:
    target = getattr(message, name)
    if hasattr(target, "CopyFrom") and not hasattr(target, "extend"):
        target.CopyFrom(value)
    elif hasattr(target, "extend"):
        target.extend(value)
    else:
        setattr(message, name, value)


_ALIGNMENT = 4096
"""Alignment in bytes. Each weight begins at a page boundary, so a runtime can map it into memory."""
_SAFE = frozenset(string.ascii_letters + string.digits + "_-.")
_FIELDS = ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data", "external_data")


def save_external(
    model: onnx.ModelProto, path: Path, *, origin: Path, location: str | None = None, threshold: int = 1024
) -> None:
    """Write a model. Its initializers of at least `threshold` bytes go to data files next to it.

    Args:
        model: the model; it is changed in place to refer to the new files.
        path: the model file. Its folder must not contain any of the files that are written.
        origin: the model file whose folder contains the external data of `model`.
        location: name of one file for all weights. None gives each weight its own file, named after the weight.

    Raises:
        UsageError: `location` is not the name of a file next to the model.
    """
    if location is not None and (location.strip(".") == "" or location == path.name or not set(location) <= _SAFE):
        raise UsageError(
            f"external data location {location!r} is not the name of a file next to the model",
            "Give a plain file name of letters, digits, and _ - .",
        )
    taken = {path.name.lower()}
    for graph in iter_graphs(model.graph):
        for tensor in graph.initializer:
            if tensor.data_type == onnx.TensorProto.STRING:
                continue
            if tensor_bytes(tensor) >= threshold:
                name = location or _own_name(tensor.name, taken)
                taken.add(name.lower())
                with (path.parent / name).open("ab") as file:
                    _move(tensor, origin, file, name)
            elif is_external(tensor):
                content = _bytes(tensor, origin)
                _clear(tensor)
                tensor.raw_data = content
    path.write_bytes(model.SerializeToString(deterministic=True))


def _own_name(tensor: str, taken: set[str]) -> str:
    """Return a file name made from the tensor's name. It differs from all names in `taken`, even on file systems that
    ignore case.
    """
    stem = "".join(c if c in _SAFE else "_" for c in tensor).strip(".")[:100] or "weight"
    name, number = stem, 1
    while name.lower() in taken:
        number += 1
        name = f"{stem}.{number}"
    return name


def _move(tensor: onnx.TensorProto, origin: Path, file: IO[bytes], name: str) -> None:
    """Append a tensor's bytes to a file, and let the tensor refer to them."""
    file.write(b"\0" * (-file.tell() % _ALIGNMENT))
    offset = file.tell()
    file.write(_bytes(tensor, origin))
    length = file.tell() - offset
    _clear(tensor)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", name), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)


def _bytes(tensor: onnx.TensorProto, origin: Path) -> bytes:
    """Return the tensor's data in the format of `raw_data`."""
    if is_external(tensor):
        return external_span(tensor, origin).read()
    if tensor.HasField("raw_data"):
        return tensor.raw_data
    import onnx_ir

    return onnx_ir.serde.deserialize_tensor(tensor).tobytes()


def _clear(tensor: onnx.TensorProto) -> None:
    for field in _FIELDS:
        tensor.ClearField(field)
    tensor.ClearField("data_location")


PROTOBUF_LIMIT = 2**31 - 1
"""Largest size of a protobuf message, in bytes. Larger models keep their weights in external data."""


def parse_model(path: Path) -> onnx.ModelProto:
    """Return the protobuf in a file. The protobuf always has a graph with nodes, and an opset that onnx knows. No other
    checks are made.

    Raises:
        ModelError: the file cannot be read, or is not a model with nodes and a known opset.
    """
    from google.protobuf.message import DecodeError

    content = _read(path)
    model = onnx.ModelProto()
    try:
        model.ParseFromString(content)
        # Many byte strings happen to parse, as unknown fields or as a message that is almost empty.
        parsed = model.HasField("graph") and model.ir_version > 0 and bool(model.opset_import) and _text_is_text(model)
    except DecodeError:
        parsed = False
    if not parsed:
        what, fix = likely_cause(content, path)
        raise ModelError(f"{path} is not an ONNX model: {what}", fix)
    if not model.graph.node:
        raise ModelError(f"{path} has no operators in it", "Export the model again")
    newest = onnx.defs.onnx_opset_version()
    if opset_of_proto(model) > newest:
        raise ModelError(
            f"{path} uses opset {opset_of_proto(model)}; onnx {onnx.__version__} knows opsets up to {newest}",
            "Install a newer onnx, or export the model with an older opset",
        )
    return model


def _read(path: Path) -> bytes:
    try:
        if (path / "manifest.json").is_file():
            raise ModelError(f"{path} is a bundle, not a model", f"Give the .onnx file in it; {BUNDLES_GO}")
        if path.is_dir():
            raise ModelError(f"{path} is a directory, not a model", "Give the .onnx file in it")
        if not path.exists():
            if is_interrupted(path):
                fix = "A killed run has moved it; write to that name again, which first restores it"
                raise ModelError(f"{path} is not there now", fix)
            raise ModelError(f"{path} does not exist", "Check the path of the model")
        if not path.is_file():
            raise ModelError(f"{path} is not a regular file", "Give an .onnx file")
        if is_archived_bundle(path):
            raise ModelError(f"{path} is a bundle, not a model", f"Give the .onnx file it was made from; {BUNDLES_GO}")
        size = path.stat().st_size
        if size == 0:
            raise ModelError(f"{path} is empty", "Export or download the model again")
        if size > PROTOBUF_LIMIT:
            raise ModelError(
                f"{path} has {size} bytes, more than a protobuf can have (2 GiB)",
                "If it is an ONNX model, save it with external data (onnx.save with save_as_external_data=True)",
            )
        return read_file(path)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}", "Check the file and its permissions") from error


def opset_of_proto(model: onnx.ModelProto) -> int:
    """Return the version of the main operator set; 0 if the model does not import it."""
    return max((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), default=0)


def _text_is_text(message: Any) -> bool:
    """Return whether every string in a message is valid UTF-8. The parser returns other strings as bytes, which cause
    errors in later steps.

    The parser refuses messages nested deeper than 100, which limits the recursion.
    """
    from google.protobuf.descriptor import FieldDescriptor

    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_STRING:
            if not all(isinstance(v, str) for v in ([value] if isinstance(value, str | bytes) else value)):
                return False
        elif field.type == FieldDescriptor.TYPE_MESSAGE and not all(
            _text_is_text(v) for v in ([value] if hasattr(value, "ListFields") else value)
        ):
            return False
    return True
