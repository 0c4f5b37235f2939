"""The host reference model: a program as standard ONNX that stock ONNX Runtime runs with the same integers.

- Convolutions and products are QLinearConv, one weight scale for each output channel; a product is one of 1 × 1, so
  that it has an int32 bias.
- Relus are integer Clips. Max pooling, concatenation and data movement work on the integers.
- A sum is written out in float32 operations that are exact on its integers: the runtime's QLinearAdd rounds once where
  the array rounds each operand, and saturates elsewhere. Cast, and not QuantizeLinear, so that nothing is fused.
- What a part in float reads is dequantized by Cast and Mul, too: behind a DequantizeLinear the runtime's optimiser
  quantizes weights of what was kept in float, and makes integer operators of what has such.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.backends.systolic.graph_writer import GraphWriter
from edgeq.backends.systolic.program import (
    Clamp,
    Conv,
    Dequantize,
    Fc,
    Float,
    MaxPool,
    Program,
    Rearrange,
    ResidualAdd,
    Tile,
    tile_values,
)
from edgeq.graph.convert import from_bytes
from edgeq.graph.query import MAIN_DOMAINS
from edgeq.signature import Signature

OPSET = 17
IR_VERSION = 8


def host_reference_model(program: Program, signature: Signature) -> ir.Model:
    """The reference model of `program`; inputs and outputs are named and typed as the float model's.

    Args:
        signature: of the float model.
    """
    return _ReferenceWriter(program, signature, {"": OPSET}, IR_VERSION).model


class _ReferenceWriter(GraphWriter):
    @functools.cached_property
    def _read_in_float(self) -> frozenset[str]:
        """Names of the tensors that parts in float read."""
        return frozenset(name for step in self._program.steps if isinstance(step, Float) for name in step.inputs)

    def _dequantize(self, step: Dequantize) -> None:
        if step.output not in self._read_in_float:
            super()._dequantize(step)
            return
        tensor = self._program.tensors[step.input]
        # One for each value of the last axis: a single factor is moved behind a product, which rounds otherwise.
        scales = self._constant(f"{step.input}/scales", np.full(tensor.shape[-1:], tensor.params.scale))
        integers = [self._values[step.input]]
        made = self._node("Cast", integers, f"{step.name}/cast", f"{step.input}/float", to=ir.DataType.FLOAT)
        self._node("Mul", [made, scales], step.name, step.output)

    def _conv(self, step: Conv) -> None:
        source = (self._values[step.input], *self._params(step.input))
        made = self._qlinear_conv(
            step.name,
            source,
            (step.weights, _scales(step.tiles), step.bias),
            step.output,
            f"{step.name}/conv" if step.relu or step.pool else step.output,
            group=step.groups,
            strides=step.strides,
            dilations=step.dilations,
            pads=step.pads,
        )
        if step.relu:
            made = self._relu(step.name, made, f"{step.name}/relu" if step.pool else step.output)
        if step.pool is not None:
            self._pool(step.pool, made, f"{step.name}/pool", step.output)

    def _product(self, step: Fc, rows: ir.Value) -> ir.Value:
        weights = step.weights.reshape(*step.weights.shape, 1, 1)
        layer = (weights, _scales(step.tiles), step.bias)
        source = (rows, *self._params(step.input))
        made = self._qlinear_conv(step.name, source, layer, step.output, f"{step.name}/product")
        return self._relu(step.name, made, f"{step.name}/relu") if step.relu else made

    def _add(self, step: ResidualAdd) -> None:
        name = step.name
        low, zero, high = (self._constant(f"float/{v}", np.array(v, np.float32)) for v in (-128, 0, 127))
        parts = []
        operands = (("left", step.left, step.left_multiplier), ("right", step.right, step.right_multiplier))
        for side, tensor, factor in operands:
            own = f"{name}/{side}"
            multiplier = self._constant(f"{own}/multiplier", np.array(factor, np.float32))
            part = self._node("Cast", [self._values[tensor]], f"{own}/cast", f"{own}/float", to=ir.DataType.FLOAT)
            part = self._node("Mul", [part, multiplier], f"{own}/scale", f"{own}/scaled")
            part = self._node("Round", [part], f"{own}/round", f"{own}/rounded")
            parts.append(self._node("Clip", [part, low, high], f"{own}/clip", f"{own}/cut"))
        total = self._node("Add", parts, f"{name}/add", f"{name}/sum")
        total = self._node("Clip", [total, zero if step.relu else low, high], f"{name}/clip", f"{name}/sat")
        # What has the sum's name makes its integers: a tensor of other units is not to be taken for the sum.
        self._node("Cast", [total], name, step.output, to=ir.DataType.INT8)

    def _max_pool(self, step: MaxPool) -> None:
        self._node(
            "MaxPool",
            [self._values[step.input]],
            step.name,
            step.output,
            kernel_shape=step.kernel,
            strides=step.strides,
            dilations=step.dilations,
            pads=step.pads,
        )

    def _clamp(self, step: Clamp) -> None:
        bounds = [self._constant(f"int8/{v}", np.array(v, np.int8)) for v in (step.low, step.high)]
        self._node("Clip", [self._values[step.input], *bounds], step.name, step.output)

    def _rearrange(self, step: Rearrange) -> None:
        self._graft(from_bytes(step.model), {step.input: self._values[step.input]}, step.name)

    def _graft(self, part: ir.Model, inputs: Mapping[str, ir.Value], name: str) -> dict[str, ir.Value]:
        """The model imports what the part needs."""
        imports = self._model.graph.opset_imports
        for domain in {node.domain for node in part.graph.all_nodes()}:
            main = domain in MAIN_DOMAINS
            version = part.graph.opset_imports.get(domain, 1)
            imports["" if main else domain] = max(version, OPSET if main else 1, imports.get(domain, 1))
        return super()._graft(part, inputs, name)

    def _relu(self, name: str, source: ir.Value, output: str) -> ir.Value:
        return self._node("Clip", [source, self._zero()], f"{name}/relu", output)


def _scales(tiles: tuple[Tile, ...]) -> NDArray[np.float32] | np.float32:
    """The weight scale of each output channel; one where all are the same."""
    scales = tile_values(tiles, "weight_scale")
    return scales if len(set(scales.tolist())) > 1 else scales[0]
