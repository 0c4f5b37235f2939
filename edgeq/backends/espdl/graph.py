"""Lower a Q/DQ model with power-of-two scales to an integer graph.

Every node computes on integers: its inputs come from DequantizeLinear nodes, and its output goes to QuantizeLinear
nodes with the same scale. A Relu or Clip between a node and its QuantizeLinear becomes part of the node: rounding is
monotonic, so integers can be clipped instead of numbers. A node that only moves elements keeps its input's exponent.

`operators` has a function for each ONNX operator. The axes of a tensor may be stored in any order
(`edgeq.backends.litert.layout`): around a Conv or pool it is NHWC, and where an operator needs the model's order, a
Transpose restores it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.backends.espdl.chips import EspFamily
from edgeq.backends.espdl.network import (
    LIMITS,
    LINEAR,
    RELU,
    Attribute,
    EspGraph,
    EspNode,
    EspPort,
    EspTensor,
    EspType,
)
from edgeq.backends.espdl.rounding import saturate
from edgeq.backends.espdl.tables import clamp_function, lookup_table, rounded
from edgeq.backends.litert.layout import Order, channels_last, keeps_elements, model_order, moves, stored_shape
from edgeq.errors import ModelError
from edgeq.model.graph import (
    clamp_bounds,
    constant,
    is_constant,
    is_op,
    moves_data,
    name_of,
    only_reader,
    readers,
    sizes,
)
from edgeq.model.quant_params import QuantParams, params_of

_TYPES: Mapping[ir.DataType, EspType] = {ir.DataType.INT8: "int8", ir.DataType.INT16: "int16"}
_FUSED = ("Conv", "Gemm")
_SPATIAL = ("Conv", "MaxPool", "AveragePool", "GlobalAveragePool", "Resize", "SpaceToDepth")
_ORDERED = ("Transpose", "Reshape", "Flatten", "MatMul", "Gemm", "Softmax")


class CannotLowerError(Exception):
    """Report a node that the runtime cannot compute. The message states only the reason."""


@dataclass(frozen=True)
class EspScale:
    """Describe the integers of an activation: their type and exponent."""

    type: EspType
    exponent: int


@dataclass(frozen=True, eq=False)
class EspStored:
    """Describe a tensor that represents a tensor of the model with its axes in `order`.

    Attributes:
        shape: the shape of the model's tensor.
    """

    tensor: EspTensor
    order: Order
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Result:
    """Describe the result of a node with the clamps behind it: the model's tensor, its scale and its bounds."""

    value: ir.Value
    scale: EspScale
    low: float = -math.inf
    high: float = math.inf


