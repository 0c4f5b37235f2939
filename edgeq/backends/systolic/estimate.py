"""Describe where each layer of a program runs, and estimate the array's time and memory traffic.

The time is an estimate from tile sizes; no cycle is simulated. Take a product of I rows, J columns and depth K that is
cut into pieces of (i, j, k) tiles of DIM (`array.product_tiles`). ⌈x⌉ is x in tiles of DIM, rounded up. n_I and n_J
are the numbers of pieces along I and J:

    compute cycles = ⌈I⌉ · ⌈J⌉ · ⌈K⌉ · DIM            one row of a tile per cycle; the time to fill the array is hidden
    bytes in       = I·K · n_J + K·J · n_I + 4·J       each operand is loaded again for every piece along the other axis
    bytes out      = I·J, or the result of pooling if that is smaller
    cycles         = max(compute cycles, bytes / BYTES_PER_CYCLE)    loads overlap with computing (double buffers)
    utilisation    = multiply-accumulates / (cycles · DIM²)

A convolution is a product with I = output positions, J = output channels and K = kernel · input channels. Its input is
read as an image, not as patches, once for every piece along J. A depthwise or grouped convolution is one product for
each group, and a product fills only as many columns as its group has channels. A sum moves three tensors of its size:
both operands and the result. The core's work is not estimated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edgeq.backends.systolic import program as steps
from edgeq.backends.systolic.array import ArrayConfig, product_tiles
from edgeq.backends.systolic.program import Program, Step, Weighted
from edgeq.measure.coverage import Coverage, coverage_of
from edgeq.measure.node_runs import NodeRun
from edgeq.model.convert import from_bytes
from edgeq.util.records import write_as


@dataclass(frozen=True)
class MacPlacement:
    """Describe where a program's multiply-accumulates run.

    Attributes:
        macs: multiply-accumulates for one sample, including float layers.
        array: multiply-accumulates on the array.
        depthwise: multiply-accumulates of depthwise layers, on the array or the core. On the array, such a layer uses a
            single column.
        on_core: multiply-accumulates of each depthwise layer that runs on the core.
    """

    macs: int
    array: int
    depthwise: int
    on_core: tuple[int, ...]

    @property
    def array_share(self) -> float:
        """Return the array's share of the multiply-accumulates; 0 if the program has no multiply-accumulates."""
        return self.array / self.macs if self.macs else 0.0

    def sentence(self) -> str:
        """Return a one-line summary for the user."""
        text = f"{self.array_share:.1%} of the multiply-accumulates run on the array"
        if self.depthwise:
            text += f"; depthwise layers, which fill only one column of it, are {self.depthwise / self.macs:.1%}"
        if self.on_core:
            share = f"{len(self.on_core)} of them ({sum(self.on_core) / self.macs:.1%})"
            text += f", and {share} run on the core, with a scale for each channel"
        return text


def place(program: Program, macs: Mapping[str, int] | None = None) -> MacPlacement:
    """Return where the layers of `program` run.

    Args:
        macs: multiply-accumulates of the float model's nodes (`edgeq.model.macs.node_macs`). They are used for the
            float parts.
    """
    total = array = depthwise = 0
    on_core = []
    for step in program.steps:
        # A float step holds whole nodes of the model, so their counts are those of the float model.
        count = sum((macs or {}).get(name, 0) for name in step.reasons) if isinstance(step, steps.Float) else 0
        count += step_macs(program, step)
        total += count
        inside = isinstance(step, steps.Fc) or (isinstance(step, steps.Conv) and on_array(step, program.array.dim))
        array += count if inside else 0
        if isinstance(step, steps.Conv) and step.depthwise:
            depthwise += count
            if not inside:
                on_core.append(count)
    return MacPlacement(total, array, depthwise, tuple(on_core))


def on_array(step: steps.Conv, dim: int) -> bool:
    """Return whether a convolution runs on the array. It does if the width of every tile but the last is a multiple of
    `dim`.
    """
    return all((tile.stop - tile.start) % dim == 0 for tile in step.tiles[:-1])


def step_macs(program: Program, step: Step) -> int:
    """Return a step's multiply-accumulates for one sample."""
    if isinstance(step, steps.Conv):
        return math.prod(step.conv_shape) * int(step.weights[0].size)
    if isinstance(step, steps.Fc):
        return math.prod(program.tensors[step.output].shape) * int(step.weights.shape[1])
    return 0


