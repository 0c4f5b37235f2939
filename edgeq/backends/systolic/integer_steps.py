"""What one step of a program that is not in float computes, with the array's own integers.

Modelled are int8 operands, int32 accumulators that wrap, the float32 multiplier with one rounding of the product,
rounding half to even (or as the header's macro does), saturation, relu and max pooling on the way out; on request the
output-stationary array, whose partial sums leave it with 20 bits.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.backends.systolic.array import Dataflow
from edgeq.backends.systolic.kernels import convolve, exact_type, largest_in_windows, multiply, sum_windows, wrapped
from edgeq.backends.systolic.program import (
    AveragePool,
    Clamp,
    Concat,
    Conv,
    Dequantize,
    Fc,
    Int8s,
    Int32s,
    MaxPool,
    Program,
    Quantize,
    Rearrange,
    ResidualAdd,
    Step,
    Tile,
    step_outputs,
    tile_values,
)
from edgeq.backends.systolic.rounding import Rounding, rescale, round_values, saturate, shift_right
from edgeq.backends.systolic.tiling import product_tiles

Array = NDArray[Any]


@dataclass(frozen=True)
class LayerRun:
    """What happened in one step that accumulates or adds, over all samples.

    Attributes:
        values: results before pooling.
        overflows: accumulators that left int32 and wrapped.
        saturated: results that were cut to -128 or 127.
    """

    name: str
    values: int
    overflows: int
    saturated: int

    @property
    def saturation(self) -> float:
        """Share of results that were cut."""
        return self.saturated / self.values if self.values else 0.0


class IntegerSteps:
    """Runs single steps of a program.

    Args:
        keep_sums: whether the sums of the last convolution are kept, for running it again with another bias.
    """

    def __init__(
        self, program: Program, *, rounding: Rounding = "even", dataflow: Dataflow = "WS", keep_sums: bool = False
    ) -> None:
        self._tensors = program.tensors
        self._array = program.array
        self._rounding = rounding
        self._dataflow = dataflow
        self._keep_sums = keep_sums
        self._sums: tuple[Array, Array, Array] | None = None

    def run(self, step: Step, read: list[Array], runs: list[LayerRun] | None = None) -> Array:
        """The output of a step.

        Args:
            step: any but a `Float`.
            read: its inputs, [N, ...] each.
            runs: gets a report, where the step accumulates or adds.
        """
        runs = [] if runs is None else runs
        x = read[0]
        output = self._tensors[step_outputs(step)[0]]
        match step:
            case Quantize():
                return output.params.quantize(x)
            case Dequantize():
                return self._tensors[step.input].params.dequantize(x)
            case Conv():
                return self._conv(step, x, runs)
            case Fc():
                return self._fc(step, x, runs)
            case ResidualAdd():
                return self._add(step, x, read[1], runs)
            case MaxPool():
                return largest_in_windows(x, step.kernel, step.strides, step.dilations, step.pads, output.shape[2:])
            case AveragePool():
                sums = sum_windows(x, step.kernel, step.strides, step.pads, output.shape[2:])
                return saturate(rescale(sums, np.float32(step.multiplier)))
            case Clamp():
                return np.clip(x, np.int8(step.low), np.int8(step.high))
            case Concat():
                return np.concatenate(read, axis=step.axis)
            case Rearrange():
                return _rearranged(step, x).reshape(len(x), *output.shape[1:])
        raise TypeError(f"{type(step).__name__} is no integer step")

    def _conv(self, step: Conv, x: Int8s, runs: list[LayerRun]) -> Int8s:
        outputs = len(step.bias)
        # A step that is run again with another bias has the same sums.
        if self._sums is not None and self._sums[0] is x and self._sums[1] is step.weights:
            sums = self._sums[2]
        else:
            sums = self._convolved(step, x)
            self._sums = (x, step.weights, sums) if self._keep_sums else None
        y = self._finish(step.name, sums, step.bias[:, None, None], step.tiles, (outputs, 1, 1), step.relu, runs)
        if step.pool is None:
            return y
        p = step.pool
        size = self._tensors[step.output].shape[2:]
        return largest_in_windows(
            y, (p.size, p.size), (p.stride, p.stride), (1, 1), (p.padding,) * 4, size, fill=0 if p.padding else -128
        )

    def _convolved(self, step: Conv, x: Int8s) -> Array:
        """Output stationary, it is one product for each group of channels and each tile with its own scale."""
        if self._dataflow == "WS":
            return convolve(x, step.weights, step.groups, step.strides, step.dilations, step.pads)
        depth = step.weights.shape[1]
        parts = []
        for start, stop in _slices(step.tiles, len(step.bias) // step.groups):
            group = start * step.groups // len(step.bias)
            own, weights = x[:, group * depth : (group + 1) * depth], step.weights[start:stop]
            k_tile = self._k_tile(step.conv_shape[2] * step.conv_shape[3], stop - start, weights[0].size)
            parts.append(convolve(own, weights, 1, step.strides, step.dilations, step.pads, k_tile=k_tile))
        return np.concatenate(parts, axis=1)

    def _fc(self, step: Fc, x: Int8s, runs: list[LayerRun]) -> Int8s:
        outputs, depth = step.weights.shape
        kind = exact_type(step.weights)
        matrix = x.reshape(-1, depth).astype(kind)
        weights, rows = step.weights.astype(kind), len(matrix) // len(x)
        slices = [(0, outputs)] if self._dataflow == "WS" else _slices(step.tiles, outputs)
        parts = [
            multiply(weights[start:stop], matrix.T, self._k_tile(rows, stop - start, depth)) for start, stop in slices
        ]
        sums = np.concatenate(parts).T
        y = self._finish(step.name, sums, step.bias, step.tiles, (outputs,), step.relu, runs)
        return y.reshape(len(x), *self._tensors[step.output].shape[1:])

    def _k_tile(self, rows: int, columns: int, depth: int) -> int:
        if self._dataflow == "WS":
            return 0
        array = self._array
        return product_tiles(rows, columns, depth, array).k * array.dim

    def _finish(
        self,
        name: str,
        sums: Array,
        bias: Int32s,
        tiles: tuple[Tile, ...],
        shape: tuple[int, ...],
        relu: bool,
        runs: list[LayerRun],
    ) -> Int8s:
        accumulator, overflows = wrapped(sums, bias)
        multipliers = tile_values(tiles, "multiplier").reshape(shape)
        if self._array.output_scale == "shift":
            scaled = shift_right(accumulator, -np.log2(multipliers).astype(np.int64))
        else:
            scaled = rescale(accumulator, multipliers, rounding=self._rounding)
        runs.append(_report(name, scaled, overflows, relu))
        return saturate(scaled, relu=relu)

    def _add(self, step: ResidualAdd, left: Int8s, right: Int8s, runs: list[LayerRun]) -> Int8s:
        parts = [
            np.clip(round_values(x.astype(np.float32) * np.float32(factor), rounding=self._rounding), -128, 127)
            for x, factor in ((left, step.left_multiplier), (right, step.right_multiplier))
        ]
        total = parts[0] + parts[1]
        runs.append(_report(step.name, total, 0, step.relu))
        return saturate(total, relu=step.relu)


def _rearranged(step: Rearrange, x: Int8s) -> Int8s:
    if step.index is None:
        return x
    moved = np.where(step.index < 0, np.int8(0), x.reshape(len(x), -1)[:, step.index])
    return np.asarray(moved, np.int8)


def _report(name: str, results: NDArray[np.float32], overflows: int, relu: bool) -> LayerRun:
    saturated = int(np.count_nonzero(results > 127))
    if not relu:
        saturated += int(np.count_nonzero(results < -128))
    return LayerRun(name, results.size, overflows, saturated)


def _slices(tiles: tuple[Tile, ...], group: int) -> list[tuple[int, int]]:
    """(start, stop) of the output channels of each tile within each group of `group` channels."""
    edges = {0, *(tile.stop for tile in tiles), *range(group, tiles[-1].stop + 1, group)}
    ordered = sorted(edges)
    return list(itertools.pairwise(ordered))