class EspLowering:
    """Hold the state of one lowering: the nodes so far, and the stored form of each tensor that has one."""

    def __init__(
        self, model: ir.Model, family: EspFamily, handlers: Mapping[str, Callable[[EspLowering, ir.Node], None]]
    ) -> None:
        self._graph, self._handlers = model.graph, handlers
        self.family = family
        self._nodes: list[EspNode] = []
        self._forms: dict[str, EspStored] = {}
        # Several nodes may read a tensor in another order of axes or with another exponent; they share that form.
        self._derived: dict[Any, EspTensor] = {}
        self._names: set[str] = set()
        self._folded: set[ir.Node] = set()
        self._node = ""

    def run(self) -> EspGraph:
        """Lower the whole model.

        Raises:
            ModelError: a node cannot be lowered; the message names the node, its operator and the reason.
        """
        for node in self._graph:
            self._node = str(node.name)
            try:
                self._lower(node)
            except CannotLowerError as refusal:
                raise ModelError(
                    f"node {node.name!r} ({node.op_type}) cannot be written to an .espdl file: {refusal}",
                    "Export the model without it, or choose another target",
                ) from None
        inputs = [value for value in self._graph.inputs if not value.is_initializer()]
        return EspGraph(tuple(map(self._port, inputs)), tuple(map(self._port, self._graph.outputs)), tuple(self._nodes))

    def _port(self, value: ir.Value) -> EspPort:
        stored = self._forms.get(name_of(value))
        if stored is None or stored.tensor.values is not None:
            raise ModelError(
                f"{value.name!r} is not quantized, and ESP-DL has no float kernels for layers", "Quantize all layers"
            )
        return EspPort(name_of(value), stored.tensor, stored.order)

    def _lower(self, node: ir.Node) -> None:
        if node in self._folded or is_op(node, "Constant"):
            return
        if is_op(node, "QuantizeLinear"):
            self._quantize(node)
        elif is_op(node, "DequantizeLinear"):
            # A constant's integers are read when a layer needs them, as weights or as a bias.
            if not is_constant(node.inputs[0]):
                self._forms[name_of(node.outputs[0])] = self.stored(node.inputs[0])
        else:
            handler = self._handlers.get(node.op_type) if is_op(node, node.op_type) else None
            if handler is None:
                raise CannotLowerError("ESP-DL has no kernel for it, or edgeq does not write this operator yet")
            handler(self, node)

    def _quantize(self, node: ir.Node) -> None:
        value, scale = node.inputs[0], _scale(node)
        assert value is not None
        if value.is_graph_input() and name_of(value) not in self._forms:
            self._input(value, scale)
        source = self.stored(value)
        if source.tensor.type == "float32":
            tensor = self._fresh(name_of(node.outputs[0]), source.tensor.shape, scale.type, scale.exponent)
            self.emit("QuantizeLinear", (source.tensor,), tensor)
            self._forms[name_of(node.outputs[0])] = replace(source, tensor=tensor)
        else:
            self._forms[name_of(node.outputs[0])] = self.requantized(source, scale)

    def _input(self, value: ir.Value, scale: EspScale) -> None:
        shape = self.sizes(value)
        # An input in the order of its first convolution saves a transposition of the whole image.
        order = channels_last(len(shape)) if _wants_channels_last(value) else model_order(len(shape))
        tensor = self._fresh(name_of(value), stored_shape(shape, order), scale.type, scale.exponent)
        self._forms[name_of(value)] = EspStored(tensor, order, shape)

    # Methods that the operators' functions call.

    def stored(self, value: ir.Value | None) -> EspStored:
        """Return the stored form of a computed tensor."""
        form = self._forms.get(name_of(value))
        if form is None and value is not None and value.is_graph_input():
            # Operators that move elements may stand between the input and its QuantizeLinear.
            scale = _common_scale(value)
            if scale is not None:
                self._input(value, scale)
                form = self._forms.get(name_of(value))
        if form is None:
            raise CannotLowerError(f"it reads {name_of(value)!r}, which is not quantized")
        return form

    def integers(self, value: ir.Value | None) -> EspStored:
        """Return the stored form of a tensor of integers."""
        form = self.stored(value)
        if form.tensor.type not in LIMITS:
            raise CannotLowerError(f"it reads {name_of(value)!r}, which is in float")
        return form

    def constant(self, value: ir.Value | None) -> tuple[NDArray[Any], QuantParams | None]:
        """Return the values of a constant: integers and their parameters, or other values and None."""
        maker = value.producer() if value is not None else None
        if maker is not None and is_op(maker, "DequantizeLinear"):
            values, params = constant(maker.inputs[0]), params_of(maker)
            if values is not None and params is not None:
                return values, params
        values = constant(value)
        if values is None:
            raise CannotLowerError(f"{name_of(value)!r} is computed, not constant")
        return values, None

    def is_constant(self, value: ir.Value | None) -> bool:
        """Return whether a value is a constant, or the dequantized form of constant integers."""
        maker = value.producer() if value is not None else None
        is_stored = maker is not None and is_op(maker, "DequantizeLinear") and is_constant(maker.inputs[0])
        return is_constant(value) or is_stored

    def floats(self, value: ir.Value | None) -> NDArray[np.float64]:
        """Return the values of a constant as floats."""
        values, params = self.constant(value)
        return (values if params is None else params.dequantize(values)).astype(np.float64)

    def sizes(self, value: ir.Value | None) -> tuple[int, ...]:
        """Return the shape of a tensor in the model."""
        shape = sizes(value)
        if shape is None:
            raise CannotLowerError(f"the shape of {name_of(value)!r} is not known")
        return shape

    def arranged(self, stored: EspStored, order: Order) -> EspStored:
        """Return a tensor with its axes stored in another order."""
        if stored.order == order:
            return stored
        permutation = moves(stored.order, order)
        key = (stored.tensor, permutation)
        if key not in self._derived:
            shape = stored_shape(stored.shape, order)
            moved = self._fresh(f"{stored.tensor.name}/ordered", shape, stored.tensor.type, stored.tensor.exponent)
            if keeps_elements(stored.tensor.shape, permutation):
                self.reshape(stored.tensor, moved)
            else:
                self.emit("Transpose", (stored.tensor,), moved, {"perm": permutation})
            self._derived[key] = moved
        return EspStored(self._derived[key], order, stored.shape)

    def requantized(self, stored: EspStored, scale: EspScale) -> EspStored:
        """Return a tensor with another exponent or type."""
        source = stored.tensor
        if (source.type, source.exponent) == (scale.type, scale.exponent):
            return stored
        key = (source, scale)
        if key not in self._derived:
            tensor = self._fresh(f"{source.name}/requantized", source.shape, scale.type, scale.exponent)
            self.emit("RequantizeLinear", (source,), tensor)
            self._derived[key] = tensor
        return replace(stored, tensor=self._derived[key])

    def reshape(self, source: EspTensor, output: EspTensor) -> None:
        """Write a Reshape."""
        self.emit("Reshape", (source, self.numbers(output.shape)), output, {"allowzero": 0})

    def numbers(self, values: Sequence[int]) -> EspTensor:
        """Return a constant of int64 numbers, such as a shape. Equal constants share one tensor."""
        key = ("numbers", *map(int, values))
        if key not in self._derived:
            array = np.array(values, np.int64)
            self._derived[key] = replace(self._fresh("numbers", array.shape, "int64"), values=array)
        return self._derived[key]

    def fixed(self, name: str, values: NDArray[Any], exponents: Sequence[int], layout: str = "") -> EspTensor:
        """Return a new constant."""
        tensor = self._fresh(name, values.shape, values.dtype.name)  # type: ignore[arg-type]
        return replace(tensor, exponents=tuple(map(int, exponents)), values=values, layout=layout)

    def quantized(self, name: str, numbers: NDArray[np.float64], scale: EspScale) -> EspTensor:
        """Return a constant with an exponent, rounded as the chip rounds."""
        steps = rounded(numbers * 2.0**-scale.exponent, self.family.arithmetic)
        return self.fixed(name, saturate(steps.astype(np.int64), scale.type), (scale.exponent,))

    def emit(
        self,
        kind: str,
        inputs: Sequence[EspTensor | None],
        output: EspTensor,
        attributes: Mapping[str, Attribute] | None = None,
        table: EspTensor | None = None,
    ) -> None:
        """Write one node. The node is named after its output, because no two tensors have the same name."""
        name = output.name
        self._nodes.append(EspNode(kind, name, tuple(inputs), (output,), dict(attributes or {}), table, self._node))

    def result(self, node: ir.Node) -> _Result:
        """Return where the result of a node goes: behind the clamps that follow it, to a QuantizeLinear."""
        value, low, high = node.outputs[0], -math.inf, math.inf
        while True:
            reader = only_reader(value)
            bounds = clamp_bounds(reader) if reader is not None else None
            if reader is None or bounds is None:
                break
            # The clamps apply one after the other, so each bound is clipped by those behind it.
            low, high = max(bounds[0], min(low, bounds[1])), max(bounds[0], min(high, bounds[1]))
            self._folded.add(reader)
            value = reader.outputs[0]
        scale = _common_scale(value)
        if scale is None:
            raise CannotLowerError("its result is not quantized, and ESP-DL has no float kernel for it")
        return _Result(value, scale, low, high)

    def finish(
        self,
        node: ir.Node,
        kind: str,
        inputs: Sequence[EspTensor | None],
        order: Order,
        attributes: Mapping[str, Attribute] | None = None,
        *,
        exponent: int | None = None,
    ) -> None:
        """Write the node that computes a node's result, and the clamps behind it.

        Args:
            order: the order in which the axes of the result are stored.
            exponent: the least exponent that the kernel can give. A finer result is shifted afterwards. With one scale
                for all weights, this loses nothing: both saturate at the same number.
        """
        result = self.result(node)
        shape = self.sizes(node.outputs[0])
        wanted = result.scale
        scale = wanted if exponent is None else replace(wanted, exponent=max(exponent, wanted.exponent))
        fuses = kind in _FUSED
        # A Relu alone costs nothing there. The runtime has no other bound of a layer.
        relu = fuses and result.low == 0
        if fuses:
            attributes = {**(attributes or {}), "activation": RELU if relu else LINEAR}
        tensor = self._fresh(name_of(result.value), stored_shape(shape, order), scale.type, scale.exponent)
        self.emit(kind, inputs, tensor, attributes)
        stored = self.requantized(EspStored(tensor, order, shape), wanted)
        self.hold(result.value, self._clamped(stored, -math.inf if relu else result.low, result.high))

    def _clamped(self, stored: EspStored, low: float, high: float) -> EspStored:
        source = stored.tensor
        step = 2.0**source.exponent
        least, most = (limit * step for limit in LIMITS[source.type])
        # Saturation already clips to these numbers.
        if low <= least and high >= most:
            return stored
        tensor = self._fresh(f"{source.name}/clipped", source.shape, source.type, source.exponent)
        if low == 0 and high >= most:
            self.emit("Relu", (source,), tensor)
        else:
            self.look_up(source, tensor, clamp_function(low, high))
        return replace(stored, tensor=tensor)

    def look_up(self, source: EspTensor, output: EspTensor, function: Callable[[Any], Any]) -> None:
        """Write the node that looks up a function of one number."""
        name = self._free(f"{output.name}/table")
        table = lookup_table(name, function, source, output.exponent, output.type, self.family.arithmetic)
        self.emit("LUT", (source,), output, table=table)

    def hold(self, value: ir.Value, stored: EspStored) -> None:
        """Record the stored form of a tensor of the model."""
        self._forms[name_of(value)] = stored

    def fresh(self, name: str, stored: EspTensor, shape: Sequence[int]) -> EspTensor:
        """Return a new tensor with the type and the exponent of another."""
        return self._fresh(name, shape, stored.type, stored.exponent)

    def _fresh(self, name: str, shape: Sequence[int], type_: EspType, exponent: int = 0) -> EspTensor:
        return EspTensor(self._free(name), tuple(map(int, shape)), type_, (exponent,))

    def new(self, name: str, shape: Sequence[int], scale: EspScale) -> EspTensor:
        """Return a new tensor with a scale."""
        return self._fresh(name, shape, scale.type, scale.exponent)

    def float_tensor(self, name: str, shape: Sequence[int]) -> EspTensor:
        """Return a new tensor of floats."""
        return self._fresh(name, shape, "float32")

    def _free(self, name: str) -> str:
        # A file must not have two tensors of one name, and a node may write several.
        free, count = name, 1
        while free in self._names:
            count += 1
            free = f"{name}/{count}"
        self._names.add(free)
        return free


