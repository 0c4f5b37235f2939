"""What follows a tensor element by element: the function of one number that the rest of the network sees of it.

After a convolution often stands an activation: one node (Sigmoid, HardSwish), or several (x * Sigmoid(x), the Erf form
of GELU). However it is written, it maps each element on its own, so it can be found by following the tensor through
element-wise nodes, and evaluated by running them on a list of numbers.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from edgeq.session import SessionSettings, open_session
from edgeq.tune.recover.uses import readers

_ONE = frozenset(
    {
        "Abs",
        "Celu",
        "Clip",
        "Elu",
        "Erf",
        "Exp",
        "Gelu",
        "HardSigmoid",
        "HardSwish",
        "Identity",
        "LeakyRelu",
        "Log",
        "Mish",
        "Neg",
        "QuickGelu",
        "Reciprocal",
        "Relu",
        "Selu",
        "Sigmoid",
        "Softplus",
        "Softsign",
        "Sqrt",
        "Swish",
        "Tanh",
        "ThresholdedRelu",
    }
)
_TWO = frozenset({"Add", "Div", "Max", "Min", "Mul", "Pow", "Sub"})


Function = Callable[[NDArray[Any]], NDArray[np.float64]]
"""Numbers → float64 [ends, numbers]."""


@dataclass(frozen=True, eq=False)
class Follower:
    """The element-wise part behind a tensor.

    Attributes:
        tensor: where it begins.
        nodes: in order; empty where nothing element-wise follows.
        ends: tensors that other nodes or the outside read; among them `tensor` itself where it is read directly.
    """

    tensor: str
    nodes: tuple[onnx.NodeProto, ...]
    ends: tuple[str, ...]


class Followers:
    """Finds and evaluates what follows tensors of one model.

    Args:
        model: its small constants must be loaded.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self._model = model
        self._readers = readers(model)
        self._places = {id(node): place for place, node in enumerate(model.graph.node)}
        self._scalars = {
            tensor.name: tensor
            for tensor in model.graph.initializer
            if int(np.prod(tensor.dims)) == 1 and tensor.data_type == TensorProto.FLOAT
        }
        self._outputs = {output.name for output in model.graph.output}

    def of(self, tensor: str) -> Follower:
        """What follows `tensor`: all nodes that compute each element from one element of it and scalar constants."""
        known = {tensor}
        nodes: list[onnx.NodeProto] = []
        waiting = self._behind(tensor)
        while waiting:
            place = heapq.heappop(waiting)
            node = self._model.graph.node[place]
            # A node waits once for each tensor that it reads.
            if node.output[0] not in known and self._elementwise(node, known):
                nodes.append(node)
                known.add(node.output[0])
                for behind in self._behind(node.output[0]):
                    heapq.heappush(waiting, behind)
        inside = {id(node) for node in nodes}
        ends = [
            name
            for name in [tensor, *(node.output[0] for node in nodes)]
            if name in self._outputs or any(id(reader) not in inside for reader in self._readers.get(name, ()))
        ]
        return Follower(tensor, tuple(nodes), tuple(ends))

    def values(self, follower: Follower, numbers: NDArray[Any]) -> NDArray[np.float64]:
        """float64 [ends, n]: what each end is for each of the numbers (any shape of n elements)."""
        return self.function(follower)(np.ascontiguousarray(numbers, np.float32))

    def _behind(self, tensor: str) -> list[int]:
        """Places in the graph of the nodes that read a tensor, a heap."""
        return [self._places[id(node)] for node in self._readers.get(tensor, ())]

    def _elementwise(self, node: onnx.NodeProto, known: set[str]) -> bool:
        if node.domain not in ("", "ai.onnx", "com.microsoft") or len(node.output) != 1:
            return False
        if node.op_type in _ONE:
            return node.input[0] in known and all(not name or name in self._scalars for name in node.input[1:])
        return node.op_type in _TWO and all(name in known or name in self._scalars for name in node.input)

    def function(self, follower: Follower) -> Function:
        """`values` of one follower, as a function that can be called many times."""
        if set(follower.ends) <= {follower.tensor}:
            return lambda numbers: np.tile(np.asarray(numbers, np.float64).reshape(1, -1), (len(follower.ends), 1))
        piece = onnx.ModelProto(ir_version=self._model.ir_version)
        piece.opset_import.extend(self._model.opset_import)
        piece.graph.name = "follower"
        piece.graph.node.extend(follower.nodes)
        read = {name for node in follower.nodes for name in node.input}
        piece.graph.initializer.extend(tensor for name, tensor in self._scalars.items() if name in read)
        piece.graph.input.append(onnx.helper.make_tensor_value_info(follower.tensor, TensorProto.FLOAT, ["n"]))
        made = [name for name in follower.ends if name != follower.tensor]
        piece.graph.output.extend(onnx.ValueInfoProto(name=name) for name in made)
        session = open_session(piece.SerializeToString(), SessionSettings(optimization="basic", intra_op_threads=1))

        def run(numbers: NDArray[Any]) -> NDArray[np.float64]:
            flat = np.ascontiguousarray(numbers, np.float32).reshape(-1)
            found: Mapping[str, Any] = dict(zip(made, session.run(made, {follower.tensor: flat}), strict=True))
            ends: Sequence[Any] = [found.get(name, flat) for name in follower.ends]
            return np.stack([np.asarray(end, np.float64).reshape(-1) for end in ends])

        return run
