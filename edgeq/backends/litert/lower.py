"""Lower a Q/DQ model to the operators of a .tflite file.

A node computes on integers if all its activations come from DequantizeLinear nodes and all its outputs go to
QuantizeLinear nodes with the same parameters. All other nodes compute in float, between a DEQUANTIZE and a QUANTIZE. So
do nodes that meet this condition but whose integer form the file cannot express. A node that only moves elements keeps
the integers, scales and zero points of its input. If a QuantizeLinear follows such a node, the file quantizes before
the node instead, because the order of the two does not matter.

Each ONNX operator has a function in `operators`. The axes of a tensor may be stored in any order (`layout`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.backends.litert.dialect import dialect
from edgeq.backends.litert.layout import (
    Order,
    channels_last,
    keeps_elements,
    model_order,
    moves,
    reshaped,
    stored_shape,
)
from edgeq.backends.litert.network import QUANTIZED, Port, Scales, TfliteNetwork, TfliteOperator, TfliteTensor, Type
from edgeq.backends.refusals import find_refusals
from edgeq.errors import ModelError
from edgeq.model.graph import constant, is_constant, is_op, moves_data, name_of, operator_of, sizes

_TYPES: dict[ir.DataType, Type] = {
    ir.DataType.FLOAT: "float32",
    ir.DataType.INT8: "int8",
    # The int8 kernels take signed integers, so unsigned ones are shifted by 128, see `_parameters`.
    ir.DataType.UINT8: "int8",
    ir.DataType.INT16: "int16",
    ir.DataType.INT32: "int32",
    # Indices and sizes. No tensor of such a model has 2^31 elements.
    ir.DataType.INT64: "int32",
    ir.DataType.BOOL: "bool",
}


class CannotWriteError(Exception):
    """Report a node that the file cannot express. The message states only the reason."""


class Stored:
    """Describe a tensor of the file that represents a tensor of the model, with its axes in `order`.

    Attributes:
        shape: the shape of the model's tensor.
        features: for a tensor of two axes, the model's index of each element on the second axis; None if the elements
            are in the model's order.
    """

    def __init__(
        self, tensor: TfliteTensor, order: Order, shape: Sequence[int], features: NDArray[np.int64] | None = None
    ) -> None:
        self.tensor, self.order, self.shape, self.features = tensor, order, tuple(shape), features

    @property
    def scales(self) -> Scales | None:
        """Return the scales of a quantized tensor, or None for other types."""
        return self.tensor.scales if self.tensor.type in QUANTIZED else None


class Lowering:
    """Hold the state of one lowering: the operators so far, and the stored form of each model tensor that has one."""

    def __init__(self, model: ir.Model, handlers: dict[str, Callable[[Lowering, ir.Node], None]]) -> None:
        self._graph, self._handlers = model.graph, handlers
        self._operators: list[TfliteOperator] = []
        self._forms: dict[str, Stored] = {}
        # Several float nodes may read one integer tensor; they share its DEQUANTIZE.
        self._floats: dict[str, Stored] = {}
        # The same holds for tensors in another order of axes.
        self._arranged: dict[tuple[TfliteTensor, Order], Stored] = {}
        self._names: set[str] = set()
        self._shared: dict[Any, TfliteTensor] = {}
        self._node = ""
        # The type of the numbers that the current node computes on.
        self.type: Type = "float32"

    @property
    def integer(self) -> bool:
        """Return whether the current node computes on integers."""
        return self.type in QUANTIZED

    def run(self) -> TfliteNetwork:
        """Lower the whole model.

        Raises:
            ModelError: a node cannot be lowered; the message names the node, its operator and the reason.
        """
        inputs = tuple(self._input(value) for value in self._graph.inputs if not value.is_initializer())
        for node, reason in self._refused_nodes():
            raise ModelError(
                f"node {node.name!r} ({node.op_type}) cannot be written to a .tflite file: {reason}",
                "Export the model without it; `edgeq inspect MODEL -t TARGET` lists all such nodes",
            )
        outputs = tuple(self._output(value) for value in self._graph.outputs)
        # A node that was first tried in integers may have left operators behind.
        return TfliteNetwork(inputs, outputs, tuple(self._operators)).without_unused()

    def refusals(self) -> tuple[dict[str, str], tuple[TfliteOperator, ...]]:
        """Return the reason for each node that cannot be lowered, by name, and the operators of all other nodes.

        Raises:
            ModelError: an input cannot be lowered.
        """
        for value in self._graph.inputs:
            if not value.is_initializer():
                self._input(value)
        refused = {str(node.name): reason for node, reason in self._refused_nodes()}
        return refused, tuple(self._operators)

    def _refused_nodes(self) -> Iterator[tuple[ir.Node, str]]:
        """Lower all nodes, and yield each node that cannot be lowered, with the reason. See `find_refusals`."""

        def lower(node: ir.Node) -> None:
            """Lower one node under its name."""
            self._node = str(node.name)
            self._lower(node)

        def substitute(value: ir.Value, shape: Sequence[int]) -> None:
            """Make a tensor that stands for an output of a refused node."""
            tensor = self._fresh(name_of(value), tuple(shape), self.type_of(value))
            self._forms[name_of(value)] = Stored(tensor, model_order(len(shape)), tuple(shape))

        return find_refusals(self._graph, lower, CannotWriteError, substitute)

    # Inputs and outputs.

    def _input(self, value: ir.Value) -> Port:
        shape = sizes(value)
        if shape is None:
            raise ModelError(f"input {value.name!r} has no fixed sizes", "Fix them with ⟨fix⟩ NAME=SIZE")
        # An input in the order of its first convolution saves a transposition of the whole image.
        order = channels_last(len(shape)) if _wants_channels_last(value) else model_order(len(shape))
        params = self._only_parameters(value)
        type_ = params.type if params is not None else _TYPES.get(value.dtype or ir.DataType.FLOAT)
        if type_ is None:
            raise ModelError(f"input {value.name!r} is of type {value.dtype}", "Export the model with another type")
        tensor = self._fresh(name_of(value), stored_shape(shape, order), type_, params)
        self._forms[name_of(value)] = Stored(tensor, order, shape)
        return Port(name_of(value), tensor, order)

    def _output(self, value: ir.Value) -> Port:
        stored = self.stored(value)
        stored = self.in_order(stored)
        tensor = stored.tensor
        return Port(name_of(value), tensor, stored.order)

    def _only_parameters(self, value: ir.Value) -> Scales | None:
        """Return the quantization parameters of a tensor.

        Return None unless all its readers are QuantizeLinear nodes with the same parameters. Nodes that move elements
        may be between the tensor and these readers.
        """
        if value.is_graph_output() or not value.uses():
            return None
        common: Scales | None = None
        for use in value.uses():
            if is_op(use.node, "QuantizeLinear") and use.idx == 0:
                params: Scales | None = _parameters(use.node)
            elif (moves_data(use.node) and use.idx == 0) or is_op(use.node, "Concat"):
                params = self._only_parameters(use.node.outputs[0])
            else:
                return None
            if params is None or (common is not None and not common.equals(params)):
                return None
            common = params
        return common

    # Nodes.

    def _lower(self, node: ir.Node) -> None:
        if is_op(node, "QuantizeLinear"):
            self._quantize(node)
        elif is_op(node, "DequantizeLinear"):
            # A constant's integers are read by `constant` when a layer needs them, as weights or as a bias.
            if not is_constant(node.inputs[0]):
                self._forms[name_of(node.outputs[0])] = self.stored(node.inputs[0])
        elif is_op(node, "Constant"):
            return
        else:
            handler = self._handlers.get(node.op_type) if is_op(node, node.op_type) else None
            if handler is None:
                raise CannotWriteError("edgeq does not write this operator yet")
            self.type = self._type_of_node(node)
            try:
                handler(self, node)
            except CannotWriteError:
                # A refusal of the integer form is not final: the float form may exist, between two conversions.
                if not self.integer:
                    raise
                self.type = "float32"
                handler(self, node)

    def _type_of_node(self, node: ir.Node) -> Type:
        """Return the type of the integers that a node computes on, or "float32"."""
        types = {self.stored(v).tensor.type for v in node.inputs if v is not None and not self.is_constant(v)}
        # No kernel mixes 8-bit and 16-bit activations.
        type_ = types.pop() if len(types) == 1 else "float32"
        return type_ if type_ in QUANTIZED and self._computes_on_integers(node, type_) else "float32"

    def _computes_on_integers(self, node: ir.Node, type_: Type) -> bool:
        # Such a node needs no QuantizeLinear behind it: it keeps its input's scale.
        if moves_data(node) or is_op(node, "Flatten", "Identity", "Dropout", "MaxPool"):
            return True
        # The bias of a layer on 16-bit activations is a number in the model, see `wide`.
        bias = operator_of(node).bias if type_ == "int16" else None
        numbers = (_is_number(value) for place, value in enumerate(node.inputs) if place != bias)
        # Numbers of these operators are bounds, fillers and factors, which have no scale of their own.
        if not is_op(node, "Clip", "Pad", "Resize") and any(numbers):
            return False
        params = [self._only_parameters(v) for v in node.outputs if v.uses() or v.is_graph_output()]
        return all(scales is not None and scales.type == type_ for scales in params)

    def _quantize(self, node: ir.Node) -> None:
        source, params = self.stored(node.inputs[0]), _parameters(node)
        self._forms[name_of(node.outputs[0])] = self.requantized(source, params)

    def requantized(self, source: Stored, params: Scales, name: str = "") -> Stored:
        """Return a tensor as integers with the scales `params`."""
        if source.scales is not None and source.scales.equals(params):
            return source
        key = ("quantized", source.tensor, params.type, params.scale.tobytes(), params.zero.tobytes())
        integers = self._shared.get(key)
        if integers is None:
            integers = self._fresh(name or f"{source.tensor.name}/quantized", source.tensor.shape, params.type, params)
            self._emit("QUANTIZE", (source.tensor,), (integers,))
            self._shared[key] = integers
        return Stored(integers, source.order, source.shape, source.features)

    # Methods that the operators' functions call.

    def is_constant(self, value: ir.Value | None) -> bool:
        """Return whether a value is a constant, or the dequantized form of constant integers."""
        return is_constant(value) or (
            value is not None
            and is_op(value.producer(), "DequantizeLinear")
            and is_constant(value.producer().inputs[0])  # type: ignore[union-attr]
        )

    def constant(self, value: ir.Value | None) -> tuple[NDArray[Any], Scales | None]:
        """Return the values of a constant: integers and their scales, or other values and None."""
        maker = value.producer() if value is not None else None
        if maker is not None and is_op(maker, "DequantizeLinear"):
            values, params = constant(maker.inputs[0]), _parameters(maker)
            assert values is not None
            # The scales of `_parameters` are shifted by 128 as well.
            if values.dtype == np.uint8:
                values = (values.astype(np.int16) - 128).astype(np.int8)
            return values, params
        values = constant(value)
        if values is None:
            raise CannotWriteError(f"{name_of(value)} is computed, not constant")
        return values, None

    def floats(self, value: ir.Value | None) -> NDArray[np.float32]:
        """Return the values of a constant as floats."""
        values, params = self.constant(value)
        if params is None:
            return values
        shape = [1] * values.ndim
        if params.scale.size > 1:
            shape[params.axis % values.ndim] = -1
        scale, zero = params.scale.reshape(shape), params.zero.reshape(shape)
        return ((values.astype(np.int64) - zero).astype(np.float32) * scale).astype(np.float32)

    def stored(self, value: ir.Value | None) -> Stored:
        """Return the stored form of a tensor, as integers if it has an integer form."""
        form = self._forms.get(name_of(value))
        if form is None:
            if value is None or not self.is_constant(value):
                raise CannotWriteError(f"it reads {name_of(value)!r}, which no node makes")
            values, params = self.constant(value)
            return Stored(self.fixed(name_of(value), values, params), model_order(values.ndim), values.shape)
        return form

    def activation(self, value: ir.Value | None) -> Stored:
        """Return an activation as integers if the current node computes on integers, or else as floats."""
        stored = self.stored(value)
        if self.integer or stored.tensor.type not in QUANTIZED:
            return stored
        key = stored.tensor.name
        if key not in self._floats:
            floats = self._fresh(f"{key}/dequantized", stored.tensor.shape, "float32")
            self._emit("DEQUANTIZE", (stored.tensor,), (floats,))
            self._floats[key] = Stored(floats, stored.order, stored.shape, stored.features)
        dequantized = self._floats[key]
        return Stored(dequantized.tensor, stored.order, stored.shape, stored.features)

    def arranged(self, stored: Stored, order: Order) -> Stored:
        """Return a tensor with its axes stored in another order."""
        stored = self.in_order(stored)
        if stored.order == order:
            return stored
        key = (stored.tensor, moves(stored.order, order))
        if key not in self._arranged:
            shape = stored_shape(stored.shape, order)
            moved = self._like(stored, f"{stored.tensor.name}/{''.join(map(str, order))}", shape)
            if keeps_elements(stored.tensor.shape, key[1]):
                self.reshape(stored.tensor, moved)
            else:
                permutation = self.fixed("permutation", np.array(key[1], np.int32))
                self._emit("TRANSPOSE", (stored.tensor, permutation), (moved,))
            self._arranged[key] = Stored(moved, order, stored.shape)
        moved = self._arranged[key].tensor
        return Stored(moved, order, stored.shape)

    def in_order(self, stored: Stored) -> Stored:
        """Return a tensor with its features moved back into the model's order, if they are in another."""
        if stored.features is None:
            return stored
        ordered = self._like(stored, f"{stored.tensor.name}/in_order", stored.tensor.shape)
        places = self.fixed("places", np.argsort(stored.features).astype(np.int32))
        self._emit("GATHER", (stored.tensor, places), (ordered,), {"axis": 1, "batchDims": 0})
        return Stored(ordered, stored.order, stored.shape)

    def as_shape(self, stored: Stored, shape: Sequence[int], name: str) -> Stored:
        """Return a tensor reshaped to `shape`, which is in the model's order of axes. The file moves as few elements as
        possible.
        """
        stored = self.in_order(stored)
        if tuple(shape) == stored.shape:
            return stored
        input_order, order = reshaped(stored.shape, stored.order, tuple(shape))
        source = self.arranged(stored, input_order)
        target = stored_shape(shape, order)
        if target == source.tensor.shape:
            return Stored(source.tensor, order, shape)
        output = self._like(source, name, target)
        self.reshape(source.tensor, output)
        return Stored(output, order, shape)

    def flattened(self, stored: Stored, name: str) -> Stored:
        """Return a tensor as [N, features], with the features in their stored order."""
        order = stored.order
        shape = stored.shape
        if stored.features is not None or order[0] != 0 or len(shape) < 2:
            return self.as_shape(stored, (shape[0], int(np.prod(shape[1:]))), name)
        # Moving the features would cost time in every run. Recording where they went lets the next product permute its
        # weights once, at conversion.
        places = np.arange(int(np.prod(shape[1:]))).reshape(shape[1:]).transpose([a - 1 for a in order[1:]]).ravel()
        flat = (shape[0], places.size)
        output = self._like(stored, name, flat)
        self.reshape(stored.tensor, output)
        in_order = bool(np.all(places == np.arange(places.size)))
        return Stored(output, model_order(2), flat, None if in_order else places)

    def reshape(self, source: TfliteTensor, output: TfliteTensor) -> None:
        """Write a RESHAPE."""
        shape = np.array(output.shape, np.int32)
        self._emit("RESHAPE", (source, self.fixed("shape", shape)), (output,), {"newShape": list(output.shape)})

    def fixed(self, name: str, values: NDArray[Any], scales: Scales | None = None) -> TfliteTensor:
        """Return the tensor that stores a constant. Equal constants share one tensor."""
        # Integers with scales are the biases of layers on 16-bit activations.
        if values.dtype == np.int64 and scales is None:
            # ONNX writes "to the end" as the largest int64. The nearest int32 means the same.
            limits = np.iinfo(np.int32)
            values = values.clip(limits.min, limits.max).astype(np.int32)
        values = np.ascontiguousarray(values)
        parameters = (scales.scale.tobytes(), scales.zero.tobytes(), scales.axis) if scales is not None else ()
        # Keyed by content: shapes and permutations repeat in every block of a network.
        key = ("constant", values.dtype.str, values.shape, values.tobytes(), parameters)
        if key not in self._shared:
            tensor = self._fresh(name, values.shape, values.dtype.name, scales)  # type: ignore[arg-type]
            self._shared[key] = replace(tensor, values=values)
        return self._shared[key]

    def write(
        self,
        node: ir.Node,
        kind: str,
        inputs: Sequence[TfliteTensor | None],
        order: Order,
        options: dict[str, Any] | None = None,
        *,
        scales: Scales | None = None,
        like: TfliteTensor | None = None,
        output: int = 0,
    ) -> None:
        """Write the operator that makes a node's output, with its axes in `order`.

        Args:
            scales: scales of its integer output. If the QuantizeLinear after the node has other scales, a QUANTIZE
                follows. None means the scales of that QuantizeLinear.
            like: a tensor whose type and scales the output keeps.
        """
        value = node.outputs[output]
        shape, name = self.sizes(value), name_of(value)
        if like is not None:
            tensor = self._fresh(name, stored_shape(shape, order), like.type, like.scales)
        else:
            type_ = "float32" if self.integer else self.type_of(value)
            tensor = self.partial(name, stored_shape(shape, order), scales or self._only_parameters(value), type_)
        self._emit(kind, tuple(inputs), (tensor,), options)
        self.hold(value, Stored(tensor, order, shape))

    def partial(
        self, name: str, shape: Sequence[int], scales: Scales | None = None, type_: Type = "float32"
    ) -> TfliteTensor:
        """Return a new tensor. If the current node computes on integers, the tensor has integers with the scales
        `scales`. Otherwise, it has the type `type_`.
        """
        return self._fresh(name, tuple(shape), self.type if self.integer else type_, scales if self.integer else None)

    def type_of(self, value: ir.Value) -> Type:
        """Return the type of the file's tensor for a tensor of the model that is not quantized."""
        type_ = _TYPES.get(value.dtype or ir.DataType.FLOAT)
        if type_ is None or type_ in QUANTIZED:
            raise CannotWriteError(f"{value.name!r} is of type {value.dtype}")
        return type_

    def emit(
        self,
        kind: str,
        inputs: Sequence[TfliteTensor | None],
        output: TfliteTensor,
        options: dict[str, Any] | None = None,
        *more_outputs: TfliteTensor,
    ) -> TfliteTensor:
        """Write one operator that is a step of the current node, and return its first output. `more_outputs` are its
        other outputs.
        """
        self._emit(kind, tuple(inputs), (output, *more_outputs), options)
        return output

    def hold(self, value: ir.Value, stored: Stored) -> None:
        """Record `stored` as the stored form of a tensor of the model."""
        self._forms[name_of(value)] = stored

    def parameters(self, node: ir.Node) -> Scales | None:
        """Return the quantization parameters of the node's output, or None if the node does not compute on integers."""
        return self._only_parameters(node.outputs[0]) if self.integer else None

    def sizes(self, value: ir.Value | None) -> tuple[int, ...]:
        """Return the shape of a tensor in the model."""
        shape = sizes(value)
        if shape is None:
            raise CannotWriteError(f"the shape of {name_of(value)!r} is not known")
        return shape

    def like(self, source: TfliteTensor, name: str, shape: Sequence[int]) -> TfliteTensor:
        """Return a new tensor with the type and scales of another."""
        return self._fresh(name, tuple(shape), source.type, source.scales)

    def _like(self, stored: Stored, name: str, shape: Sequence[int]) -> TfliteTensor:
        return self.like(stored.tensor, name, shape)

    def _fresh(self, name: str, shape: tuple[int, ...], type_: Type, scales: Scales | None = None) -> TfliteTensor:
        # A file must not have two tensors of one name, and a node may write several.
        free, count = name, 1
        while free in self._names:
            count += 1
            free = f"{name}/{count}"
        self._names.add(free)
        return TfliteTensor(free, tuple(int(size) for size in shape), type_, scales)

    def _emit(
        self,
        kind: str,
        inputs: tuple[TfliteTensor | None, ...],
        outputs: tuple[TfliteTensor, ...],
        options: dict[str, Any] | None = None,
    ) -> None:
        operator = TfliteOperator(kind, inputs, outputs, options or {}, self._node)
        # The handler's operator has no such kernel in any runtime, so the node falls back to floats.
        if self.integer and outputs[0].type in QUANTIZED and dialect()[kind].version(operator.type) == 0:
            raise CannotWriteError(f"{kind} has no {operator.type} kernel")
        self._operators.append(operator)


