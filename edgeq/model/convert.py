"""Convert models between protobuf, bytes and the in-memory form. Weights in data files are not read."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
from edgeq_device.system.files import check_file
from numpy.typing import NDArray

from edgeq.errors import ModelError, one_line
from edgeq.model.graph import every_node


def from_proto(proto: onnx.ModelProto, base: Path | None = None, *, label: object = "the model") -> ir.Model:
    """Return the in-memory model of a checked protobuf. Weights are not copied.

    Args:
        base: folder to which the locations of external weights are relative. The files are read only when values are
            needed.
        label: the model's file, for messages.

    Raises:
        ModelError: the model contains something undefined, such as an element type that ONNX does not have.
    """
    try:
        model = ir.serde.deserialize_model(proto)
        # The walk reads every body, so that a damaged one raises its error here, inside the `try`.
        for _ in ir.traversal.RecursiveGraphIterator(model.graph):
            continue  # An attribute that should contain a graph may have none.
    # ValueError, KeyError, AttributeError and others. The cause of the error has the useful text.
    except Exception as error:
        cause = error.__cause__ or error
        text = one_line(cause, most=300) or type(cause).__name__
        raise ModelError(f"{label} cannot be read: {text}", "Export the model again") from error
    if base is not None:
        _relocate_tensors(model, base)
    return model


class DataTensor(ir.ExternalTensor):
    """Read a tensor from a data file in the model's folder. The file may have several hard links, as in the stores of
    DVC, Nix and Bazel. onnx_ir refuses such files.
    """

    @functools.cached_property
    def _file(self) -> ir.ExternalTensor:
        """The same tensor at an absolute path. onnx_ir checks only relative paths.

        Raises:
            ModelError: the file is not a regular file in the folder. It was one when the model was loaded.
        """
        # Checked again when it is read: the file may have been replaced since the model was loaded.
        folder = Path(self.base_dir).resolve()
        file = (folder / self.location).resolve()
        try:
            check_file(file)
        except OSError as error:
            raise ModelError(
                f"{file} cannot be read: {error.strerror}", "Copy the data file next to the model"
            ) from error
        if not file.is_relative_to(folder):
            raise ModelError(f"{file} is not in {folder}", "External data must be in the model's folder or below")
        return ir.ExternalTensor(file, self.offset, self.length, self.dtype, shape=self.shape, name=self.name or "")

    def numpy(self) -> NDArray[Any]:
        """Return the values. They are mapped into memory and not copied."""
        return self._file.numpy()

    def __array__(self, dtype: Any = None) -> NDArray[Any]:
        return self._file.__array__(dtype)

    def tobytes(self) -> bytes:
        """Return the bytes of the values."""
        return self._file.tobytes()

    def tofile(self, file: Any) -> None:
        """Write the bytes of the values to a binary stream."""
        self._file.tofile(file)

    def release(self) -> None:
        """Free the mapped memory."""
        self.__dict__.pop("_file", None)


def _relocate_tensors(model: ir.Model, base: Path) -> None:
    """Let all external tensors of a model read from data files in the folder `base`, in place."""

    def moved(tensor: Any) -> Any:
        if not isinstance(tensor, ir.ExternalTensor):
            return tensor
        copy = DataTensor(
            tensor.location,
            tensor.offset,
            tensor.length,
            tensor.dtype,
            shape=tensor.shape,
            name=tensor.name,
            doc_string=tensor.doc_string,
            metadata_props=tensor.metadata_props,
            base_dir=base,
        )
        copy.meta.update(tensor.meta)
        return copy

    for graph in model.graphs():
        for value in graph.initializers.values():
            value.const_value = moved(value.const_value)
    for node in every_node(model):
        for name, attribute in node.attributes.items():
            # A reference to an attribute of a function has no value of its own.
            if attribute.is_ref():
                continue
            if attribute.type is ir.AttributeType.TENSOR and isinstance(attribute.value, ir.ExternalTensor):
                node.attributes[name] = ir.AttrTensor(name, moved(attribute.value))
            elif attribute.type is ir.AttributeType.TENSORS:
                node.attributes[name] = ir.AttrTensors(name, [moved(tensor) for tensor in attribute.value])


def external_folder(model: ir.Model) -> Path | None:
    """Return the folder to which the locations of external weights are relative. Return None if all weights are in
    memory.
    """
    tensors = (value.const_value for graph in model.graphs() for value in graph.initializers.values())
    folder = next((t.base_dir for t in tensors if isinstance(t, ir.ExternalTensor)), None)
    return None if folder is None else Path(folder).absolute()


def to_proto(model: ir.Model) -> onnx.ModelProto:
    """Return the protobuf of a model. The protobuf refers to external weights, which are not read. `value_info` lists
    only the outputs of nodes, because the tensor of an initializer already contains its type and shape.
    """
    proto = ir.serde.serialize_model(model)
    for graph in (proto.graph, *inner_graphs(proto.graph.node)):
        weights = {tensor.name for tensor in graph.initializer}
        described = [value for value in graph.value_info if value.name not in weights]
        del graph.value_info[:]
        graph.value_info.extend(described)
    return proto


def update_shapes(proto: onnx.ModelProto, model: ir.Model) -> None:
    """Write the types and shapes of the main graph's inner tensors and outputs into `proto`, in place. `proto` is the
    result of `to_proto` before the types and shapes were known.
    """
    graph = proto.graph
    del graph.value_info[:], graph.output[:]
    inner_values = [
        value for node in model.graph for value in node.outputs if value.name and not value.is_graph_output()
    ]
    graph.value_info.extend(
        ir.serde.serialize_value(v) for v in inner_values if v.type is not None or v.shape is not None
    )
    graph.output.extend(ir.serde.serialize_value(value) for value in model.graph.outputs)


def to_bytes(model: ir.Model) -> bytes:
    """Return a model as the content of one file. The same model always gives the same bytes. The content refers to
    external weights without containing them.

    Raises:
        ValueError: the model exceeds protobuf's limit of 2 GiB.
    """
    # Without `deterministic`, protobuf may write maps in any order, and digests would differ.
    content: bytes = to_proto(model).SerializeToString(deterministic=True)
    return content


def from_bytes(content: bytes) -> ir.Model:
    """Return the in-memory form of a model. `content` is a result of `to_bytes`."""
    return from_proto(onnx.load_model_from_string(content))


def bytes_of_text(text: str, weights: Mapping[str, NDArray[Any]]) -> bytes:
    """Return the content of a model file for a model in ONNX's text form. `weights` become initializers of its
    graph.
    """
    model = onnx.parser.parse_model(text)
    tensors = (onnx.numpy_helper.from_array(np.ascontiguousarray(values), name) for name, values in weights.items())
    model.graph.initializer.extend(tensors)
    content: bytes = model.SerializeToString()
    return content


def inner_graphs(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.GraphProto]:
    """Yield the graphs inside nodes such as If, Loop and Scan, in depth-first order."""
    for node in nodes:
        for attribute in node.attribute:
            for body in [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]:
                yield body
                yield from inner_graphs(body.node)
