"""What runs in int8 on which backend, and why not where it does not: `targets/backends/*.toml`, read and applied."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from edgeq.errors import HardwareError
from edgeq.graph.query import is_op, name_of, node_input
from edgeq.registry import data_folders
from edgeq.resources import shipped

DEFAULT = "*"
"""The key under which `int8_rules` gives the rule for operator types that the file does not name."""


@dataclass(frozen=True)
class Rule:
    """What one backend does with one operator type.

    Attributes:
        int8: whether there is an int8 form at all.
        condition: what must hold for it, names from `CONDITIONS` joined by ", "; "" when it always can.
        reason: how it runs in int8, or why it does not.
        source: where that is known from.
    """

    int8: bool
    condition: str
    reason: str
    source: str


@dataclass(frozen=True)
class SlowFusion:
    """A fusion of the runtime's optimiser that costs time where it happens.

    Attributes:
        optimizer: its name, as ONNX Runtime's option to disable optimizers takes it.
        where: it matters to a model that has all operator types of one of these groups.
        reason: why, one sentence without a full stop.
        source: where that is known from.
    """

    optimizer: str
    where: tuple[frozenset[str], ...]
    reason: str
    source: str


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


def backends(folder: Path | None = None) -> tuple[str, ...]:
    """Names of the backends that have rules, plug-ins' among them; or those of one folder."""
    return tuple(sorted({path.stem for place in _folders(folder) for path in place.glob("*.toml")}))


def int8_rules(backend: str, folder: Path | None = None) -> Mapping[str, Rule]:
    """Operator type → rule of a backend; `DEFAULT` → the rule for all others.

    Raises:
        HardwareError: no such backend, or its file is malformed.
    """
    content, path = _read(backend, folder)
    try:
        default = content["default"]
        rules = {DEFAULT: Rule(False, "", str(default["reason"]), str(default["source"]))}
        for entry in content["rule"]:
            rule = _rule(entry, path)
            for op_type in entry["operators"]:
                if op_type in rules:
                    raise HardwareError(f"{path}: {op_type} has two rules", "Remove one")
                rules[op_type] = rule
    except KeyError as error:
        raise HardwareError(f"{path}: {error} is missing", "Add it") from error
    return rules


def slow_fusions(backend: str, model: ir.Model, folder: Path | None = None) -> tuple[SlowFusion, ...]:
    """Fusions that a backend's runtime is better kept from for this model.

    Raises:
        HardwareError: no such backend, or its file is malformed.
    """
    content, path = _read(backend, folder)
    present = {node.op_type for node in model.graph}
    try:
        fusions = [
            SlowFusion(
                str(entry["optimizer"]),
                tuple(frozenset(group) for group in entry["where"]),
                str(entry["reason"]),
                str(entry["source"]),
            )
            for entry in content.get("slow_fusion", ())
        ]
    except KeyError as error:
        raise HardwareError(f"{path}: {error} is missing", "Add it") from error
    return tuple(f for f in fusions if any(group <= present for group in f.where))


def quantizable_operators(rules: Mapping[str, Rule]) -> tuple[str, ...]:
    """Operator types that have an int8 form, sorted."""
    return tuple(sorted(op_type for op_type, rule in rules.items() if rule.int8))


def explain_float(
    node: ir.Node,
    rules: Mapping[str, Rule],
    context: NodeContext | None = None,
    *,
    excluded: Collection[str] = (),
) -> str:
    """Why a node runs in float: excluded by the user, no int8 form, or a condition that does not hold.

    Args:
        excluded: names of nodes that are to stay in float.

    Returns:
        The reason; "" where nothing is known against int8.
    """
    if node.name in excluded:
        return "excluded by request"
    if node.domain not in ("", "ai.onnx"):
        return f"{node.domain}.{node.op_type} is not a standard operator, so the quantizer leaves it alone"
    rule = rules.get(node.op_type, rules[DEFAULT])
    if not rule.int8:
        return rule.reason
    context = context or NodeContext()
    for name in rule.condition.split(", ") if rule.condition else ():
        failure = _condition(name)(node, context)
        if failure:
            return failure
    return ""


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
    return "its first matrix is transposed" if _integer(node, "transA") else ""


def _nearest(node: ir.Node, context: NodeContext) -> str:
    mode = node.attributes.get_string("mode", "nearest")
    return "" if mode == "nearest" else f"its mode is {mode}; only nearest works on integers"


def _no_dilation(node: ir.Node, context: NodeContext) -> str:
    dilations = list(node.attributes.get_ints("dilations", ()))
    return "" if all(d == 1 for d in dilations) else f"it has dilations {dilations}"


def _no_ceil_mode(node: ir.Node, context: NodeContext) -> str:
    return "it has ceil_mode = 1" if _integer(node, "ceil_mode") else ""


