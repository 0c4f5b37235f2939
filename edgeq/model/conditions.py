"""Check the conditions under which a backend's rules run a node in int8."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from edgeq.model.graph import (
    clamp_bounds,
    is_op,
    name_of,
    node_input,
)


@dataclass(frozen=True)
class NodeContext:
    """Hold the facts about the graph that conditions need, in addition to the node itself.

    Attributes:
        constants: names of tensors with fixed values.
        quantized: names of the tensors that are known to be int8 when the node reads them; None if this is not known.
        convolved: names of the tensors from `find_convolved`; None if they are not known.
        normalized: names of the tensors from `find_normalized`.
        before_layers: nodes that lead to a layer, from `edgeq.model.graph.before_layers`; None if they are not known.
        float_reasons: name → reason, for nodes that must stay in float.
    """

    constants: Collection[str] = ()
    quantized: Collection[str] | None = None
    convolved: Collection[str] | None = None
    normalized: Collection[str] = ()
    before_layers: Collection[ir.Node] | None = None
    float_reasons: Mapping[str, str] = field(default_factory=dict)

    def has_constant(self, *values: ir.Value | None) -> bool:
        """Return whether at least one of the values is constant."""
        return any(name_of(value) in self.constants for value in values if value is not None)


def _constant_weights(node: ir.Node, context: NodeContext) -> str:
    if context.has_constant(node_input(node, 1)):
        return ""
    return "its weights are computed, not constant"


def _constant_operand(node: ir.Node, context: NodeContext) -> str:
    if context.has_constant(*node.inputs[:2]):
        return ""
    return "it multiplies two activations, which integers hardly speed up"


def _after_quantized(node: ir.Node, context: NodeContext) -> str:
    if context.quantized is None or any(name_of(value) in context.quantized for value in node.inputs):
        return ""
    return "its input is not quantized, and quantizing it for this operator alone would gain nothing"


def _apart_from_products(node: ir.Node, context: NodeContext) -> str:
    if context.before_layers is not None and node not in context.before_layers and not _not_normalized(node, context):
        return _after_quantized(node, context)
    if context.convolved is None or any(name_of(value) in context.convolved for value in float_inputs(node)):
        return ""
    return "it reads matrix products or float operators, whose results are floats at no cost"


def float_inputs(node: ir.Node) -> list[ir.Value]:
    """Return the inputs of a node that may be floats. Shapes, indices and masks are left out."""
    # A tensor of unknown type may be float.
    types = (None, ir.DataType.UNDEFINED, ir.DataType.FLOAT)
    return [value for value in node.inputs if value is not None and value.dtype in types]


def _not_normalized(node: ir.Node, context: NodeContext) -> str:
    if not any(name_of(value) in context.normalized for value in node.outputs):
        return ""
    return "a normalization reads its result in float"


def _after_conv_or_add(node: ir.Node, context: NodeContext) -> str:
    source = node_input(node, 0)
    if source is not None and is_op(source.producer(), "Conv", "Add"):
        return _after_quantized(node, context)
    return "it fuses only into a Conv or Add right before it"


def _unit_alpha_beta(node: ir.Node, context: NodeContext) -> str:
    alpha, beta = node.attributes.get_float("alpha", 1.0), node.attributes.get_float("beta", 1.0)
    # Without a bias, beta has no effect.
    if alpha == 1.0 and (beta == 1.0 or node_input(node, 2) is None):
        return ""
    return "its alpha or beta is not 1; multiply it into the weights"


def _range_takes_its_place(node: ir.Node, context: NodeContext) -> str:
    """Return "" if the range of the tensor before a Relu or Clip can replace this node. Otherwise return the reason. A
    range always includes zero.
    """
    source = node_input(node, 0)
    # The tensor before the clamp would get the range of the clamp, and an output of the model must not.
    if source is not None and source.is_graph_output():
        return "its input is also an output of the model, which keeps its own range"
    bounds = clamp_bounds(node)
    if bounds is None:
        return "its bounds are computed, so no range can take its place"
    low, high = bounds
    return "" if low <= 0 <= high else f"its bounds, {low:g} to {high:g}, exclude zero, which every range includes"


def _no_dilation(node: ir.Node, context: NodeContext) -> str:
    dilations = list(node.attributes.get_ints("dilations", ()))
    return "" if all(d == 1 for d in dilations) else f"it has dilations {dilations}"


def _one_group(node: ir.Node, context: NodeContext) -> str:
    groups = node.attributes.get_int("group", 1)
    if groups == 1:
        return ""
    return f"its channels are in {groups} groups: in int8, such layers lose the most accuracy and save the least time"


def _not_vector(node: ir.Node, context: NodeContext) -> str:
    a, b = (known_sizes(value) or () for value in node.inputs[:2])
    columns = b[-2] if node.attributes.get_int("transB", 0) and len(b) > 1 else b[-1] if len(b) > 1 else 0
    rows = a[-1] if node.attributes.get_int("transA", 0) and len(a) > 1 else a[-2] if len(a) > 1 else 0
    # The number of rows may be the batch size, which is not a property of the layer. Only a result with one column is
    # certainly a vector.
    if columns == 1 or (rows == 1 and len(a) > 2):
        return "it multiplies a matrix with a vector, which is bound by memory"
    return ""


def _equal_shapes(node: ir.Node, context: NodeContext) -> str:
    if context.has_constant(*node.inputs):
        return "one operand is constant"
    shapes = [shape for shape in map(known_sizes, node.inputs) if shape is not None]
    # 0 stands for a symbolic size, which may be equal to any other.
    unlike = any(len(set(sizes) - {0}) > 1 for sizes in zip(*shapes, strict=False))
    return "its operands have different shapes" if unlike or len(set(map(len, shapes))) > 1 else ""


def known_sizes(value: ir.Value | None) -> tuple[int, ...] | None:
    """Return the shape of a value, with 0 for symbolic sizes. Return None if the rank is not known."""
    if value is None or value.shape is None:
        return None
    return tuple(size if isinstance(size, int) else 0 for size in value.shape)


Condition = Callable[[ir.Node, NodeContext], str]


def _attribute(name: str, text: str, *allowed: int | str) -> Condition:
    """Return a function that checks whether an attribute has one of the `allowed` values. The first of them is the
    default. `text` is the reason for any other value.
    """

    def check(node: ir.Node, context: NodeContext) -> str:
        """Return "" if the attribute has an allowed value, else the reason."""
        setting = node.attributes[name].value if name in node.attributes else allowed[0]
        return "" if setting in allowed else text.format(setting)

    return check


CONDITIONS: dict[str, Condition] = {
    "constant-weights": _constant_weights,
    "constant-operand": _constant_operand,
    "after-quantized": _after_quantized,
    "after-conv-or-add": _after_conv_or_add,
    "apart-from-products": _apart_from_products,
    "not-normalized": _not_normalized,
    "unit-alpha-beta": _unit_alpha_beta,
    "not-transposed-a": _attribute("transA", "its first matrix is transposed", 0),
    "nearest": _attribute("mode", "its mode is {}; only nearest works on integers", "nearest"),
    "range-takes-its-place": _range_takes_its_place,
    "no-dilation": _no_dilation,
    "no-ceil-mode": _attribute("ceil_mode", "it has ceil_mode = {}", 0),
    "explicit-padding": _attribute("auto_pad", "it has auto_pad = {}", "NOTSET", "VALID"),
    "not-vector": _not_vector,
    "one-group": _one_group,
    "equal-shapes": _equal_shapes,
}
"""Name → function that checks a node. It returns "" if the condition is met or nothing is known against it. Otherwise
it returns the reason."""


def _least_channels(bound: int) -> Condition:
    """Return a function that checks whether a dense convolution has at least `bound` input or output channels.
    Depthwise convolutions always pass, because they have their own kernels.
    """

    def check(node: ir.Node, context: NodeContext) -> str:
        """Return "" if the condition holds or the weight's shape is not known, else the reason."""
        weight = known_sizes(node_input(node, 1)) or ()
        groups = max(1, node.attributes.get_int("group", 0))
        # A size of 0 is not known. Depthwise and grouped convolutions have kernels of their own.
        if len(weight) < 3 or groups > 1 or max(weight[:2]) >= bound or not all(weight[:2]):
            return ""
        return f"it has {weight[1]} and {weight[0]} channels: fewer than {bound} leave most of an int8 tile empty"

    return check


BOUNDED_CONDITIONS: dict[str, Callable[[int], Condition]] = {"least-channels": _least_channels}
"""Name → function that returns a check for a bound. In a file of rules, the bound follows a colon: "least-channels:16".
"""
GAINS = frozenset({"apart-from-products", "constant-operand", "least-channels", "not-normalized", "not-vector"})
"""Names (without bounds) of the conditions under which int8 is faster. All other conditions decide whether int8 is
possible."""


def is_condition(name: str) -> bool:
    """Return whether a file of rules may contain `name` as a condition. Examples are "nearest" and, with a bound,
    "least-channels:16".
    """
    stem, colon, bound = name.partition(":")
    return bound.isdecimal() and stem in BOUNDED_CONDITIONS if colon else name in CONDITIONS


def condition(name: str) -> Condition:
    """Return the check for the condition `name`. `is_condition` must be True for it."""
    stem, colon, bound = name.partition(":")
    return BOUNDED_CONDITIONS[stem](int(bound)) if colon else CONDITIONS[name]
