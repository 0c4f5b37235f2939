"""Q/DQ pairs written into a graph: symmetric int8, zero point 0, weights as integers with a scale a channel.

Formulas: scale = largest magnitude / 127; q = round to nearest even(x / scale), kept in -127..127 for weights. Scales
are rounded up to a value that the 16-bit type of the rest of the graph holds, because the file has them in that type,
and weights are rounded by that value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.backends.tensorrt.placement import Plan
from edgeq.calibrate.ranges import Range
from edgeq.errors import CalibrationError
from edgeq.graph.edit import Editor, drop_unused_initializers
from edgeq.graph.operators import channel_axis
from edgeq.graph.quant_params import QuantParams
from edgeq.graph.query import constant_values
from edgeq.scheme import FloatType

LEVELS = 127
QUANTIZED, RESTORED = "_QuantizeLinear_Output", "_DequantizeLinear_Output"
# float16's least positive value times 16: a smaller scale would keep fewer than five bits.
_LEAST_SCALE = 2.0**-20
_STORED: Mapping[str, type] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def stored_scale(magnitude: NDArray[np.floating] | float, float_type: FloatType = "float32") -> NDArray[np.float32]:
    """float32 scales that type `float_type` holds exactly and that cover `magnitude`; 1/127 where it is 0."""
    wanted = np.asarray(magnitude, np.float64) / LEVELS
    wanted = np.where(wanted == 0, 1 / LEVELS, np.maximum(wanted, _LEAST_SCALE))
    stored: type = _STORED[float_type]
    scale: NDArray[Any] = wanted.astype(stored)
    # A tiny excess over 127 steps is the rounding of the division, not a value that would be cut off.
    short = scale.astype(np.float64) * (1 + 1e-6) < wanted
    up = np.nextafter(scale, np.asarray(np.inf, stored))
    return np.asarray(np.where(short, up, scale), np.float32)


def weight_params(weight: NDArray[np.float32], axis: int | None, float_type: FloatType = "float32") -> QuantParams:
    """Symmetric parameters with one scale for each index of `axis`, or one in all; float64, of values that `float_type`
    holds."""
    others = None if axis is None else tuple(i for i in range(weight.ndim) if i != axis)
    magnitude = np.max(np.abs(np.asarray(weight, np.float64)), axis=others, initial=0.0)
    scale = stored_scale(magnitude, float_type).astype(np.float64)
    return QuantParams(scale, np.zeros(scale.shape, np.int64), ir.DataType.INT8, axis=axis or 0, narrow=True)


def weight_axis(node: ir.Node, rank: int) -> int | None:
    """The axis of a weight, input 1 of `node`, along which its outputs lie; None where there is none to scale by."""
    if node.op_type == "MatMul" and rank != 2:
        return None
    return channel_axis(node) % rank


def insert_pairs(
    model: ir.Model, plan: Plan, ranges: Mapping[str, Range], *, per_channel: bool, float_type: FloatType
) -> None:
    """Write the pairs of `plan` into `model`, in place. Tensors that several layers read in int8 share one pair.

    Raises:
        CalibrationError: a tensor of the plan has no range.
    """
    missing = next((name for name in plan.activations if name not in ranges), None)
    if missing is not None:
        raise CalibrationError(f"tensor {missing!r} has no range", "The calibration is not of this model: run it again")
    writer = _Writer(model, ranges, per_channel, float_type)
    nodes = {node.name: node for node in model.graph}
    for edge in plan.edges:
        node = nodes[edge.node]
        write = writer.weight if edge.tensor in plan.weights else writer.activation
        node.replace_input_with(edge.place, write(node, edge.place, edge.tensor))
    drop_unused_initializers(model.graph)


class _Writer:
    def __init__(self, model: ir.Model, ranges: Mapping[str, Range], per_channel: bool, float_type: FloatType) -> None:
        self._editor = Editor(model)
        self._ranges, self._per_channel, self._float_type = ranges, per_channel, float_type
        self._made: dict[tuple[str, int | None], ir.Value] = {}

    def activation(self, node: ir.Node, place: int, tensor: str) -> ir.Value:
        """The tensor behind its pair, which is made at the first call, in front of `node`."""
        if (tensor, None) not in self._made:
            parameters = self._parameters(tensor, stored_scale(self._ranges[tensor].bound, self._float_type))
            value = node.inputs[place]
            for op_type, output in (("QuantizeLinear", QUANTIZED), ("DequantizeLinear", RESTORED)):
                self._made[tensor, None] = value = self._editor.node(
                    op_type, [value, *parameters], f"{tensor}_{op_type}", output=tensor + output, before=node
                )
        return self._made[tensor, None]

    def weight(self, node: ir.Node, place: int, tensor: str) -> ir.Value:
        """The weight restored from its integers, which are made at the first call, in front of `node`."""
        values = constant_values(node.inputs[place])
        axis = weight_axis(node, values.ndim) if self._per_channel and place == 1 else None
        key = (tensor, -1 if axis is None else axis)
        if key not in self._made:
            params = weight_params(values, axis, self._float_type)
            # Two layers may read one weight along different axes.
            name = tensor if all(tensor != known for known, _ in self._made) else f"{tensor}_along_{axis}"
            parameters = self._parameters(name, params.scale.astype(np.float32))
            integers = self._editor.constant(f"{name}_quantized", params.quantize(values))
            self._made[key] = self._editor.node(
                "DequantizeLinear",
                [integers, *parameters],
                f"{name}_DequantizeLinear",
                output=name + RESTORED,
                before=node,
                attributes={} if axis is None else {"axis": axis},
            )
        return self._made[key]

    def _parameters(self, name: str, scale: NDArray[Any]) -> tuple[ir.Value, ir.Value]:
        zero = np.zeros(scale.shape, np.int8)
        return self._editor.constant(f"{name}_scale", scale), self._editor.constant(f"{name}_zero_point", zero)
