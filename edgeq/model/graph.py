"""Query a graph: producers, readers, constants, shapes, attributes, bodies, and the properties of operators.

onnx_ir answers most queries itself (`Value.producer()`, `Value.uses()`, `Value.is_graph_output()`). It counts a use
inside the body of an If, Loop or Scan like any other use. This module adds the missing queries.

The table `OPERATORS` describes the inputs of each operator, with one row per operator type. In the table, a place is
the index of a node's input, counted from 0. The rows cover operators of ONNX and of ONNX Runtime's `com.microsoft`, and
operators that ONNX Runtime's optimiser creates. An operator type means the same in every domain, except for the types
in `_BY_DOMAIN`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.run.draws import DROPOUT, RANDOM

MAIN_DOMAINS = ("", "ai.onnx")
MICROSOFT = "com.microsoft"


def is_op(node: ir.Node | None, *op_types: str) -> bool:
    """Return whether a node is one of these ONNX operators. For QuantizeLinear and DequantizeLinear, ONNX Runtime's own
    versions count too.
    """
    if node is None or node.op_type not in op_types:
        return False
    return node.domain in MAIN_DOMAINS or node.op_type in ("QuantizeLinear", "DequantizeLinear")


def node_input(node: ir.Node, place: int | None) -> ir.Value | None:
    """Return the value at input `place`; None if the node leaves that input out."""
    return node.inputs[place] if place is not None and place < len(node.inputs) else None


def name_of(value: ir.Value | None) -> str:
    """Return the name of a tensor in the file, or "" if the value is None."""
    return (value.name or "") if value is not None else ""


def constant_tensor(value: ir.Value | None) -> ir.TensorProtocol | None:
    """Return the tensor of a Constant node, or of an initializer that no input can override. Return None for computed
    values. The tensor's data is not read.
    """
    if value is None or value.is_graph_input():
        return None
    if value.is_initializer():
        return value.const_value
    return ir.convenience.get_const_tensor(value)


def constant(value: ir.Value | None) -> NDArray[Any] | None:
    """Return the values of a constant, or None for other values. See `constant_tensor` for what counts as a constant.
    External data is read immediately.
    """
    tensor = constant_tensor(value)
    return None if tensor is None else np.asarray(tensor.numpy())


def constant_values(value: ir.Value | None) -> NDArray[Any]:
    """Return the values of a constant. The caller must know that the value is a constant."""
    values = constant(value)
    assert values is not None, name_of(value)
    return values


def is_constant(value: ir.Value | None) -> bool:
    """Return whether a value is the output of a Constant node, or an initializer that no input can override."""
    return constant_tensor(value) is not None


def maker(value: ir.Value) -> ir.Node:
    """Return the node that computes a value. The value must not be an input or an initializer."""
    node = value.producer()
    assert node is not None, value.name
    return node


def clamp_bounds(node: ir.Node) -> tuple[float, float] | None:
    """Return the bounds of a Relu, or of a Clip of floats. A missing bound is infinite. Return None for other nodes and
    if a bound is computed. The bounds of a Clip are attributes up to opset 10 and inputs from opset 11.
    """
    # A Relu is a Clip with one bound.
    if is_op(node, "Relu"):
        return 0.0, math.inf
    if not is_op(node, "Clip"):
        return None
    bounds = []
    for place, attribute, otherwise in ((1, "min", -math.inf), (2, "max", math.inf)):
        bound_input = node_input(node, place)
        tensor = constant_tensor(bound_input)
        if bound_input is None:
            bounds.append(float(np.float32(node.attributes.get_float(attribute, otherwise))))
        elif tensor is None or tensor.size != 1 or not tensor.dtype.is_floating_point():
            return None
        else:
            bounds.append(float(tensor.numpy().reshape(())))
    return bounds[0], bounds[1]


def opset_of(model: ir.Model) -> int:
    """Return the version of the main operator set; 0 if the model does not import it."""
    return max((model.opset_imports.get(domain, 0) for domain in MAIN_DOMAINS), default=0)


def only_reader(value: ir.Value) -> ir.Node | None:
    """Return the only node that reads a value. Return None if the value is a graph output, if it is read more than
    once, or if the reader is in a body of another node.
    """
    uses = value.uses()
    if len(uses) != 1 or value.is_graph_output():
        return None
    reader = next(iter(uses)).node
    return reader if reader.graph is value.graph else None


def clamps(graph: ir.Graph) -> Iterator[ir.Node]:
    """Yield the Relu and Clip nodes that are the only readers of their input, in reverse graph order."""
    for node in reversed(graph):
        if is_op(node, "Relu", "Clip") and node.inputs[0] is not None and only_reader(node.inputs[0]) is node:
            yield node


def read_count(value: ir.Value) -> int:
    """Return how often a value is read: by inputs of nodes, including those in bodies, and as a graph output."""
    return len(value.uses()) + value.is_graph_output()


def consumers(value: ir.Value) -> list[tuple[ir.Node, int]]:
    """Return the nodes of a value's own graph that have it as an input, each with the index of that input."""
    return [(use.node, use.idx) for use in value.uses() if use.node.graph is value.graph]


