"""Write a float model for TensorRT: either with Q/DQ pairs and the rest in 16 bits, or with a calibration table next to
it.

These rules decide which tensors of the float graph get Q/DQ pairs:

- Both operands of a weighted layer (Conv, ConvTranspose, Gemm, MatMul) are quantized. Its output and its bias are not.
  TensorRT fuses the pairs before the layer and the nodes after it (BatchNormalization, an activation) into the layer.
- A residual Add is fused into the layer that makes one of its operands, if only the Add reads that layer's result. The
  other operand, the skip branch, is then quantized, so that the fused layer reads it as int8.
- Tensors that are connected by data-movement operators (Concat, MaxPool ...) share one scale, so that Q and DQ can move
  past these operators.
- Nothing else is quantized. A tensor is also not quantized if its int8 range cuts off too much of its power.

Pairs are symmetric int8 with zero point 0. The scale is the tensor's largest magnitude / 127. A number x becomes the
integer q = x / scale, rounded to nearest with ties to even. For weights q is limited to -127..127, and each channel has
a scale. The file stores each scale in the 16-bit type of the rest of the graph, so each scale is rounded up to a value
of that type. The weights are quantized with the rounded scale.

ONNX Runtime would change the biases of int8 layers. When it loads a model, before any provider gets the graph, its
optimizer WeightBiasQuantization converts the biases of Conv, ConvTranspose and Gemm layers after Q/DQ pairs to int32.
It divides a bias by the product of the layer's scales, in the type of the bias. In float16, a bias of more than 65504
steps overflows and makes the layer's result useless. TensorRT does not support an int32 bias either. The optimizer
matches only a constant bias with one axis. So edgeq gives the biases another form:

- a Gemm's bias gets a second axis;
- a convolution's bias becomes the shift of a BatchNormalization after the convolution. Networks trained with Q/DQ pairs
  reach TensorRT in that form, and TensorRT folds the node into the convolution.

In the graph itself, edgeq casts nodes that are not in int8 to 16 bits, if calibration shows that their values fit. A
node computes in 16 bits if four conditions are true: its operator supports 16-bit types, no tensor that it reads or
makes exceeded the type's limit in calibration, no such tensor must be exact (an index, a large whole number, a large
angle), and no constant overflows or vanishes in the type. Every other node
stays in float32, and edgeq records the reason. Cast nodes connect the two types. Inputs and outputs of the graph keep
their types.

With implicit quantization, edgeq writes the float model with all its shapes, and a table that contains the range of
every tensor. TensorRT then chooses by itself which nodes run in int8. This works only up to TensorRT 10. A model cannot
have both Q/DQ pairs and a table.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
from edgeq_device.engines.catalog import parse_version
from numpy.typing import NDArray

from edgeq.backends.tensorrt.options import facts
from edgeq.calibration.plan import quantizable_tensors
from edgeq.calibration.ranges import Range
from edgeq.calibration.table import CACHE, FLATBUFFERS, JSON, write_native, write_tables
from edgeq.errors import CalibrationError, HardwareError, ModelError
from edgeq.model.conditions import NodeContext, known_sizes
from edgeq.model.edit import Editor, drop_unused_initializers, insert_behind
from edgeq.model.exact import Exactness, is_layer_output
from edgeq.model.graph import (
    MAIN_DOMAINS,
    GraphIndex,
    bodies,
    channel_axis,
    constant,
    constant_values,
    is_op,
    maker,
    name_of,
    node_input,
    only_reader,
    opset_of,
)
from edgeq.model.int8_prediction import explain_float, foreign_type_reason
from edgeq.model.int8_rules import DEFAULT, Int8Rule
from edgeq.model.load import is_quantized
from edgeq.model.quant_params import QuantParams
from edgeq.model.shapes import element_types, write_shapes
from edgeq.quantization.qdq import insert_pair, restore_constant, scale_and_zero
from edgeq.scheme import FloatType

ADD = "Add"
_AFTER = "after-quantized"


class Edge(NamedTuple):
    """Describe one operand to quantize: the tensor `tensor`, which `node` reads as its input number `place`."""

    node: str
    place: int
    tensor: str


@dataclass(frozen=True)
class OperandPlan:
    """List the operands to quantize.

    Attributes:
        edges: activations and constant weights to quantize, in graph order.
        weights: names of the constant tensors in `edges`.
        reasons: the reason why a node is not in int8, by node name, for all nodes whose operator type could be in int8.
    """

    edges: tuple[Edge, ...]
    weights: frozenset[str]
    reasons: Mapping[str, str]

    @property
    def activations(self) -> tuple[str, ...]:
        """Return the names of the activations that get a pair, without duplicates."""
        return tuple(dict.fromkeys(e.tensor for e in self.edges if e.tensor not in self.weights))


def weighted_operators(rules: Mapping[str, Int8Rule]) -> frozenset[str]:
    """Return the operator types that can run in int8 even if no neighbouring operator does."""
    conditions = {op: rule.condition.split(", ") for op, rule in rules.items() if rule.int8}
    return frozenset(op for op, names in conditions.items() if _AFTER not in names)


def plan_placement(
    model: ir.Model,
    rules: Mapping[str, Int8Rule],
    *,
    exclude: Mapping[str, str] = MappingProxyType({}),
    op_types: Collection[str] | None = None,
    cut: Mapping[str, float] | None = None,
    most_cut: float = 1.0,
    gains: bool = True,
    hazards: Mapping[str, str] | None = None,
) -> OperandPlan:
    """Choose which operands of a prepared float model to quantize.

    Args:
        rules: int8 rules of the backend.
        exclude: the reason for each node to leave in float.
        op_types: the only operator types to quantize; None means every type that the rules allow.
        cut: share of each tensor's power that its range cuts off (`edgeq.calibration.ranges`).
        most_cut: the largest share that may be cut off.
        gains: whether to quantize only layers that int8 is expected to make faster.
        hazards: tensors that must not be in 8 bits, each with a reason. Messages print the reason directly after the
            tensor's name.
    """
    lost = {name: _too_wide(share) for name, share in (cut or {}).items() if share > most_cut} | dict(hazards or {})
    types = element_types(model)
    index = GraphIndex(model)
    context = NodeContext(index.computed_constants)
    weighted = weighted_operators(rules)
    edges: list[Edge] = []
    reasons: dict[str, str] = {}
    layers: set[ir.Node] = set()
    for node in model.graph:
        if node.op_type not in weighted:
            continue
        name, operands = str(node.name), [name_of(value) for value in node.inputs[:2]]
        reason = explain_float(node, rules, context, excluded=exclude, gains=gains)
        if not reason and op_types is not None and node.op_type not in op_types:
            reason = foreign_type_reason(node.op_type)
        if not reason and any(types.get(tensor, ir.DataType.FLOAT) != ir.DataType.FLOAT for tensor in operands):
            reason = "its operands are not float32"
        if not reason:
            reason = next((f"tensor {tensor!r} {lost[tensor]}" for tensor in operands if tensor in lost), "")
        if reason:
            reasons[name] = reason
            continue
        layers.add(node)
        edges.extend(Edge(name, place, tensor) for place, tensor in enumerate(operands))
    depth = _depths(model)
    if rules.get(ADD, rules[DEFAULT]).int8 and (op_types is None or ADD in op_types):
        for node in model.graph:
            edge = _skip_branch(node, layers, depth, index) if node.name not in exclude else None
            if edge is not None and edge.tensor not in lost:
                edges.append(edge)
    weights = frozenset(e.tensor for e in edges if e.tensor in model.graph.initializers)
    return OperandPlan(tuple(sorted(edges, key=lambda e: (index.order[e.node], e.place))), weights, reasons)


def _too_wide(share: float) -> str:
    return f"has a range that cuts off {share:.0%} of its power: its values spread too wide for 8 bits"


def _skip_branch(
    node: ir.Node, layers: Collection[ir.Node], depth: Mapping[ir.Value, int], index: GraphIndex
) -> Edge | None:
    """Return the operand of a residual Add to quantize, or None if the Add does not fuse into an int8 layer."""
    values = [value for value in node.inputs if value is not None]
    if not is_op(node, ADD) or len(set(values)) != 2:
        return None
    if any(name_of(value) in index.computed_constants for value in values):
        return None
    if known_sizes(values[0]) != known_sizes(values[1]):
        return None
    makers = [value.producer() for value in values]
    mains = [place for place in (0, 1) if makers[place] in layers and only_reader(values[place]) is node]
    if not mains:
        return None
    # If both branches end in an int8 layer that only the Add reads, the shorter branch is the skip branch.
    main = max(mains, key=lambda place: depth[values[place]])
    return Edge(str(node.name), 1 - main, name_of(values[1 - main]))


def _depths(model: ir.Model) -> dict[ir.Value, int]:
    """Return the number of nodes on the longest path to each tensor."""
    depth: dict[ir.Value, int] = {}
    for node in model.graph:
        below = 1 + max((depth.get(value, 0) for value in node.inputs if value is not None), default=0)
        depth.update(dict.fromkeys(node.outputs, below))
    return depth


def shield_biases(model: ir.Model) -> None:
    """Change the form of biases, in place, so that ONNX Runtime does not convert them. This affects every layer whose
    operands are dequantized from int8.
    """
    editor = Editor(model)
    for node in tuple(model.graph):
        bias = node_input(node, 2) if is_op(node, "Conv", "ConvTranspose", "Gemm") else None
        values = constant(bias)
        if bias is None or values is None or values.ndim != 1:
            continue
        if not all(is_op(value.producer(), "DequantizeLinear") for value in node.inputs[:2] if value is not None):
            continue
        if node.op_type == "Gemm":
            node.replace_input_with(2, editor.constant(f"{bias.name}_row", values[np.newaxis]))
            continue
        ones, zeros = np.ones_like(values), np.zeros_like(values)
        one, zero = (editor.constant(f"{bias.name}_{name}", v) for name, v in (("unit", ones), ("zero", zeros)))
        node.resize_inputs(2)
        made = node.outputs[0]
        shifted = editor.node(
            "BatchNormalization",
            [made, one, bias, zero, one],
            f"{node.name}_bias",
            after=node,
            attributes={"epsilon": 0.0},
        )
        insert_behind(made, shifted, shifted, f"{made.name}_without_bias")
        made.type, made.shape = shifted.type, shifted.shape
    drop_unused_initializers(model.graph)


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
    wanted = np.asarray(magnitude, np.float64) / LEVELS
    wanted = np.where(wanted == 0, 1 / LEVELS, np.maximum(wanted, _LEAST_SCALE))
    stored: type = _STORED[float_type]
    scale: NDArray[Any] = wanted.astype(stored)
    # A tiny excess over 127 steps comes from rounding in the division. It does not mean that a value would be cut off.
    short = scale.astype(np.float64) * (1 + 1e-6) < wanted
    up = np.nextafter(scale, np.asarray(np.inf, stored))
    return np.asarray(np.where(short, up, scale), np.float32)


def weight_params(weight: NDArray[np.float32], axis: int | None, float_type: FloatType = "float32") -> QuantParams:
    """Return symmetric quantization parameters with one scale for each index of `axis`, or a single scale if `axis` is
    None.

    The scales are float64 numbers that `float_type` represents exactly.
    """
    others = None if axis is None else tuple(i for i in range(weight.ndim) if i != axis)
    magnitude = np.max(np.abs(np.asarray(weight, np.float64)), axis=others, initial=0.0)
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
    missing = next((name for name in plan.activations if name not in ranges), None)
    if missing is not None:
        raise CalibrationError(f"tensor {missing!r} has no range", "The calibration is not of this model: run it again")
    editor = Editor(model)
    nodes = {node.name: node for node in model.graph}
    made: dict[tuple[str, int | None], ir.Value] = {}
    inserted: list[ir.Value] = []
    for edge in plan.edges:
        node, tensor = nodes[edge.node], edge.tensor
        value = node.inputs[edge.place]
        assert value is not None
        weight = constant_values(value) if tensor in plan.weights else None
        # Two layers may read one weight along different axes.
        axis = weight_axis(node, weight.ndim) if weight is not None and per_channel and edge.place == 1 else None
        if (tensor, axis) not in made:
            if weight is None:
                scale = stored_scale(ranges[tensor].bound, float_type)
                params = QuantParams(scale, np.zeros((), np.int64), ir.DataType.INT8)
                inserted += insert_pair(editor, value, params, before=node)
            else:
                name = tensor if all(tensor != known for known, _ in made) else f"{tensor}_along_{axis}"
                params = weight_params(weight, axis, float_type)
                scale_and_zero(editor, name, params)  # the file lists the scale and zero point before the integers
                inserted.append(restore_constant(editor, name, weight, params, node))
            made[tensor, axis] = inserted[-1]
        node.replace_input_with(edge.place, made[tensor, axis])
    for value in inserted:  # the type depends on the scale, which may get a 16-bit type later
        value.type = value.shape = None
    drop_unused_initializers(model.graph)


NATIVE = "calibration.tensorrt"
"""File name of the calibration table in TensorRT's own format, for trtexec and builders other than ONNX Runtime."""
FILES = (FLATBUFFERS, JSON, CACHE, NATIVE)


