"""Between the in-memory model and protobuf, for files and for libraries that take nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.errors import ModelError


def from_proto(proto: onnx.ModelProto, base: Path | None = None, *, where: object = "the model") -> ir.Model:
    """The in-memory model of a checked protobuf. Weights are not copied.

    Args:
        base: folder that the locations of external weights are relative to; they are read when their values are.
        where: the model's file, for messages.

    Raises:
        ModelError: something in it has no meaning, such as an element type that ONNX does not have.
    """
    try:
        model = ir.serde.deserialize_model(proto)
        for _ in ir.traversal.RecursiveGraphIterator(model.graph):
            continue  # an attribute may lack the graph that its type announces
    except Exception as error:  # ValueError, KeyError, AttributeError and others, each with the one that it followed
        cause = error.__cause__ or error
        text = " ".join(str(cause).split())[:300] or type(cause).__name__
        raise ModelError(f"{where} cannot be read: {text}", "Export the model again") from error
    if base is not None:
        ir.external_data.set_base_dir(model.graph, base)
    return model


def external_folder(model: ir.Model) -> Path | None:
    """The folder that the locations of external weights are relative to; None where all weights are in memory."""
    tensors = (value.const_value for graph in model.graphs() for value in graph.initializers.values())
    folder = next((t.base_dir for t in tensors if isinstance(t, ir.ExternalTensor)), None)
    return None if folder is None else Path(folder).absolute()


def to_proto(model: ir.Model) -> onnx.ModelProto:
    """The protobuf of a model; external weights stay references. `value_info` holds what nodes make: the type and shape
    of an initializer are in its tensor."""
    proto = ir.serde.serialize_model(model)
    for graph in (proto.graph, *inner_graphs(proto.graph.node)):
        weights = {tensor.name for tensor in graph.initializer}
        described = [value for value in graph.value_info if value.name not in weights]
        del graph.value_info[:]
        graph.value_info.extend(described)
    return proto


def to_bytes(model: ir.Model) -> bytes:
    """A model as one file's content, the same for the same model; external weights stay references.

    Raises:
        ValueError: it is larger than protobuf's 2 GiB.
    """
    content: bytes = to_proto(model).SerializeToString(deterministic=True)
    return content


def from_bytes(content: bytes) -> ir.Model:
    """The in-memory model of what `to_bytes` gave."""
    return from_proto(onnx.load_model_from_string(content))


def bytes_of_text(text: str, weights: Mapping[str, NDArray[Any]]) -> bytes:
    """A model in ONNX's text form as one file's content; `weights` become initializers of its graph."""
    model = onnx.parser.parse_model(text)
    tensors = (onnx.numpy_helper.from_array(np.ascontiguousarray(values), name) for name, values in weights.items())
    model.graph.initializer.extend(tensors)
    content: bytes = model.SerializeToString()
    return content


def inner_graphs(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.GraphProto]:
    """The graphs inside nodes, those of If, Loop and Scan, depth first."""
    for node in nodes:
        for attribute in node.attribute:
            for body in [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]:
                yield body
                yield from inner_graphs(body.node)
