"""A model run piece by piece, so that results of one piece can be changed before the next one reads them.

All samples advance together; only tensors that are still needed are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.model.graph import name_of, reads
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


Array = NDArray[Any]


class Stepper:
    """Runs the nodes of `model` in order, up to a given tensor.

    Nodes and initializers are read when they are run: a change of an initializer is seen by all nodes that have not run
    yet. Nodes run as written, without ONNX Runtime's optimisation.

    Args:
        model: its nodes in topological order.
        feeds: for each sample, the inputs by name.
        threads: threads inside an operator; 0 for the runtime's default.
    """

    def __init__(self, model: ir.Model, feeds: Sequence[Mapping[str, Array]], *, threads: int = 0) -> None:
        self._model = model
        self._nodes = list(model.graph)
        self._settings = SessionSettings(optimization="none", intra_op_threads=threads)
        self._position = 0
        self._values: list[dict[str, Array]] = [dict(feed) for feed in feeds]
        self._place = {name_of(v): index for index, node in enumerate(self._nodes) for v in node.outputs if v.name}
        self._last_use: dict[str, int] = {}
        for index, node in enumerate(self._nodes):
            self._last_use.update((name_of(value), index) for value in reads(node))
        self._last_use.update((name_of(output), len(self._nodes)) for output in model.graph.outputs)

    def advance(self, tensor: str) -> list[Array]:
        """Run up to the node that computes `tensor`; the value of it for each sample."""
        stop = self._place[tensor] + 1
        if stop > self._position:
            self._run(stop, tensor)
        return [values[tensor] for values in self._values]

    def add(self, tensor: str, shift: Array) -> None:
        """Add `shift` (it must broadcast) to a tensor that was computed, in every sample."""
        for values in self._values:
            values[tensor] = values[tensor] + shift

    def _run(self, stop: int, tensor: str) -> None:
        nodes = self._nodes[self._position : stop]
        made = {name_of(output) for node in nodes for output in node.outputs if output.name}
        read = {name_of(value) for node in nodes for value in reads(node)}
        given = sorted(read & self._values[0].keys())
        kept = sorted(name for name in made if name == tensor or self._last_use.get(name, -1) >= stop)
        first = {name: self._values[0][name] for name in given}
        session = open_piece(self._model, nodes, first, kept, self._settings)
        self._position = stop
        for values in self._values:
            results = session.run(kept, {name: values[name] for name in given})
            values.update(zip(kept, results, strict=True))
            for name in [n for n in values if n != tensor and self._last_use.get(n, -1) < stop]:
                del values[name]
