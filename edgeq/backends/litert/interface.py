"""Give a file the inputs and outputs of the model from which it was made, with axes in the model's order.

A deployed file has integer inputs and outputs, with axes in the order of its operators. By contrast, a file that edgeq
times against other engines takes the place of the model. It has the model's own inputs and outputs, and quantizes and
reorders its inputs itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from edgeq.backends.litert.layout import Order, keeps_elements, model_order, moves, stored_shape
from edgeq.backends.litert.network import QUANTIZED, Port, TfliteNetwork, TfliteOperator, TfliteTensor

_NAMES = {ir.DataType.FLOAT: "float", ir.DataType.DOUBLE: "double"}


def with_signature(network: TfliteNetwork, source: ir.Model) -> TfliteNetwork:
    """Return the network with the types and sizes of the model's inputs and outputs, so that its file states them. If
    the batch size is open, samples run one by one.
    """
    values = {value.name: value for value in (*source.graph.inputs, *source.graph.outputs)}
    inputs, outputs = (
        [_with_signature(port, values[port.name]) for port in ports] for ports in (network.inputs, network.outputs)
    )
    return replace(network, inputs=tuple(inputs), outputs=tuple(outputs))


def _with_signature(port: Port, value: ir.Value) -> Port:
    if value.shape is None or value.dtype is None or len(value.shape) != len(port.order):
        return port
    fixed = stored_shape(port.tensor.shape, moves(port.order, model_order(len(port.order))))
    shape = (size if isinstance(size, int) else size.value for size in value.shape)
    # Only the batch size may stay open, because the file fixes all other sizes.
    sizes = tuple(size if place == 0 else have for place, (size, have) in enumerate(zip(shape, fixed, strict=True)))
    return replace(port, type=f"tensor({_NAMES.get(value.dtype, value.dtype.name.lower())})", shape=sizes)


def with_model_interface(network: TfliteNetwork, order: Callable[[int], Order] = model_order) -> TfliteNetwork:
    """Return the network with additional operators that quantize its inputs, dequantize its outputs and reorder the
    axes of both.

    Args:
        order: returns the order of the axes of an input or output, from their number.
    """
    inputs, ahead = [], []
    for port in network.inputs:
        model_input, operators = _model_input(port, order(len(port.order)))
        inputs.append(model_input)
        ahead += operators
    outputs, behind = [], []
    for port in network.outputs:
        model_output, operators = _model_output(port, order(len(port.order)))
        outputs.append(model_output)
        behind += operators
    return replace(
        network,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        operators=(*ahead, *network.operators, *behind),
    )


def _model_input(port: Port, order: Order) -> tuple[Port, list[TfliteOperator]]:
    """Return an input in the model's form with axes in `order`, and the operators that turn it into the network's
    input. They quantize before they reorder axes, so they move integers and not floats.
    """
    shape = stored_shape(port.tensor.shape, moves(port.order, order))
    model_tensor = current = TfliteTensor(
        f"{port.name}/model", shape, "float32" if port.tensor.type in QUANTIZED else port.tensor.type
    )
    operators = []
    moved = order != port.order
    if port.tensor.type in QUANTIZED:
        name, type_ = f"{port.name}/integers", port.tensor.type
        current = replace(model_tensor, name=name, type=type_, scales=port.tensor.scales)
        # Without a move, the QUANTIZE writes the network's own input tensor, and no extra tensor is needed.
        current = current if moved else port.tensor
        operators.append(TfliteOperator("QUANTIZE", (model_tensor,), (current,)))
    if moved:
        operators.append(_move(current, port.tensor, moves(order, port.order)))
    model_port = replace(port, tensor=model_tensor, order=order)
    return (model_port, operators) if operators else (port, [])


def _model_output(port: Port, order: Order) -> tuple[Port, list[TfliteOperator]]:
    """Return an output in the model's form with axes in `order`, and the operators that make it from the network's
    output.
    """
    current, operators = port.tensor, []
    if port.order != order:
        permutation = moves(port.order, order)
        converted = replace(
            current, name=f"{port.name}/moved", shape=stored_shape(current.shape, permutation), values=None
        )
        operators.append(_move(current, converted, permutation))
        current = converted
    if current.type in QUANTIZED:
        converted = TfliteTensor(f"{port.name}/model", current.shape, "float32")
        operators.append(TfliteOperator("DEQUANTIZE", (current,), (converted,)))
        current = converted
    return replace(port, tensor=current, order=order), operators


def _move(source: TfliteTensor, target: TfliteTensor, permutation: Order) -> TfliteOperator:
    """Return the operator that stores `source` with its axes permuted."""
    # A RESHAPE copies nothing in the runtimes, while a TRANSPOSE copies every element.
    if keeps_elements(source.shape, permutation):
        values = np.array(target.shape, np.int32)
        shape = TfliteTensor(f"{target.name}/shape", values.shape, "int32", values=values)
        return TfliteOperator("RESHAPE", (source, shape), (target,), {"newShape": list(target.shape)})
    values = np.array(permutation, np.int32)
    return TfliteOperator(
        "TRANSPOSE", (source, TfliteTensor(f"{target.name}/axes", values.shape, "int32", values=values)), (target,)
    )
