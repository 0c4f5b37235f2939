"""The host reference model: a program as standard ONNX that stock ONNX Runtime runs with the same integers.

- Convolutions and products are QLinearConv, one weight scale for each output channel; a product is one of 1 × 1, so
  that it has an int32 bias.
- Relus are integer Clips. Max pooling, joins and moves work on the integers.
- A sum is spelled out in float32 operations that are exact on its integers: the runtime's QLinearAdd rounds once where
  the array rounds each operand, and saturates elsewhere. Cast, and not QuantizeLinear, so that no fusion sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from edgeq.backends.systolic.graph_writer import GraphWriter
from edgeq.backends.systolic.parts import grafted
from edgeq.backends.systolic.program import (
    AveragePool,
    Clamp,
    Concat,
    Conv,
    Dequantize,
    Fc,
    Float,
    MaxPool,
    Pads,
    Pair,
    Program,
    Quantize,
    Rearrange,
    ResidualAdd,
    tile_values,
)
from edgeq.signature import Signature

OPSET = 17
IR_VERSION = 8


def host_reference_model(program: Program, signature: Signature) -> onnx.ModelProto:
    """The reference model of `program`; inputs and outputs are named and typed as the float model's.

    Args:
        signature: of the float model.
    """
    writer = TwinWriter(program)
    for step in program.steps:
        writer.add(step)
    return writer.model(signature)


class TwinWriter(GraphWriter):
    """The reference model's nodes and constants."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self._opset = OPSET

    def model(self, signature: Signature) -> onnx.ModelProto:
        return self._model(signature, [helper.make_opsetid("", self._opset)], IR_VERSION)

    def add(self, step: Any) -> None:
        name = step.name
        if isinstance(step, Quantize):
            scale = self._scale(step.output)
            self._node("QuantizeLinear", [step.input, scale, self._zero()], step.output, name)
        elif isinstance(step, Dequantize):
            self._node("DequantizeLinear", [step.input, self._scale(step.input), self._zero()], step.output, name)
        elif isinstance(step, Conv):
            self._conv(step)
        elif isinstance(step, Fc):
            self._fc(step)
        elif isinstance(step, ResidualAdd):
            self._add(step)
        elif isinstance(step, MaxPool):
            a = {"kernel_shape": step.kernel, "strides": step.strides, "dilations": step.dilations}
            self._node("MaxPool", [step.input], step.output, name, pads=step.pads, **a)
        elif isinstance(step, AveragePool):
            self._average(step)
        elif isinstance(step, Clamp):
            low, high = (self._constant(f"int8/{v}", np.array(v, np.int8)) for v in (step.low, step.high))
            self._node("Clip", [step.input, low, high], step.output, name)
        elif isinstance(step, Concat):
            self._node("Concat", list(step.inputs), step.output, name, axis=step.axis)
        else:
            assert isinstance(step, Rearrange | Float)
            self._graft(step)

    def _conv(self, step: Conv) -> None:
        convolved = f"{step.name}/conv" if step.relu or step.pool else step.output
        activated = f"{step.name}/relu" if step.pool else step.output
        weights = self._constant(f"{step.name}/weights", step.weights)
        scales = tile_values(step.tiles, "weight_scale")
        self._qlinear_conv(
            step.name,
            (step.input, self._scale(step.input)),
            (weights, scales),
            (convolved, self._scale(step.output)),
            step.bias,
            group=step.groups,
            strides=step.strides,
            dilations=step.dilations,
            pads=step.pads,
            kernel_shape=step.weights.shape[2:],
        )
        if step.relu:
            self._relu(step.name, convolved, activated)
        if step.pool is not None:
            p = step.pool
            self._node(
                "MaxPool",
                [activated if step.relu else convolved],
                step.output,
                f"{step.name}/pool",
                kernel_shape=(p.size, p.size),
                strides=(p.stride, p.stride),
                pads=(p.padding,) * 4,
            )

    def _fc(self, step: Fc) -> None:
        outputs, depth = step.weights.shape
        shape = self._program.tensors[step.output].shape
        column = self._constant(f"{step.name}/column", np.array([-1, depth, 1, 1], np.int64))
        back = self._constant(f"{step.name}/back", np.array([-1, *shape[1:]], np.int64))
        self._node("Reshape", [step.input, column], f"{step.name}/rows", f"{step.name}/as-image")
        weights = self._constant(f"{step.name}/weights", step.weights.reshape(outputs, depth, 1, 1))
        scales = tile_values(step.tiles, "weight_scale")
        self._qlinear_conv(
            step.name,
            (f"{step.name}/rows", self._scale(step.input)),
            (weights, scales),
            (f"{step.name}/product", self._scale(step.output)),
            step.bias,
            kernel_shape=(1, 1),
        )
        product = f"{step.name}/product"
        if step.relu:
            self._relu(step.name, product, f"{step.name}/relu")
            product = f"{step.name}/relu"
        self._node("Reshape", [product, back], step.output, f"{step.name}/as-rows")

    def _add(self, step: ResidualAdd) -> None:
        floats = {v: self._constant(f"float/{v}", np.array(v, np.float32)) for v in (-128, 0, 127)}
        parts = []
        for side, factor in (("left", step.left_multiplier), ("right", step.right_multiplier)):
            own = f"{step.name}/{side}"
            multiplier = self._constant(f"{own}/multiplier", np.array(factor, np.float32))
            self._node("Cast", [getattr(step, side)], f"{own}/float", f"{own}/cast", to=TensorProto.FLOAT)
            self._node("Mul", [f"{own}/float", multiplier], f"{own}/scaled", f"{own}/scale")
            self._node("Round", [f"{own}/scaled"], f"{own}/rounded", f"{own}/round")
            self._node("Clip", [f"{own}/rounded", floats[-128], floats[127]], f"{own}/cut", f"{own}/clip")
            parts.append(f"{own}/cut")
        self._node("Add", parts, f"{step.name}/sum", step.name)
        low = floats[0 if step.relu else -128]
        self._node("Clip", [f"{step.name}/sum", low, floats[127]], f"{step.name}/sat", f"{step.name}/clip")
        self._node("Cast", [f"{step.name}/sat"], step.output, f"{step.name}/cast", to=TensorProto.INT8)

    def _average(self, step: AveragePool) -> None:
        """A depthwise convolution with ones; its weight scale is 1 / window."""
        channels = self._program.tensors[step.input].shape[1]
        ones = np.ones((channels, 1, *step.kernel), np.int8)
        share = np.float32(1 / (step.kernel[0] * step.kernel[1]))
        self._qlinear_conv(
            step.name,
            (step.input, self._scale(step.input)),
            (self._constant(f"{step.name}/ones", ones), np.array([share], np.float32)),
            (step.output, self._scale(step.output)),
            None,
            group=channels,
            strides=step.strides,
            pads=step.pads,
            kernel_shape=step.kernel,
        )

    def _graft(self, step: Rearrange | Float) -> None:
        part = onnx.load_from_string(step.model)
        nodes, constants = grafted(part, step.name)
        self._opset = max(self._opset, max(o.version for o in part.opset_import if o.domain in ("", "ai.onnx")))
        self._nodes.extend(nodes)
        self._constants.update((t.name, t) for t in constants)

    def _qlinear_conv(
        self,
        name: str,
        data: tuple[str, str],
        weights: tuple[str, NDArray[np.float32]],
        result: tuple[str, str],
        bias: NDArray[np.int32] | None,
        **attributes: int | Pair | Pads | Sequence[int],
    ) -> None:
        scales = weights[1] if len(set(weights[1].tolist())) > 1 else weights[1][0]
        zeros = np.zeros(np.shape(scales), np.int8)
        weight_scale = self._constant(f"{name}/weight-scale", np.asarray(scales, np.float32))
        weight_zero = self._constant(f"{name}/weight-zero", zeros)
        inputs = [*data, self._zero(), weights[0], weight_scale, weight_zero, result[1], self._zero()]
        if bias is not None:
            inputs.append(self._constant(f"{name}/bias", bias))
        self._node("QLinearConv", inputs, result[0], name, **attributes)

    def _relu(self, name: str, source: str, output: str) -> None:
        self._node("Clip", [source, self._zero()], output, f"{name}/relu")
