"""The element-wise part behind a tensor, as a function of one number: what the rest of the network sees of it.

After a convolution often comes an activation function: one node (Sigmoid, HardSwish), or several (x * Sigmoid(x), the
Erf form of GELU). However it is written, it maps each element on its own, so it is found by following the tensor
through element-wise nodes, and evaluated by running them on a list of numbers.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.graph.index import GraphIndex
from edgeq.graph.operators import operator_of
from edgeq.graph.query import MAIN_DOMAINS, MICROSOFT, name_of, readers
from edgeq.session import SessionSettings
from edgeq.tune.recover.layers import initializer
from edgeq.tune.recover.piece import open_piece

Function = Callable[[NDArray[Any]], NDArray[Any]]
"""Numbers → [ends, numbers], float64 where not mentioned otherwise."""


@dataclass(frozen=True, eq=False)
class Follower:
    """The element-wise part behind a tensor.

    Attributes:
        tensor: name of the tensor where it begins.
        nodes: in the order of the graph; empty where nothing element-wise follows.
        ends: names of the tensors that other nodes read or that are graph outputs; among them `tensor` itself where it
            is read directly.
    """

    tensor: str
    nodes: tuple[ir.Node, ...]
    ends: tuple[str, ...]


class Followers:
    """Finds and evaluates the element-wise parts behind tensors of one model's main graph."""

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self._values = GraphIndex(model).values
        self._nodes = list(model.graph)
        self._places = {node: place for place, node in enumerate(self._nodes)}

    def of(self, tensor: str) -> Follower:
        """The nodes behind `tensor` that compute each element from one element of it and scalar constants."""
        if tensor not in self._values:
            return Follower(tensor, (), ())
        start = self._values[tensor]
        known = [start]
        nodes: list[ir.Node] = []
        waiting = self._behind(start)
        while waiting:
            node = self._nodes[heapq.heappop(waiting)]
            # A node is queued once for each tensor that it reads.
            if node.outputs[0] not in known and _is_elementwise(node, known):
                nodes.append(node)
                known.append(node.outputs[0])
                for behind in self._behind(node.outputs[0]):
                    heapq.heappush(waiting, behind)
        ends = [v for v in known if v.is_graph_output() or any(reader not in nodes for reader in readers(v))]
        return Follower(tensor, tuple(nodes), tuple(name_of(end) for end in ends))

    def function(self, follower: Follower, dtype: type[np.floating[Any]] = np.float64) -> Function:
        """The function that the nodes of `follower` compute (in float32), for any number of calls.

        Args:
            dtype: of its results.
        """
        computed = [name for name in follower.ends if name != follower.tensor]
        if not computed:
            return lambda numbers: np.tile(np.asarray(numbers, dtype).reshape(1, -1), (len(follower.ends), 1))
        feed = {follower.tensor: np.zeros(1, np.float32)}
        settings = SessionSettings(optimization="basic", intra_op_threads=1)
        session = open_piece(self._model, follower.nodes, feed, computed, settings)

        def run(numbers: NDArray[Any]) -> NDArray[Any]:
            """[ends, n]: what each end computes from n values of the followed tensor."""
            flat = np.ascontiguousarray(numbers, np.float32).reshape(-1)
            found = dict(zip(computed, session.run(computed, {follower.tensor: flat}), strict=True))
            ends = [found.get(name, flat) for name in follower.ends]
            return np.stack([np.asarray(end, dtype).reshape(-1) for end in ends])

        return run

    def _behind(self, value: ir.Value) -> list[int]:
        """Places in the graph of the nodes that read a value, a heap."""
        return sorted(self._places[node] for node in readers(value))


def _is_elementwise(node: ir.Node, known: list[ir.Value]) -> bool:
    """Whether each element of a node's one output comes from one element of `known` tensors and scalar constants."""
    row = operator_of(node)
    if not row.elementwise or node.domain not in (*MAIN_DOMAINS, MICROSOFT) or len(node.outputs) != 1:
        return False
    places = len(node.inputs) if len(row.activations) > 1 else 1
    data, options = node.inputs[:places], node.inputs[places:]
    return all(value in known or _is_scalar(value) for value in data) and all(map(_is_scalar, options))


def _is_scalar(value: ir.Value | None) -> bool:
    """Whether an input is a constant float32 number, or left out."""
    tensor = initializer(value)
    return value is None or (tensor is not None and tensor.size == 1 and tensor.dtype == ir.DataType.FLOAT)
