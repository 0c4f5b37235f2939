"""Describe the array: the parameters in a target's [systolic] table, and the pieces of a product that fit its memories.

Products are cut into pieces that fit the array's memories. Sizes are in tiles of dim × dim elements. For a product of
[I, K] with [K, J], the scratchpad contains a piece of each operand, and the accumulator contains the int32 result:

    (I·K + K·J) · dim rows of scratchpad, I·J · dim rows of accumulator

The rows must fit into the respective memory, or into half of it if the next piece is loaded meanwhile (weight
stationary). A convolution works on pieces of b images, orows × ocols outputs (before pooling), och output and kch input
channels. Each piece needs

    ⌈kch / dim⌉ · b · irows · icols + ⌈och / dim⌉ · krows · kcols · kch rows of scratchpad,
    ⌈och / dim⌉ · b · orows · ocols rows of accumulator
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta

from edgeq.errors import HardwareError

Text = Annotated[str, Meta(pattern=r"\S", description="text")]


@dataclass(frozen=True)
class ArrayTable:
    """Define the keys of a target's [systolic] table. A key that is left out has the default of Gemmini's generator.

    Attributes:
        dim: rows and columns of the array, in processing elements.
        scratchpad_kib: size of the memory for operands, KiB.
        scratchpad_banks: number of its banks.
        scratchpad_bank_rows: rows of a bank, each of `dim` elements.
        accumulator_kib: size of the memory for int32 results, KiB.
        accumulator_rows: its rows, each of `dim` results.
        max_bytes: bytes of the largest transfer from or to main memory.
        element_type: type of operands; only "int8".
        accumulator_type: type of sums; only "int32".
        scale_type: type of the multiplier of results: "float32", or "shift" for powers of two.
        dataflow: "WS" (weight stationary) or "OS" (output stationary).
    """

    dim: int | None = None
    scratchpad_kib: int | None = None
    scratchpad_banks: int | None = None
    scratchpad_bank_rows: int | None = None
    accumulator_kib: int | None = None
    accumulator_rows: int | None = None
    max_bytes: int | None = None
    element_type: Text | None = None
    accumulator_type: Text | None = None
    scale_type: Text | None = None
    dataflow: Text | None = None


OutputScale = Literal["float", "shift"]
Dataflow = Literal["WS", "OS"]
_SCALES: Mapping[str, OutputScale] = {"float32": "float", "float": "float", "shift": "shift"}


@dataclass(frozen=True)
class ArrayConfig:
    """Describe the generator's parameters that affect numbers, tiles and estimates.

    Attributes:
        dim: rows and columns of the array (DIM).
        scratchpad_rows: rows of dim int8 values, over all banks.
        accumulator_rows: rows of dim int32 values.
        max_bytes: the largest DRAM burst, in bytes.
        output_scale: the multiplier of accumulators: "float" (any float32) or "shift" (a power of two).
        dataflow: "WS" (weight stationary) or "OS" (output stationary).
    """

    dim: int = 16
    scratchpad_rows: int = 16384
    accumulator_rows: int = 1024
    max_bytes: int = 64
    output_scale: OutputScale = "float"
    dataflow: Dataflow = "WS"

    def __post_init__(self) -> None:
        # The generator makes square arrays of a power of two.
        if self.dim < 1 or self.dim & (self.dim - 1) or self.dim > 256:
            raise HardwareError(f"[systolic] dim is {self.dim}", "Use a power of two up to 256")
        for name in ("scratchpad_rows", "accumulator_rows"):
            # One tile of each operand must fit, or no product can be computed.
            if getattr(self, name) < 2 * self.dim:
                raise HardwareError(
                    f"[systolic] {name} is {getattr(self, name)}", f"Use at least two tiles of {self.dim} rows"
                )
        if self.max_bytes < 1:
            raise HardwareError(f"[systolic] max_bytes is {self.max_bytes}", "Use a positive number")


def array_config(table: Mapping[str, Any]) -> ArrayConfig:
    """Return the `ArrayConfig` of a target's [systolic] table. Missing keys get the generator's defaults.

    Raises:
        HardwareError: a value is impossible or contradicts another. The message names the key.
    """
    # The keys exist so that a target states its types, and no model is built for an array of other types.
    for key, supported in (("element_type", "int8"), ("accumulator_type", "int32")):
        if table.get(key, supported) != supported:
            raise HardwareError(f"[systolic] {key} is {table[key]!r}", f"edgeq only builds for {supported} arrays")
    scale, dataflow = str(table.get("scale_type", "float32")), str(table.get("dataflow", "WS"))
    for key, value, choices in (("scale_type", scale, [*_SCALES]), ("dataflow", dataflow, ["WS", "OS"])):
        if value not in choices:
            raise HardwareError(f"[systolic] {key} is {value!r}", f"It can be {', '.join(choices)}")
    dim = int(table.get("dim", ArrayConfig.dim))
    # A dim of 0 is refused only by `ArrayConfig`, after the division.
    row_bytes = max(dim, 1)
    return ArrayConfig(
        dim=dim,
        scratchpad_rows=_rows(table, "scratchpad", row_bytes, default_kib=256),
        accumulator_rows=_rows(table, "accumulator", 4 * row_bytes, default_kib=64),
        max_bytes=int(table.get("max_bytes", ArrayConfig.max_bytes)),
        output_scale=_SCALES[scale],
        dataflow="OS" if dataflow == "OS" else "WS",
    )


def _rows(table: Mapping[str, Any], memory: str, row_bytes: int, *, default_kib: int) -> int:
    """Return the number of rows of a memory, from its size in KiB or from its row and bank counts.

    If the table has both, they must agree.
    """
    rows = int(table.get(f"{memory}_kib", default_kib)) * 1024 // row_bytes
    declared = table.get("accumulator_rows" if memory == "accumulator" else "scratchpad_bank_rows")
    if declared is None:
        return rows
    # 4 is the generator's own number of banks.
    declared = int(declared) * (int(table.get("scratchpad_banks", 4)) if memory == "scratchpad" else 1)
    if f"{memory}_kib" in table and declared != rows:
        raise HardwareError(
            f"[systolic] {memory}_kib = {table[f'{memory}_kib']} is {rows} rows of {row_bytes} bytes, not {declared}",
            "Make size, rows and dim agree, or give only one of size and rows",
        )
    return declared


class ProductTiles(NamedTuple):
    """Hold the size of one piece of a product, in tiles of dim along the rows, columns and depth."""

    i: int
    j: int
    k: int


def product_tiles(rows: int, columns: int, depth: int, array: ArrayConfig) -> ProductTiles:
    """Return the largest piece that fits. The search starts with a balanced piece and enlarges it tile by tile along j,
    i and k.
    """
    # Double buffering: one half holds the piece that is computed, the other receives the next.
    share = 2 if array.dataflow == "WS" else 1
    scratchpad = array.scratchpad_rows // share // array.dim
    accumulator = array.accumulator_rows // share // array.dim
    total = tuple(-(-size // array.dim) for size in (rows, columns, depth))
    # A square piece needs the fewest bytes of operands for its number of results.
    side = max(math.isqrt(accumulator), 1)
    tile = [min(total[0], side), min(total[1], side), 1]
    tile[2] = max(min(total[2], scratchpad // (tile[0] + tile[1])), 1)

    def fits(i: int, j: int, k: int) -> bool:
        """Return whether a piece of i × j tiles, k tiles deep, fits into accumulator and scratchpad."""
        return (i + j) * k <= scratchpad and i * j <= accumulator

    grown = True
    while grown:
        grown = False
        # The order of the library's own search, so that edgeq estimates the pieces that it will use.
        for axis in (1, 0, 2):
            larger = tile.copy()
            larger[axis] += 1
            if larger[axis] <= total[axis] and fits(*larger):
                tile, grown = larger, True
    return ProductTiles(*tile)
