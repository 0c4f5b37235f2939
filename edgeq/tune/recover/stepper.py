"""A model run piece by piece, so that the piece behind can be changed by what the piece before gave.

All samples stand at the same place of the graph; only tensors that are still needed are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from edgeq.session import SessionSettings, open_session
from edgeq.tune.recover.uses import reads

Array = NDArray[Any]


class Stepper:
    """Runs the nodes of `model` in order, up to where it is told.

    The nodes are read when they are run: a change of an initializer is seen by all nodes that have not run yet. They
    run as written, without the runtime's optimisation.

    Args:
        model: with its weights; its nodes in topological order, as ONNX demands.
        feeds: one dictionary of inputs a sample.
        nodes, extra: run these instead of the model's nodes, with these constants besides the model's.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        feeds: Sequence[Mapping[str, Array]],
        *,
        nodes: Sequence[onnx.NodeProto] | None = None,
        extra: Sequence[onnx.TensorProto] = (),
        threads: int = 0,
    ) -> None:
        self._model = model
        self._nodes = list(model.graph.node if nodes is None else nodes)
        self._extra = extra
        self._threads = threads
        self._position = 0
        self._values: list[dict[str, Array]] = [dict(feed) for feed in feeds]
        self._constants = {tensor.name for tensor in model.graph.initializer}
        self._place = {name: index for index, node in enumerate(self._nodes) for name in node.output if name}
        outputs = {output.name for output in model.graph.output}
        self._last_use: dict[str, int] = {}
        for index, node in enumerate(self._nodes):
            for name in reads(node):
                self._last_use[name] = index
        self._last_use.update(dict.fromkeys(outputs, len(self._nodes)))

    def advance(self, tensor: str) -> list[Array]:
        """Run up to the node that makes `tensor`; its value for each sample."""
        stop = self._place[tensor] + 1
        if stop > self._position:
            self._run(stop, tensor)
        return [values[tensor] for values in self._values]

    def add(self, tensor: str, shift: Array) -> None:
        """Add to a tensor that is there, in every sample."""
        for values in self._values:
            values[tensor] = values[tensor] + shift

    def _run(self, stop: int, tensor: str) -> None:
        nodes = self._nodes[self._position : stop]
        made = {name for node in nodes for name in node.output if name}
        read = {name for node in nodes for name in reads(node)}
        given = sorted(name for name in read if name in self._values[0])
        kept = [name for name in made if name == tensor or self._last_use.get(name, -1) >= stop]
        session = open_session(
            self._piece(nodes, given, sorted(kept), read).SerializeToString(),
            SessionSettings(optimization="none", intra_op_threads=self._threads),
        )
        self._position = stop
        for values in self._values:
            results = session.run(sorted(kept), {name: values[name] for name in given})
            values.update(zip(sorted(kept), results, strict=True))
            for name in [n for n in values if n != tensor and self._last_use.get(n, -1) < stop]:
                del values[name]

    def _piece(
        self, nodes: Sequence[onnx.NodeProto], given: Sequence[str], kept: Sequence[str], read: set[str]
    ) -> onnx.ModelProto:
        piece = onnx.ModelProto(ir_version=self._model.ir_version)
        piece.opset_import.extend(self._model.opset_import)
        piece.functions.extend(self._model.functions)
        piece.graph.name = "piece"
        piece.graph.node.extend(nodes)
        constants = [*self._model.graph.initializer, *self._extra]
        piece.graph.initializer.extend(t for t in constants if t.name in read)
        for name in given:
            piece.graph.input.append(_described(name, self._values[0][name]))
        piece.graph.output.extend(onnx.ValueInfoProto(name=name) for name in kept)
        # An output must be made by a node; an initializer that is an output is none.
        assert not self._constants & set(kept)
        return piece


def _described(name: str, value: Any) -> onnx.ValueInfoProto:
    """A graph input that takes such a value: an array, or a list of arrays where the graph has a sequence."""
    if isinstance(value, list):
        kind = onnx.helper.np_dtype_to_tensor_dtype(np.asarray(value[0]).dtype if value else np.dtype(np.float32))
        return onnx.helper.make_tensor_sequence_value_info(name, kind, None)
    return onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(np.asarray(value).dtype), None)
