"""Run a model piece by piece, so that results of one piece can be changed before the next piece reads them.

All samples advance together. Only tensors that are still needed are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.model.graph import is_op, name_of, reads
from edgeq.run.session import SessionSettings
from edgeq.tuning.recover.piece import open_piece

Array = NDArray[Any]


class Stepper:
    """Run the nodes of `model` in order, up to a given tensor.

    A node and its initializers are read when the node runs. So if an initializer changes, all nodes that have not run
    yet use the new value. Nodes run as written, without ONNX Runtime's optimisation.

    Args:
        model: a model with its nodes in topological order.
        feeds: the inputs by name, for each sample.
        threads: threads inside an operator; 0 for the runtime's default.
    """

    def __init__(self, model: ir.Model, feeds: Sequence[Mapping[str, Array]], *, threads: int = 0) -> None:
        self._model = model
        # A weight is dequantized where it is read. It would otherwise be computed long before it changes.
        self._weights = {node.outputs[0]: node for node in model.graph if _dequantizes_weight(node)}
        self._nodes = [node for node in model.graph if node.outputs[0] not in self._weights]
        self._settings = SessionSettings(optimization="none", intra_op_threads=threads)
        self._position = 0
        self._values: list[dict[str, Array]] = [dict(feed) for feed in feeds]
        self._place = {name_of(v): index for index, node in enumerate(self._nodes) for v in node.outputs if v.name}
        self._last_use: dict[str, int] = {}
        for index, node in enumerate(self._nodes):
            self._last_use.update((name_of(value), index) for value in reads(node))
        # Graph outputs are needed until the end.
        self._last_use.update((name_of(output), len(self._nodes)) for output in model.graph.outputs)

    def advance(self, tensor: str) -> list[Array]:
        """Run up to the node that computes `tensor`, and return its value for each sample."""
        stop = self._place[tensor] + 1
        if stop > self._position:
            self._run(stop, tensor)
        return [values[tensor] for values in self._values]

    def add(self, tensor: str, shift: Array) -> None:
        """Add `shift`, which broadcasts, to a tensor that has been computed, in every sample."""
        for values in self._values:
            values[tensor] = values[tensor] + shift

    def _find_weights(self, nodes: Sequence[ir.Node]) -> list[ir.Node]:
        """Return the nodes that dequantize the weights that `nodes` read."""
        values = dict.fromkeys(value for node in nodes for value in reads(node))
        return [self._weights[value] for value in values if value in self._weights]

    def _run(self, stop: int, tensor: str) -> None:
        step = self._nodes[self._position : stop]
        nodes = [*self._find_weights(step), *step]
        computed = {name_of(output) for node in nodes for output in node.outputs if output.name}
        sources = {name_of(value) for node in nodes for value in reads(node)}
        inputs = sorted(sources & self._values[0].keys())
        live_names = sorted(name for name in computed if name == tensor or self._last_use.get(name, -1) >= stop)
        example = {name: self._values[0][name] for name in inputs}
        session = open_piece(self._model, nodes, example, live_names, self._settings)
        self._position = stop
        for values in self._values:
            results = session.run(live_names, {name: values[name] for name in inputs})
            values.update(zip(live_names, results, strict=True))
            # Free what no later node reads: all samples are in memory at once.
            for name in [n for n in values if n != tensor and self._last_use.get(n, -1) < stop]:
                del values[name]


def _dequantizes_weight(node: ir.Node) -> bool:
    """Return whether a node dequantizes an initializer, for other nodes only."""
    constant = all(value is None or value.is_initializer() for value in node.inputs)
    return is_op(node, "DequantizeLinear") and constant and not node.outputs[0].is_graph_output()
