"""What the writers of both ONNX files share: the model so far, and the steps that both write alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.backends.systolic.fixed_batch import forget_types
from edgeq.backends.systolic.parts import graft
from edgeq.backends.systolic.program import (
    AveragePool,
    Clamp,
    Concat,
    Conv,
    Dequantize,
    Fc,
    Float,
    MaxPool,
    Pool,
    Program,
    Quantize,
    Rearrange,
    ResidualAdd,
    Step,
)
from edgeq.graph.convert import from_bytes
from edgeq.graph.edit import Editor
from edgeq.signature import Signature, TensorSpec

Params = tuple[ir.Value, ir.Value]
"""Scale and zero point."""


class GraphWriter(ABC):
    """Writes a program as an ONNX model, step by step.

    Args:
        signature: of the float model: inputs and outputs are named and typed as there.
    """

    def __init__(self, program: Program, signature: Signature, opsets: Mapping[str, int], ir_version: int) -> None:
        self._program = program
        inputs = [_typed(ir.Value(name=spec.name), spec) for spec in signature.inputs]
        graph = ir.Graph(inputs, [], nodes=(), opset_imports=dict(opsets), name=program.name)
        self._model = ir.Model(graph, ir_version=ir_version, producer_name="edgeq")
        self._editor = Editor(self._model)
        self._values = {value.name or "": value for value in inputs}
        # Names of the program's tensors are theirs; what is between them gets other ones.
        self._tensors = {name for name in program.tensors if name not in self._values}
        for name in sorted(self._tensors):
            self._editor.free_value_name(name)
        for step in program.steps:
            self._write(step)
        graph.outputs.extend(_typed(self._values[spec.name], spec) for spec in signature.outputs)
        forget_types(graph)

    @property
    def model(self) -> ir.Model:
        """The whole program as a model."""
        return self._model

    def _write(self, step: Step) -> None:
        match step:
            case Quantize():
                inputs = [self._values[step.input], *self._params(step.output)]
                self._node("QuantizeLinear", inputs, step.name, step.output)
            case Dequantize():
                self._dequantize(step)
            case Conv():
                self._conv(step)
            case Fc():
                self._fc(step)
            case ResidualAdd():
                self._add(step)
            case MaxPool():
                self._max_pool(step)
            case AveragePool():
                self._average(step)
            case Clamp():
                self._clamp(step)
            case Concat():
                inputs = [self._values[name] for name in step.inputs]
                self._node("Concat", inputs, step.name, step.output, axis=step.axis)
            case Rearrange():
                self._rearrange(step)
            case Float():
                self._graft(from_bytes(step.model), {name: self._values[name] for name in step.inputs}, step.name)

    def _dequantize(self, step: Dequantize) -> None:
        inputs = [self._values[step.input], *self._params(step.input)]
        self._node("DequantizeLinear", inputs, step.name, step.output)

    @abstractmethod
    def _conv(self, step: Conv) -> None: ...

    @abstractmethod
    def _product(self, step: Fc, rows: ir.Value) -> ir.Value:
        """A product as a convolution of 1 × 1 of `rows` [N, K, 1, 1]."""

    @abstractmethod
    def _add(self, step: ResidualAdd) -> None: ...

    @abstractmethod
    def _max_pool(self, step: MaxPool) -> None: ...

    @abstractmethod
    def _clamp(self, step: Clamp) -> None: ...

    @abstractmethod
    def _rearrange(self, step: Rearrange) -> None: ...

    def _fc(self, step: Fc) -> None:
        name, depth = step.name, step.weights.shape[1]
        shape = self._program.tensors[step.output].shape
        column = self._constant(f"{name}/column", np.array([-1, depth, 1, 1], np.int64))
        back = self._constant(f"{name}/back", np.array([-1, *shape[1:]], np.int64))
        rows = self._node("Reshape", [self._values[step.input], column], f"{name}/as-image", f"{name}/rows")
        self._node("Reshape", [self._product(step, rows), back], f"{name}/as-rows", step.output)

    def _pool(self, pool: Pool, source: ir.Value, name: str, output: str) -> ir.Value:
        """The pooling on a convolution's way out."""
        kernel, strides, pads = (pool.size,) * 2, (pool.stride,) * 2, (pool.padding,) * 4
        return self._node("MaxPool", [source], name, output, kernel_shape=kernel, strides=strides, pads=pads)

    def _average(self, step: AveragePool) -> None:
        """A depthwise convolution with ones; its weight scale is 1 / window."""
        channels = self._program.tensors[step.input].shape[1]
        self._qlinear_conv(
            step.name,
            (self._values[step.input], *self._params(step.input)),
            (np.ones((channels, 1, *step.kernel), np.int8), np.float32(1 / (step.kernel[0] * step.kernel[1])), None),
            step.output,
            group=channels,
            strides=step.strides,
            pads=step.pads,
        )

    def _qlinear_conv(
        self,
        name: str,
        data: tuple[ir.Value, ir.Value, ir.Value],
        layer: tuple[NDArray[np.int8], NDArray[np.float32] | np.float32, NDArray[np.int32] | None],
        tensor: str,
        output: str = "",
        **attributes: Any,
    ) -> ir.Value:
        """Insert a QLinearConv.

        Args:
            data: input, its scale and zero point.
            layer: weights [O, I, kh, kw], their scale or scales [O], bias.
            tensor: the program's tensor whose scale the output has.
            output: name of the output; "": that of the tensor.
        """
        weights, scales, bias = layer
        zero = self._constant(f"{name}/weight-zero", np.zeros(scales.shape, np.int8)) if scales.ndim else self._zero()
        inputs = [
            *data,
            self._constant(f"{name}/weights", weights),
            self._constant(f"{name}/weight-scale", np.asarray(scales)),
            zero,
            *self._params(tensor),
        ]
        if bias is not None:
            inputs.append(self._constant(f"{name}/bias", bias))
        return self._node("QLinearConv", inputs, name, output or tensor, kernel_shape=weights.shape[2:], **attributes)

    def _graft(self, part: ir.Model, inputs: Mapping[str, ir.Value], name: str) -> dict[str, ir.Value]:
        """Add the nodes of a part; its outputs are tensors of the program from then on."""
        outputs = graft(self._editor, part, inputs, name)
        self._values.update(outputs)
        return outputs

    def _node(
        self, op_type: str, inputs: Sequence[ir.Value], name: str, output: str, *, domain: str = "", **attributes: Any
    ) -> ir.Value:
        """Insert a node whose output is called `output`: a tensor of the program, or one between them."""
        ordered = dict(sorted(attributes.items()))
        made = self._editor.node(op_type, inputs, name, output=output, domain=domain, attributes=ordered)
        if output in self._tensors:
            made.name = output
            self._values[output] = made
        return made

    def _params(self, tensor: str) -> Params:
        return self._constant(f"{tensor}/scale", self._program.tensors[tensor].params.scale), self._zero()

    def _zero(self) -> ir.Value:
        return self._constant("int8/0", np.array(0, np.int8))

    def _constant(self, name: str, values: NDArray[Any]) -> ir.Value:
        return self._editor.constant(name, values)


def _typed(value: ir.Value, spec: TensorSpec) -> ir.Value:
    if value.type is not None and not isinstance(value.type, ir.TensorType):
        return value  # a sequence or an optional, of whose elements the signature tells
    value.type = ir.TensorType(ir.DataType.from_numpy(np.dtype(spec.dtype)))
    value.shape = None if spec.shape is None else ir.Shape(spec.shape)
    return value
