"""Predict from a float graph which nodes a backend will run in int8, and explain why the others stay in float.

The rules are in `targets/backends/*.toml`. They depend on operator types, constants and shapes, but not on scales.
After quantization, the runtime's optimised graph shows which nodes really run in int8.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import onnx_ir as ir

from edgeq.errors import HardwareError
from edgeq.model.graph import (
    GraphIndex,
    before_layers,
    clamp_bounds,
    computed_constants,
    indexed,
    is_op,
    moves_data,
    name_of,
    node_input,
    operator_of,
    readers,
)
from edgeq.model.products import REASON as MASKED
from edgeq.model.products import find_masks, node_macs
from edgeq.scheme import Scheme
from edgeq.util.record_files import read_toml
from edgeq.util.registry import data_folders, shipped


@dataclass(frozen=True)
class NodeContext:
    """Hold the facts about the graph that conditions need, in addition to the node itself.

    Attributes:
        constants: names of tensors with fixed values.
        quantized: names of the tensors that are known to be int8 when the node reads them; None if this is not known.
        convolved: names of the tensors from `find_convolved`; None if they are not known.
        normalized: names of the tensors from `find_normalized`.
        before_layers: nodes that lead to a layer, from `edgeq.model.graph.before_layers`; None if they are not known.
        kept: name → reason, for nodes that must stay in float.
    """

    constants: Collection[str] = ()
    quantized: Collection[str] | None = None
    convolved: Collection[str] | None = None
    normalized: Collection[str] = ()
    before_layers: Collection[ir.Node] | None = None
    kept: Mapping[str, str] = field(default_factory=dict)

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
    if context.convolved is None or any(name_of(value) in context.convolved for value in _floats(node)):
        return ""
    return "it reads matrix products or float operators, whose results are floats at no cost"


def _floats(node: ir.Node) -> list[ir.Value]:
    """Return the inputs of a node that may be floats. Shapes, indices and masks are left out."""
    wanted = (None, ir.DataType.UNDEFINED, ir.DataType.FLOAT)
    return [value for value in node.inputs if value is not None and value.dtype in wanted]


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
    if alpha == 1.0 and (beta == 1.0 or node_input(node, 2) is None):
        return ""
    return "its alpha or beta is not 1; multiply it into the weights"


def _range_takes_its_place(node: ir.Node, context: NodeContext) -> str:
    """Return "" if the range of the tensor before a Relu or Clip can replace this node. Otherwise return the reason. A
    range always includes zero.
    """
    source = node_input(node, 0)
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
        found = node.attributes[name].value if name in node.attributes else allowed[0]
        return "" if found in allowed else text.format(found)

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


DEFAULT = "*"
"""Key of the rule for operator types that a file of rules does not list."""


@dataclass(frozen=True)
class Int8Rule:
    """Describe how one backend runs one operator type.

    Attributes:
        int8: whether the backend has any int8 form of the operator.
        condition: conditions for the int8 form: names from `CONDITIONS`, joined by ", "; "" if there are none.
        reason: how the operator runs in int8, or why it does not.
        source: where this is documented.
        float_result: whether the integer kernel can output floats at no extra cost.
    """

    int8: bool
    condition: str
    reason: str
    source: str
    float_result: bool = False


@dataclass(frozen=True)
class SlowFusion:
    """Describe a fusion of the runtime's optimiser that makes some models slower.

    Attributes:
        optimizer: name of the fusion in ONNX Runtime's option that disables optimizers.
        where: groups of operator types. The fusion matters to a model that has all types of at least one group.
        reason: why the fusion makes such models slower, one sentence without a full stop.
        source: where this is documented.
    """

    optimizer: str
    where: tuple[frozenset[str], ...]
    reason: str
    source: str


@dataclass(frozen=True)
class _Default:
    """Describe the rule for operator types that have no rule of their own."""

    reason: str
    source: str


@dataclass(frozen=True)
class _RuleEntry:
    """Hold one rule as it is written in the file."""

    operators: tuple[str, ...]
    int8: Literal["yes", "no", "only-if"]
    reason: str
    source: str
    only_if: tuple[str, ...] = ()
    float_result: bool = False


@dataclass(frozen=True)
class _RulesFile:
    """Hold the part of a backend's file that this module reads. `extends` names another backend, whose rules apply to
    operators without a rule in this file.
    """

    default: _Default | None = None
    rule: tuple[_RuleEntry, ...] = ()
    extends: str = ""
    slow_fusion: tuple[SlowFusion, ...] = ()


def backends(folder: Path | None = None) -> tuple[str, ...]:
    """Return the names of the backends that have rules, including those of plug-ins. If `folder` is given, only this
    folder is searched.
    """
    return tuple(sorted({path.stem for place in _folders(folder) for path in place.glob("*.toml")}))


def int8_rules(backend: str, folder: Path | None = None) -> Mapping[str, Int8Rule]:
    """Return the rules of a backend, by operator type. The key `DEFAULT` has the rule for all other types.

    Raises:
        HardwareError: the backend does not exist, or its file is malformed.
    """
    content, path = _read(backend, folder)
    if content.default is None and not content.extends:
        raise HardwareError(f"{path}: default is missing", "Add it, or extend a backend that has it")
    rules: dict[str, Int8Rule] = {}
    if content.default is not None:
        rules[DEFAULT] = Int8Rule(False, "", content.default.reason, content.default.source)
    for entry in content.rule:
        rule = _rule(entry, path)
        for op_type in entry.operators:
            if op_type in rules:
                raise HardwareError(f"{path}: {op_type} has two rules", "Remove one")
            rules[op_type] = rule
    return {**int8_rules(content.extends, folder), **rules} if content.extends else rules


def rules_title(backend: str) -> str:
    """Return the phrase by which a forecast refers to a backend's rules."""
    return f"the int8 rules of the {backend} backend"


