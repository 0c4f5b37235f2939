"""Read models with data outside, models too large for protobuf, and the structure of both."""

from __future__ import annotations

import string
from pathlib import Path
from typing import IO, Any

import onnx
import onnx_ir as ir

from edgeq.errors import ModelError, UsageError
from edgeq.model.clean import BUNDLES_GO, is_archived_bundle, likely_cause
from edgeq.model.edit import to_proto
from edgeq.model.tensors import external_span, is_external, iter_graphs, tensor_bytes
from edgeq.util.placement import interrupted

KEPT_BYTES = 1024
"""Tensors up to this size stay: they may be shapes, axes or scales that shape inference and conversion read."""


def skeleton(model: ir.Model) -> onnx.ModelProto:
    """The protobuf of `model` where every larger or external initializer of the main graph has become a graph input of
    its type and shape. Initializers of bodies stay: a body cannot have inputs of its own choosing.
    """
    graph = model.graph
    large = {name for name, value in graph.initializers.items() if _is_large(value.const_value)}
    values = graph.initializers.values()
    # A view takes a third of the time that a copy does, which counts in models of many nodes.
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
    """`skeleton` of a protobuf that is not checked yet."""
    copy = onnx.ModelProto()
    for field, value in model.ListFields():
        if field.name != "graph":
            _assign(copy, field.name, value)
    for field, value in model.graph.ListFields():
        if field.name != "initializer":
            _assign(copy.graph, field.name, value)
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


def shaped_skeleton(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return `proto_skeleton` with a shape on every input and output. onnx's checker wants one; ONNX Runtime does not,
    and many exporters leave it out."""
    bare = proto_skeleton(model)
    for value in [*bare.graph.input, *bare.graph.output]:
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.shape.SetInParent()
    return bare


def reattach(bare: onnx.ModelProto, model: ir.Model) -> ir.Model:
    """The model of `bare`, a skeleton of `model` that may have been changed since, with the weights of `model`."""
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
"""Bytes: weights start at pages, so that a runtime can map them."""
_SAFE = frozenset(string.ascii_letters + string.digits + "_-.")
_FIELDS = ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data", "external_data")


def save_external(
    model: onnx.ModelProto, path: Path, *, origin: Path, location: str | None = None, threshold: int = 1024
) -> None:
    """Write a model with its initializers of `threshold` bytes or more in data files beside it.

    Args:
        model: changed in place: afterwards it refers to the new files.
        path: the model file, in a folder that holds no file of the names that are written.
        origin: model file whose external tensors `model` has.
        location: name of the one file for all weights; None gives each its own, named after it.

    Raises:
        UsageError: `location` is not the name of a file beside the model.
    """
    if location is not None and (location.strip(".") == "" or location == path.name or not set(location) <= _SAFE):
        raise UsageError(
            f"external data location {location!r} is not the name of a file beside the model",
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
    """A file name made of the tensor's, unique among `taken`, also on file systems that ignore case."""
    stem = "".join(c if c in _SAFE else "_" for c in tensor).strip(".")[:100] or "weight"
    name, number = stem, 1
    while name.lower() in taken:
        number += 1
        name = f"{stem}.{number}"
    return name


def _move(tensor: onnx.TensorProto, origin: Path, file: IO[bytes], name: str) -> None:
    """Append a tensor's bytes to a file, and let it refer to them."""
    file.write(b"\0" * (-file.tell() % _ALIGNMENT))
    offset = file.tell()
    file.write(_bytes(tensor, origin))
    length = file.tell() - offset
    _clear(tensor)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", name), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)


def _bytes(tensor: onnx.TensorProto, origin: Path) -> bytes:
    """The tensor as `raw_data` would hold it."""
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
"""Bytes. A protobuf message cannot be longer; larger models keep their weights in external data."""


def parse_model(path: Path) -> onnx.ModelProto:
    """The protobuf in a file: a graph with nodes, of an opset that onnx knows. Nothing else of it is checked.

    Raises:
        ModelError: it cannot be read, or is something else.
    """
    from google.protobuf.message import DecodeError

    content = _read(path)
    model = onnx.ModelProto()
    try:
        model.ParseFromString(content)
        # Many byte strings happen to parse: as unknown fields, or as a message that holds next to nothing.
        parsed = model.HasField("graph") and model.ir_version > 0 and bool(model.opset_import) and _text_is_text(model)
    except DecodeError:
        parsed = False
    if not parsed:
        what, fix = likely_cause(content, path)
        raise ModelError(f"{path} is not an ONNX model: {what}", fix)
    if not model.graph.node:
        raise ModelError(f"{path} has no operators in it", "Export the model again")
    newest = onnx.defs.onnx_opset_version()
    if _opset(model) > newest:
        raise ModelError(
            f"{path} uses opset {_opset(model)}; onnx {onnx.__version__} knows opsets up to {newest}",
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
            if interrupted(path):
                fix = "A run that was killed has moved it away; write to that name again, which puts it back first"
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
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}", "Check the file and its permissions") from error


def _opset(model: onnx.ModelProto) -> int:
    return max((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), default=0)


def _text_is_text(message: Any) -> bool:
    """Whether every string in a message is UTF-8. The parser lets others through as bytes, which break what follows.

    Recursion is bounded by the parser, which refuses messages nested deeper than 100.
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