def check_version(tensorrt: str, where: str) -> None:
    """Refuse a target whose TensorRT does not support tables, or whose TensorRT version is not known.

    Args:
        tensorrt: version of TensorRT; "" if it is not known.
        where: the target, for the message.
    """
    known = facts()
    if not tensorrt:
        raise HardwareError(
            f"{where} does not name its TensorRT version: {known.table['reason']}",
            "Name a target with `runtime.tensorrt`, or use --format QDQ",
        )
    if parse_version(tensorrt) >= parse_version(known.table["below_tensorrt"]):
        raise HardwareError(f"{where} has TensorRT {tensorrt}: {known.table['reason']}", known.table["fix"])


def write_implicit(model: ir.Model, ranges: Mapping[str, Range], folder: Path, tensorrt: str) -> tuple[str, ...]:
    """Write the calibration tables of `model` into `folder`, and add all known shapes to `model`. On failure, write no
    table.

    Raises:
        ModelError: `model` has Q/DQ.
        CalibrationError: a float tensor has no range, or has a name that a table cannot contain.
    """
    if is_quantized(model):
        raise ModelError(
            "the model has QuantizeLinear or DequantizeLinear; TensorRT accepts these or a table, not both",
            "Use --format QDQ, or give the float32 model",
        )
    tensors = quantizable_tensors(model)
    missing = [name for name in tensors if name not in ranges]
    if missing:
        raise CalibrationError(
            f"tensor {missing[0]!r} has no range (missing: {len(missing)}), and TensorRT needs one for each tensor",
            "Calibrate this model again, for all its tensors",
        )
    problem = write_shapes(model)
    wanted = {name: ranges[name] for name in tensors}
    write_tables(folder, wanted, tensors=tensors)
    write_native(folder / NATIVE, wanted, version=native_version(tensorrt))
    unknown = f"; some shapes are not known ({problem})" if problem else ""
    return (f"{len(tensors)} tensors have a range in the tables{unknown}",)


