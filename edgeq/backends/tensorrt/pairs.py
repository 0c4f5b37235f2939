"""Write the Q/DQ pairs of a plan into a float graph, with scales that the type of the rest of the graph can hold.

Pairs are symmetric int8 with zero point 0. The scale is the tensor's largest magnitude / 127. A number x becomes the
integer q = x / scale, rounded to nearest with ties to even. For weights q is limited to -127..127, and each channel has
a scale. The file stores each scale in the 16-bit type of the rest of the graph, so each scale is rounded up to a value
of that type. The weights are quantized with the rounded scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.backends.tensorrt.placement import OperandPlan
from edgeq.calibration.ranges import Range
from edgeq.errors import CalibrationError
from edgeq.model.edit import Editor, drop_unused_initializers
from edgeq.model.graph import channel_axis, constant_values
from edgeq.model.quant_params import QuantParams
from edgeq.quantization.qdq import insert_pair, restore_constant, scale_and_zero
from edgeq.scheme import FloatType

LEVELS = 127
QUANTIZED, RESTORED = "_QuantizeLinear_Output", "_DequantizeLinear_Output"

# The minimum is 16 times the smallest positive float16 value: a smaller scale would keep fewer than five significant
# bits.
_LEAST_SCALE = 2.0**-20
_STORED: Mapping[str, type] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def stored_scale(magnitude: NDArray[np.floating] | float, float_type: FloatType = "float32") -> NDArray[np.float32]:
    """Return float32 scales that cover `magnitude` and that `float_type` represents exactly. The scale for a magnitude
    of 0 is 1/127.
    """
    exact = np.asarray(magnitude, np.float64) / LEVELS
    exact = np.where(exact == 0, 1 / LEVELS, np.maximum(exact, _LEAST_SCALE))
    stored: type = _STORED[float_type]
    scale: NDArray[Any] = exact.astype(stored)
    # A tiny excess over 127 steps comes from rounding in the division. It does not mean that a value would be cut off.
    short = scale.astype(np.float64) * (1 + 1e-6) < exact
    # A scale that was rounded down would cut off the largest values, so it moves up to the next number of the type.
    up = np.nextafter(scale, np.asarray(np.inf, stored))
    return np.asarray(np.where(short, up, scale), np.float32)


def weight_params(weight: NDArray[np.float32], axis: int | None, float_type: FloatType = "float32") -> QuantParams:
    """Return symmetric quantization parameters with one scale for each index of `axis`, or a single scale if `axis` is
    None.

    The scales are float64 numbers that `float_type` represents exactly.
    """
    reduced_axes = None if axis is None else tuple(i for i in range(weight.ndim) if i != axis)
    magnitude = np.max(np.abs(np.asarray(weight, np.float64)), axis=reduced_axes, initial=0.0)
    scale = stored_scale(magnitude, float_type).astype(np.float64)
    return QuantParams(scale, np.zeros(scale.shape, np.int64), ir.DataType.INT8, axis=axis or 0, narrow=True)


def weight_axis(node: ir.Node, rank: int) -> int | None:
    """Return the axis of output channels in the weight that `node` reads as input 1, or None if the weight has no such
    axis.
    """
    if node.op_type == "MatMul" and rank != 2:
        return None
    return channel_axis(node) % rank


def insert_pairs(
    model: ir.Model, plan: OperandPlan, ranges: Mapping[str, Range], *, per_channel: bool, float_type: FloatType
) -> None:
    """Write the pairs of `plan` into `model`, in place. If several layers read a tensor in int8, they share one pair.

    Raises:
        CalibrationError: a tensor in the plan has no range.
    """
    # Checked before the first change, so that a failure leaves the model as it was.
    missing = next((name for name in plan.activations if name not in ranges), None)
    if missing is not None:
        raise CalibrationError(f"tensor {missing!r} has no range", "The calibration is not of this model: run it again")
    editor = Editor(model)
    nodes = {node.name: node for node in model.graph}
    restored: dict[tuple[str, int | None], ir.Value] = {}
    inserted: list[ir.Value] = []
    for edge in plan.edges:
        node, tensor = nodes[edge.node], edge.tensor
        value = node.inputs[edge.place]
        assert value is not None
        weight = constant_values(value) if tensor in plan.weights else None
        # Two layers may read one weight along different axes.
        axis = weight_axis(node, weight.ndim) if weight is not None and per_channel and edge.place == 1 else None
        # One pair for all readers lets TensorRT keep the tensor in int8 between them.
        if (tensor, axis) not in restored:
            if weight is None:
                scale = stored_scale(ranges[tensor].bound, float_type)
                params = QuantParams(scale, np.zeros((), np.int64), ir.DataType.INT8)
                inserted += insert_pair(editor, value, params, before=node)
            else:
                name = tensor if all(tensor != weight_name for weight_name, _ in restored) else f"{tensor}_along_{axis}"
                params = weight_params(weight, axis, float_type)
                scale_and_zero(editor, name, params)  # the file lists the scale and zero point before the integers
                inserted.append(restore_constant(editor, name, weight, params, node))
            restored[tensor, axis] = inserted[-1]
        node.replace_input_with(edge.place, restored[tensor, axis])
    for value in inserted:  # the type depends on the scale, which may get a 16-bit type later
        value.type = value.shape = None
    drop_unused_initializers(model.graph)
