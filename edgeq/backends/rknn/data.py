"""Read the known properties of Rockchip's compiler from `targets/rknn/*.toml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from edgeq.errors import HardwareError, suggest
from edgeq.model.opset import Opset
from edgeq.run.toolkit import Toolkit
from edgeq.util.folders import shipped
from edgeq.util.record_files import read_toml


@dataclass(frozen=True)
class ZeroPoint:
    """Name the one zero point that the compiler does not preserve."""

    avoided: int
    why: str
    source: str


@dataclass(frozen=True)
class Swish:
    """Name the operators that the compiler merges with a Mul after them."""

    gates: tuple[str, ...]
    why: str
    source: str


@dataclass(frozen=True)
class PoolRules:
    """Describe the MaxPool windows that edgeq writes as chains of smaller windows."""

    windows: tuple[int, ...]
    chained: int
    why: str
    source: str


@dataclass(frozen=True)
class Attribute:
    """Describe an attribute that edgeq writes with the value `write`. None means that edgeq removes the attribute if
    its value is 0.
    """

    operator: str
    name: str
    why: str
    source: str
    write: int | float | None = None


@dataclass(frozen=True)
class DisabledRule:
    """Name a rule of the compiler that edgeq switches off."""

    name: str
    why: str
    source: str


@dataclass(frozen=True)
class Float16:
    """Set the minimum SQNR in dB of a model with float16 layers, relative to kernels that compute these layers in
    float32.
    """

    least_db: float
    why: str
    source: str


@dataclass(frozen=True)
class Rounding:
    """State the SQNR in dB that remains if float sums are only rounded in another order."""

    least_db: float
    why: str
    source: str


@dataclass(frozen=True)
class Table:
    """Name the rows of the compiler's table that are not layers of the model."""

    conversions: tuple[str, ...]
    ends: tuple[str, ...]
    why: str
    source: str


@dataclass(frozen=True)
class Level:
    """Set the compiler's optimization level."""

    optimization_level: int
    why: str
    source: str


@dataclass(frozen=True)
class Dialect:
    """Hold the contents of targets/rknn/dialect.toml."""

    verified: str
    opset: Opset
    zero_point: ZeroPoint
    swish: Swish
    pool: PoolRules
    rounding: Rounding
    table: Table
    float16: Float16
    level: Level
    attribute: tuple[Attribute, ...]
    disable_rule: tuple[DisabledRule, ...]


@cache
def dialect() -> Dialect:
    """Return the description of the models that the compiler supports."""
    return read_toml(shipped("targets") / "rknn" / "dialect.toml", Dialect, HardwareError, "Install edgeq again")


@cache
def toolkit() -> Toolkit:
    """Return the toolkit that contains the compiler."""
    return read_toml(shipped("targets") / "rknn" / "toolkit.toml", Toolkit, HardwareError, "Install edgeq again")


@dataclass(frozen=True)
class Chip:
    """Describe a chip from targets/rknn/chips.toml."""

    name: str
    title: str
    cores: int = 1
    # False if the chip's boards cannot run edgeq's runner, which needs Python.
    python: bool = True
    # False if the NPU computes in integers alone.
    float16: bool = True


@dataclass(frozen=True)
class _Chips:
    chip: tuple[Chip, ...]
    source: Mapping[str, str]


def chip_named(name: str) -> Chip:
    """Return the chip that has this name in the compiler.

    Raises:
        HardwareError: no chip has that name; suggests the nearest name.
    """
    table = read_toml(shipped("targets") / "rknn" / "chips.toml", _Chips, HardwareError, "Install edgeq again").chip
    chips = {chip.name: chip for chip in table}
    if name not in chips:
        raise HardwareError(f"the compiler does not know the chip {name!r}", suggest(name, chips))
    return chips[name]
