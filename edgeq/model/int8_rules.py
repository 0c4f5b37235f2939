"""What runs in int8 on which backend, and why not where it does not: `targets/backends/*.toml`, read and applied."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import onnx_ir as ir

from edgeq.errors import HardwareError
from edgeq.model.int8_conditions import BOUNDED_CONDITIONS, CONDITIONS, GAINS, NodeContext, condition, is_condition
from edgeq.records import read_toml
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
class _Default:
    """What holds for operator types that no rule names."""

    reason: str
    source: str


@dataclass(frozen=True)
class _Entry:
    """A rule as a file has it."""

    operators: tuple[str, ...]
    int8: Literal["yes", "no", "only-if"]
    reason: str
    source: str
    only_if: tuple[str, ...] = ()


@dataclass(frozen=True)
class _File:
    """What is read here of a backend's file."""

    default: _Default
    rule: tuple[_Entry, ...]
    slow_fusion: tuple[SlowFusion, ...] = ()


def backends(folder: Path | None = None) -> tuple[str, ...]:
    """Names of the backends that have rules, plug-ins' among them; or those of one folder."""
    return tuple(sorted({path.stem for place in _folders(folder) for path in place.glob("*.toml")}))


def int8_rules(backend: str, folder: Path | None = None) -> Mapping[str, Rule]:
    """Operator type → rule of a backend; `DEFAULT` → the rule for all others.

    Raises:
        HardwareError: no such backend, or its file is malformed.
    """
    content, path = _read(backend, folder)
    rules = {DEFAULT: Rule(False, "", content.default.reason, content.default.source)}
    for entry in content.rule:
        rule = _rule(entry, path)
        for op_type in entry.operators:
            if op_type in rules:
                raise HardwareError(f"{path}: {op_type} has two rules", "Remove one")
            rules[op_type] = rule
    return rules


def rules_title(backend: str) -> str:
    """How a forecast by `int8_rules` names them."""
    return f"the int8 rules of the {backend} backend"


def slow_fusions(backend: str, model: ir.Model, folder: Path | None = None) -> tuple[SlowFusion, ...]:
    """Fusions that a backend's runtime is better kept from for this model.

    Raises:
        HardwareError: no such backend, or its file is malformed.
    """
    content, _ = _read(backend, folder)
    present = {node.op_type for node in model.graph}
    return tuple(f for f in content.slow_fusion if any(group <= present for group in f.where))


def quantizable_operators(rules: Mapping[str, Rule]) -> tuple[str, ...]:
    """Operator types that have an int8 form, sorted."""
    return tuple(sorted(op_type for op_type, rule in rules.items() if rule.int8))


def explain_float(
    node: ir.Node,
    rules: Mapping[str, Rule],
    context: NodeContext | None = None,
    *,
    excluded: Collection[str] = (),
    gains: bool = True,
) -> str:
    """Why a node runs in float: excluded by the user, no int8 form, or a condition that does not hold.

    Args:
        excluded: names of nodes that are to stay in float.
        gains: whether conditions count that are about what int8 gains.

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
        if not gains and name.partition(":")[0] in GAINS:
            continue
        failure = condition(name)(node, context)
        if failure:
            return failure
    return ""


def _read(backend: str, folder: Path | None) -> tuple[_File, Path]:
    found = [path for place in _folders(folder) if (path := place / f"{backend}.toml").is_file()]
    if not found:
        known = ", ".join(backends(folder))
        raise HardwareError(f"no int8 rules for the backend {backend!r}", f"There are rules for {known}")
    if len(found) > 1:
        raise HardwareError(f"the backend {backend!r} has two files of rules, {found[0]} and {found[1]}", "Remove one")
    path = found[0]
    return read_toml(path, _File, HardwareError, "Correct the file", unknown_keys=True), path


def _rule(entry: _Entry, path: Path) -> Rule:
    where = f"{path}: rule for {', '.join(entry.operators)}"
    if bool(entry.only_if) != (entry.int8 == "only-if"):
        raise HardwareError(f'{where}: only_if goes with int8 = "only-if"', "Give both or neither")
    for name in entry.only_if:
        if not is_condition(name):
            known = ", ".join((*CONDITIONS, *(f"{bounded}:N" for bounded in BOUNDED_CONDITIONS)))
            raise HardwareError(f"{where}: unknown condition {name!r}", f"Known: {known}")
    return Rule(entry.int8 != "no", ", ".join(entry.only_if), entry.reason, entry.source)


def _folders(folder: Path | None) -> tuple[Path, ...]:
    return (folder,) if folder else (shipped("targets") / "backends", *data_folders("targets/backends"))