def slow_fusions(backend: str, model: ir.Model, folder: Path | None = None) -> tuple[SlowFusion, ...]:
    """Return the fusions that a backend's runtime should not apply to this model.

    Raises:
        HardwareError: the backend does not exist, or its file is malformed.
    """
    content, _ = _read(backend, folder)
    present = {node.op_type for node in model.graph}
    return tuple(f for f in content.slow_fusion if any(group <= present for group in f.where))


NORMALIZATIONS = frozenset(
    {"GroupNormalization", "InstanceNormalization", "LayerNormalization", "LpNormalization", "RMSNormalization"}
)
_SUMS = frozenset({"Add", "Concat", "GlobalAveragePool", "ReduceMean", "Sum"})


def find_convolved(model: ir.Model) -> frozenset[str]:
    """Return the names of tensors that are computed from a convolution or a float input of the model. Paths that lead
    through matrix products or normalizations do not count.
    """
    found = {name_of(value) for value in model.graph.inputs if value.dtype == ir.DataType.FLOAT}
    for node in model.graph:
        rule = operator_of(node).mac_rule
        if rule or node.op_type in NORMALIZATIONS:
            convolved = rule.startswith("conv")
        else:
            convolved = any(name_of(value) in found for value in _floats(node))
        if convolved:
            found.update(name_of(output) for output in node.outputs)
    return frozenset(found)


def find_normalized(model: ir.Model) -> frozenset[str]:
    """Return the names of tensors that normalizations read, directly or after sums, means and data movement. A residual
    stream is an example. A normalization that is built from simple operators is recognised by its mean.
    """
    found: set[str] = set()
    for node in reversed(list(model.graph)):
        for value in node.outputs:
            if any(_normalizes(reader, value) for reader in readers(value)) or any(
                (reader.op_type in _SUMS or moves_data(reader)) and name_of(reader.outputs[0]) in found
                for reader in readers(value)
            ):
                found.add(name_of(value))
    return frozenset(found)


def _normalizes(node: ir.Node, value: ir.Value) -> bool:
    """Return whether a node is part of a normalization of `value`. This is true if the node is a normalization,
    computes the mean that is subtracted from `value`, or squares `value` for a mean of squares.
    """
    if node.op_type in NORMALIZATIONS:
        return node.inputs[0] is value
    made = readers(node.outputs[0])
    if is_op(node, "ReduceMean"):
        return any(is_op(reader, "Sub") and value in reader.inputs for reader in made)
    squares = is_op(node, "Pow") or (is_op(node, "Mul") and node.inputs[0] is node.inputs[1])
    return squares and any(is_op(reader, "ReduceMean") for reader in made)


def quantizable_operators(rules: Mapping[str, Int8Rule]) -> tuple[str, ...]:
    """Return the operator types that have an int8 form, sorted."""
    return tuple(sorted(op_type for op_type, rule in rules.items() if rule.int8))


