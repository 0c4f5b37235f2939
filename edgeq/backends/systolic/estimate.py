"""How long the array takes and what it moves, estimated from tile sizes alone. No cycle is simulated.

For a product of I rows, J columns and depth K, cut into pieces of (i, j, k) tiles of DIM (`tiling`), with ⌈x⌉ counted
in tiles of DIM and n = the number of pieces along an axis:

    compute cycles = ⌈I⌉ · ⌈J⌉ · ⌈K⌉ · DIM            one row of a tile a cycle; filling the array is hidden
    bytes in       = I·K · n_J + K·J · n_I + 4·J       each operand again for every piece along the other axis
    bytes out      = I·J, or what is left of it after pooling
    cycles         = max(compute cycles, bytes / BYTES_PER_CYCLE)    loads overlap with computing (double buffers)
    utilisation    = multiply-accumulates / (cycles · DIM²)

A convolution is a product with I = output positions, J = output channels and K = kernel · input channels, and its input
is read as it is (not as patches), once for every piece along J. A depthwise or grouped one is a product for each group,
which fills only the columns that the group has. Sums move three times their size. The core's work is not estimated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from edgeq.backends.systolic.array import ArrayConfig
from edgeq.backends.systolic.placement import on_array, step_macs
from edgeq.backends.systolic.program import Conv, Fc, Program, ResidualAdd
from edgeq.backends.systolic.tiling import product_tiles
from edgeq.records import written

BYTES_PER_CYCLE = 16
"""DRAM bandwidth that the estimate assumes: a 128-bit bus that is never idle."""


@dataclass(frozen=True)
class LayerEstimate:
    """One layer on the array, one sample.

    Attributes:
        cycles: the larger of computing and moving.
        compute_cycles: without waiting for memory.
        traffic: bytes between DRAM and the array's memories.
        utilisation: of the array's multipliers, 0 to 1.
    """

    name: str
    macs: int
    cycles: int
    compute_cycles: int
    traffic: int = field(metadata=written(name="dram_bytes"))
    utilisation: float = field(metadata=written(digits=4))


@dataclass(frozen=True)
class Estimate:
    """Layers on the array, in order. An estimate, by the formulas of this module."""

    layers: tuple[LayerEstimate, ...]
    array: ArrayConfig

    @property
    def cycles(self) -> int:
        """Of all layers, one after the other."""
        return sum(layer.cycles for layer in self.layers)

    @property
    def traffic(self) -> int:
        """Bytes between DRAM and the array's memories, over all layers."""
        return sum(layer.traffic for layer in self.layers)

    @property
    def utilisation(self) -> float:
        """Of all layers together."""
        return sum(layer.macs for layer in self.layers) / (self.cycles * self.array.dim**2) if self.cycles else 0.0

    def __record__(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "estimate": True,
            "formula": "max(tiles computed · dim, bytes moved / bytes_per_cycle) a layer",
            "bytes_per_cycle": BYTES_PER_CYCLE,
            "cycles": self.cycles,
            "dram_bytes": self.traffic,
            "utilisation": round(self.utilisation, 4),
            "layers": self.layers,
        }


def estimate(program: Program) -> Estimate:
    """Cycles, DRAM traffic and utilisation of every layer that runs on the array."""
    layers = []
    for step in program.steps:
        if isinstance(step, Conv) and on_array(step, program.array.dim):
            layers.append(_conv(program, step))
        elif isinstance(step, Fc):
            outputs, depth = step.weights.shape
            rows = math.prod(program.tensors[step.output].shape) // outputs
            layers.append(_product(program, step, 1, rows, outputs, depth, rows * depth, rows * outputs))
        elif isinstance(step, ResidualAdd):
            size = math.prod(program.tensors[step.output].shape)
            layers.append(LayerEstimate(step.name, 0, -(-3 * size // BYTES_PER_CYCLE), 0, 3 * size, 0.0))
    return Estimate(tuple(layers), program.array)


def _conv(program: Program, step: Conv) -> LayerEstimate:
    _, outputs, rows, columns = step.conv_shape
    read = math.prod(program.tensors[step.input].shape) // step.groups
    written = math.prod(program.tensors[step.output].shape) // step.groups
    share = outputs // step.groups
    return _product(program, step, step.groups, rows * columns, share, int(step.weights[0].size), read, written)


def _product(
    program: Program, step: Conv | Fc, groups: int, rows: int, columns: int, depth: int, read: int, written: int
) -> LayerEstimate:
    array = program.array
    tiles = product_tiles(rows, columns, depth, array)
    whole = [-(-size // array.dim) for size in (rows, columns, depth)]
    passes_i, passes_j = -(-whole[0] // tiles.i), -(-whole[1] // tiles.j)
    traffic = groups * (read * passes_j + depth * columns * passes_i + 4 * columns + written)
    compute = groups * math.prod(whole) * array.dim
    cycles = max(compute, -(-traffic // BYTES_PER_CYCLE))
    macs = step_macs(program, step)
    return LayerEstimate(step.name, macs, cycles, compute, traffic, macs / (cycles * array.dim**2))
