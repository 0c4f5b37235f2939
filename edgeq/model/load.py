"""Load and save models. Files are untrusted, so edgeq checks sizes before it allocates memory."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import onnx
import onnx_ir as ir
from edgeq_device.engines.catalog import engine_of_file, read_file_signature
from edgeq_device.errors import BundleError
from edgeq_device.model.onnxfile import read_onnx
from edgeq_device.model.tensors import DTYPES, is_name
from edgeq_device.system.files import open_file
from numpy.typing import NDArray

from edgeq.errors import ModelError, OutputError, UsageError, one_line
from edgeq.model.clean import sort_nodes
from edgeq.model.edit import from_proto, to_proto
from edgeq.model.fold import check_functions, make_dense
from edgeq.model.graph import GraphIndex, every_node, is_quantized_operator
from edgeq.model.shapes import describe, inferred_shapes
from edgeq.model.tensors import (
    DAMAGED,
    check_external,
    check_sparse_tensor,
    check_tensor,
    external_span,
    is_external,
    iter_graphs,
    iter_nodes,
    iter_sparse_tensors,
    iter_tensors,
    parse_model,
    proto_skeleton,
    settle_constants,
    shaped_skeleton,
    weight_bytes,
    weight_tensors,
)
from edgeq.signature import Dimension, Signature, TensorSpec
from edgeq.util.registry import device_errors

INLINE_LIMIT = 2**30
"""Largest size of the tensors, in bytes, of a model that is saved as one file. It is half of protobuf's limit, which
leaves space for Q/DQ nodes, shapes and copies of some weights."""
SMALL_EXTERNAL = 2**26
"""Largest size of external data, in bytes, that `load_model` reads into the model by default."""

FREE_INITIALIZERS = 4
"""First IR version in which an initializer need not be an input."""

ExternalData = Literal["small", "all", "none"]


def load_model(path: Path, *, external_data: ExternalData = "small") -> onnx.ModelProto:
    """Read a model file and check it.

    The file must parse, each tensor must have the length that its shape requires, external data must be inside its
    folder, the graph must be acyclic, and onnx's checker must accept the model. edgeq sorts the nodes if necessary,
    clears sizes with placeholder names ("?", "-1"), and makes sparse weights dense.

    Args:
        external_data: "small" reads external data into the model if there is little of it, which suits most callers;
            "all" always reads it; "none" keeps checked references to the files.

    Raises:
        ModelError: a check failed; the message names the file, the problem and the solution.
    """
    model = parse_model(path)
    for tensor in iter_tensors(model):
        check_tensor(tensor, path)
    for sparse in iter_sparse_tensors(model):
        check_sparse_tensor(sparse, path)
    total = check_external(filter(is_external, iter_tensors(model)), path)
    for graph in iter_graphs(model.graph):
        sort_nodes(graph, path)
        _free_sizes(graph)
        _refuse_references(graph, path)
    check_functions(model, path)
    check_valid(model, path)
    settle_constants(model, path)
    make_dense(model, path)
    _on_one_device(model)
    if external_data == "all" or (external_data == "small" and total <= SMALL_EXTERNAL):
        for tensor in iter_tensors(model):
            if is_external(tensor):
                _read_in(tensor, path)
    return model


def _refuse_references(graph: onnx.GraphProto, path: Path) -> None:
    """Refuse an attribute that refers to an attribute of a function although no function contains its node."""
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.ref_attr_name:
                name = node.name or next(iter(node.output), "")
                raise ModelError(
                    f"{path}: attribute {attribute.name!r} of node {name!r} refers to a function that is not there",
                    "Export the model again",
                )


def read_model(path: Path) -> ir.Model:
    """Load a model with `load_model` and return it as an in-memory model. External data is read only when it is needed.

    Raises:
        ModelError: for the same reasons as `load_model`.
    """
    model = load_model(path, external_data="none")
    return in_memory(model, data_folder(model, path), where=path)


def data_folder(model: onnx.ModelProto, path: Path) -> Path:
    """Return the folder to which the locations of a loaded model's external data are relative.

    This is normally the model's own folder. If links lead out of that folder, as `external_span` allows, the locations
    are changed, in place: they become relative to a common folder of all data files. Later code then needs no special
    rule.

    Raises:
        ModelError: for the same reasons as `load_model`.
    """
    spans = [(tensor, external_span(tensor, path)) for tensor in iter_tensors(model) if is_external(tensor)]
    if all(span.file.is_relative_to(path.parent.resolve()) for _, span in spans):
        return path.parent
    folder = Path(os.path.commonpath([span.file.parent for _, span in spans]))
    for tensor, span in spans:
        place = next(entry for entry in tensor.external_data if entry.key == "location")
        place.value = span.file.relative_to(folder).as_posix()
    return folder


def read_own(path: Path, folder: Path | None = None) -> ir.Model:
    """Read a model like `read_model`, but without checks. Use it for files that edgeq just wrote from a checked model,
    and for files of a bundle that was checked when it was opened.

    Args:
        folder: folder of external data, which a bundle's variant may set; None for the file's folder.

    Raises:
        ModelError: the model contains something undefined.
    """
    return in_memory(onnx.load(path, load_external_data=False), folder or path.parent, where=path)


def in_memory(model: onnx.ModelProto, base: Path, *, where: object = "the model") -> ir.Model:
    """Return the in-memory form of a loaded model. Old models also list initializers as inputs; in the result,
    initializers are not inputs.

    Args:
        base: folder of the model's external data.
        where: the model's file, for messages.

    Raises:
        ModelError: the model contains something undefined.
    """
    from onnx_ir.passes.common import RemoveInitializersFromInputsPass

    memory = from_proto(model, base, where=where)
    weights = RemoveInitializersFromInputsPass()(memory)
    if weights.modified:
        memory.ir_version = max(memory.ir_version, FREE_INITIALIZERS)
    return memory


def check_declared_sizes(model: onnx.ModelProto, folder: Path, where: Path) -> None:
    """Refuse a model that declares tensors far larger than its inputs and weights. This check comes before a session is
    opened.

    Args:
        folder: folder of the model's external data, which is not read.
        where: the model's file, for messages.

    Raises:
        ModelError: for the same reasons as `describe`.
    """
    describe(in_memory(model, folder, where=where), where, proto_skeleton(model))


def model_signature(path: Path) -> Signature:
    """Return the inputs and outputs of a model that is about to run. Initializers that old models also list as inputs
    do not count.

    Raises:
        ModelError: for the same reasons as `load_runnable` and `check_declared_sizes`.
    """
    model = load_runnable(path)
    signature = signature_of(model, path)
    check_declared_sizes(model, path.parent, path)
    return signature


_OWN_FORMAT = "edgeq.own_format"


def load_runnable(path: Path) -> onnx.ModelProto:
    """Load a model that is about to run, without its weights. A file in an engine's own format becomes a model with one
    unknown node, which has the inputs and outputs that the file declares.

    Raises:
        ModelError: for the same reasons as `load_model`, or if a file in an engine's own format does not declare its
            inputs and outputs.
    """
    return _stated(path) or load_model(path, external_data="none")


def _stated(path: Path) -> onnx.ModelProto | None:
    """Return a model with the inputs and outputs that the file declares, if the file is in an engine's own format.
    Return None if `path` is an ONNX file.
    """
    with device_errors():
        found = read_file_signature(path) if path.is_file() else None
    if found is None:
        return None
    graph = onnx.GraphProto(name="stated")
    try:
        for key, place in (("inputs", graph.input), ("outputs", graph.output)):
            for one in found[key]:
                kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(DTYPES[one["type"]]))
                place.append(onnx.helper.make_tensor_value_info(one["name"], kind, one["shape"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path} states its inputs and outputs wrongly: {one_line(error)}", DAMAGED) from error
    if not (graph.input and graph.output):
        raise ModelError(f"{path} does not state its inputs and outputs", "Name a file that edgeq wrote")
    read, made = ([one.name for one in values] for values in (graph.input, graph.output))
    graph.node.append(onnx.helper.make_node("Whole", read, made, name="whole", domain=_OWN_FORMAT))
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid(_OWN_FORMAT, 1)]
    return onnx.ModelProto(ir_version=8, graph=graph, opset_import=opsets)


def own_runnable(path: Path) -> onnx.ModelProto:
    """Load a model like `load_runnable`, but without checks. Use it for the same files as `read_own`."""
    return _stated(path) or onnx.load(path, load_external_data=False)


def own_signature(model: Path | bytes, where: Path) -> Signature:
    """Return the signature of a file, or of the content of a file, without checks. Use it for the same files as
    `read_own`.

    Args:
        where: the file's name in messages.
    """
    return signature_of(onnx.load_model_from_string(model) if isinstance(model, bytes) else own_runnable(model), where)


def signature_of(model: onnx.ModelProto, path: Path) -> Signature:
    """Return the inputs and outputs of a model. `path` is for messages."""
    weights = {t.name for t in model.graph.initializer}
    return Signature(
        tuple(_spec(i, path) for i in model.graph.input if i.name not in weights),
        tuple(_spec(o, path, sequences=True) for o in model.graph.output),
    )


def model_files(path: Path, folder: Path | None = None) -> tuple[Path, ...]:
    """Return the model file, followed by its external data files in sorted order. Each data file is checked to be
    inside its folder. Weights are not read.

    Args:
        folder: folder of external data, which a bundle's variant may set; None for the model's folder. In other
            functions of this module, `folder` has the same meaning.

    Raises:
        ModelError: the file is not a model, or external data is outside the allowed folders.
    """
    if engine_of_file(path.name) is not None:
        return (path,)
    locations = {external_span(tensor, path, folder).location for tensor in _external_tensors(path)}
    return (path, *((folder or path.parent) / location for location in sorted(locations)))


def model_bytes(path: Path, folder: Path | None = None) -> int:
    """Return the size of a model on disk in bytes, including external data."""
    return sum(file.stat().st_size for file in model_files(path, folder))


def data_name(output: Path) -> str:
    """Return the name of the file next to `output` that contains the weights of a large model."""
    return f"{output.name}.data"


def data_beside(output: Path, model: Path) -> tuple[str, ...]:
    """Return the names of extra files that a model at `output` may need if it is made from `model`. Pass them to
    `edgeq.util.outputs.output_file`.

    Raises:
        ModelError: for the same reasons as `model_files`.
    """
    return (data_name(output),) if model_bytes(model) > INLINE_LIMIT else ()


def model_digest(path: Path, folder: Path | None = None) -> str:
    """Return the SHA-256 of a model in hex. Without external data it is the digest of the file, as `sha256sum` prints
    it. With external data it is a hash of the digests of all files and of the names of the data files.
    """
    files = model_files(path, folder)
    if len(files) == 1:
        return _file_digest(path)
    whole = hashlib.sha256(bytes.fromhex(_file_digest(path)))
    for file in files[1:]:
        whole.update(file.relative_to(folder or path.parent).as_posix().encode() + b"\0")
        whole.update(bytes.fromhex(_file_digest(file)))
    return whole.hexdigest()


_SHARED_AT_MOST = 2


def share_model(model: ir.Model, path: Path, made_of: GraphIndex) -> GraphIndex:
    """Keep in memory the model that was just written to `path`. `shared_model` then need not read the file. The model
    must not be changed afterwards.

    Args:
        made_of: the prepared model that the model was made from. It keeps the last few models that were made from it,
            and frees them when it is freed itself.
    """
    kept = _made_of(made_of)
    kept.pop(path, None)
    while len(kept) >= _SHARED_AT_MOST:
        kept.pop(next(iter(kept)))
    graph = GraphIndex(model, path)
    kept[path] = _state(path), graph
    return graph


def shared_model(path: Path, made_of: GraphIndex) -> GraphIndex:
    """Return the model in a file that edgeq wrote. The model is shared: to change it, change a clone.

    Args:
        made_of: the prepared model that the model was made from; see `share_model`.

    Raises:
        ModelError: for the same reasons as `read_own`.
    """
    state, graph = _made_of(made_of).get(path, ((), None))
    return graph if graph is not None and state == _state(path) else share_model(read_own(path), path, made_of)


def _made_of(source: GraphIndex) -> dict[Path, tuple[tuple[int, ...], GraphIndex]]:
    return source.once("files that were made of it", dict)


def _state(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size


def save_model(
    model: ir.Model, path: Path, *, inline_limit: int = INLINE_LIMIT, proto: onnx.ModelProto | None = None
) -> None:
    """Write a model to one file if its tensors have at most `inline_limit` bytes. Otherwise write the weights to a
    second file, which has the name `data_name(path)`.

    The same model always gives the same bytes. Call this function inside `edgeq.util.outputs.output_file`, which moves
    both files to their final names.

    Args:
        proto: result of `to_proto` for this model, if the caller already has it.

    Raises:
        OutputError: the model has external tensors in an unknown folder.
    """
    external = [tensor for tensor in weight_tensors(model) if isinstance(tensor, ir.ExternalTensor)]
    if any(not tensor.base_dir for tensor in external):
        raise OutputError(
            f"{path} cannot be written: the model refers to external data in an unknown folder",
            "Load the model with its external data",
        )
    if weight_bytes(model) > inline_limit:
        ir.save(model, path, external_data=data_name(path), size_threshold_bytes=1024)
        return
    if external:
        model, proto = model.clone(), None
        ir.external_data.load_to_model(model)
    path.write_bytes((proto or to_proto(model)).SerializeToString(deterministic=True))


def is_quantized(model: ir.Model) -> bool:
    """Return whether a model already contains quantized operators: QuantizeLinear, DequantizeLinear, QLinear* or
    integer operators.
    """
    return any(is_quantized_operator(node.op_type) for node in every_node(model))


def _external_tensors(path: Path) -> list[onnx.TensorProto]:
    """Return the external tensors of a file without reading their data."""
    try:
        found = read_onnx(path, str(path)).external
    # Either the file is not a model, and the parser gives a better message, or it is an unusual model that `read_onnx`
    # does not accept.
    except BundleError:
        return [tensor for tensor in iter_tensors(parse_model(path)) if is_external(tensor)]
    return [
        onnx.TensorProto(
            name=tensor.name,
            data_type=tensor.data_type,
            dims=tensor.dims,
            data_location=onnx.TensorProto.EXTERNAL,
            external_data=[onnx.StringStringEntryProto(key=key, value=value) for key, value in tensor.entries.items()],
        )
        for tensor in found
    ]


def check_valid(model: onnx.ModelProto, path: Path) -> None:
    """Check a model against the rules of the ONNX format. Large weights are left out of the check.

    Raises:
        ModelError: the model breaks a rule.
    """
    try:
        onnx.checker.check_model(shaped_skeleton(model))
    except Exception as error:  # The C++ code raises ValidationError, RuntimeError, IndexError and others.
        raise ModelError(
            f"{path} is not a valid ONNX model: {one_line(error, most=300)}", "Export the model again"
        ) from error


def _spec(value: onnx.ValueInfoProto, path: Path, *, sequences: bool = False) -> TensorSpec:
    """Return the name, dtype and shape of an input or output. `path` is for messages.

    Args:
        sequences: whether to accept a sequence or an optional of tensors. Its elements are then described.
    """
    while sequences and (kind := value.type.WhichOneof("value")) in ("sequence_type", "optional_type"):
        value = onnx.ValueInfoProto(name=value.name, type=getattr(value.type, kind).elem_type)
        value.type.tensor_type.ClearField("shape") if value.type.HasField("tensor_type") else None
    if not value.type.HasField("tensor_type") or value.type.tensor_type.elem_type == 0:
        kind = value.type.WhichOneof("value") or "untyped value"
        raise ModelError(
            f"{path}: {value.name!r} is a {kind.removesuffix('_type')}",
            "edgeq needs tensors as inputs, and no maps as outputs; from scikit-learn, export with "
            "options={'zipmap': False}",
        )
    tensor = value.type.tensor_type
    if tensor.elem_type not in onnx.TensorProto.DataType.values():
        raise ModelError(f"{path}: {value.name!r} has the unknown data type {tensor.elem_type}", DAMAGED)
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    shape = tuple(_dimension(d) for d in tensor.shape.dim) if tensor.HasField("shape") else None
    return TensorSpec(value.name, dtype, shape)


def _free_sizes(graph: onnx.GraphProto) -> None:
    """Clear sizes with placeholder names, in place. If placeholders were symbols, all sizes with the same placeholder
    would have to be equal.
    """
    for value in [*graph.input, *graph.output, *graph.value_info]:
        for dim in value.type.tensor_type.shape.dim if value.type.HasField("tensor_type") else ():
            if _dimension(dim) is None:
                dim.Clear()


def _on_one_device(model: onnx.ModelProto) -> None:
    """Remove, in place, the description of how a model is spread over several devices (IR version 11). edgeq deploys to
    one device, and an incomplete description would prevent writing the in-memory model.
    """
    for node in iter_nodes(model):
        if getattr(node, "device_configurations", None):
            node.ClearField("device_configurations")
    if getattr(model, "configuration", None):
        model.ClearField("configuration")


def _dimension(dim: onnx.TensorShapeProto.Dimension) -> Dimension:
    if dim.HasField("dim_value") and dim.dim_value > 0:  # Some exporters write -1 or 0 for a free size.
        return int(dim.dim_value)
    return dim.dim_param if dim.HasField("dim_param") and is_name(dim.dim_param) else None


def _file_digest(path: Path) -> str:
    try:
        with open_file(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}", "Check the file and its permissions") from error


def _read_in(tensor: onnx.TensorProto, path: Path) -> None:
    tensor.raw_data = external_span(tensor, path).read()
    tensor.ClearField("data_location")
    tensor.ClearField("external_data")


# Type of an object that users often pass instead of a path → the function call that saves the object to a file.
_SAVED_BY = {"ModelProto": "onnx.save(model, PATH)", "Model": "onnx_ir.save(model, PATH)"}


def path_of(given: object, what: str = "model") -> Path:
    """Return `given` as a path.

    Args:
        given: a str, a Path or another os.PathLike that contains text.
        what: kind of file, for the message.

    Raises:
        UsageError: `given` is anything else, such as a model in memory.
    """
    if isinstance(given, (str, os.PathLike)):
        text = os.fspath(given)
        if isinstance(text, str):
            return Path(text)
    kind = type(given).__name__
    if isinstance(given, (bytes, bytearray, memoryview)):
        save = "Path(PATH).write_bytes(model)"
    else:
        save = _SAVED_BY.get(kind, "")
    fix = f"Save it first, {save}, and give PATH" if save else "Give a path, as str or Path"
    raise UsageError(f"the {what} is given as {kind}, and a path (str or Path) is needed", fix)


T = TypeVar("T")

_FLOAT_BYTES = 4


def tensor_sizes(model: onnx.ModelProto, inputs: Mapping[str, NDArray[Any]]) -> dict[str, int]:
    """Return the size in bytes of each tensor, by name, when the model runs on `inputs`. Every element counts as four
    bytes. Tensors whose size cannot be inferred are left out.
    """
    bare = proto_skeleton(model)
    del bare.graph.value_info[:]
    for value in bare.graph.input:
        if value.name in inputs:
            dims = value.type.tensor_type.shape.dim
            del dims[:]
            for size in inputs[value.name].shape:
                dims.add().dim_value = size
    for value in bare.graph.output:
        value.type.tensor_type.ClearField("shape")
    inferred = inferred_shapes(bare, data_prop=True).graph
    return {
        value.name: _FLOAT_BYTES * math.prod(d.dim_value for d in value.type.tensor_type.shape.dim)
        for value in [*inferred.input, *inferred.value_info, *inferred.output]
        if value.type.tensor_type.HasField("shape")
        and all(d.HasField("dim_value") for d in value.type.tensor_type.shape.dim)
    }


def partitions(sized: Iterable[tuple[T, int]], budget: int) -> Iterator[list[T]]:
    """Yield the items in groups of neighbours. The sizes in a group add up to at most `budget`. An item that is larger
    than `budget` gets its own group.

    Args:
        sized: pairs of an item and its size, in the unit of `budget`.
    """
    partition: list[T] = []
    used = 0
    for item, size in sized:
        if partition and used + size > budget:
            yield partition
            partition, used = [], 0
        partition.append(item)
        used += size
    if partition:
        yield partition


def structure_digest(model: Path, session_options: Mapping[str, str]) -> str:
    """Return a hash of a model's operators, attributes, connections, shapes and dtypes. The values of constants are
    left out. If two models made from one float model have the same digest, they run the same kernels on the same
    shapes.

    Args:
        model: a file that edgeq wrote.
        session_options: options of the session, which are included in the hash.
    """
    graph = onnx.load(model, load_external_data=False).graph
    digest = hashlib.sha256(json.dumps(sorted(session_options.items())).encode())
    for node in graph.node:
        attributes = sorted(a.SerializeToString(deterministic=True) for a in node.attribute)
        digest.update(json.dumps([node.domain, node.op_type, list(node.input), list(node.output)]).encode())
        for attribute in attributes:
            digest.update(attribute)
    for tensor in sorted(graph.initializer, key=lambda t: t.name):
        digest.update(json.dumps([tensor.name, tensor.data_type, list(tensor.dims)]).encode())
    return digest.hexdigest()


def content_digest(model: Path, session_options: Mapping[str, str]) -> str:
    """Return a hash of a model's files and of the session options. Equal digests mean that the model and the options
    are the same.
    """
    digest = hashlib.sha256(json.dumps(sorted(session_options.items())).encode())
    for file in model_files(model):
        with open_file(file) as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def in_engine(digest: str, engine: str) -> str:
    """Return a structure or content digest that also depends on the engine. "" means onnxruntime's own kernels."""
    return hashlib.sha256((digest + engine).encode()).hexdigest() if engine else digest
