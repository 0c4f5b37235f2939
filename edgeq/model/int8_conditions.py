"""Conditions on a node under which a backend has an integer form of it; `targets/backends/*.toml` name them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import onnx_ir as ir

from edgeq.model.graph import clamp_bounds, is_op, name_of, node_input


@dataclass(frozen=True)
class NodeContext:
    """What conditions depend on besides the node.

    Attributes:
        constants: names of tensors with fixed values.
        quantized: names of tensors known to be int8 where the node reads them; None when nothing is known about it.
    """

    constants: Collection[str] = ()
    quantized: Collection[str] | None = None

    def has_constant(self, *values: ir.Value | None) -> bool:
        """Whether one of the values is constant."""
        return any(name_of(value) in self.constants for value in values if value is not None)


def _constant_weights(node: ir.Node, context: NodeContext) -> str:
    if context.has_constant(node_input(node, 1)):
        return ""
    return "its weights are computed, not constant"


def _after_quantized(node: ir.Node, context: NodeContext) -> str:
    if context.quantized is None or any(name_of(value) in context.quantized for value in node.inputs):
        return ""
    return "its input is not quantized, and quantizing it for this operator alone would gain nothing"


def _after_conv_or_add(node: ir.Node, context: NodeContext) -> str:
    source = node_input(node, 0)
    if source is not None and is_op(source.producer(), "Conv", "Add"):
        return _after_quantized(node, context)
    return "it fuses only into a Conv or Add right before it"


def _unit_alpha_beta(node: ir.Node, context: NodeContext) -> str:
    alpha, beta = node.attributes.get_float("alpha", 1.0), node.attributes.get_float("beta", 1.0)
    if alpha == 1.0 and (beta == 1.0 or node_input(node, 2) is None):
        return ""
    return "its alpha or beta is not 1; multiply it into the weights"


def _not_transposed_a(node: ir.Node, context: NodeContext) -> str:
    return "its first matrix is transposed" if node.attributes.get_int("transA", 0) else ""


def _nearest(node: ir.Node, context: NodeContext) -> str:
    mode = node.attributes.get_string("mode", "nearest")
    return "" if mode == "nearest" else f"its mode is {mode}; only nearest works on integers"


def _range_takes_its_place(node: ir.Node, context: NodeContext) -> str:
    """A Relu or Clip disappears into the range of the tensor before it, which always holds zero."""
    source = node_input(node, 0)
    if source is not None and source.is_graph_output():
        return "what it reads is an output of the model too, and keeps a range of its own"
    bounds = clamp_bounds(node)
    if bounds is None:
        return "its bounds are computed, so no range can take its place"
    low, high = bounds
    return "" if low <= 0 <= high else f"its bounds, {low:g} to {high:g}, leave out zero, which every range holds"


def _no_dilation(node: ir.Node, context: NodeContext) -> str:
    dilations = list(node.attributes.get_ints("dilations", ()))
    return "" if all(d == 1 for d in dilations) else f"it has dilations {dilations}"


def _no_ceil_mode(node: ir.Node, context: NodeContext) -> str:
    return "it has ceil_mode = 1" if node.attributes.get_int("ceil_mode", 0) else ""


def _explicit_padding(node: ir.Node, context: NodeContext) -> str:
    mode = node.attributes.get_string("auto_pad", "NOTSET")
    return "" if mode in ("NOTSET", "VALID") else f"it has auto_pad = {mode}"


def _not_vector(node: ir.Node, context: NodeContext) -> str:
    a, b = (known_sizes(value) or () for value in node.inputs[:2])
    columns = b[-2] if node.attributes.get_int("transB", 0) and len(b) > 1 else b[-1] if len(b) > 1 else 0
    rows = a[-1] if node.attributes.get_int("transA", 0) and len(a) > 1 else a[-2] if len(a) > 1 else 0
    # A row count that is the batch is no property of the layer: only a result with one column is surely a vector.
    if columns == 1 or (rows == 1 and len(a) > 2):
        return "it multiplies a matrix with a vector, which is bound by memory"
    return ""


def _equal_shapes(node: ir.Node, context: NodeContext) -> str:
    if context.has_constant(*node.inputs):
        return "one operand is constant"
    shapes = [shape for shape in map(known_sizes, node.inputs) if shape is not None]
    unlike = any(len(set(sizes) - {0}) > 1 for sizes in zip(*shapes, strict=False))
    return "its operands have different shapes" if unlike or len(set(map(len, shapes))) > 1 else ""


def known_sizes(value: ir.Value | None) -> tuple[int, ...] | None:
    """The shape of a value, 0 for a size that is symbolic; None where the rank is not known."""
    if value is None or value.shape is None:
        return None
    return tuple(size if isinstance(size, int) else 0 for size in value.shape)


Condition = Callable[[ir.Node, NodeContext], str]

CONDITIONS: dict[str, Condition] = {
    "constant-weights": _constant_weights,
    "after-quantized": _after_quantized,
    "after-conv-or-add": _after_conv_or_add,
    "unit-alpha-beta": _unit_alpha_beta,
    "not-transposed-a": _not_transposed_a,
    "nearest": _nearest,
    "range-takes-its-place": _range_takes_its_place,
    "no-dilation": _no_dilation,
    "no-ceil-mode": _no_ceil_mode,
    "explicit-padding": _explicit_padding,
    "not-vector": _not_vector,
    "equal-shapes": _equal_shapes,
}
"""Name → check of a node: "" when the condition holds (or nothing is known against it), else what contradicts it."""


def _least_channels(bound: int) -> Condition:
    """Both sides of a dense convolution are narrower than `bound`. A depthwise one has kernels of its own."""

    def check(node: ir.Node, context: NodeContext) -> str:
        """See `_least_channels`; "" where the weight's shape is not known."""
        weight = known_sizes(node_input(node, 1)) or ()
        groups = max(1, node.attributes.get_int("group", 0))
        if len(weight) < 3 or groups > 1 or max(weight[:2]) >= bound or not all(weight[:2]):
            return ""
        return f"it has {weight[1]} and {weight[0]} channels: fewer than {bound} leave most of an int8 tile empty"

    return check


BOUNDED_CONDITIONS: dict[str, Callable[[int], Condition]] = {"least-channels": _least_channels}
"""Name → check by a bound, which the file gives behind a colon: "least-channels:16"."""


GAINS = frozenset({"not-vector", "least-channels"})
"""Conditions under which int8 is worth it, by their names without a bound. All others decide whether it is possible."""


def is_condition(name: str) -> bool:
    """Whether a file of rules may name such a condition: "nearest", or "least-channels:16" with a bound."""
    stem, colon, bound = name.partition(":")
    return bound.isdecimal() and stem in BOUNDED_CONDITIONS if colon else name in CONDITIONS


def condition(name: str) -> Condition:
    """The check of that name, as `is_condition` knows it."""
    stem, colon, bound = name.partition(":")
    return BOUNDED_CONDITIONS[stem](int(bound)) if colon else CONDITIONS[name]
