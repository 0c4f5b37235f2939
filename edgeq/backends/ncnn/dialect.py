"""Read which layers ncnn has, and their numbers, from targets/ncnn/operators.toml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from edgeq.errors import HardwareError
from edgeq.util.folders import shipped
from edgeq.util.record_files import read_toml


@dataclass(frozen=True)
class WinogradLimit:
    """Describe the sum beyond which ncnn's int8 Winograd convolution wraps.

    Attributes:
        option: ncnn's option that switches the method off.
        kernel: side of the kernels for which ncnn uses the method.
        largest_sum: largest magnitude of a sum of integer products that is computed correctly.
    """

    option: str
    kernel: int
    largest_sum: int
    why: str
    source: str


@dataclass(frozen=True)
class NcnnDialect:
    """Hold the tables of targets/ncnn/operators.toml, which explains the fields."""

    verified: str
    most_axes: int
    options: Mapping[str, bool]
    unary: Mapping[str, int]
    binary: Mapping[str, int]
    powers: Mapping[str, int]
    reversed: Mapping[str, int]
    reduction: Mapping[str, int]
    elements: Mapping[str, str]
    permute: tuple[tuple[str, ...], ...]
    winograd: WinogradLimit
    why: Mapping[str, str]
    source: Mapping[str, str]


@cache
def dialect() -> NcnnDialect:
    """Return ncnn's layers and their numbers."""
    return read_toml(shipped("targets") / "ncnn" / "operators.toml", NcnnDialect, HardwareError, "Install edgeq again")
