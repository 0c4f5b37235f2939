"""Write LSTM and GRU."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.backends.ncnn.lower import NcnnLowering, NotInNcnnError
from edgeq.backends.ncnn.network import Blob
from edgeq.model.graph import is_op, node_input

# For each gate of ncnn's file, in its order, the place of the gate in ONNX's weights.
_LSTM_GATES = (0, 2, 1, 3)
_GRU_GATES = (1, 0, 2)
_DIRECTIONS = {"forward": 0, "reverse": 1, "bidirectional": 2}
_DEFAULTS = {
    "LSTM": ["Sigmoid", "Tanh", "Tanh"],
    "GRU": ["Sigmoid", "Tanh"],
}


def write_recurrent(work: NcnnLowering, node: ir.Node) -> None:
    """Write LSTM or GRU over a sequence of one sample."""
    shape = work.shape(node.inputs[0])
    direction = node.attributes.get_string("direction", "forward")
    hidden = node.attributes.get_int("hidden_size", 0)
    _check(work, node, shape, direction)
    weights, recurrent = work.floats(node.inputs[1]), work.floats(node.inputs[2])
    directions = weights.shape[0]
    gates = _LSTM_GATES if is_op(node, "LSTM") else _GRU_GATES
    bias_value = node_input(node, 3)
    bias = (
        np.zeros((directions, 2 * len(gates) * hidden), np.float32) if bias_value is None else work.floats(bias_value)
    )
    parts = [(_ordered(weights, gates), True), (_biases(bias, gates, hidden), True), (_ordered(recurrent, gates), True)]
    states = _states(work, node, directions, hidden)
    dims: list[tuple[int, ...]] = [(shape[0], directions * hidden)]
    # A layer that gets the state also returns it.
    returned = [value for value in node.outputs[1:] if value.name and (value.uses() or value.is_graph_output())]
    count = 2 if is_op(node, "LSTM") else 1
    if returned or states:
        dims += [(directions, hidden)] * count
    settings = {0: hidden, 1: weights.size, 2: _DIRECTIONS[direction]}
    source = work.shaped(work.blob(node.inputs[0]), (shape[0], shape[2]))
    blobs = work.emit_many(node.op_type, (source, *states), dims, settings, interleaved=parts)
    sequence = blobs[0]
    if directions > 1 and node.outputs[0].name:
        # ONNX has the direction before the sample: [steps, directions, 1, hidden], in the same order of elements.
        sequence = work.shaped(sequence, (shape[0], directions * hidden))
    for value, blob in zip(node.outputs, (sequence, *blobs[1:]), strict=False):
        if value.name:
            work.hold(value, blob)


def _check(work: NcnnLowering, node: ir.Node, shape: tuple[int, ...], direction: str) -> None:
    if len(shape) != 3 or shape[1] != 1 or node.attributes.get_int("layout", 0) != 0:
        raise NotInNcnnError("its input is not [steps, 1, features]")
    if node_input(node, 4) is not None and work.numbers(node.inputs[4]) != [shape[0]]:
        raise NotInNcnnError("it ends sequences early")
    if node_input(node, 7) is not None and np.any(work.floats(node.inputs[7])):
        raise NotInNcnnError("it has peepholes")
    if "clip" in node.attributes or node.attributes.get_int("input_forget", 0) != 0:
        raise NotInNcnnError("it clips, or couples gates")
    names = list(node.attributes.get_strings("activations", ()))
    count = 2 if direction == "bidirectional" else 1
    if names and [name.lower() for name in names] != [name.lower() for name in _DEFAULTS[node.op_type] * count]:
        raise NotInNcnnError(f"its activations are {', '.join(names)}")
    if is_op(node, "GRU") and not node.attributes.get_int("linear_before_reset", 0):
        raise NotInNcnnError("it resets before the product; ncnn resets after it (linear_before_reset = 1)")


def _states(work: NcnnLowering, node: ir.Node, directions: int, hidden: int) -> tuple[Blob, ...]:
    """Return the blobs of the initial states, or () if all of them are zero."""
    values = [node_input(node, place) for place in ((5, 6) if is_op(node, "LSTM") else (5,))]
    zero = [value is None or (work.is_constant(value) and not np.any(work.floats(value))) for value in values]
    if all(zero):
        return ()
    if any(value is None for value in values):
        raise NotInNcnnError("it has one initial state of two")
    return tuple(work.shaped(work.blob(value), (directions, hidden)) for value in values)


def _ordered(weights: NDArray[np.float32], gates: tuple[int, ...]) -> NDArray[np.float32]:
    """Return weights [directions, gates * hidden, features] with the gates in ncnn's order."""
    split = weights.reshape(weights.shape[0], len(gates), -1, weights.shape[2])
    return np.ascontiguousarray(split[:, gates])


def _biases(bias: NDArray[np.float32], gates: tuple[int, ...], hidden: int) -> NDArray[np.float32]:
    """Return the biases of each direction in ncnn's order: of inputs and states together, but of a GRU's candidate
    apart.
    """
    split = bias.reshape(bias.shape[0], 2, len(gates), hidden)
    of_inputs, of_states = split[:, 0][:, gates], split[:, 1][:, gates]
    if len(gates) == len(_LSTM_GATES):
        return np.ascontiguousarray(of_inputs + of_states)
    joined = (of_inputs + of_states)[:, :2]
    # The candidate's state is multiplied by the reset gate together with its bias.
    return np.ascontiguousarray(np.concatenate([joined, of_inputs[:, 2:], of_states[:, 2:]], axis=1))
