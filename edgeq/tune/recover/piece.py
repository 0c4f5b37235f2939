"""Sessions of some nodes of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir

from edgeq.graph.query import reads
from edgeq.session import SessionSettings, open_session

if TYPE_CHECKING:
    import onnxruntime as ort


def open_piece(
    model: ir.Model,
    nodes: Sequence[ir.Node],
    feed: Mapping[str, Any],
    outputs: Sequence[str],
    settings: SessionSettings,
) -> ort.InferenceSession:
    """A session of `nodes`, with those initializers of `model` that they read.

    Args:
        nodes: of the main graph, in its order.
        feed: values such as the session will get, by name: arrays, or lists of arrays for sequences. Shapes are free.
        outputs: names of tensors that the nodes compute.
    """
    piece = onnx.ModelProto(ir_version=model.ir_version)
    piece.opset_import.extend(onnx.helper.make_opsetid(*entry) for entry in model.opset_imports.items())
    piece.graph.name = "piece"
    piece.graph.node.extend(ir.serde.serialize_node(node) for node in nodes)
    read = dict.fromkeys(value for node in nodes for value in reads(node))
    constants = [value for value in read if value.is_initializer() and value.name not in feed]
    piece.graph.initializer.extend(_serialized(value) for value in constants)
    piece.graph.input.extend(_described(name, value) for name, value in feed.items())
    piece.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
    return open_session(piece.SerializeToString(), settings)


def _serialized(initializer: ir.Value) -> onnx.TensorProto:
    tensor = initializer.const_value
    assert tensor is not None
    if isinstance(tensor, ir.ExternalTensor):  # a session of bytes has no folder to read from
        tensor = ir.Tensor(tensor.numpy(), dtype=tensor.dtype)
    tensor.name = initializer.name
    return ir.serde.serialize_tensor(tensor)


def _described(name: str, value: Any) -> onnx.ValueInfoProto:
    """A graph input for values like this one."""
    if isinstance(value, list):
        kind = onnx.helper.np_dtype_to_tensor_dtype(np.asarray(value[0]).dtype if value else np.dtype(np.float32))
        return onnx.helper.make_tensor_sequence_value_info(name, kind, None)
    return onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(np.asarray(value).dtype), None)