def exponents_of(params: QuantParams) -> tuple[int, ...]:
    """Return the exponents of scales.

    Raises:
        CannotLowerError: a scale is not a power of two, or a zero point is not 0.
    """
    if params.zero_point.any():
        raise CannotLowerError("a zero point is not 0, and ESP-DL has none")
    mantissas, exponents = np.frexp(params.scale.astype(np.float64).ravel())
    if not np.all(mantissas == 0.5):
        raise CannotLowerError("a scale is not a power of two; build the model for an ESP-DL target")
    return tuple(int(exponent) - 1 for exponent in exponents)


def _scale(node: ir.Node) -> EspScale:
    params = params_of(node)
    if params is None or params.dtype not in _TYPES or params.per_channel:
        raise CannotLowerError("ESP-DL takes activations of signed integers with one fixed scale")
    return EspScale(_TYPES[params.dtype], exponents_of(params)[0])


def _common_scale(value: ir.Value) -> EspScale | None:
    """Return the scale that all readers of a tensor give it; None if one of them reads floats, or if they differ. Nodes
    that move elements may stand between the tensor and these readers.
    """
    if value.is_graph_output() or not readers(value):
        return None
    common: EspScale | None = None
    for use in value.uses():
        if is_op(use.node, "QuantizeLinear") and use.idx == 0:
            scale: EspScale | None = _scale(use.node)
        elif (moves_data(use.node) and use.idx == 0) or is_op(use.node, "Concat"):
            scale = _common_scale(use.node.outputs[0])
        else:
            return None
        if scale is None or (common is not None and common != scale):
            return None
        common = scale
    return common


def _wants_channels_last(value: ir.Value) -> bool:
    """Return whether the first later node that depends on the order of the axes wants the channels last."""
    shape, waiting, visited = sizes(value), [value], {value}
    if shape is None or len(shape) != 4:
        return False
    while waiting:
        # Breadth first: the nearest operator decides.
        for node in readers(waiting.pop(0)):
            if is_op(node, *_SPATIAL):
                return True
            if is_op(node, *_ORDERED):
                return False
            new = [v for v in node.outputs if v not in visited]
            visited.update(new)
            waiting += new
    return False
