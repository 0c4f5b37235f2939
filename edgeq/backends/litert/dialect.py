"""What a .tflite file can hold: the rows of targets/litert/operators.toml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from edgeq.errors import HardwareError
from edgeq.util.records import read_toml
from edgeq.util.registry import shipped


@dataclass(frozen=True)
class Row:
    """One operator of the file; targets/litert/operators.toml says what the fields are."""

    kind: str
    float32: int
    int8: int
    options: str = ""
    rules: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Table:
    source: str
    operator: tuple[Row, ...]


@cache
def dialect() -> Mapping[str, Row]:
    """Return the operators by their names in the schema."""
    table = read_toml(shipped("targets") / "litert" / "operators.toml", _Table, HardwareError, "Install edgeq again")
    return {row.kind: row for row in table.operator}