def _explicit_padding(node: ir.Node, context: NodeContext) -> str:
    mode = node.attributes.get_string("auto_pad", "NOTSET")
    return "" if mode in ("NOTSET", "VALID") else f"it has auto_pad = {mode}"


def _not_vector(node: ir.Node, context: NodeContext) -> str:
    a, b = (known_sizes(value) or () for value in node.inputs[:2])
    columns = b[-2] if _integer(node, "transB") and len(b) > 1 else b[-1] if len(b) > 1 else 0
    rows = a[-1] if _integer(node, "transA") and len(a) > 1 else a[-2] if len(a) > 1 else 0
    # A row count that is the batch is no property of the layer: only a result with one column is surely a vector.
    if columns == 1 or (rows == 1 and len(a) > 2):
        return "it multiplies a matrix with a vector, which is bound by memory"
    return ""


def _equal_shapes(node: ir.Node, context: NodeContext) -> str:
    if context.has_constant(*node.inputs):
        return "one operand is constant"
    shapes = [known_sizes(value) for value in node.inputs]
    if None not in shapes and len(set(shapes)) > 1:
        return "its operands have different shapes"
    return ""


def known_sizes(value: ir.Value | None) -> tuple[int, ...] | None:
    """The shape of a value, 0 for a size that is symbolic; None where the rank is not known."""
    if value is None or value.shape is None:
        return None
    return tuple(size if isinstance(size, int) else 0 for size in value.shape)


def _integer(node: ir.Node, name: str) -> int:
    return int(node.attributes.get_int(name, 0))


Condition = Callable[[ir.Node, NodeContext], str]

CONDITIONS: dict[str, Condition] = {
    "constant-weights": _constant_weights,
    "after-quantized": _after_quantized,
    "after-conv-or-add": _after_conv_or_add,
    "unit-alpha-beta": _unit_alpha_beta,
    "not-transposed-a": _not_transposed_a,
    "nearest": _nearest,
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
        weight = known_sizes(node_input(node, 1)) or ()
        groups = max(1, _integer(node, "group"))
        if len(weight) < 3 or groups > 1 or max(weight[:2]) >= bound or not all(weight[:2]):
            return ""
        return f"it has {weight[1]} and {weight[0]} channels: fewer than {bound} leave most of an int8 tile empty"

    return check


BOUNDED_CONDITIONS: dict[str, Callable[[int], Condition]] = {"least-channels": _least_channels}
"""Name → check by a bound, which the file gives behind a colon: "least-channels:16"."""


def _is_condition(name: str) -> bool:
    stem, colon, bound = name.partition(":")
    return bound.isdecimal() and stem in BOUNDED_CONDITIONS if colon else name in CONDITIONS


def _condition(name: str) -> Condition:
    stem, colon, bound = name.partition(":")
    return BOUNDED_CONDITIONS[stem](int(bound)) if colon else CONDITIONS[name]


def _read(backend: str, folder: Path | None) -> tuple[Mapping[str, Any], Path]:
    found = [path for place in _folders(folder) if (path := place / f"{backend}.toml").is_file()]
    if not found:
        known = ", ".join(backends(folder))
        raise HardwareError(f"no int8 rules for the backend {backend!r}", f"There are rules for {known}")
    if len(found) > 1:
        raise HardwareError(f"the backend {backend!r} has two files of rules, {found[0]} and {found[1]}", "Remove one")
    path = found[0]
    try:
        return tomllib.loads(path.read_text(encoding="utf-8")), path
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise HardwareError(f"{path}: {error}", "Correct the file") from error


def _rule(entry: Mapping[str, Any], path: Path) -> Rule:
    where = f"{path}: rule for {', '.join(entry['operators'])}"
    int8, only_if = entry["int8"], entry.get("only_if", [])
    if int8 not in ("yes", "no", "only-if"):
        raise HardwareError(f"{where}: int8 is {int8!r}", 'It can be "yes", "no" or "only-if"')
    if bool(only_if) != (int8 == "only-if"):
        raise HardwareError(f'{where}: only_if goes with int8 = "only-if"', "Give both or neither")
    for name in only_if:
        if not _is_condition(name):
            known = ", ".join((*CONDITIONS, *(f"{bounded}:N" for bounded in BOUNDED_CONDITIONS)))
            raise HardwareError(f"{where}: unknown condition {name!r}", f"Known: {known}")
    return Rule(int8 != "no", ", ".join(only_if), str(entry["reason"]), str(entry["source"]))


def _folders(folder: Path | None) -> tuple[Path, ...]:
    return (folder,) if folder else (shipped("targets") / "backends", *data_folders("targets/backends"))
