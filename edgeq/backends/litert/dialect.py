"""Read which operators a .tflite file can express, from the rows of targets/litert/operators.toml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from edgeq.backends.litert.network import Scales, Type
from edgeq.calibration.groups import SHARING
from edgeq.calibration.ranges import Range
from edgeq.errors import HardwareError
from edgeq.util.folders import shipped
from edgeq.util.record_files import read_toml


@dataclass(frozen=True)
class FixedScale:
    """Hold the scale and zero point that the kernels always give an output."""

    scale: float
    zero: int


@dataclass(frozen=True)
class OperatorRow:
    """Describe one operator of a .tflite file. targets/litert/operators.toml explains the fields."""

    kind: str
    float32: int
    int8: int
    int16: int = 0
    options: str = ""
    rules: tuple[str, ...] = ()
    # Names of engines, as in targets/engines.
    lacking: tuple[str, ...] = ()
    lacking_int16: tuple[str, ...] = ()
    clamps: bool = False
    output: Mapping[str, FixedScale] = field(default_factory=dict)

    def version(self, type_: Type | None) -> int:
        """Return the version that a file states for the operator on numbers of a type; 0 if no runtime has a kernel."""
        return {"int8": self.int8, "int16": self.int16}.get(type_ or "", self.float32)

    def lacks(self, engine: str, type_: Type | None) -> bool:
        """Return whether an engine has no kernel of the operator for numbers of a type."""
        return engine in self.lacking or (type_ == "int16" and engine in self.lacking_int16)


@dataclass(frozen=True)
class _OperatorTable:
    source: str
    tied: tuple[str, ...]
    wide: tuple[str, ...]
    results: Mapping[str, Range]
    wide_results: Mapping[str, float]
    wide_notes: Mapping[str, str]
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


def fixed_output(kind: str, type_: Type) -> Scales | None:
    """Return the scales that the kernels of an operator always give their integer outputs, whatever scales a file
    contains. Return None if the kernels use the scales in the file.
    """
    fixed = dialect()[kind].output.get(type_)
    return Scales.of(fixed.scale, fixed.zero, type_) if fixed is not None else None


def wide_operators() -> frozenset[str]:
    """Return the ONNX operators that have kernels for 16-bit activations."""
    return frozenset(_table().wide)


def wide_results() -> Mapping[str, float]:
    """Return the scales of the 16-bit outputs of the ONNX operators whose kernels have fixed output scales."""
    return _table().wide_results


def wide_notes() -> Mapping[str, str]:
    """Return for some engines a sentence on their kernels for 16-bit activations."""
    return _table().wide_notes


def tied() -> frozenset[str]:
    """Return the ONNX operators that require one common range for all their inputs and outputs."""
    # Operators that only move elements can never change a scale.
    return SHARING | frozenset(_table().tied)


def results() -> Mapping[str, Range]:
    """Return the output ranges of the ONNX operators whose kernels have fixed output scales."""
    return _table().results