def native_version(version: str) -> str:
    """Return TensorRT's version in the form of its cache's first line: "8.6.1" → "8601", "10.3" → "100300"."""
    major, minor, patch = (*parse_version(version), 0, 0)[:3]
    return f"{major}{minor:02}{patch:02}" if major >= 10 else f"{major}{minor}{patch:02}"


_FLOAT = ir.DataType.FLOAT
_Q, _DQ, _CAST = "QuantizeLinear", "DequantizeLinear", "Cast"
# These operators read any type without a Cast.
_RADIANS = 0.01
"""Largest rounding error of an angle."""
_INDIFFERENT = frozenset({_Q, _CAST, "Shape", "Size"})
_TYPED_BY_ATTRIBUTE = frozenset({"dtype", "to", "output_dtype"})


Slots = tuple[tuple[bool, ...], tuple[bool, ...]]
"""Whether each input and each output of a node may be in 16 bits."""


def cast_float_nodes(model: ir.Model, half: str, observed: Mapping[str, Range]) -> dict[str, str]:
    """Cast the float nodes of `model` to 16 bits in place, if their values fit.

    Args:
        half: "float16" or "bfloat16".
        observed: smallest and largest value of each tensor in calibration.

    Returns:
        The reason why a node stays in float32, by node name, for nodes with float data.
    """
    caster = _Caster(model, half, observed)
    reasons = caster.decide()
    caster.rewrite({str(node.name) for node in model.graph} - set(reasons))
    return reasons


