"""Give a file the inputs and outputs of the model from which it was made, with axes in the model's order.

A deployed file has integer inputs and outputs, with axes in the order of its operators. By contrast, a file that edgeq
times against other engines takes the place of the model. It has the model's own inputs and outputs, and quantizes and
reorders its inputs itself.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir

from edgeq.backends.litert.layout import Order, keeps_elements, moves, plain, stored_shape
from edgeq.backends.litert.network import Port, TfliteNetwork, TfliteOperator, TfliteTensor

_NAMES = {ir.DataType.FLOAT: "float", ir.DataType.DOUBLE: "double"}


def stating(network: TfliteNetwork, source: ir.Model) -> TfliteNetwork:
    """Return the network with the types and sizes of the model's inputs and outputs, so that its file states them. If
    the batch size is open, samples run one by one.
    """
    values = {value.name: value for value in (*source.graph.inputs, *source.graph.outputs)}
    inputs, outputs = (
        [_stating(port, values[port.name]) for port in ports] for ports in (network.inputs, network.outputs)
    )
    return replace(network, inputs=tuple(inputs), outputs=tuple(outputs))


def _stating(port: Port, value: ir.Value) -> Port:
    if value.shape is None or value.dtype is None or len(value.shape) != len(port.order):
        return port
    fixed = stored_shape(port.tensor.shape, moves(port.order, plain(len(port.order))))
    shape = (own if isinstance(own, int) else own.value for own in value.shape)
    # Only the batch size may stay open, because the file fixes all other sizes.
    sizes = tuple(own if place == 0 else have for place, (own, have) in enumerate(zip(shape, fixed, strict=True)))
    return replace(port, type=f"tensor({_NAMES.get(value.dtype, value.dtype.name.lower())})", shape=sizes)


def with_own_interface(network: TfliteNetwork) -> TfliteNetwork:
    """Return the network with additional operators that quantize its inputs, dequantize its outputs and reorder the
    axes of both.
    """
    inputs, ahead = [], []
    for port in network.inputs:
        taken, operators = _ahead(port)
        inputs.append(taken)
        ahead += operators
    outputs, behind = [], []
    for port in network.outputs:
        given, operators = _behind(port)
        outputs.append(given)
        behind += operators
    return replace(
        network,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        operators=(*ahead, *network.operators, *behind),
    )


def _ahead(port: Port) -> tuple[Port, list[TfliteOperator]]:
    """Return an input in the model's form, and the operators that turn it into the network's input. They quantize
    before they reorder axes, so they move integers and not floats.
    """
    shape = stored_shape(port.tensor.shape, moves(port.order, plain(len(port.order))))
    taken = current = TfliteTensor(
        f"{port.name}/model", shape, "float32" if port.tensor.type == "int8" else port.tensor.type
    )
    operators = []
    moved = plain(len(shape)) != port.order
    if port.tensor.type == "int8":
        current = replace(taken, name=f"{port.name}/integers", type="int8", scales=port.tensor.scales)
        current = current if moved else port.tensor
        operators.append(TfliteOperator("QUANTIZE", (taken,), (current,)))
    if moved:
        operators.append(_move(current, port.tensor, port.order))
    own = replace(port, tensor=taken, order=plain(len(shape)))
    return (own, operators) if operators else (port, [])


def _behind(port: Port) -> tuple[Port, list[TfliteOperator]]:
    """Return an output in the model's form, and the operators that make it from the network's output."""
    current, operators = port.tensor, []
    order = plain(len(port.order))
    if port.order != order:
        permutation = moves(port.order, order)
        made = replace(current, name=f"{port.name}/moved", shape=stored_shape(current.shape, permutation), values=None)
        operators.append(_move(current, made, permutation))
        current = made
    if current.type == "int8":
        made = TfliteTensor(f"{port.name}/model", current.shape, "float32")
        operators.append(TfliteOperator("DEQUANTIZE", (current,), (made,)))
        current = made
    return replace(port, tensor=current, order=order), operators


def _move(source: TfliteTensor, made: TfliteTensor, permutation: Order) -> TfliteOperator:
    """Return the operator that stores `source` with its axes permuted."""
    if keeps_elements(source.shape, permutation):
        values = np.array(made.shape, np.int32)
        shape = TfliteTensor(f"{made.name}/shape", values.shape, "int32", values=values)
        return TfliteOperator("RESHAPE", (source, shape), (made,), {"newShape": list(made.shape)})
    values = np.array(permutation, np.int32)
    return TfliteOperator(
        "TRANSPOSE", (source, TfliteTensor(f"{made.name}/axes", values.shape, "int32", values=values)), (made,)
    )
