"""Q/DQ pairs written into a graph: symmetric int8, zero point 0, weights as integers with a scale a channel.

Formulas: scale = largest magnitude / 127; q = round to nearest even(x / scale), kept in -127..127 for weights. Scales
are rounded up to a value that the 16-bit type of the rest holds, because the file says them in that type, and weights
are rounded by that value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from edgeq.backends.tensorrt.placement import Plan
from edgeq.calibrate.ranges import Range
from edgeq.errors import CalibrationError
from edgeq.model.tensors import iter_graphs
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


def quantize_weight(
    weight: NDArray[np.float32], axis: int | None, float_type: FloatType = "float32"
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Integers and scales, one scale for each index of `axis`, or one in all."""
    values = np.asarray(weight, np.float64)
    if axis is None:
        scale = stored_scale(np.max(np.abs(values), initial=0.0), float_type)
        steps = values / scale
    else:
        others = tuple(i for i in range(values.ndim) if i != axis)
        scale = stored_scale(np.max(np.abs(values), axis=others, initial=0.0), float_type)
        shape = [1] * values.ndim
        shape[axis] = -1
        steps = values / scale.astype(np.float64).reshape(shape)
    return np.clip(np.rint(steps), -LEVELS, LEVELS).astype(np.int8), scale


def channel_axis(node: onnx.NodeProto, rank: int) -> int | None:
    """The axis of a weight, input 1 of `node`, along which its outputs lie; None where there is none to scale by."""
    if node.op_type == "ConvTranspose":
        return 1
    if node.op_type == "Gemm":
        transposed = next((a.i for a in node.attribute if a.name == "transB"), 0)
        return 0 if transposed else 1
    if node.op_type == "MatMul":
        return rank - 1 if rank == 2 else None
    return 0


def insert_pairs(
    model: onnx.ModelProto, plan: Plan, ranges: Mapping[str, Range], *, per_channel: bool, float_type: FloatType
) -> None:
    """Write the pairs of `plan` into `model`, in place. Tensors that several layers read in int8 share one pair.

    Raises:
        CalibrationError: a tensor of the plan has no range.
    """
    missing = next((name for name in plan.activations if name not in ranges), None)
    if missing is not None:
        raise CalibrationError(f"tensor {missing!r} has no range", "The calibration is not of this model: run it again")
    writer = _Writer(model, ranges, per_channel, float_type)
    wanted: dict[str, dict[int, str]] = {}
    for edge in plan.edges:
        wanted.setdefault(edge.node, {})[edge.place] = edge.tensor
    for node in list(model.graph.node):
        for place, tensor in wanted.get(node.name, {}).items():
            constant = tensor in plan.weights
            node.input[place] = writer.weight(node, place, tensor) if constant else writer.activation(tensor)
        writer.nodes.append(node)
    writer.finish()


class _Writer:
    def __init__(
        self, model: onnx.ModelProto, ranges: Mapping[str, Range], per_channel: bool, float_type: FloatType
    ) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self._model, self._ranges, self._per_channel, self._float_type = model, ranges, per_channel, float_type
        self._weights = {tensor.name: tensor for tensor in model.graph.initializer}
        self._made: dict[tuple[str, int | None], str] = {}

    def activation(self, tensor: str) -> str:
        key = (tensor, None)
        if key not in self._made:
            scale = stored_scale(self._ranges[tensor].bound, self._float_type)
            parameters = self._parameters(tensor, scale, np.zeros((), np.int8))
            whole, back = tensor + QUANTIZED, tensor + RESTORED
            self.nodes.append(
                helper.make_node("QuantizeLinear", [tensor, *parameters], [whole], f"{tensor}_QuantizeLinear")
            )
            self.nodes.append(
                helper.make_node("DequantizeLinear", [whole, *parameters], [back], f"{tensor}_DequantizeLinear")
            )
            self._made[key] = back
        return self._made[key]

    def weight(self, node: onnx.NodeProto, place: int, tensor: str) -> str:
        values = numpy_helper.to_array(self._weights[tensor])
        axis = channel_axis(node, values.ndim) if self._per_channel and place == 1 else None
        key = (tensor, -1 if axis is None else axis)
        if key not in self._made:
            integers, scale = quantize_weight(values, axis, self._float_type)
            # Two layers may read one weight along different axes.
            name = tensor if all(tensor != known for known, _ in self._made) else f"{tensor}_along_{axis}"
            parameters = self._parameters(name, scale, np.zeros(scale.shape, np.int8))
            self._model.graph.initializer.append(numpy_helper.from_array(integers, f"{name}_quantized"))
            restore = helper.make_node(
                "DequantizeLinear",
                [f"{name}_quantized", *parameters],
                [name + RESTORED],
                f"{name}_DequantizeLinear",
            )
            if axis is not None:
                restore.attribute.append(helper.make_attribute("axis", axis))
            self.nodes.append(restore)
            self._made[key] = name + RESTORED
        return self._made[key]

    def _parameters(self, name: str, scale: NDArray[np.float32], zero: NDArray[np.int8]) -> tuple[str, str]:
        self._model.graph.initializer.append(numpy_helper.from_array(scale, f"{name}_scale"))
        self._model.graph.initializer.append(numpy_helper.from_array(zero, f"{name}_zero_point"))
        return f"{name}_scale", f"{name}_zero_point"

    def finish(self) -> None:
        graph = self._model.graph
        del graph.node[:]
        graph.node.extend(self.nodes)
        drop_unused(self._model)


def drop_unused(model: onnx.ModelProto) -> None:
    """Remove initializers that nothing reads, in place."""
    read = {name for graph in iter_graphs(model.graph) for node in graph.node for name in node.input}
    read |= {output.name for graph in iter_graphs(model.graph) for output in graph.output}
    kept = [tensor for tensor in model.graph.initializer if tensor.name in read]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