def readers(value: ir.Value) -> tuple[ir.Node, ...]:
    """Return the nodes of a value's own graph that read the value, each once. A node also counts if its body reads the
    value; in that case the nodes are in graph order.
    """
    nodes = dict.fromkeys(use.node for use in value.uses())
    # Nearly always no body reads the value. Then the graph need not be searched.
    if all(node.graph is value.graph for node in nodes) or value.graph is None:
        return tuple(nodes)
    return tuple(node for node in value.graph if node in nodes or value in captured(node))


def sizes(value: ir.Value | None) -> tuple[int, ...] | None:
    """Return the shape of a value if all its sizes are known, else None."""
    if value is None or value.shape is None or not all(isinstance(size, int) for size in value.shape):
        return None
    return tuple(int(size) for size in value.shape)  # type: ignore[arg-type]


def every_node(model: ir.Model) -> Iterator[ir.Node]:
    """Yield all nodes of a model: those of the main graph, of bodies, and of the model's functions."""
    yield from model.graph.all_nodes()
    for function in model.functions.values():
        yield from function.all_nodes()


def bodies(node: ir.Node) -> Iterator[ir.Graph]:
    """Yield the graphs directly inside a node such as If, Loop, Scan or SequenceMap."""
    for attribute in node.attributes.values():
        if attribute.type is ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type is ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()


def captured(node: ir.Node) -> tuple[ir.Value, ...]:
    """Return the values of outer graphs that the bodies inside a node read, each once, in order."""
    values: dict[ir.Value, None] = {}
    for body in bodies(node):
        # A value of an inner body is not captured from outside.
        graph_ids = {id(graph) for graph in (body, *body.subgraphs())}
        inputs = [v for inner in body.all_nodes() for v in inner.inputs if v is not None]
        inside = (*inputs, *(g_out for graph in (body, *body.subgraphs()) for g_out in graph.outputs))
        values.update((value, None) for value in inside if id(value.graph) not in graph_ids)
    return tuple(values)


def reads(node: ir.Node) -> tuple[ir.Value, ...]:
    """Return all values that a node reads from its graph, each once. These are its inputs and the values that its
    bodies capture.
    """
    return tuple(dict.fromkeys([*(v for v in node.inputs if v is not None), *captured(node)]))


def attributes(node: ir.Node) -> dict[str, Any]:
    """Return attribute name → plain value. A value is a number, a string, a list of these, or an unchanged tensor or
    graph.
    """
    return {name: attribute.value for name, attribute in node.attributes.items()}


