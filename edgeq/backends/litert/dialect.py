"""Read which operators a .tflite file can express, from the rows of targets/litert/operators.toml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from edgeq.calibration.groups import SHARING
from edgeq.calibration.ranges import Range
from edgeq.errors import HardwareError
from edgeq.util.folders import shipped
from edgeq.util.record_files import read_toml


@dataclass(frozen=True)
class OperatorRow:
    """Describe one operator of a .tflite file. targets/litert/operators.toml explains the fields."""

    kind: str
    float32: int
    int8: int
    options: str = ""
    rules: tuple[str, ...] = ()
    # Names of engines, as in targets/engines.
    lacking: tuple[str, ...] = ()


@dataclass(frozen=True)
class _OperatorTable:
    source: str
    tied: tuple[str, ...]
    results: Mapping[str, Range]
    operator: tuple[OperatorRow, ...]


@cache
def _table() -> _OperatorTable:
    return read_toml(
        shipped("targets") / "litert" / "operators.toml", _OperatorTable, HardwareError, "Install edgeq again"
    )


@cache
def dialect() -> Mapping[str, OperatorRow]:
    """Return the operators of a .tflite file, keyed by their names in the schema."""
    return {row.kind: row for row in _table().operator}


def tied() -> frozenset[str]:
    """Return the ONNX operators that require one common range for all their inputs and outputs."""
    # Operators that only move elements can never change a scale.
    return SHARING | frozenset(_table().tied)


def results() -> Mapping[str, Range]:
    """Return the output ranges of the ONNX operators whose kernels have fixed output scales."""
    return _table().results
