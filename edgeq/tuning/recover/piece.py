"""Open a session of some nodes of a model, so that a model can be run piece by piece."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir

from edgeq.model.graph import reads
from edgeq.run.session import SessionSettings, open_session

if TYPE_CHECKING:
    import onnxruntime as ort


def open_piece(
    model: ir.Model,
    nodes: Sequence[ir.Node],
    feed: Mapping[str, Any],
    outputs: Sequence[str],
    settings: SessionSettings,
) -> ort.InferenceSession:
    """Return a session of `nodes`, with the initializers of `model` that they read.

    Args:
        nodes: nodes of the main graph, in the order of the graph.
        feed: examples of the session's inputs by name: arrays, or lists of arrays for sequences. The session also
            accepts other shapes.
        outputs: names of tensors that the nodes compute.
    """
    piece = onnx.ModelProto(ir_version=model.ir_version)
    piece.opset_import.extend(onnx.helper.make_opsetid(*entry) for entry in model.opset_imports.items())
    piece.graph.name = "piece"
    piece.graph.node.extend(ir.serde.serialize_node(node) for node in nodes)
    sources = dict.fromkeys(value for node in nodes for value in reads(node))
    # A feed may stand in for an initializer, for example for one that a caller changes.
    constants = [value for value in sources if value.is_initializer() and value.name not in feed]
    piece.graph.initializer.extend(_serialize(value) for value in constants)
    piece.graph.input.extend(_describe_input(name, value) for name, value in feed.items())
    piece.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
    return open_session(piece.SerializeToString(), settings)


def _serialize(initializer: ir.Value) -> onnx.TensorProto:
    tensor = initializer.const_value
    assert tensor is not None
    if isinstance(tensor, ir.ExternalTensor):  # a session opened from bytes has no folder to read from
        tensor = ir.Tensor(tensor.numpy(), dtype=tensor.dtype)
    tensor.name = initializer.name
    return ir.serde.serialize_tensor(tensor)


def _describe_input(name: str, value: Any) -> onnx.ValueInfoProto:
    """Return a graph input for values of the same type as `value`."""
    if isinstance(value, list):
        kind = onnx.helper.np_dtype_to_tensor_dtype(np.asarray(value[0]).dtype if value else np.dtype(np.float32))
        return onnx.helper.make_tensor_sequence_value_info(name, kind, None)
    return onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(np.asarray(value).dtype), None)
