"""One systolic array: its size, its memories, and how its output scale works. From a target's [systolic] table.

How large products are cut into pieces that the array's memories hold.

Sizes are in tiles of dim × dim elements. A product of [I, K] with [K, J] keeps a piece of both in the scratchpad and
the int32 result in the accumulator:

    (I·K + K·J) · dim rows of scratchpad, I·J · dim rows of accumulator

each at most the memory, or half of it where the next piece is loaded meanwhile (weight stationary). A convolution
keeps, for a piece of b images, orows × ocols outputs (before pooling), och output and kch input channels,

    ⌈kch / dim⌉ · b · irows · icols + ⌈och / dim⌉ · krows · kcols · kch rows of scratchpad,
    ⌈och / dim⌉ · b · orows · ocols rows of accumulator
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from edgeq.errors import HardwareError

OutputScale = Literal["float", "shift"]
Dataflow = Literal["WS", "OS"]
_SCALES: Mapping[str, OutputScale] = {"float32": "float", "float": "float", "shift": "shift"}


@dataclass(frozen=True)
class ArrayConfig:
    """The generator's parameters that numbers, tiles and estimates depend on.

    Attributes:
        dim: rows and columns of the array (DIM).
        scratchpad_rows: rows of dim int8 values, over all banks.
        accumulator_rows: rows of dim int32 values.
        max_bytes: the widest DRAM burst, in bytes.
        output_scale: "float": accumulators are multiplied with a float32; "shift": with a power of two.
        dataflow: "WS" (weight stationary) or "OS" (output stationary).
    """

    dim: int = 16
    scratchpad_rows: int = 16384
    accumulator_rows: int = 1024
    max_bytes: int = 64
    output_scale: OutputScale = "float"
    dataflow: Dataflow = "WS"

    def __post_init__(self) -> None:
        if self.dim < 1 or self.dim & (self.dim - 1) or self.dim > 256:
            raise HardwareError(f"[systolic] dim is {self.dim}", "It is a power of two up to 256")
        for name in ("scratchpad_rows", "accumulator_rows"):
            if getattr(self, name) < 2 * self.dim:
                raise HardwareError(
                    f"[systolic] {name} is {getattr(self, name)}", f"Two tiles of {self.dim} rows are the least"
                )
        if self.max_bytes < 1:
            raise HardwareError(f"[systolic] max_bytes is {self.max_bytes}", "It is a positive number")


def array_config(table: Mapping[str, Any]) -> ArrayConfig:
    """An `ArrayConfig` from a target's [systolic] table; what it leaves out is the generator's default.

    Raises:
        HardwareError: a value that no array has, or that does not go with the others; names the key.
    """
    for key, known in (("element_type", "int8"), ("accumulator_type", "int32")):
        if table.get(key, known) != known:
            raise HardwareError(f"[systolic] {key} is {table[key]!r}", f"Only {known} arrays can be built for")
    scale = str(table.get("scale_type", "float32"))
    if scale not in _SCALES:
        raise HardwareError(f"[systolic] scale_type is {scale!r}", f"It can be {', '.join(_SCALES)}")
    dataflow = str(table.get("dataflow", "WS"))
    if dataflow not in ("WS", "OS"):
        raise HardwareError(f"[systolic] dataflow is {dataflow!r}", "It can be WS, OS")
    dim = int(table.get("dim", ArrayConfig.dim))
    if dim < 1:
        raise HardwareError(f"[systolic] dim is {dim}", "It is a power of two up to 256")
    return ArrayConfig(
        dim=dim,
        scratchpad_rows=_rows(table, "scratchpad", dim, default_kib=256),
        accumulator_rows=_rows(table, "accumulator", 4 * dim, default_kib=64),
        max_bytes=int(table.get("max_bytes", ArrayConfig.max_bytes)),
        output_scale=_SCALES[scale],
        dataflow="OS" if dataflow == "OS" else "WS",
    )


def _rows(table: Mapping[str, Any], memory: str, row_bytes: int, *, default_kib: int) -> int:
    """Rows of a memory, from its size in KiB; row and bank counts that are given too have to agree with it."""
    rows = int(table.get(f"{memory}_kib", default_kib)) * 1024 // row_bytes
    declared = table.get("accumulator_rows") if memory == "accumulator" else _scratchpad_rows(table)
    if declared is None:
        return rows
    if f"{memory}_kib" in table and int(declared) != rows:
        raise HardwareError(
            f"[systolic] {memory}_kib = {table[f'{memory}_kib']} is {rows} rows of {row_bytes} bytes, not {declared}",
            "Make size, rows and dim agree, or give only one of size and rows",
        )
    return int(declared)


def _scratchpad_rows(table: Mapping[str, Any]) -> int | None:
    if "scratchpad_bank_rows" not in table:
        return None
    return int(table["scratchpad_bank_rows"]) * int(table.get("scratchpad_banks", 4))


@dataclass(frozen=True)
class ProductTiles:
    """A piece of a product, in tiles of dim."""

    i: int
    j: int
    k: int


def product_tiles(rows: int, columns: int, depth: int, array: ArrayConfig) -> ProductTiles:
    """The largest piece that fits: it starts as a balanced one and grows a tile at a time in j, i and k."""
    share = 2 if array.dataflow == "WS" else 1
    scratchpad = array.scratchpad_rows // share // array.dim
    accumulator = array.accumulator_rows // share // array.dim
    whole = tuple(-(-size // array.dim) for size in (rows, columns, depth))
    side = max(math.isqrt(accumulator), 1)
    tile = [min(whole[0], side), min(whole[1], side), 1]
    tile[2] = max(min(whole[2], scratchpad // (tile[0] + tile[1])), 1)

    def fits(i: int, j: int, k: int) -> bool:
        """Whether i x j tiles of the product, k deep, fit into accumulator and scratchpad; all in tiles of `dim`."""
        return (i + j) * k <= scratchpad and i * j <= accumulator

    grown = True
    while grown:
        grown = False
        for axis in (1, 0, 2):
            larger = tile.copy()
            larger[axis] += 1
            if larger[axis] <= whole[axis] and fits(*larger):
                tile, grown = larger, True
    return ProductTiles(*tile)