def coverage(program: Program, macs: Mapping[str, int]) -> Coverage:
    """Return the `Coverage` of the program: its integer nodes, on the array or the core, and its float nodes, each with
    the reason why it is in float.
    """
    runs: list[NodeRun] = []
    reasons: dict[str, str] = {}
    for step in program.steps:
        kind = type(step).__name__
        if isinstance(step, steps.Float):
            op_types = {node.name: node.op_type for node in from_bytes(step.model).graph}
            runs += [NodeRun(n, n, op_types.get(n, ""), "float", macs.get(n, 0)) for n in step.reasons]
            reasons |= step.reasons
        elif isinstance(step, steps.Quantize | steps.Dequantize):
            runs.append(NodeRun(step.name, step.name, kind, "conversion", 0))
        else:
            source = step.sources[0] if step.sources else step.name
            runs.append(NodeRun(step.name, source, kind, "int8", step_macs(program, step)))
    method = "the program that was compiled for the array"
    return coverage_of(runs, lambda run: reasons[run.name], basis="modelled", how=method)


BYTES_PER_CYCLE = 16
"""The assumed DRAM bandwidth: a 128-bit bus that is never idle."""


@dataclass(frozen=True)
class LayerEstimate:
    """Describe the estimate for one layer on the array, for one sample.

    Attributes:
        cycles: cycles for computing or for moving data, whichever is larger.
        compute_cycles: cycles for computing, without waiting for memory.
        traffic: bytes between DRAM and the array's memories.
        utilisation: utilisation of the array's multipliers, 0 to 1.
    """

    name: str
    macs: int
    cycles: int
    compute_cycles: int
    traffic: int = field(metadata=write_as(name="dram_bytes"))
    utilisation: float = field(metadata=write_as(digits=4))


@dataclass(frozen=True)
class ArrayEstimate:
    """Hold the estimates for the layers on the array, in order, by the formulas of this module."""

    layers: tuple[LayerEstimate, ...]
    array: ArrayConfig

    @property
    def cycles(self) -> int:
        """Return the total cycles of all layers, if they run one after the other."""
        return sum(layer.cycles for layer in self.layers)

    @property
    def traffic(self) -> int:
        """Return the total bytes between DRAM and the array's memories."""
        return sum(layer.traffic for layer in self.layers)

    @property
    def utilisation(self) -> float:
        """Return the utilisation of the array over all layers together."""
        return sum(layer.macs for layer in self.layers) / (self.cycles * self.array.dim**2) if self.cycles else 0.0

    def __record__(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "estimate": True,
            "formula": "max(tiles computed · dim, bytes moved / bytes_per_cycle) a layer",
            "bytes_per_cycle": BYTES_PER_CYCLE,
            "cycles": self.cycles,
            "dram_bytes": self.traffic,
            "utilisation": round(self.utilisation, 4),
            "layers": self.layers,
        }


def estimate(program: Program) -> ArrayEstimate:
    """Return cycles, DRAM traffic and utilisation of every layer that runs on the array."""
    layers = []
    for step in program.steps:
        if isinstance(step, steps.Conv) and on_array(step, program.array.dim):
            layers.append(_conv(program, step))
        elif isinstance(step, steps.Fc):
            outputs, depth = step.weights.shape
            rows = math.prod(program.tensors[step.output].shape) // outputs
            layers.append(_product(program, step, 1, rows, outputs, depth, rows * depth, rows * outputs))
        elif isinstance(step, steps.ResidualAdd):
            size = math.prod(program.tensors[step.output].shape)
            # A sum multiplies nothing that counts, so only its traffic takes time.
            layers.append(LayerEstimate(step.name, 0, -(-3 * size // BYTES_PER_CYCLE), 0, 3 * size, 0.0))
    return ArrayEstimate(tuple(layers), program.array)


def _conv(program: Program, step: steps.Conv) -> LayerEstimate:
    _, outputs, rows, columns = step.conv_shape
    bytes_in = math.prod(program.tensors[step.input].shape) // step.groups
    bytes_out = math.prod(program.tensors[step.output].shape) // step.groups
    share = outputs // step.groups
    return _product(program, step, step.groups, rows * columns, share, int(step.weights[0].size), bytes_in, bytes_out)


def _product(
    program: Program, step: Weighted, groups: int, rows: int, columns: int, depth: int, bytes_in: int, bytes_out: int
) -> LayerEstimate:
    array = program.array
    tiles = product_tiles(rows, columns, depth, array)
    tile_counts = [-(-size // array.dim) for size in (rows, columns, depth)]
    passes_i, passes_j = -(-tile_counts[0] // tiles.i), -(-tile_counts[1] // tiles.j)
    traffic = groups * (bytes_in * passes_j + depth * columns * passes_i + 4 * columns + bytes_out)
    compute = groups * math.prod(tile_counts) * array.dim
    # Loads overlap with computing, so the slower of the two decides.
    cycles = max(compute, -(-traffic // BYTES_PER_CYCLE))
    macs = step_macs(program, step)
    return LayerEstimate(step.name, macs, cycles, compute, traffic, macs / (cycles * array.dim**2))
