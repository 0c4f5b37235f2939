"""Read the families of chips and the runtime's limits from targets/espdl/chips.toml."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from edgeq.backends.espdl.rounding import ChipArithmetic, Rounding
from edgeq.errors import HardwareError, suggest
from edgeq.util.folders import shipped
from edgeq.util.record_files import read_toml


@dataclass(frozen=True)
class EspFamily:
    """Describe how the kernels of a family of chips compute. targets/espdl/chips.toml explains the fields."""

    name: str
    rounding: Rounding
    lane_bits: int
    bias_bits: int
    blocked: bool
    per_channel: bool
    source: str
    tie_margin: float = 0.0

    @property
    def arithmetic(self) -> ChipArithmetic:
        """Return the arithmetic of the kernels."""
        return ChipArithmetic(self.rounding, self.lane_bits, self.tie_margin)


@dataclass(frozen=True)
class EspChip:
    """Describe one chip: the family of its kernels, its name in ESP-IDF, and its memory."""

    name: str
    title: str
    family: str
    idf_target: str
    internal_kib: int
    source: str
    psram: bool = False


@dataclass(frozen=True)
class EspRuntime:
    """Describe the runtime's component and its limits."""

    component: str
    versions: str
    tested: str
    source: str


@dataclass(frozen=True)
class EspWide:
    """Describe the kernels for 16-bit activations. targets/espdl/chips.toml explains the fields."""

    operators: tuple[str, ...]
    accumulator_bits: int
    source: str


@dataclass(frozen=True)
class _ChipTable:
    runtime: EspRuntime
    wide: EspWide
    family: tuple[EspFamily, ...]
    chip: tuple[EspChip, ...]


@cache
def _table() -> _ChipTable:
    return read_toml(shipped("targets") / "espdl" / "chips.toml", _ChipTable, HardwareError, "Install edgeq again")


def runtime() -> EspRuntime:
    """Return the runtime's component."""
    return _table().runtime


def wide_kernels() -> EspWide:
    """Return which ONNX operators have kernels for 16-bit activations, and how wide their sums are."""
    return _table().wide


def chip_named(name: str) -> EspChip:
    """Return a chip by its name.

    Raises:
        HardwareError: the name is unknown. The message suggests the nearest one.
    """
    chips = {chip.name: chip for chip in _table().chip}
    if name not in chips:
        raise HardwareError(f"ESP-DL does not run on {name!r}", suggest(name, chips))
    return chips[name]


def family_named(name: str) -> EspFamily:
    """Return a family by its name.

    Raises:
        HardwareError: the name is unknown. The message suggests the nearest one.
    """
    families = {family.name: family for family in _table().family}
    if name not in families:
        raise HardwareError(f"ESP-DL has no family of chips {name!r}", suggest(name, families))
    return families[name]