def _parameters(node: ir.Node) -> Scales:
    """Return the scales of a Q or DQ node. Unsigned integers are stored as signed ones, reduced by 128."""
    scale, zero = constant(node.inputs[1]), constant(node.inputs[2]) if len(node.inputs) > 2 else None
    if scale is None:
        raise CannotWriteError("its scale is computed")
    # ONNX: without a zero point, the integers are uint8.
    unsigned = zero is None or zero.dtype == np.uint8
    if zero is None:
        zero = np.zeros(scale.shape, np.uint8)
    elif zero.dtype not in (np.uint8, np.int8, np.int16, np.int32):
        raise CannotWriteError(f"it has integers of type {zero.dtype}")
    shifted = np.atleast_1d(zero.astype(np.int64) - 128 * unsigned)
    type_: Type = "int16" if zero.dtype == np.int16 else "int8"
    return Scales(np.atleast_1d(scale.astype(np.float32)), shifted, node.attributes.get_int("axis", 1), type_)


def _is_number(value: ir.Value | None) -> bool:
    """Return whether a value is a float constant, which shows that the node that reads it was not quantized."""
    return is_constant(value) and value is not None and value.dtype == ir.DataType.FLOAT


# The kernels of the file for these operators take channels last.
_SPATIAL = ("Conv", "ConvTranspose", "MaxPool", "AveragePool", "GlobalAveragePool", "Resize", "BatchNormalization")
# These operators give the order of axes a meaning, so an input in another order would have to be moved first.
_PLAIN = ("Transpose", "Reshape", "Flatten", "MatMul", "Gemm", "Gather")


def _wants_channels_last(value: ir.Value) -> bool:
    """Return whether a tensor should be stored channels-last, judged by the first later node that depends on the axis
    order.
    """
    shape, waiting = sizes(value), [value]
    visited: set[ir.Value] = set()
    if shape is None or len(shape) < 3:
        return False
    while waiting:
        # Breadth first: the nearest operator decides.
        current = waiting.pop(0)
        for use in current.uses():
            if is_op(use.node, *_SPATIAL):
                return True
            if is_op(use.node, *_PLAIN):
                return False
            waiting.extend(v for v in use.node.outputs if v not in visited)
            visited.update(use.node.outputs)
    return False
