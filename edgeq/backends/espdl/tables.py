"""Make the tables in which the runtime looks up functions of one number.

A table for 8 bits has the result of every integer. A table for 16 bits has that of every 256th, and the runtime takes
the nearest. Results are rounded as the chips round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.backends.espdl.network import LIMITS, EspTensor, EspType
from edgeq.backends.espdl.rounding import ChipArithmetic
from edgeq.model.graph import clamp_bounds, constant, node_input

Function = Callable[[NDArray[np.float64]], NDArray[np.float64]]
_STEP = 256
_TIE = 0.5


def lookup_table(
    name: str, function: Function, source: EspTensor, exponent: int, type_: EspType, arithmetic: ChipArithmetic
) -> EspTensor:
    """Return the table of a function whose result has an exponent and a type.

    Args:
        source: the tensor that the function reads.
    """
    low, high = LIMITS[source.type]
    codes = np.arange(low, high + 1) if source.type == "int8" else np.arange(low, high + 2, _STEP)
    with np.errstate(all="ignore"):  # a logarithm of a negative number saturates like one of 0
        numbers = np.asarray(codes * 2.0**source.exponent, np.float64)
        results = function(numbers) * 2.0**-exponent
    low, high = LIMITS[type_]
    values = rounded(np.nan_to_num(results, nan=low, posinf=high, neginf=low), arithmetic).clip(low, high)
    return EspTensor(name, values.shape, type_, (exponent,), values.astype(type_))


def rounded(numbers: NDArray[np.float64], arithmetic: ChipArithmetic) -> NDArray[np.float64]:
    """Return numbers rounded to integers, in float64."""
    return np.rint(numbers) if arithmetic.rounding == "half-even" else np.floor(numbers + _TIE)


def clamp_function(low: float, high: float) -> Function:
    """Return the function that clips numbers."""
    return lambda numbers: numbers.clip(low, high)


def function_of(node: ir.Node) -> Function | None:
    """Return the function that an ONNX node applies to each number; None if it is not a function of one number."""
    bounds = clamp_bounds(node)
    if bounds is not None:
        return clamp_function(*bounds)
    make = _FUNCTIONS.get(node.op_type)
    return make(node) if make is not None else None


def _sigmoid(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1 / (1 + np.exp(-numbers))


def _hard_sigmoid(node: ir.Node) -> Function:
    slope, offset = node.attributes.get_float("alpha", 0.2), node.attributes.get_float("beta", 0.5)
    return lambda numbers: (slope * numbers + offset).clip(0, 1)


def _leaky(node: ir.Node) -> Function:
    slope = node.attributes.get_float("alpha", 0.01)
    return lambda numbers: np.where(numbers < 0, slope * numbers, numbers)


def _parametric(node: ir.Node) -> Function | None:
    slope = constant(node_input(node, 1))
    if slope is None or slope.size != 1:
        return None
    return lambda numbers: np.where(numbers < 0, float(slope.ravel()[0]) * numbers, numbers)


def _elu(node: ir.Node) -> Function:
    factor = node.attributes.get_float("alpha", 1.0)
    return lambda numbers: np.where(numbers < 0, factor * np.expm1(numbers), numbers)


_FUNCTIONS: Mapping[str, Callable[[ir.Node], Function | None]] = {
    "Elu": _elu,
    "Exp": lambda node: np.exp,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": lambda node: lambda numbers: numbers * (numbers / 6 + _TIE).clip(0, 1),
    "LeakyRelu": _leaky,
    "Log": lambda node: np.log,
    "PRelu": _parametric,
    "Sigmoid": lambda node: _sigmoid,
    "Sqrt": lambda node: np.sqrt,
    "Tanh": lambda node: np.tanh,
}