class _Caster:
    def __init__(self, model: ir.Model, half: str, observed: Mapping[str, Range]) -> None:
        self._model, self._half = model, half
        self._type = ir.DataType[half.upper()]
        self._limit = facts().rest[half].limit
        self._observed = observed
        self._types = element_types(model)
        self._captured = GraphIndex(model).captured
        self._opset = opset_of(model)
        self._exact = self._exact_tensors()
        self._slots = {node: self._slots_of(node) for node in model.graph}
        self._editor = Editor(model)

    # Choice of types.

    def decide(self) -> dict[str, str]:
        """Return the reason why a node stays in float32, by node name."""
        reasons = {}
        for node in self._model.graph:
            floats = any(self._is_float(value) for value in (*node.inputs, *node.outputs))
            if floats and node.op_type not in (_Q, _DQ):
                reason = self._why_not(node)
                if reason:
                    reasons[str(node.name)] = reason
        for node in self._model.graph:
            self._keep_together(node, reasons)
        return reasons

    def _keep_together(self, add: ir.Node, reasons: dict[str, str]) -> None:
        """Give a residual Add the same type as the layer into which it fuses, because a Cast between them would prevent
        the fusion.
        """
        makers = [value.producer() for value in add.inputs if value is not None]
        if add.op_type != ADD or sum(is_op(maker, _DQ) for maker in makers) != 1:
            return
        pair = [str(node.name) for node in (add, *makers) if node is not None and not is_op(node, _DQ)]
        reason = next((reasons[name] for name in pair if name in reasons), None)
        if reason is not None:
            for name in pair:
                reasons.setdefault(name, reason)

    def _why_not(self, node: ir.Node) -> str:
        reads, makes = self._slots[node]
        if _has_body(node):
            return "stays in fp32: edgeq does not change its body"
        if self._other_than_tensors(node):
            return "stays in fp32: an input or output is not a tensor, and keeps the type of its elements"
        if node.domain not in MAIN_DOMAINS:
            return f"stays in fp32: {node.domain}.{node.op_type} is not a standard operator"
        if node.op_type in facts().float32_operators:
            return facts().float32_operators[node.op_type]
        if not any(reads) and not any(makes):
            return f"stays in fp32: {node.op_type} supports no other type here"
        places = [*zip(node.inputs, reads, strict=True), *zip(node.outputs, makes, strict=True)]
        for value in (value for value, allowed in places if allowed and value is not None and self._is_float(value)):
            name = name_of(value)
            if name in self._exact:
                return f"stays in fp32: {self._exact[name]}"
            if name in self._captured:
                return f"stays in fp32: the body of a loop or branch reads {name!r}"
            reason = self._constant_problem(value) if value.is_initializer() else self._range_problem(name)
            if reason:
                return reason
        return ""

    def _exact_tensors(self) -> dict[str, str]:
        """Return tensor → reason, for tensors that the 16-bit type would round to another index, whole number or angle.

        The type contains all whole numbers up to two divided by the distance from 1 to the next number.
        """
        exactness = Exactness(self._model)
        most = 2 / float(self._type.eps)
        reasons: dict[str, str] = {}

        def keep(value: ir.Value, reason: str) -> None:
            for origin in exactness.origins(value):
                # The type of a layer's output decides the type of the layer.
                if not is_layer_output(origin) or self._bound(origin) > most:
                    reasons.setdefault(name_of(origin), reason)

        for cast, reader in exactness.index_casts().items():
            if cast.inputs[0] is not None:
                limits = f"whole numbers only up to {most:.0f}"
                keep(cast.inputs[0], f"it leads to an index of {reader.name!r}, and {self._half} has all {limits}")
        for value in exactness.whole_numbers():
            if self._bound(value) > most:
                name, reached = value.name, f"{self._bound(value):.4g}"
                keep(value, f"tensor {name!r} has whole numbers up to {reached}, over {most:.0f} for {self._half}")
        for value in exactness.angles():
            if self._bound(value) / most > _RADIANS:
                name, reached = value.name, f"{self._bound(value):.4g}"
                keep(value, f"tensor {name!r} is an angle up to {reached}, which {self._half} rounds too coarsely")
        return reasons

    def _bound(self, value: ir.Value) -> float:
        span = self._observed.get(name_of(value).removesuffix(RESTORED))
        return span.bound if span is not None else 0.0

    def _other_than_tensors(self, node: ir.Node) -> bool:
        """Return whether an input or output of `node` is a sequence, an optional or a map."""
        values = (value for value in (*node.inputs, *node.outputs) if value is not None)
        return any(self._types.get(name_of(value)) == ir.DataType.UNDEFINED for value in values)

    def _range_problem(self, name: str) -> str:
        source = name.removesuffix(RESTORED)
        if source != name and source not in self._observed:
            # The tensor is a dequantized weight. Its values are not larger than those of the float weight.
            return ""
        span = self._observed.get(source)
        if span is None:
            return f"stays in fp32: calibration saw no values of tensor {source!r}"
        if span.bound > self._limit:
            return f"stays in fp32: tensor {source!r} reaches {span.bound:.4g}, over {self._limit:.4g} for {self._half}"
        return ""

    def _constant_problem(self, value: ir.Value) -> str:
        values = np.abs(constant_values(value))
        # Attention masks are full of infinities, but 16-bit types have infinities too.
        finite = values[np.isfinite(values)]
        largest = float(np.max(finite, initial=0.0))
        if largest > 2 * self._limit:
            return f"stays in fp32: constant {value.name!r} reaches {largest:.4g}, more than the range of {self._half}"
        if values.size == 1 and largest > 0 and not np.any(values.astype(self._type.numpy())):
            return f"stays in fp32: constant {value.name!r} is {largest:.4g}, which is 0 in {self._half}"
        return ""

    def _slots_of(self, node: ir.Node) -> Slots:
        if node.domain not in MAIN_DOMAINS or _has_body(node) or self._other_than_tensors(node):
            return (False,) * len(node.inputs), (False,) * len(node.outputs)
        schema = onnx.defs.get_schema(node.op_type, self._opset, "")
        fixed = not _TYPED_BY_ATTRIBUTE.isdisjoint(node.attributes)
        inputs = tuple(self._takes(schema.inputs, place) for place in range(len(node.inputs)))
        floats = any(ok and self._is_float(value) for ok, value in zip(inputs, node.inputs, strict=True))
        outputs = tuple(
            floats and not fixed and self._takes(schema.outputs, place) and self._is_float(value)
            for place, value in enumerate(node.outputs)
        )
        return inputs, outputs

    def _takes(self, parameters: object, place: int) -> bool:
        listed = list(parameters)  # type: ignore[call-overload]
        return bool(listed) and f"tensor({self._half})" in listed[min(place, len(listed) - 1)].types

    def _is_float(self, value: ir.Value | None) -> bool:
        if value is None:
            return False
        held = value.const_value if value.is_initializer() else None
        return (held.dtype if held is not None else self._types.get(name_of(value))) == _FLOAT

    # Rewrite of the graph in these types.

    def rewrite(self, halved: set[str]) -> None:
        """Give the nodes in `halved` 16-bit inputs and outputs, and insert a Cast wherever the type changes."""
        graph = self._model.graph
        self._made = {value: _FLOAT for value in graph.inputs if self._is_float(value)}
        self._copies: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}
        self._scales: dict[ir.Value, Any] = {}
        restored: dict[ir.Value, ir.Node] = {}
        nodes = tuple(graph)
        for node, following in zip(nodes, [*nodes[1:], None], strict=True):
            if node.op_type == _DQ:
                # The node moves down to its readers. Each type that they need gets its own copy.
                restored[node.outputs[0]] = node
                continue
            small, (reads, makes) = node.name in halved, self._slots[node]
            for place, value in enumerate(node.inputs):
                if value is None:
                    continue
                kind = self._type if small and reads[place] else _FLOAT
                if value in restored:
                    node.replace_input_with(place, self._restore(restored[value], kind, node))
                elif self._is_float(value) and node.op_type not in _INDIFFERENT:
                    node.replace_input_with(place, self._as(value, kind, node))
            if node.op_type == _Q:
                self._type_scale(node)
            for place, output in enumerate(node.outputs):
                if self._is_float(output):
                    self._set_type(output, self._type if small and makes[place] else _FLOAT)
                    self._restore_output(output, following)
        drop_unused_initializers(graph)

    def _set_type(self, value: ir.Value, kind: ir.DataType) -> None:
        self._made[value] = kind
        if value.type is not None and not value.is_graph_output():
            value.type = ir.TensorType(kind)

    def _as(self, value: ir.Value, kind: ir.DataType, before: ir.Node) -> ir.Value:
        """Return `value` in the type `kind`: unchanged, as a converted constant, or as the output of a Cast. Each copy
        is made only once.
        """
        constant_value = value.is_initializer()
        if kind == (_FLOAT if constant_value else self._made.get(value, _FLOAT)):
            return value
        if (value, kind) not in self._copies:
            name = f"{value.name}_{self._half}"
            if constant_value:
                copy = self._editor.constant(name, constant_values(value).astype(self._type.numpy()))
            else:
                copy = self._cast(value, f"{value.name}_to_{'fp32' if kind == _FLOAT else self._half}", kind, before)
            self._copies[value, kind] = copy
        return self._copies[value, kind]

    def _cast(self, value: ir.Value, name: str, kind: ir.DataType, before: ir.Node | None) -> ir.Value:
        return self._editor.node(_CAST, [value], f"{name}_Cast", output=name, before=before, attributes={"to": kind})

    def _type_scale(self, node: ir.Node) -> None:
        """Change the scale of a QuantizeLinear to the type of its input."""
        data, scale = node.inputs[:2]
        assert data is not None
        assert scale is not None
        node.replace_input_with(1, self._as(scale, self._made.get(data, _FLOAT), node))

    def _restore(self, node: ir.Node, kind: ir.DataType, before: ir.Node) -> ir.Value:
        """Return the output of a DequantizeLinear in the type `kind`, placed before its first reader in that type. The
        type of the scale decides the type of the output.
        """
        original = node.outputs[0]
        if (original, kind) not in self._copies:
            self._scales.setdefault(original, node.inputs[1])
            scale = self._as(self._scales[original], kind, before)
            if any(value is original for value, _ in self._copies):
                made = self._editor.node(
                    _DQ,
                    [node.inputs[0], scale, *node.inputs[2:]],
                    f"{node.name}_again",
                    output=f"{original.name}_again",
                    before=before,
                    attributes=node.attributes,
                )
            else:
                made = original
                node.replace_input_with(1, scale)
                self._model.graph.remove(node)
                self._model.graph.insert_before(before, node)
            self._set_type(made, kind)
            self._copies[original, kind] = made
        return self._copies[original, kind]

    def _restore_output(self, value: ir.Value, before: ir.Node | None) -> None:
        """Keep the type of a graph output at float32, and keep its name."""
        if value.is_graph_output() and self._made[value] != _FLOAT:
            name = str(value.name)
            wide = self._cast(value, f"{name}_wide", _FLOAT, before)
            insert_behind(value, wide, wide, f"{name}_{self._half}")
            maker(wide).name = f"{name}_Cast"
            self._made[wide] = _FLOAT
            self._copies[wide, self._made[value]] = value


def _has_body(node: ir.Node) -> bool:
    return next(bodies(node), None) is not None
