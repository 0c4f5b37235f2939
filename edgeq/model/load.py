"""Load, check and save models. Files are untrusted, so edgeq checks sizes before it allocates memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
import onnx_ir as ir
from edgeq_device.engines.catalog import read_file_signature
from edgeq_device.model.tensors import DTYPES, is_name

from edgeq.errors import ModelError, OutputError, one_line
from edgeq.model.convert import from_proto, to_proto
from edgeq.model.files import INLINE_LIMIT, data_name
from edgeq.model.functions import check_functions
from edgeq.model.graph import every_node, is_quantized_operator
from edgeq.model.order import sort_nodes
from edgeq.model.parsing import parse_model
from edgeq.model.shapes import describe
from edgeq.model.skeleton import proto_skeleton, shaped_skeleton
from edgeq.model.sparse import make_dense
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
    settle_constants,
    weight_bytes,
    weight_tensors,
)
from edgeq.signature import Dimension, Signature, TensorSpec
from edgeq.util.device_errors import device_errors

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
    # Sizes come first: every later check may allocate memory for what the file declares.
    for tensor in iter_tensors(model):
        check_tensor(tensor, path)
    for sparse in iter_sparse_tensors(model):
        check_sparse_tensor(sparse, path)
    total = check_external(filter(is_external, iter_tensors(model)), path)
    # onnx's checker refuses nodes out of order, so the nodes are sorted before it runs.
    for graph in iter_graphs(model.graph):
        sort_nodes(graph, path)
        _clear_placeholders(graph)
        _refuse_references(graph, path)
    # Shape inference and onnxruntime expand every call, so functions that grow without end are refused before.
    check_functions(model, path)
    check_valid(model, path)
    # Only now is the model known to be valid, and its parts may be rewritten.
    settle_constants(model, path)
    make_dense(model, path)
    _drop_devices(model)
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
    return to_memory(model, data_folder(model, path), label=path)


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
    # Locations may not lead out of their folder, so the common folder of all data files takes its place.
    folder = Path(os.path.commonpath([span.file.parent for _, span in spans]))
    for tensor, span in spans:
        place = next(entry for entry in tensor.external_data if entry.key == "location")
        place.value = span.file.relative_to(folder).as_posix()
    return folder


def read_unchecked(path: Path, folder: Path | None = None) -> ir.Model:
    """Read a model like `read_model`, but without checks. Use it for files that edgeq just wrote from a checked model,
    and for files of a bundle that was checked when it was opened.

    Args:
        folder: folder of external data, which a bundle's variant may set; None for the file's folder.

    Raises:
        ModelError: the model contains something undefined.
    """
    return to_memory(onnx.load(path, load_external_data=False), folder or path.parent, label=path)


def to_memory(model: onnx.ModelProto, base: Path, *, label: object = "the model") -> ir.Model:
    """Return the in-memory form of a loaded model. Old models also list initializers as inputs; in the result,
    initializers are not inputs.

    Args:
        base: folder of the model's external data.
        label: the model's file, for messages.

    Raises:
        ModelError: the model contains something undefined.
    """
    from onnx_ir.passes.common import RemoveInitializersFromInputsPass

    memory = from_proto(model, base, label=label)
    weights = RemoveInitializersFromInputsPass()(memory)
    # In older versions, a checker demands that every initializer is an input.
    if weights.modified:
        memory.ir_version = max(memory.ir_version, FREE_INITIALIZERS)
    return memory


def check_declared_sizes(model: onnx.ModelProto, folder: Path, path: Path) -> None:
    """Refuse a model that declares tensors far larger than its inputs and weights. This check comes before a session is
    opened.

    Args:
        folder: folder of the model's external data, which is not read.
        path: the model's file, for messages.

    Raises:
        ModelError: for the same reasons as `describe`.
    """
    describe(to_memory(model, folder, label=path), path, proto_skeleton(model))


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
    return _read_stated(path) or load_model(path, external_data="none")


def _read_stated(path: Path) -> onnx.ModelProto | None:
    """Return a model with the inputs and outputs that the file declares, if the file is in an engine's own format.
    Return None if `path` is an ONNX file.
    """
    with device_errors():
        stated = read_file_signature(path) if path.is_file() else None
    if stated is None:
        return None
    graph = onnx.GraphProto(name="stated")
    try:
        for key, place in (("inputs", graph.input), ("outputs", graph.output)):
            for entry in stated[key]:
                kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(DTYPES[entry["type"]]))
                place.append(onnx.helper.make_tensor_value_info(entry["name"], kind, entry["shape"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path} states its inputs and outputs wrongly: {one_line(error)}", DAMAGED) from error
    if not (graph.input and graph.output):
        raise ModelError(f"{path} does not state its inputs and outputs", "Name a file that edgeq wrote")
    input_names, output_names = ([entry.name for entry in values] for values in (graph.input, graph.output))
    # Nothing is known about what the file computes. One node with all inputs and outputs keeps the model valid.
    graph.node.append(onnx.helper.make_node("Whole", input_names, output_names, name="whole", domain=_OWN_FORMAT))
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid(_OWN_FORMAT, 1)]
    return onnx.ModelProto(ir_version=8, graph=graph, opset_import=opsets)


def load_unchecked(path: Path) -> onnx.ModelProto:
    """Load a model like `load_runnable`, but without checks. Use it for the same files as `read_unchecked`."""
    return _read_stated(path) or onnx.load(path, load_external_data=False)


def unchecked_signature(model: Path | bytes, path: Path) -> Signature:
    """Return the signature of a file, or of the content of a file, without checks. Use it for the same files as
    `read_unchecked`.

    Args:
        path: the file's name in messages.
    """
    return signature_of(onnx.load_model_from_string(model) if isinstance(model, bytes) else load_unchecked(model), path)


def signature_of(model: onnx.ModelProto, path: Path) -> Signature:
    """Return the inputs and outputs of a model. `path` is for messages."""
    # Models before IR version 4 list their weights as inputs, too.
    weights = {t.name for t in model.graph.initializer}
    return Signature(
        tuple(_spec(i, path) for i in model.graph.input if i.name not in weights),
        tuple(_spec(o, path, sequences=True) for o in model.graph.output),
    )


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
    # protobuf refuses larger messages. The threshold keeps scales and shapes in the model file.
    if weight_bytes(model) > inline_limit:
        ir.save(model, path, external_data=data_name(path), size_threshold_bytes=1024)
        return
    # One file must not depend on the data files of the model that it was made from.
    if external:
        model, proto = model.clone(), None
        ir.external_data.load_to_model(model)
    path.write_bytes((proto or to_proto(model)).SerializeToString(deterministic=True))


def is_quantized(model: ir.Model) -> bool:
    """Return whether a model already contains quantized operators: QuantizeLinear, DequantizeLinear, QLinear* or
    integer operators.
    """
    return any(is_quantized_operator(node.op_type) for node in every_node(model))


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
    # Outputs may be sequences of tensors, such as the list of boxes of a detector. Only the type of the elements
    # matters.
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
    # Asking onnx for the dtype of an unknown number raises a bare KeyError.
    if tensor.elem_type not in onnx.TensorProto.DataType.values():
        raise ModelError(f"{path}: {value.name!r} has the unknown data type {tensor.elem_type}", DAMAGED)
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    shape = tuple(_dimension(d) for d in tensor.shape.dim) if tensor.HasField("shape") else None
    return TensorSpec(value.name, dtype, shape)


def _clear_placeholders(graph: onnx.GraphProto) -> None:
    """Clear sizes with placeholder names, in place. If placeholders were symbols, all sizes with the same placeholder
    would have to be equal.
    """
    for value in [*graph.input, *graph.output, *graph.value_info]:
        for dim in value.type.tensor_type.shape.dim if value.type.HasField("tensor_type") else ():
            if _dimension(dim) is None:
                dim.Clear()


def _drop_devices(model: onnx.ModelProto) -> None:
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


def _read_in(tensor: onnx.TensorProto, path: Path) -> None:
    tensor.raw_data = external_span(tensor, path).read_bytes()
    tensor.ClearField("data_location")
    tensor.ClearField("external_data")