def explain_float(
    node: ir.Node,
    rules: Mapping[str, Int8Rule],
    context: NodeContext | None = None,
    *,
    excluded: Mapping[str, str] = MappingProxyType({}),
    gains: bool = True,
) -> str:
    """Return why a node runs in float: the scheme excludes it, it has no int8 form, or a condition is not met.

    Args:
        excluded: the reason for each node that must stay in float.
        gains: whether to apply the conditions in `GAINS` too. They check whether int8 is faster, not whether it is
            possible.

    Returns:
        The reason; "" if no reason against int8 is known.
    """
    if node.name is not None and node.name in excluded:
        return excluded[node.name]
    if node.domain not in ("", "ai.onnx"):
        return f"{node.domain}.{node.op_type} is not a standard operator, so the quantizer leaves it alone"
    rule = rules.get(node.op_type, rules[DEFAULT])
    if not rule.int8:
        return rule.reason
    context = context or NodeContext()
    if node.name in context.kept:
        return context.kept[node.name or ""]
    for name in rule.condition.split(", ") if rule.condition else ():
        if not gains and name.partition(":")[0] in GAINS:
            continue
        failure = condition(name)(node, context)
        if failure:
            return failure
    return ""


def _read(backend: str, folder: Path | None) -> tuple[_RulesFile, Path]:
    found = [path for place in _folders(folder) if (path := place / f"{backend}.toml").is_file()]
    if not found:
        known = ", ".join(backends(folder))
        raise HardwareError(f"no int8 rules for the backend {backend!r}", f"There are rules for {known}")
    if len(found) > 1:
        raise HardwareError(f"the backend {backend!r} has two files of rules, {found[0]} and {found[1]}", "Remove one")
    path = found[0]
    return read_toml(path, _RulesFile, HardwareError, "Correct the file", unknown_keys=True), path


def _rule(entry: _RuleEntry, path: Path) -> Int8Rule:
    where = f"{path}: rule for {', '.join(entry.operators)}"
    if bool(entry.only_if) != (entry.int8 == "only-if"):
        raise HardwareError(f'{where}: only_if goes with int8 = "only-if"', "Give both or neither")
    for name in entry.only_if:
        if not is_condition(name):
            known = ", ".join((*CONDITIONS, *(f"{bounded}:N" for bounded in BOUNDED_CONDITIONS)))
            raise HardwareError(f"{where}: unknown condition {name!r}", f"Known: {known}")
    return Int8Rule(entry.int8 != "no", ", ".join(entry.only_if), entry.reason, entry.source, entry.float_result)


def _folders(folder: Path | None) -> tuple[Path, ...]:
    return (folder,) if folder else (shipped("targets") / "backends", *data_folders("targets/backends"))


Verdict = Literal["int8", "float", "other"]

_FOLDED = "one of its operands becomes constant once all sizes are fixed, and some engines fail if it is quantized"
_STACKED = "its constant is not a matrix, which cannot have one scale per channel; --no-per-channel quantizes it"


@dataclass(frozen=True)
class NodePrediction:
    """Predict how one node will run.

    Attributes:
        name, op_type: name and type of the node.
        macs: multiply-accumulates of one inference.
        verdict: "int8", "float", or "other" for a node without float data (shapes, indices, masks).
        reason: how the node runs in int8, or why it does not.
    """

    name: str
    op_type: str
    macs: int
    verdict: Verdict
    reason: str


def predict_int8(
    model: ir.Model | GraphIndex,
    rules: Mapping[str, Int8Rule],
    scheme: Scheme | None = None,
    macs: Mapping[str, int] | None = None,
    hazards: Mapping[str, str] | None = None,
) -> tuple[NodePrediction, ...]:
    """Predict each node of a prepared float model, in graph order. Nodes inside If, Loop and Scan come last, as float.

    Args:
        model: a model from `prepare_model`: its nodes are sorted and have names, and its shapes are known. Weights may
            be external.
        rules: rules of the backend, from `int8_rules`.
        scheme: scheme that sets what is quantized, and how; None for static quantization of everything that the rules
            allow.
        macs: multiply-accumulates by node name; None for those of `node_macs`.
        hazards: for each tensor that must not be in 8 bits, the part of the reason after the tensor's name. Only static
            schemes use the hazards, because other schemes have no ranges.
    """
    index = indexed(model)
    model = index.model
    macs = node_macs(model) if macs is None else macs
    judge = _judge
    if scheme is not None:
        judge = partial(_judge_under, scheme, stacked_products(model), index.computed_constants)
    constants = {name for name in index.values if index.is_constant(name)}
    hazardous = hazardous_nodes(model, hazards or {}) if scheme is None or scheme.mode == "static" else {}
    quantized: set[str] = set()
    context = NodeContext(
        constants,
        quantized,
        find_convolved(model),
        find_normalized(model),
        before_layers(model),
        {
            **hazardous,
            **dict.fromkeys(nodes_with_folded_operands(index), _FOLDED),
            **dict.fromkeys(find_masks(model), MASKED),
        },
    )
    predictions: list[NodePrediction] = []
    for node in model.graph:
        if node.op_type == "Constant":
            continue
        verdict, reason = judge(node, rules, context)
        if verdict == "int8":
            quantized.update(name_of(output) for output in node.outputs)
        name = node.name or ""
        predictions.append(NodePrediction(name, node.op_type, macs[name], verdict, reason))
    reason = rules.get("Loop", rules[DEFAULT]).reason
    inside = [(node.name or "", node.op_type) for body in model.graph.subgraphs() for node in body]
    predictions.extend(NodePrediction(name, op_type, macs[name], "float", reason) for name, op_type in inside)
    return tuple(predictions)