@dataclass(frozen=True)
class KernelGeometry:
    """Describe how a kernel moves over an image. Each field except `group` has one entry per spatial axis.

    Attributes:
        kernel, strides, dilations: sizes.
        pads: pairs (before, after).
        group: number of channel groups.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    group: int


def geometry(node: ir.Node, image: tuple[int, ...], kernel: tuple[int, ...]) -> KernelGeometry:
    """Return the geometry of a convolution or pooling node. `image` and `kernel` are spatial sizes."""
    settings, axes = node.attributes, len(kernel)
    strides = tuple(settings.get_ints("strides", [1] * axes))
    dilations = tuple(settings.get_ints("dilations", [1] * axes))
    auto = settings.get_string("auto_pad", "NOTSET")
    pads = list(settings.get_ints("pads", [0] * 2 * axes))
    # ONNX ignores `pads` if `auto_pad` is set.
    if auto == "VALID":
        pads = [0] * 2 * axes
    elif auto != "NOTSET":
        totals = [
            max(0, (-(-size // stride) - 1) * stride + (taps - 1) * dilation + 1 - size)
            for size, stride, taps, dilation in zip(image, strides, kernel, dilations, strict=True)
        ]
        # If the padding is odd, the names say at which end the extra element is.
        less, more = [t // 2 for t in totals], [t - t // 2 for t in totals]
        pads = less + more if auto == "SAME_UPPER" else more + less
    both = tuple((int(pads[axis]), int(pads[axis + axes])) for axis in range(axes))
    return KernelGeometry(kernel, strides, dilations, both, settings.get_int("group", 1))


def is_random(node: ir.Node) -> bool:
    """Return whether a node draws random numbers in each run. A Dropout does so in training mode."""
    if node.domain not in MAIN_DOMAINS or node.op_type != DROPOUT:
        return node.domain in MAIN_DOMAINS and node.op_type in RANDOM
    training = node_input(node, 2)
    # A computed training flag may be true, so the node counts as random.
    values = None if training is None else constant(training)
    return training is not None and (values is None or bool(values.any()))


def random_nodes(model: ir.Model) -> tuple[ir.Node, ...]:
    """Return the nodes of a model that draw random numbers, with those in bodies and functions."""
    return tuple(filter(is_random, every_node(model)))


def random_tensors(graph: ir.Graph) -> frozenset[str]:
    """Return the names of the tensors of a main graph whose values depend on random numbers. The shape of a tensor does
    not count as a value.
    """
    names: set[str] = set()
    for node in graph:
        # A shape is the same in each run, even if the values are random.
        if is_op(node, "Shape", "Size"):
            continue
        inner = (n for body in bodies(node) for n in body.all_nodes())
        if is_random(node) or not names.isdisjoint(v.name for v in reads(node)) or any(map(is_random, inner)):
            names.update(output.name for output in node.outputs if output.name)
    return frozenset(names)


T = TypeVar("T")


def named_values(graph: ir.Graph) -> dict[str, ir.Value]:
    """Return the inputs, the initializers and the outputs of nodes, by name."""
    outputs = [output for node in graph for output in node.outputs]
    return {value.name: value for value in (*graph.inputs, *graph.initializers.values(), *outputs) if value.name}


def computed_constants(graph: ir.Graph, *, sizes: bool = False) -> frozenset[str]:
    """Return the names of the tensors that have the same values in each run: initializers, and tensors computed only
    from constants. Values computed inside bodies of If, Loop and Scan are not followed.

    Args:
        sizes: whether shapes count as constants. This is correct if all sizes are fixed.
    """
    names = {name for name, value in named_values(graph).items() if is_constant(value)}
    for node in graph:
        # A body may run any number of times, so nothing is known about its results.
        if is_random(node) or next(bodies(node), None) is not None:
            continue
        fixed = sizes and is_op(node, "Shape", "Size")
        if fixed or names.issuperset(value.name for value in node.inputs if value is not None):
            names.update(output.name for output in node.outputs if output.name)
    return frozenset(names)


class GraphIndex:
    """Index the main graph of a model by name. The model must not change while the index is in use.

    Attributes:
        model: the model.
        graph: the main graph of the model.
        path: a file that contains the same model; None if there is no file.
    """

    def __init__(self, model: ir.Model, path: Path | None = None) -> None:
        self.model = model
        self.graph = model.graph
        self.path = path
        self._made: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the result of `make`. For each key, `make` is called only once; later calls with the same key return
        the same result.
        """
        if key not in self._made:
            self._made[key] = make()
        entry: T = self._made[key]
        return entry

    @cached_property
    def nodes(self) -> dict[str, ir.Node]:
        """Return node name → node."""
        return {node.name: node for node in self.graph if node.name}

    @cached_property
    def values(self) -> dict[str, ir.Value]:
        """Return tensor name → value, for inputs, initializers and outputs of nodes."""
        return named_values(self.graph)

    @cached_property
    def order(self) -> dict[str, int]:
        """Return node name → position in the graph."""
        return {node.name: position for position, node in enumerate(self.graph) if node.name}

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Return the names of graph inputs that are not weights."""
        return tuple(v.name for v in self.graph.inputs if v.name and not v.is_initializer())

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """Return the names of graph outputs."""
        return tuple(value.name for value in self.graph.outputs if value.name)

    @cached_property
    def captured(self) -> frozenset[str]:
        """Return the names of main graph tensors that the bodies of If, Loop and Scan nodes read."""
        return frozenset(value.name for node in self.graph for value in captured(node) if value.name)

    @cached_property
    def computed_constants(self) -> frozenset[str]:
        """Return the result of the function `computed_constants`, without shapes."""
        return computed_constants(self.graph)

    def is_constant(self, name: str) -> bool:
        """Return whether `name` is the output of a Constant node or an initializer that no input can override."""
        return name in self.values and is_constant(self.values[name])

    def constant(self, name: str) -> NDArray[Any]:
        """Return the values of the constant `name`. External data is read immediately.

        Raises:
            KeyError: there is no such constant.
        """
        values = constant(self.values[name])
        if values is None:
            raise KeyError(name)
        return values


def indexed(model: ir.Model | GraphIndex) -> GraphIndex:
    """Return `model` if it is already an index. Otherwise return a new index of it."""
    return model if isinstance(model, GraphIndex) else GraphIndex(model)


MacRule = Literal[
    "", "conv", "conv-transpose", "matmul", "recurrent", "einsum", "attention", "fused-attention", "nbits"
]
Movement = Literal["", "permutes", "selects"]


@dataclass(frozen=True)
class IntegerInput:
    """Describe an integer input of an operator, and the inputs for its scale and zero point.

    Attributes:
        value: place of the integers.
        scale: place of the scale; None if the node outputs unscaled sums of integers.
        zero_point: place of the zero point.
    """

    value: int
    scale: int | None
    zero_point: int


@dataclass(frozen=True)
class Operator:
    """Describe one row of the operator table.

    Attributes:
        op_type: operator type.
        activations: places of the data that changes from sample to sample.
        weights: places of the operands that count as weights if they are constant. The first place is that of the main
            weight of a layer.
        bias: place of the bias. If it is quantized, its scale is that of the products.
        integers: integer inputs, the activation before the weight. For operators with any number of inputs, see
            `integer_inputs`.
        integer_output: places of the scale and the zero point of an integer output.
        float_form: for an integer operator, the corresponding float operator.
        dynamic: whether the operator reads floats and measures their range itself at run time.
        mac_rule: rule for counting multiply-accumulates, see `edgeq.model.macs`; "" if the operator multiplies no
            matrices.
        mac_operands: places of the operands whose shapes the rule uses; () for all inputs.
        movement: for an operator that only moves values, the kind of movement. "permutes": every element appears once
            in the output. "selects": some elements are left out, repeated or put next to a constant. The output has the
            scale of the input.
        elementwise: whether each element of the output depends only on the elements of the activations at the same
            position.
    """

    op_type: str
    activations: tuple[int, ...] = (0,)
    weights: tuple[int, ...] = ()
    bias: int | None = None
    integers: tuple[IntegerInput, ...] = ()
    integer_output: tuple[int, int] | None = None
    float_form: str = ""
    dynamic: bool = False
    mac_rule: MacRule = ""
    mac_operands: tuple[int, ...] = (0, 1)
    movement: Movement = ""
    elementwise: bool = False

    @property
    def quantized(self) -> bool:
        """Return whether the operator occurs only in quantized models."""
        return bool(self.integers or self.integer_output or self.dynamic)

    @property
    def weight(self) -> int | None:
        """Return the place of the main weight, or None if the operator has no weights."""
        return self.weights[0] if self.weights else None


def _rows(op_types: str, row: Operator) -> Iterable[tuple[str, Operator]]:
    return ((op_type, replace(row, op_type=op_type)) for op_type in op_types.split())


def _integers(*places: tuple[int, int | None, int]) -> tuple[IntegerInput, ...]:
    return tuple(IntegerInput(*place) for place in places)


# Rows that several operators share. Each operator adds what is its own.
_FUNCTION = Operator("", elementwise=True)
_LAYER = Operator("", weights=(1,), bias=2)
_CONV = replace(_LAYER, mac_rule="conv")
_MATMUL = replace(_LAYER, bias=None, mac_rule="matmul")
_PAIR = _integers((0, 1, 2), (3, 4, 5))
_SUM = Operator("", (0, 3), integers=_PAIR, integer_output=(6, 7))
_QLINEAR = Operator("", weights=(3,), integers=_PAIR, integer_output=(6, 7), mac_operands=(0, 3))
_INTEGER_SUMS = Operator("", weights=(1,), integers=_integers((0, None, 2), (1, None, 3)))
_RECURRENT = Operator("", weights=(1, 2), bias=3, mac_rule="recurrent")
# The inputs are the data and a single weight for Q, K and V.
_ATTENTION = replace(_LAYER, mac_rule="fused-attention")

OPERATORS: Mapping[str, Operator] = dict(
    (
        *_rows("Conv FusedConv NhwcFusedConv", _CONV),
        *_rows("ConvTranspose", replace(_LAYER, mac_rule="conv-transpose")),
        *_rows("Gemm FusedGemm", replace(_LAYER, mac_rule="matmul")),
        *_rows("MatMul FusedMatMul", _MATMUL),
        *_rows("RNN GRU LSTM", _RECURRENT),
        *_rows("Einsum", Operator("", activations=(0, 1), mac_rule="einsum", mac_operands=())),
        *_rows(
            "Attention MultiHeadAttention",
            Operator("", activations=(0, 1, 2), mac_rule="attention", mac_operands=(0, 1, 2)),
        ),
        *_rows("MatMulNBits", replace(_MATMUL, mac_rule="nbits")),
        *_rows("Add Mul Sub Div Max Min Pow", Operator("", activations=(0, 1), elementwise=True)),
        *_rows("Abs Celu Clip Elu Erf Exp Gelu HardSigmoid HardSwish LeakyRelu Log Mish Neg QuickGelu", _FUNCTION),
        *_rows("Reciprocal Relu Selu Sigmoid Softplus Softsign Sqrt Swish Tanh ThresholdedRelu", _FUNCTION),
        *_rows("Where", Operator("", activations=(1, 2))),
        # Operators that quantize and dequantize.
        *_rows("QuantizeLinear", Operator("", integer_output=(1, 2))),
        *_rows("DequantizeLinear", Operator("", integers=_integers((0, 1, 2)))),
        *_rows("DynamicQuantizeLinear", Operator("", dynamic=True)),
        # Operators with integer inputs and integer outputs.
        *_rows("QLinearConv", replace(_QLINEAR, bias=8, float_form="Conv", mac_rule="conv")),
        *_rows("QLinearMatMul", replace(_QLINEAR, float_form="MatMul", mac_rule="matmul")),
        *_rows("QGemm", replace(_QLINEAR, bias=6, integer_output=(7, 8), float_form="Gemm", mac_rule="matmul")),
        *_rows("QLinearAdd", replace(_SUM, float_form="Add")),
        *_rows("QLinearMul", replace(_SUM, float_form="Mul")),
        *_rows(
            "QLinearWhere",
            Operator("", (1, 4), integers=_integers((1, 2, 3), (4, 5, 6)), integer_output=(7, 8), float_form="Where"),
        ),
        *(
            row
            for form in ["Sigmoid", "LeakyRelu", "Softmax", "ReduceMean", "AveragePool", "GlobalAveragePool"]
            for row in _rows(
                f"QLinear{form}",
                Operator("", integers=_integers((0, 1, 2)), integer_output=(3, 4), float_form=form),
            )
        ),
        *_rows("QLinearConcat", Operator("", activations=(), integer_output=(0, 1), float_form="Concat")),
        # Operators with integer inputs whose outputs are sums of integers, or floats.
        *_rows("ConvInteger", replace(_INTEGER_SUMS, float_form="Conv", mac_rule="conv")),
        *_rows("ConvIntegerToFloat", replace(_INTEGER_SUMS, float_form="Conv", mac_rule="conv")),
        *_rows("MatMulInteger", replace(_INTEGER_SUMS, float_form="MatMul", mac_rule="matmul")),
        *_rows("MatMulIntegerToFloat", replace(_MATMUL, integers=_integers((0, 2, 4), (1, 3, 5)), float_form="MatMul")),
        *_rows("QAttention", replace(_ATTENTION, bias=None, integers=_integers((0, 3, 6), (1, 4, 7)))),
        # Operators with float inputs that they quantize at run time.
        *_rows(
            "DynamicQuantizeMatMul", replace(_MATMUL, integers=_integers((1, 2, 3)), float_form="MatMul", dynamic=True)
        ),
        *_rows(
            "DynamicQuantizeLSTM",
            replace(_RECURRENT, integers=_integers((1, 8, 9), (2, 10, 11)), float_form="LSTM", dynamic=True),
        ),
        *_rows("QMoE QEmbedLayerNormalization", Operator("", dynamic=True)),
        # Operators that move data.
        *_rows(
            "Reshape Flatten Squeeze Unsqueeze Transpose DepthToSpace SpaceToDepth",
            Operator("", movement="permutes"),
        ),
        *_rows("Identity", Operator("", movement="permutes", elementwise=True)),
        *_rows("Expand Gather MaxPool Pad Resize Slice Split Tile", Operator("", movement="selects")),
    )
)
# ONNX's own Attention has other inputs than the one of ONNX Runtime, which is older.
_BY_DOMAIN: Mapping[tuple[str, str], Operator] = {
    (MICROSOFT, "Attention"): replace(_ATTENTION, op_type="Attention"),
}

DATA_MOVEMENT = frozenset(op_type for op_type, row in OPERATORS.items() if row.movement)
"""Operator types whose integer kernels copy values and cannot rescale them."""
PERMUTATIONS = frozenset(op_type for op_type, row in OPERATORS.items() if row.movement == "permutes")
"""Types in `DATA_MOVEMENT` whose output contains every element of the data exactly once."""


def operator_of(node: ir.Node) -> Operator:
    """Return the table row of a node. For an operator that is not in the table, return a row that only states that the
    first input is data.
    """
    row = _BY_DOMAIN.get((node.domain, node.op_type)) or OPERATORS.get(node.op_type)
    return row or Operator(node.op_type)


def moves_data(node: ir.Node) -> bool:
    """Return whether a node only moves elements of its input, or puts constants next to them. A Resize that
    interpolates does not count.
    """
    if node.domain not in MAIN_DOMAINS or node.op_type not in DATA_MOVEMENT:
        return False
    # Cropping fills positions outside of the image with a value of its own, which the input's range may lack.
    crops = node.attributes.get_string("coordinate_transformation_mode", "") == "tf_crop_and_resize"
    return node.op_type != "Resize" or (node.attributes.get_string("mode", "nearest") == "nearest" and not crops)


def before_layers(model: ir.Model) -> frozenset[ir.Node]:
    """Return the nodes from which a path leads to a node that multiplies matrices."""
    nodes: set[ir.Node] = set()
    # In reverse order, the readers of a node's outputs are known before the node.
    for node in reversed(list(model.graph)):
        behind = {reader for output in node.outputs for reader in readers(output)}
        if any(reader in nodes or operator_of(reader).mac_rule for reader in behind):
            nodes.add(node)
    return frozenset(nodes)


def integer_inputs(node: ir.Node) -> tuple[IntegerInput, ...]:
    """Return the integer inputs of a node. This also covers operators with any number of inputs."""
    # Its inputs come in groups of three for each tensor, so no row of the table can list them.
    if node.op_type == "QLinearConcat":
        return tuple(IntegerInput(place, place + 1, place + 2) for place in range(2, len(node.inputs), 3))
    return operator_of(node).integers


def is_quantized_operator(op_type: str) -> bool:
    """Return whether an operator of this type occurs only in quantized models."""
    row = OPERATORS.get(op_type)
    return op_type.startswith("QLinear") or (row is not None and (row.quantized or row.mac_rule == "nbits"))


def is_depthwise(node: ir.Node, weight: tuple[int, ...]) -> bool:
    """Return whether each output channel of a convolution reads one input channel. `weight` is [O, I / group, ...]."""
    return weight[1] == 1 and weight[0] == node.attributes.get_int("group", 1)


def channel_axis(node: ir.Node) -> int:
    """Return the axis of the channels for per-channel scales. It is an axis of the weight, or of the data for
    QuantizeLinear and DequantizeLinear. It may be negative.
    """
    if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
        return int(node.attributes.get_int("axis", 1))
    row = operator_of(node)
    float_form = row.float_form or row.op_type
    if float_form in ("Gemm", "FusedGemm"):
        return 0 if node.attributes.get_int("transB", 0) else -1
    # Its weight is [inputs, outputs / groups, ...], unlike that of Conv.
    if float_form == "ConvTranspose":
        return 1
    return 0 if row.mac_rule in ("conv", "recurrent") else -1
