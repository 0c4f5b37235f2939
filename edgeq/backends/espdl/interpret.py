"""Run an integer graph in numpy, with the integers that the runtime gives on a family of chips.

Floats occur where the runtime has them: in averages, products of two activations, Softmax and changes of exponents.
They are float32 there too, in the same order of operations. Softmax is the only result that may differ in its last
bits, because it depends on the C library's exponential.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.backends.espdl.network import EspGraph, EspNode, EspTensor
from edgeq.backends.espdl.products import run_conv, run_gemm
from edgeq.backends.espdl.rounding import FLOATS, INTEGERS, ChipArithmetic, saturate, scale_of
from edgeq.errors import ModelError

_Arrays = tuple[NDArray[Any], ...]


def run(
    graph: EspGraph, inputs: Mapping[str, NDArray[Any]], arithmetic: ChipArithmetic
) -> dict[EspTensor, NDArray[Any]]:
    """Return the values of all tensors for one sample.

    Args:
        inputs: the integers of each input by the name of its tensor, in the runtime's order of axes.

    Raises:
        ModelError: the graph has a node that edgeq does not compute.
    """
    values: dict[EspTensor, NDArray[Any]] = {
        port.tensor: np.asarray(inputs[port.tensor.name], port.tensor.type).reshape(port.tensor.shape)
        for port in graph.inputs
    }
    for node in graph.nodes:
        kernel = _LOOKUP if node.table is not None else KERNELS.get(node.kind)
        if kernel is None:
            raise ModelError(f"node {node.name!r}: edgeq does not compute {node.kind}", "Run the file on a chip")
        data = tuple(values[t] if t.values is None else t.values for t in node.data)
        values[node.outputs[0]] = kernel(node, data, arithmetic)
    return values


def _change(node: EspNode, data: _Arrays, arithmetic: ChipArithmetic) -> NDArray[Any]:
    """Change the exponent or the type of a tensor: Requantize-, Quantize- and DequantizeLinear."""
    source, output = node.data[0], node.outputs[0]
    floats = data[0].astype(FLOATS) * (1 if source.type == "float32" else scale_of(source.exponent))
    if output.type == "float32":
        return floats.reshape(output.shape)
    return saturate(arithmetic.round(floats * scale_of(-output.exponent)), output.type).reshape(output.shape)


def _relu(node: EspNode, data: _Arrays, arithmetic: ChipArithmetic) -> NDArray[Any]:
    return np.asarray(np.maximum(_change(node, data, arithmetic), 0))


def _add(sign: int) -> Callable[[EspNode, _Arrays, ChipArithmetic], NDArray[Any]]:
    def kernel(node: EspNode, data: _Arrays, arithmetic: ChipArithmetic) -> NDArray[Any]:
        # The exponents are equal (`graph`), so the integers are added as they are.
        del arithmetic
        return saturate(data[0].astype(INTEGERS) + sign * data[1].astype(INTEGERS), node.outputs[0].type)

    return kernel


def _mul(node: EspNode, data: _Arrays, arithmetic: ChipArithmetic) -> NDArray[Any]:
    output = node.outputs[0]
    scale = scale_of(node.data[0].exponent) * scale_of(node.data[1].exponent) * scale_of(-output.exponent)
    products = (data[0].astype(INTEGERS) * data[1].astype(INTEGERS)).astype(FLOATS)
    return saturate(arithmetic.round(products * scale), output.type)


def _look_up(node: EspNode, data: _Arrays, arithmetic: ChipArithmetic) -> NDArray[Any]:
    assert node.table is not None
    assert node.table.values is not None
    codes = data[0].astype(INTEGERS) - np.iinfo(data[0].dtype).min
    step = 2 ** np.iinfo(data[0].dtype).bits // (node.table.values.size - (data[0].dtype != np.int8))
    return np.asarray(node.table.values.ravel()[arithmetic.places(codes, step)])


def _windows(node: EspNode, data: NDArray[Any], filler: int) -> NDArray[Any]:
    """Return [H, W, C, taps, taps]: the values under each place of a pool's window."""
    taps, pads, strides = map(node.integers, ("kernel_shape", "pads", "strides"))
    padded = np.pad(data[0], ((pads[0], pads[2]), (pads[1], pads[3]), (0, 0)), constant_values=filler)
    windows = np.lib.stride_tricks.sliding_window_view(padded, taps, axis=(0, 1))
    return windows[:: strides[0], :: strides[1]]


def _max_pool(node: EspNode, data: _Arrays, arithmetic: ChipArithmetic) -> NDArray[Any]:
    del arithmetic
    filler = int(np.iinfo(data[0].dtype).min)
    largest = _windows(node, data[0], filler).max(axis=(3, 4))
    return np.asarray(largest).reshape(node.outputs[0].shape)


