"""Versions, types and options of TensorRT, beside its int8 rules: `targets/backends/tensorrt.toml`, read once."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from edgeq.util.resources import shipped


@dataclass(frozen=True)
class RestType:
    """A type of what is not in int8: the largest magnitude that a calibrated tensor may have in it, the first GPU that
    has it ("": all do), and the opset, IR version and TensorRT that a file with explicit quantization and it needs."""

    limit: float
    min_compute_capability: str
    opset: int
    ir_version: int
    min_tensorrt: str


@dataclass(frozen=True)
class Facts:
    """Attributes:
    most_cut: share of a tensor's power from which on clipping it is too much.
    rest: types of what is not in int8, by name.
    float32_operators: operator type → why it is not computed in 16 bits.
    table_min_tensorrt, table_below_tensorrt: who takes calibration tables.
    table_reason, table_fix: message and fix for targets that take none.
    options: execution provider → names of options that it is known to take.
    """

    most_cut: float
    rest: Mapping[str, RestType]
    float32_operators: Mapping[str, str]
    table_min_tensorrt: str
    table_below_tensorrt: str
    table_reason: str
    table_fix: str
    options: Mapping[str, frozenset[str]]


@cache
def facts() -> Facts:
    """The shipped facts."""
    path = shipped("targets") / "backends" / "tensorrt.toml"
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    explicit, halves, table = content["explicit"], content["rest"], content["table"]
    rest = {
        name: RestType(
            entry.get("largest", math.inf) / halves["headroom"],
            entry.get("min_compute_capability", ""),
            entry.get("opset", explicit["opset"]),
            entry.get("ir_version", explicit["ir_version"]),
            entry.get("min_tensorrt", explicit["min_tensorrt"]),
        )
        for name, entry in {"float32": {}, **halves}.items()
        if isinstance(entry, dict)
    }
    kept = {op: str(entry["reason"]) for entry in content["float32_operators"] for op in entry["operators"]}
    return Facts(
        most_cut=explicit["most_cut"],
        rest=MappingProxyType(rest),
        float32_operators=MappingProxyType(kept),
        table_min_tensorrt=table["min_tensorrt"],
        table_below_tensorrt=table["below_tensorrt"],
        table_reason=table["reason"],
        table_fix=table["fix"],
        options=MappingProxyType({name: frozenset(options) for name, options in content["options"].items()}),
    )