def hazardous_nodes(model: ir.Model, hazards: Mapping[str, str]) -> dict[str, str]:
    """Return node name → reason, for nodes that read or write a tensor that must not be in 8 bits."""
    found: dict[str, str] = {}
    for node in model.graph:
        names = (name_of(value) for value in (*node.outputs, *node.inputs))
        name = next((name for name in names if name in hazards), None)
        if name is not None:
            found[node.name or ""] = f"tensor {name!r} {hazards[name]}"
    return found


def nodes_with_folded_operands(index: GraphIndex) -> frozenset[str]:
    """Return the names of the sums and products with an operand that becomes constant once all sizes are fixed, but is
    computed in the file. Position embeddings and grids are examples. OpenVINO 2026.4.1 fails on such a node between
    Q/DQ pairs.
    """
    computed = computed_constants(index.graph, sizes=True) - {name for name in index.values if index.is_constant(name)}
    sums = [node for node in index.graph if is_op(node, "Add", "Mul", "Sub")]
    return frozenset(node.name for node in sums if node.name and computed.intersection(map(name_of, node.inputs)))


def stacked_products(model: ir.Model) -> frozenset[str]:
    """Return the names of MatMul nodes whose constant has more than two axes. They have no integer form with
    per-channel scales.
    """
    products = [node for node in model.graph if node.op_type == "MatMul"]
    return frozenset(n.name for n in products if n.name and any(_is_stacked(value) for value in n.inputs))


def _judge(node: ir.Node, rules: Mapping[str, Int8Rule], context: NodeContext) -> tuple[Verdict, str]:
    read = [value for value in node.inputs if value is not None and not context.has_constant(value)]
    written = [value for value in node.outputs if value.name]
    if any(value.dtype == ir.DataType.DOUBLE for value in (*read, *written)):
        return "float", "it computes in float64; quantization starts from float32"
    if not any(value.dtype in (None, ir.DataType.UNDEFINED, ir.DataType.FLOAT) for value in written):
        # A pair in front of a Cast or a comparison would round the tensor that it reads.
        kept = context.kept.get(node.name or "")
        return ("float", kept) if kept else ("other", "it makes no floats")
    reason = explain_float(node, rules, context)
    if reason:
        return "float", reason
    unknown = next((value.name for value in (*read, *written) if not value.dtype), None)
    if unknown is not None:
        return "float", f"the type and shape of tensor {unknown!r} are not known, so the quantizer skips it"
    return "int8", rules.get(node.op_type, rules[DEFAULT]).reason


def _judge_under(
    scheme: Scheme,
    stacked: frozenset[str],
    constants: frozenset[str],
    node: ir.Node,
    rules: Mapping[str, Int8Rule],
    context: NodeContext,
) -> tuple[Verdict, str]:
    """Apply the exclusions of a scheme to a node. If the node is not excluded, return the verdict of `_judge`.

    Args:
        stacked: `stacked_products` of the model.
        constants: `computed_constants` of the model.
    """
    verdict, reason = _judge(node, rules, context)
    types = scheme.quantized_types
    if verdict == "other":
        return verdict, reason
    if node.name in scheme.exclude:
        return "float", scheme.excluded[node.name]
    if types is not None and node.op_type not in types:
        return "float", foreign(node.op_type)
    if scheme.mode == "static":
        if verdict == "int8" and scheme.per_channel and node.name in stacked:
            return "float", _STACKED
        return verdict, reason
    if scheme.mode == "dynamic" and scheme.per_channel and node.name in stacked:
        return "float", _STACKED
    if not constants.intersection(map(name_of, node.inputs[:2])):
        return "float", f"it multiplies two activations; {scheme.mode} quantization needs a constant matrix"
    return "int8", f"{scheme.mode} quantization covers it"


def foreign(op_type: str) -> str:
    """Return the reason for a node whose operator type the scheme leaves in float."""
    return f"{op_type} is not among the operator types that the scheme quantizes"


def _is_stacked(value: ir.Value | None) -> bool:
    return value is not None and value.is_initializer() and value.shape is not None and len(value.shape) != 2