def _mean(node: EspNode, sums: NDArray[Any], area: int, arithmetic: ChipArithmetic) -> NDArray[Any]:
    output = node.outputs[0]
    # The order of these products is the runtime's; another order rounds differently.
    scale = scale_of(node.data[0].exponent) * (FLOATS(1) / FLOATS(area)) * scale_of(-output.exponent)
    return saturate(arithmetic.round(sums.astype(FLOATS) * scale), output.type).reshape(output.shape)


def _average_pool(node: EspNode, data: _Arrays, arithmetic: ChipArithmetic) -> NDArray[Any]:
    windows = _windows(node, data[0].astype(INTEGERS), 0)
    return _mean(node, windows.sum(axis=(3, 4)), windows.shape[3] * windows.shape[4], arithmetic)


def _global_average_pool(node: EspNode, data: _Arrays, arithmetic: ChipArithmetic) -> NDArray[Any]:
    sums = data[0].astype(INTEGERS).sum(axis=(1, 2))
    return _mean(node, sums, data[0].shape[1] * data[0].shape[2], arithmetic)


def _softmax(node: EspNode, data: _Arrays, arithmetic: ChipArithmetic) -> NDArray[Any]:
    del arithmetic
    axis = node.integer("axis")
    numbers = data[0].astype(FLOATS) * scale_of(node.data[0].exponent)
    # The kernel for 8 bits looks up exponentials of the numbers as they are; that for 16 bits subtracts the largest.
    powers = np.exp(numbers if node.type == "int8" else numbers - numbers.max(axis=axis, keepdims=True))
    return np.asarray(powers / powers.sum(axis=axis, keepdims=True, dtype=FLOATS), FLOATS)


def _reshape(node: EspNode, data: _Arrays, arithmetic: ChipArithmetic) -> NDArray[Any]:
    del arithmetic
    return data[0].reshape(node.outputs[0].shape)


def _transpose(node: EspNode, data: _Arrays, arithmetic: ChipArithmetic) -> NDArray[Any]:
    del arithmetic
    return data[0].transpose(node.integers("perm"))


def _concat(node: EspNode, data: _Arrays, arithmetic: ChipArithmetic) -> NDArray[Any]:
    del arithmetic
    axis = node.integer("axis")
    return np.concatenate(data, axis)


def _pad(node: EspNode, data: _Arrays, arithmetic: ChipArithmetic) -> NDArray[Any]:
    del arithmetic
    before, after = np.split(data[1], 2)
    widths = tuple(zip(before.tolist(), after.tolist(), strict=True))
    return np.pad(data[0], widths, constant_values=int(data[2].ravel()[0]))


def _slice(node: EspNode, data: _Arrays, arithmetic: ChipArithmetic) -> NDArray[Any]:
    del node, arithmetic
    places = [slice(None)] * data[0].ndim
    for start, end, axis, step in zip(*(part.tolist() for part in data[1:5]), strict=True):
        places[axis] = slice(start, end, step)
    return data[0][tuple(places)]


def _resize(node: EspNode, data: _Arrays, arithmetic: ChipArithmetic) -> NDArray[Any]:
    del arithmetic
    output = data[0]
    for axis in (1, 2):
        size, old = node.outputs[0].shape[axis], output.shape[axis]
        scale = FLOATS(1) / FLOATS(size / old)
        places = np.minimum((np.arange(size, dtype=FLOATS) * scale).astype(INTEGERS), old - 1)
        output = output.take(places, axis)
    return output


KERNELS: Mapping[str, Callable[[EspNode, _Arrays, ChipArithmetic], NDArray[Any]]] = {
    "Add": _add(1),
    "AveragePool": _average_pool,
    "Concat": _concat,
    "Conv": lambda node, data, arithmetic: run_conv(node, data[0], arithmetic),
    "DequantizeLinear": _change,
    "Flatten": _reshape,
    "Gemm": lambda node, data, arithmetic: run_gemm(node, data[0], arithmetic),
    "GlobalAveragePool": _global_average_pool,
    "MaxPool": _max_pool,
    "Mul": _mul,
    "Pad": _pad,
    "QuantizeLinear": _change,
    "Relu": _relu,
    "RequantizeLinear": _change,
    "Reshape": _reshape,
    "Resize": _resize,
    "Slice": _slice,
    "Softmax": _softmax,
    "Sub": _add(-1),
    "Transpose": _transpose,
}
"""Operator type in the runtime → function of (node, values of its inputs, arithmetic) that returns its result."""
_LOOKUP = _look_up
