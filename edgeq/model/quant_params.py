"""Compute with scales and zero points.

    q = saturate(round_half_even(x / scale) + zero_point)        x' = (q - zero_point) scale

QuantizeLinear and DequantizeLinear of ONNX define these formulas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import ArrayLike, NDArray

from edgeq.model.graph import constant, constant_tensor, is_constant, node_input
from edgeq.scheme import ScaleForm

LIMITS: dict[ir.DataType, tuple[int, int]] = {
    ir.DataType.UINT8: (0, 255),
    ir.DataType.INT8: (-128, 127),
    ir.DataType.UINT16: (0, 65535),
    ir.DataType.INT16: (-32768, 32767),
    ir.DataType.INT32: (-(2**31), 2**31 - 1),
    ir.DataType.UINT4: (0, 15),
    ir.DataType.INT4: (-8, 7),
}
"""Type → smallest and largest integer. Accelerators use 16-bit types for mixed precision. 4-bit types are for weights,
and int32 is for biases."""


def fit_scale(scale: ArrayLike, form: ScaleForm) -> NDArray[np.float64]:
    """Return scales in a form that the hardware can compute with, float64 in the shape of `scale`.

    A power of two is never smaller than the given scale, so that the integers still cover the whole range. A scale of 0
    stays 0.
    """
    exact = np.asarray(scale, np.float64)
    if form == "any":
        return exact
    # The mantissa is from 0.5 to 1. If it is 0.5, the scale is a power of two already.
    mantissa, exponent = np.frexp(exact)
    return np.asarray(np.where(exact > 0, np.ldexp(1.0, exponent - (mantissa == 0.5)), exact), np.float64)


@dataclass(frozen=True, eq=False)
class QuantParams:
    """Describe how the integers of a tensor represent numbers.

    Attributes:
        scale: one number, one per channel along `axis`, or one per block of `block` elements along `axis`. The dtype is
            float32 for scales in a model, and float64 for estimates without rounding. Results have the dtype of the
            scale.
        zero_point: integers in the shape of `scale`, or one integer.
        dtype: type of the integers.
        axis: the channel axis; may be negative.
        block: number of elements along `axis` that share a scale; 0 if the scale is not per block.
        narrow: whether the smallest integer of a signed type is not used (-127..127), which makes the range symmetric.
    """

    scale: NDArray[Any]
    zero_point: NDArray[Any]
    dtype: ir.DataType
    axis: int = 0
    block: int = 0
    narrow: bool = False

    @classmethod
    def from_range(
        cls,
        low: ArrayLike,
        high: ArrayLike,
        dtype: ir.DataType,
        *,
        symmetric: bool = False,
        narrow: bool = False,
        form: ScaleForm = "any",
    ) -> QuantParams:
        """Return the parameters (scale float64) that exactly fit the range low..high, widened to include 0. They are
        computed as in ONNX Runtime's quantizer. An empty range has scale 0, which cannot be used to quantize.

        Args:
            low, high: numbers, or arrays [channels] with one range per channel.
            symmetric: whether to put the zero point in the middle of the integers and widen the range to ±max(|low|,
                |high|).
            narrow: whether the smallest integer of a signed type is not used.
            form: the form of the scale. A power of two covers the range, or cuts off at most one step of it.
        """
        low, high = np.minimum(low, 0.0), np.maximum(high, 0.0)
        if symmetric:
            high = np.maximum(-low, high)
            low = -high
        smallest, largest = LIMITS[dtype]
        smallest += narrow
        # A power of two may cut off one step, which is the largest rounding error of the next power. So a range such as
        # -1..1, which an image has, gets the finer one.
        scale = fit_scale((high - low) / (largest - smallest + (form != "any")), form)
        fitted = np.clip(np.rint(smallest - low / np.where(scale, scale, 1.0)), smallest, largest)
        zero = np.where(symmetric | (scale == 0), np.rint((smallest + largest) / 2), fitted)
        return cls(np.asarray(scale, np.float64), zero.astype(np.int64), dtype, narrow=narrow)

    @property
    def low(self) -> int:
        """Return the smallest integer that is used."""
        return LIMITS[self.dtype][0] + self.narrow

    @property
    def high(self) -> int:
        """Return the largest integer."""
        return LIMITS[self.dtype][1]

    @property
    def bits(self) -> int:
        """Return the width of an integer in bits."""
        return int(self.dtype.bitwidth)

    @property
    def per_channel(self) -> bool:
        """Return whether there is more than one scale."""
        return bool(self.scale.size > 1)

    @property
    def range(self) -> tuple[float, float]:
        """Return the smallest and largest number that the integers can represent, over all channels."""
        scale, zero_point = self.scale.astype(np.float64), self.zero_point.astype(np.int64)
        return float(((self.low - zero_point) * scale).min()), float(((self.high - zero_point) * scale).max())

    def equals(self, params: QuantParams) -> bool:
        """Return whether `params` represents numbers in the same way, with the same type, scales and zero points."""
        return (
            self.dtype == params.dtype
            and np.array_equal(self.scale.reshape(-1), params.scale.reshape(-1))
            and np.array_equal(self.zero_point.reshape(-1), params.zero_point.reshape(-1))
        )

    def quantize(self, values: NDArray[Any]) -> NDArray[Any]:
        """Quantize numbers of any shape to integers with `dtype`'s numpy type. Infinities saturate."""
        scale, zero_point = self.spread(values.shape)
        with np.errstate(over="ignore"):  # A quotient that overflows to infinity saturates as well.
            levels = np.rint(values.astype(self.scale.dtype, copy=False) / scale) + zero_point.astype(scale.dtype)
        integers: NDArray[Any] = np.clip(levels, self.low, self.high).astype(self.dtype.numpy())
        return integers

    def dequantize(self, integers: NDArray[Any]) -> NDArray[Any]:
        """Return the numbers that integers of any shape represent. The result has the dtype of the scale."""
        scale, zero_point = self.spread(integers.shape)
        numbers: NDArray[Any] = (integers.astype(np.int64) - zero_point).astype(scale.dtype) * scale
        return numbers

    def fake_quant(self, values: NDArray[Any]) -> NDArray[Any]:
        """Quantize and dequantize numbers. The result has the dtype of the scale."""
        scale, zero_point = self.spread(values.shape)
        # `asarray` is needed because `rint` returns a scalar for an array without axes.
        steps = np.asarray(np.rint(values.astype(scale.dtype, copy=False) / scale))
        np.clip(steps, self.low - zero_point, self.high - zero_point, out=steps)
        steps *= scale
        return np.asarray(steps, scale.dtype)

    def saturated(self, values: NDArray[Any]) -> tuple[int, int]:
        """Return how many values are below the range, and how many are above. Values less than half a step outside do
        not count, because clipping changes them no more than rounding would.
        """
        scale, zero_point = self.spread(values.shape)
        below = values < (self.low - zero_point - 0.5) * scale
        above = values > (self.high - zero_point + 0.5) * scale
        return int(np.count_nonzero(below)), int(np.count_nonzero(above))

    def spread(self, shape: tuple[int, ...]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return scale and zero point (int64) in shapes that broadcast against a tensor of `shape`."""
        return self._spread(self.scale, shape), self._spread(self.zero_point.astype(np.int64), shape)

    def _spread(self, parameter: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        if parameter.size == 1:
            return parameter.reshape(())
        axis = self.axis % len(shape)
        if self.block:
            return np.repeat(parameter, self.block, axis).take(range(shape[axis]), axis)
        if parameter.ndim == 2 and len(shape) == 3:  # The weights of an LSTM have scales for directions and columns.
            return parameter[:, None, :]
        spread = [1] * len(shape)
        spread[axis] = parameter.size
        return parameter.reshape(spread)


def params_of(node: ir.Node) -> QuantParams | None:
    """Return the parameters of a QuantizeLinear or DequantizeLinear. Return None if `params_at` returns None."""
    integers = node.inputs[0] if node.op_type == "DequantizeLinear" else node.outputs[0]
    return params_at(node, 1, 2, integers=integers, axis=node.attributes.get_int("axis", 1))


def params_at(
    node: ir.Node, scale: int, zero_point: int, *, integers: ir.Value | None = None, axis: int = 0
) -> QuantParams | None:
    """Return the quantization parameters that two inputs of a node contain, with the scale as float32 and the zero
    point as int64. Return None if one of them is computed at run time, or if `LIMITS` does not contain the integer
    type.

    Args:
        scale, zero_point: indices of the two inputs.
        integers: the quantized value. If the node has no zero point, the type of this value is used, and the zero point
            is 0.
    """
    steps, zero = constant(node_input(node, scale)), node_input(node, zero_point)
    if steps is None or (zero is not None and not is_constant(zero)):
        return None
    tensor = constant_tensor(zero if zero is not None else integers)
    # `output_dtype` of a DequantizeLinear (since opset 23) is the type of its floats.
    output_type = 0 if node.op_type == "DequantizeLinear" else node.attributes.get_int("output_dtype", 0)
    dtype = tensor.dtype if tensor is not None else ir.DataType(output_type)
    if dtype is ir.DataType.UNDEFINED:
        dtype = (integers.dtype if integers is not None else None) or ir.DataType.UINT8
    if dtype not in LIMITS:
        return None
    zeros = constant(zero)
    zero_points = np.zeros((), np.int64) if zeros is None else zeros.astype(np.int64)
    block = node.attributes.get_int("block_size", 0)
    return QuantParams(steps.astype(np.float32), zero_points, dtype, axis=axis, block=block)


def dynamic_params(values: NDArray[Any]) -> QuantParams:
    """Return the parameters that DynamicQuantizeLinear would use for `values`. They cover, in 8 bits, the range from
    the smallest to the largest value, widened to include zero.
    """
    low, high = float(values.min(initial=0)), float(values.max(initial=0))
    if not np.isfinite([low, high]).all():  # An attention mask may contain infinities.
        values = values[np.isfinite(values)]
        low, high = float(values.min(initial=0)), float(values.max(initial=0))
    scale = np.float32((high - low) / 255) or np.float32(1)
    return QuantParams(np.asarray(scale), np.asarray(round(-low / float(scale)), np.int64), ir.DataType.UINT8)


@dataclass(frozen=True)
class Grid:
    """Describe the integers to which activations are rounded: their type, whether the zero point is fixed
    (`symmetric`), and the form of their scales.
    """

    dtype: ir.DataType
    symmetric: bool
    form: ScaleForm = "any"

    def params(self, low: ArrayLike, high: ArrayLike) -> QuantParams:
        """Return the scale (float64) and the zero point for the range low..high, or for one range per channel."""
        # Hardware that shifts saturates at both ends of the type, so its quantizers use the smallest integer as well.
        narrow = self.symmetric and LIMITS[self.dtype][0] < 0 and self.form == "any"
        return QuantParams.from_range(low, high, self.dtype, symmetric=self.symmetric, narrow=narrow, form=self.form)

    @property
    def levels(self) -> int:
        """Return the number of different integers."""
        params = self.params(0.0, 0.0)
        return params.high - params.low + 1


def grid_of(activation_type: str, symmetric: bool, form: ScaleForm = "any") -> Grid:
    """Return the grid of an activation type. All asymmetric types share one grid, because for them only the number of
    integers matters.
    """
    if symmetric and activation_type == "int8":
        return Grid(ir.DataType.INT8, True, form)
    return Grid(ir.DataType.UINT8, symmetric, form)
