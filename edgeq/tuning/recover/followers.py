"""Follow a tensor through the element-wise nodes after it, and evaluate them as a function of one number.

An activation function that follows a convolution may be one node (Sigmoid, HardSwish), or several (x * Sigmoid(x), the
Erf form of GELU). In every form, it maps each element by itself, and the rest of the network sees only its result.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.model.graph import MAIN_DOMAINS, MICROSOFT, GraphIndex, name_of, operator_of, readers
from edgeq.run.session import SessionSettings
from edgeq.tuning.recover.layers import initializer
from edgeq.tuning.recover.piece import open_piece

Function = Callable[[NDArray[Any]], NDArray[Any]]
"""A function that maps n numbers to an array [ends, n]; float64 unless another type is mentioned."""


@dataclass(frozen=True, eq=False)
class Follower:
    """Describe the element-wise part that follows a tensor.

    Attributes:
        tensor: name of the tensor that the part follows.
        nodes: the part's nodes, in the order of the graph; empty if nothing element-wise follows.
        ends: names of tensors in the part that are graph outputs or that other nodes read. If other nodes read `tensor`
            directly, it is also among them.
    """

    tensor: str
    nodes: tuple[ir.Node, ...]
    ends: tuple[str, ...]


class Followers:
    """Find and evaluate the element-wise parts that follow tensors of one model's main graph."""

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self._values = GraphIndex(model).values
        self._nodes = list(model.graph)
        self._places = {node: place for place, node in enumerate(self._nodes)}

    def find(self, tensor: str) -> Follower:
        """Return the nodes after `tensor` that compute each element from one element of `tensor` and from scalar
        constants.
        """
        if tensor not in self._values:
            return Follower(tensor, (), ())
        start = self._values[tensor]
        reached = [start]
        nodes: list[ir.Node] = []
        waiting = self._reader_places(start)
        while waiting:
            node = self._nodes[heapq.heappop(waiting)]
            # A node is queued once for each tensor that it reads.
            if node.outputs[0] not in reached and _is_elementwise(node, reached):
                nodes.append(node)
                reached.append(node.outputs[0])
                for behind in self._reader_places(node.outputs[0]):
                    heapq.heappush(waiting, behind)
        ends = [v for v in reached if v.is_graph_output() or any(reader not in nodes for reader in readers(v))]
        return Follower(tensor, tuple(nodes), tuple(name_of(end) for end in ends))

    def function(self, follower: Follower, dtype: type[np.floating[Any]] = np.float64) -> Function:
        """Return the function that the nodes of `follower` compute (in float32). The function can be called any number
        of times.

        Args:
            dtype: type of the function's results.
        """
        computed = [name for name in follower.ends if name != follower.tensor]
        if not computed:
            return lambda numbers: np.tile(np.asarray(numbers, dtype).reshape(1, -1), (len(follower.ends), 1))
        # Every element is mapped by itself, so any number of them can run in one call as a flat list.
        feed = {follower.tensor: np.zeros(1, np.float32)}
        # One thread, because a list of numbers is too little work to share.
        settings = SessionSettings(optimization="basic", intra_op_threads=1)
        session = open_piece(self._model, follower.nodes, feed, computed, settings)

        def run(numbers: NDArray[Any]) -> NDArray[Any]:
            """Return [ends, n]: the result at each end for n values of the followed tensor."""
            flat = np.ascontiguousarray(numbers, np.float32).reshape(-1)
            results = dict(zip(computed, session.run(computed, {follower.tensor: flat}), strict=True))
            ends = [results.get(name, flat) for name in follower.ends]
            return np.stack([np.asarray(end, dtype).reshape(-1) for end in ends])

        return run

    def _reader_places(self, value: ir.Value) -> list[int]:
        """Return the positions in the graph of the nodes that read a value, as a heap."""
        return sorted(self._places[node] for node in readers(value))


def _is_elementwise(node: ir.Node, reached: list[ir.Value]) -> bool:
    """Return whether each element of a node's only output comes from one element of each `reached` tensor that it
    reads, and from scalar constants.
    """
    row = operator_of(node)
    if not row.elementwise or node.domain not in (*MAIN_DOMAINS, MICROSOFT) or len(node.outputs) != 1:
        return False
    places = len(node.inputs) if len(row.activations) > 1 else 1
    data, options = node.inputs[:places], node.inputs[places:]
    return all(value in reached or _is_scalar(value) for value in data) and all(map(_is_scalar, options))


def _is_scalar(value: ir.Value | None) -> bool:
    """Return whether an input is a constant float32 number, or is left out."""
    tensor = initializer(value)
    return value is None or (tensor is not None and tensor.size == 1 and tensor.dtype == ir.DataType.FLOAT)
