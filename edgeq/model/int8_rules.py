"""Read the rules of a backend: which operators run in int8, under which conditions, and why.

The rules are in `targets/backends/*.toml`. They depend on operator types, constants and shapes, but not on scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import onnx_ir as ir

from edgeq.errors import HardwareError
from edgeq.model.conditions import BOUNDED_CONDITIONS, CONDITIONS, is_condition
from edgeq.util.folders import shipped
from edgeq.util.record_files import read_toml
from edgeq.util.registry import find_data_folders

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
    content, path = _read_rules(backend, folder)
    if content.default is None and not content.extends:
        raise HardwareError(f"{path}: default is missing", "Add it, or extend a backend that has it")
    rules: dict[str, Int8Rule] = {}
    if content.default is not None:
        rules[DEFAULT] = Int8Rule(False, "", content.default.reason, content.default.source)
    for entry in content.rule:
        rule = _parse_rule(entry, path)
        for op_type in entry.operators:
            if op_type in rules:
                raise HardwareError(f"{path}: {op_type} has two rules", "Remove one")
            rules[op_type] = rule
    # Rules of this file replace those of the file that it extends.
    return {**int8_rules(content.extends, folder), **rules} if content.extends else rules


def rules_title(backend: str) -> str:
    """Return the phrase by which a forecast refers to a backend's rules."""
    return f"the int8 rules of the {backend} backend"


def slow_fusions(backend: str, model: ir.Model, folder: Path | None = None) -> tuple[SlowFusion, ...]:
    """Return the fusions that a backend's runtime should not apply to this model.

    Raises:
        HardwareError: the backend does not exist, or its file is malformed.
    """
    content, _ = _read_rules(backend, folder)
    present = {node.op_type for node in model.graph}
    return tuple(f for f in content.slow_fusion if any(group <= present for group in f.where))


def quantizable_operators(rules: Mapping[str, Int8Rule]) -> tuple[str, ...]:
    """Return the operator types that have an int8 form, sorted."""
    return tuple(sorted(op_type for op_type, rule in rules.items() if rule.int8))


def _read_rules(backend: str, folder: Path | None) -> tuple[_RulesFile, Path]:
    paths = [path for place in _folders(folder) if (path := place / f"{backend}.toml").is_file()]
    if not paths:
        names = ", ".join(backends(folder))
        raise HardwareError(f"no int8 rules for the backend {backend!r}", f"There are rules for {names}")
    # A plug-in must not replace the rules of a shipped backend unnoticed.
    if len(paths) > 1:
        raise HardwareError(f"the backend {backend!r} has two files of rules, {paths[0]} and {paths[1]}", "Remove one")
    path = paths[0]
    return read_toml(path, _RulesFile, HardwareError, "Correct the file", unknown_keys=True), path


def _parse_rule(entry: _RuleEntry, path: Path) -> Int8Rule:
    subject = f"{path}: rule for {', '.join(entry.operators)}"
    if bool(entry.only_if) != (entry.int8 == "only-if"):
        raise HardwareError(f'{subject}: only_if goes with int8 = "only-if"', "Give both or neither")
    for name in entry.only_if:
        if not is_condition(name):
            conditions = ", ".join((*CONDITIONS, *(f"{bounded}:N" for bounded in BOUNDED_CONDITIONS)))
            raise HardwareError(f"{subject}: unknown condition {name!r}", f"Known: {conditions}")
    return Int8Rule(entry.int8 != "no", ", ".join(entry.only_if), entry.reason, entry.source, entry.float_result)


def _folders(folder: Path | None) -> tuple[Path, ...]:
    return (folder,) if folder else (shipped("targets") / "backends", *find_data_folders("targets/backends"))
