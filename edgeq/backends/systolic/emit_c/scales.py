"""Output scales as the array takes them: a float, or how far to shift to the right."""

from __future__ import annotations

import math
from collections.abc import Sequence

from edgeq.backends.systolic.array import ArrayConfig
from edgeq.backends.systolic.emit_c.text import float_literal
from edgeq.backends.systolic.program import Tile
from edgeq.errors import ModelError

_MOST_SHIFT = 31


def output_scale(value: float, array: ArrayConfig, where: str) -> str:
    """An accumulator's multiplier as a C constant.

    Raises:
        ModelError: on an array that shifts, a multiplier that is no 1 / 2^n.
    """
    if array.output_scale == "float":
        return float_literal(value)
    mantissa, exponent = math.frexp(value)
    shift = 1 - exponent
    if mantissa != 0.5 or not 0 <= shift <= _MOST_SHIFT:
        raise ModelError(
            f"{where}: the output multiplier {value:.9g} is no right shift by 0 to {_MOST_SHIFT}",
            "Package for an array with a float output scale",
        )
    return str(shift)


def tile_array(label: str, tiles: Sequence[Tile], array: ArrayConfig) -> str:
    """LABEL_tiles: which output channels have which multiplier."""
    rows = ",\n".join(
        f"    {{{tile.start}, {tile.stop}, {output_scale(tile.multiplier, array, label)}}}" for tile in tiles
    )
    return f"static const struct eq_tile {label}_tiles[{len(tiles)}] = {{\n{rows}\n}};\n"
