"""Scale and zero point: the arithmetic of quantization.

    q = saturate(round_half_even(x / scale) + zero_point)        x' = (q - zero_point) scale

as QuantizeLinear and DequantizeLinear of ONNX have it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import ArrayLike, NDArray

from edgeq.model.graph import constant, constant_tensor, is_constant, node_input

LIMITS: dict[ir.DataType, tuple[int, int]] = {
    ir.DataType.UINT8: (0, 255),
    ir.DataType.INT8: (-128, 127),
    ir.DataType.UINT16: (0, 65535),
    ir.DataType.INT16: (-32768, 32767),
    ir.DataType.INT32: (-(2**31), 2**31 - 1),
    ir.DataType.UINT4: (0, 15),
    ir.DataType.INT4: (-8, 7),
}
"""Type → smallest and largest integer. 16-bit ones are how accelerators mix precisions, 4-bit ones hold weights, int32
ones biases."""


@dataclass(frozen=True, eq=False)
class QuantParams:
    """Describe how the integers of a tensor represent numbers.

    Attributes:
        scale: one number, one per channel along `axis`, or one per block of `block` elements along `axis`; float32 as
            in a model, or float64 where an estimate is to be free of rounding: results have its type.
        zero_point: integers of the shape of `scale`, or one.
        dtype: type of the integers.
        axis: the channel axis; may be negative.
        block: elements along `axis` that share a scale; 0 where the scale is not per block.
        narrow: whether the smallest integer of a signed type stays unused (-127..127), so that the range is symmetric.
    """

    scale: NDArray[Any]
    zero_point: NDArray[Any]
    dtype: ir.DataType
    axis: int = 0
    block: int = 0
    narrow: bool = False

    @classmethod
    def from_range(
        cls, low: ArrayLike, high: ArrayLike, dtype: ir.DataType, *, symmetric: bool = False, narrow: bool = False
    ) -> QuantParams:
        """Return the parameters (scale float64) under which low..high, widened to include 0, just fits, as ONNX
        Runtime's quantizer has them. The scale of an empty range is 0: nothing can be quantized with it.

        Args:
            low, high: numbers, or one range per channel: arrays [channels].
            symmetric: the zero point is the middle of the integers, and the range is widened to ±max(|low|, |high|).
        """
        low, high = np.minimum(low, 0.0), np.maximum(high, 0.0)
        if symmetric:
            high = np.maximum(-low, high)
            low = -high
        least, most = LIMITS[dtype]
        least += narrow
        scale = (high - low) / (most - least)
        fitted = np.clip(np.rint(least - low / np.where(scale, scale, 1.0)), least, most)
        zero = np.where(symmetric | (scale == 0), np.rint((least + most) / 2), fitted)
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
        """Return the width of an integer."""
        return int(self.dtype.bitwidth)

    @property
    def per_channel(self) -> bool:
        """Return whether there is more than one scale."""
        return bool(self.scale.size > 1)

    @property
    def range(self) -> tuple[float, float]:
        """Return the smallest and largest number that can be represented, over all channels."""
        scale, zero_point = self.scale.astype(np.float64), self.zero_point.astype(np.int64)
        return float(((self.low - zero_point) * scale).min()), float(((self.high - zero_point) * scale).max())

    def same(self, other: QuantParams) -> bool:
        """Return whether two tensors' integers mean the same numbers."""
        return (
            self.dtype == other.dtype
            and np.array_equal(self.scale.reshape(-1), other.scale.reshape(-1))
            and np.array_equal(self.zero_point.reshape(-1), other.zero_point.reshape(-1))
        )

    def quantize(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the integers, of `dtype`'s numpy type, that numbers of any shape become; infinities saturate."""
        scale, zero_point = self.spread(values.shape)
        with np.errstate(over="ignore"):  # an infinity saturates as well
            levels = np.rint(values.astype(self.scale.dtype, copy=False) / scale) + zero_point.astype(scale.dtype)
        integers: NDArray[Any] = np.clip(levels, self.low, self.high).astype(self.dtype.numpy())
        return integers

    def dequantize(self, integers: NDArray[Any]) -> NDArray[Any]:
        """Return the numbers, of the scale's type, that integers of any shape represent."""
        scale, zero_point = self.spread(integers.shape)
        numbers: NDArray[Any] = (integers.astype(np.int64) - zero_point).astype(scale.dtype) * scale
        return numbers

    def fake_quant(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return numbers after quantizing and dequantizing them."""
        scale, zero_point = self.spread(values.shape)
        steps = np.asarray(np.rint(values.astype(scale.dtype, copy=False) / scale))  # no array if there are no axes
        np.clip(steps, self.low - zero_point, self.high - zero_point, out=steps)
        steps *= scale
        return np.asarray(steps, scale.dtype)

    def saturated(self, values: NDArray[Any]) -> tuple[int, int]:
        """Return how many values lie so far below and above the range that clipping costs more than rounding does:
        by more than half a step.
        """
        scale, zero_point = self.spread(values.shape)
        below = values < (self.low - zero_point - 0.5) * scale
        above = values > (self.high - zero_point + 0.5) * scale
        return int(np.count_nonzero(below)), int(np.count_nonzero(above))

    def spread(self, shape: tuple[int, ...]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Scale and zero point (int64), each of a form that broadcasts against a tensor of `shape`."""
        return self._spread(self.scale, shape), self._spread(self.zero_point.astype(np.int64), shape)

    def _spread(self, parameter: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        if parameter.size == 1:
            return parameter.reshape(())
        axis = self.axis % len(shape)
        if self.block:
            return np.repeat(parameter, self.block, axis).take(range(shape[axis]), axis)
        if parameter.ndim == 2 and len(shape) == 3:  # LSTM: directions and columns
            return parameter[:, None, :]
        spread = [1] * len(shape)
        spread[axis] = parameter.size
        return parameter.reshape(spread)


def params_of(node: ir.Node) -> QuantParams | None:
    """Return the parameters of a QuantizeLinear or DequantizeLinear; None as for `params_at`."""
    integers = node.inputs[0] if node.op_type == "DequantizeLinear" else node.outputs[0]
    return params_at(node, 1, 2, integers=integers, axis=node.attributes.get_int("axis", 1))


def params_at(
    node: ir.Node, scale: int, zero_point: int, *, integers: ir.Value | None = None, axis: int = 0
) -> QuantParams | None:
    """Return the parameters that a node has at two of its inputs; scale as float32, zero point as int64. None where one
    of them is computed at run time, or integers of the type have no limits here.

    Args:
        scale, zero_point: places of the two among the inputs.
        integers: what they are about; its type counts where there is no zero point, which is 0 then.
    """
    steps, zero = constant(node_input(node, scale)), node_input(node, zero_point)
    if steps is None or (zero is not None and not is_constant(zero)):
        return None
    tensor = constant_tensor(zero if zero is not None else integers)
    # That of a DequantizeLinear, from opset 23 on, is the type of its floats.
    chosen = 0 if node.op_type == "DequantizeLinear" else node.attributes.get_int("output_dtype", 0)
    dtype = tensor.dtype if tensor is not None else ir.DataType(chosen)
    if dtype is ir.DataType.UNDEFINED:
        dtype = (integers.dtype if integers is not None else None) or ir.DataType.UINT8
    if dtype not in LIMITS:
        return None
    zeros = constant(zero)
    zero_points = np.zeros((), np.int64) if zeros is None else zeros.astype(np.int64)
    block = node.attributes.get_int("block_size", 0)
    return QuantParams(steps.astype(np.float32), zero_points, dtype, axis=axis, block=block)


def dynamic_params(values: NDArray[Any]) -> QuantParams:
    """Return what DynamicQuantizeLinear takes for `values`: 8 bits from the smallest to the largest, zero among
    them.
    """
    low, high = float(values.min(initial=0)), float(values.max(initial=0))
    if not np.isfinite([low, high]).all():  # an attention mask may hold infinities
        values = values[np.isfinite(values)]
        low, high = float(values.min(initial=0)), float(values.max(initial=0))
    scale = np.float32((high - low) / 255) or np.float32(1)
    return QuantParams(np.asarray(scale), np.asarray(round(-low / float(scale)), np.int64), ir.DataType.UINT8)


@dataclass(frozen=True)
class Grid:
    """Describe the integers that activations are rounded to: of type `dtype`, around a fixed zero point where
    `symmetric`.
    """

    dtype: ir.DataType
    symmetric: bool

    def params(self, low: ArrayLike, high: ArrayLike) -> QuantParams:
        """Return scale (float64) and zero point with which the range low..high, or each of several, is quantized."""
        narrow = self.dtype is ir.DataType.INT8
        return QuantParams.from_range(low, high, self.dtype, symmetric=self.symmetric, narrow=narrow)

    @property
    def levels(self) -> int:
        """Return how many integers there are."""
        params = self.params(0.0, 0.0)
        return params.high - params.low + 1


def grid_of(activation_type: str, symmetric: bool) -> Grid:
    """Return the integers of an activation type. Of what is not symmetric, only their number matters."""
    if symmetric and activation_type == "int8":
        return Grid(ir.DataType.INT8, True)
    return Grid(ir.DataType.UINT8, symmetric)
