"""Run a program with the array's own integers, bit by bit.

What is modelled: int8 operands, int32 accumulators that wrap, the float32 multiplier with one rounding of the product,
rounding half to even (or as the header's macro does), saturation, relu and max pooling on the way out; on request the
output-stationary array, whose partial sums leave it with 20 bits. What is not: time; see `estimate`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
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
    Float,
    Int8s,
    Int32s,
    MaxPool,
    Program,
    Quantize,
    Rearrange,
    ResidualAdd,
    Step,
    Tile,
    step_inputs,
    step_outputs,
    tile_values,
)
from edgeq.backends.systolic.rounding import Rounding, rescale, round_values, saturate, shift_right
from edgeq.backends.systolic.tiling import product_tiles
from edgeq.errors import DataError
from edgeq.session import SessionSettings, open_session

Array = NDArray[Any]
_BATCH = 32


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


@dataclass(frozen=True)
class Simulation:
    """Attributes:
    tensors: the kept tensors by name, samples in front.
    layers: in the order of the program.
    """

    tensors: Mapping[str, Array]
    layers: tuple[LayerRun, ...]


class Simulator:
    """A program that is ready to run; keeps the sessions of its float steps."""

    def __init__(self, program: Program, *, rounding: Rounding = "even", dataflow: Dataflow = "WS") -> None:
        self.program = program
        self._rounding = rounding
        self._dataflow = dataflow
        self._sessions = {
            step.name: open_session(step.model, SessionSettings(intra_op_threads=1))
            for step in program.steps
            if isinstance(step, Float)
        }
        self._last_use = _last_uses(program)
        self._sums: tuple[Array, Array, Array] | None = None
        self._repeats = False

    def run(self, inputs: Mapping[str, Array], *, keep: Sequence[str] | None = None, batch: int = _BATCH) -> Simulation:
        """Run samples [N, ...].

        Args:
            keep: names of tensors to return; None returns the program's outputs, "*" among them all.
            batch: samples at a time.

        Raises:
            DataError: an input is missing or does not have the model's shape or type.
        """
        count = self._check(inputs)
        wanted = tuple(self.program.outputs if keep is None else self.program.tensors if "*" in keep else keep)
        parts: dict[str, list[Array]] = {name: [] for name in wanted}
        totals: dict[str, LayerRun] = {}
        for start in range(0, count, batch):
            chunk = {name: inputs[name][start : start + batch] for name in self.program.inputs}
            found, runs = self._run_chunk(chunk, set(wanted))
            for name in wanted:
                parts[name].append(found[name])
            for run in runs:
                before = totals.get(run.name, LayerRun(run.name, 0, 0, 0))
                totals[run.name] = LayerRun(
                    run.name,
                    before.values + run.values,
                    before.overflows + run.overflows,
                    before.saturated + run.saturated,
                )
        return Simulation({name: np.concatenate(part) for name, part in parts.items()}, tuple(totals.values()))

    def step(self, step: Step, read: list[Array]) -> Array:
        """What one step that is not in float makes of what it reads."""
        return self._integer(step, read, [])

    def walk(self, inputs: Mapping[str, Array], change: Callable[[Conv | Fc, Array], Conv | Fc]) -> tuple[Step, ...]:
        """Run all samples at once, each Conv and Fc as `change` (given the step and what it reads) makes it.

        Returns:
            The program's steps, as they were run.
        """
        self._check(inputs)
        self._repeats = True
        values: dict[str, Array] = dict(inputs)
        steps: list[Step] = []
        for number, step in enumerate(self.program.steps):
            if isinstance(step, Conv | Fc):
                step = change(step, values[step.input])
            steps.append(step)
            if isinstance(step, Float):
                values.update(self._float(step, values))
            else:
                values[step_outputs(step)[0]] = self._integer(step, [values[n] for n in step_inputs(step)], [])
            for name in step_inputs(step):
                if self._last_use[name] == number:
                    values.pop(name, None)
        self._repeats, self._sums = False, None
        return tuple(steps)

    def _check(self, inputs: Mapping[str, Array]) -> int:
        counts = set()
        for name in self.program.inputs:
            tensor = self.program.tensors[name]
            if name not in inputs:
                raise DataError(f"input {name!r} is missing", f"The program takes {', '.join(self.program.inputs)}")
            value = inputs[name]
            if value.shape[1:] != tensor.shape[1:] or value.dtype != tensor.dtype:
                raise DataError(
                    f"input {name!r} is {value.dtype} {list(value.shape)}",
                    f"It has to be {tensor.dtype} [samples, {', '.join(map(str, tensor.shape[1:]))}]",
                )
            counts.add(len(value))
        if len(counts) != 1 or not min(counts):
            raise DataError("the inputs have no or differing numbers of samples", "Give as many of each")
        return counts.pop()

    def _run_chunk(self, inputs: Mapping[str, Array], wanted: set[str]) -> tuple[dict[str, Array], list[LayerRun]]:
        values: dict[str, Array] = dict(inputs)
        runs: list[LayerRun] = []
        for number, step in enumerate(self.program.steps):
            if isinstance(step, Float):
                values.update(self._float(step, values))
            else:
                read = [values[name] for name in step_inputs(step)]
                values[step_outputs(step)[0]] = self._integer(step, read, runs)
            for name in step_inputs(step):
                if self._last_use[name] == number and name not in wanted:
                    values.pop(name, None)
        return values, runs

    def _float(self, step: Float, values: Mapping[str, Array]) -> dict[str, Array]:
        """Sample by sample: a float part may hold the batch of 1 in its constants."""
        session = self._sessions[step.name]
        count = len(values[step.inputs[0]])
        rows = [
            session.run(list(step.outputs), {name: values[name][i : i + 1] for name in step.inputs})
            for i in range(count)
        ]
        return {name: np.concatenate([row[place] for row in rows]) for place, name in enumerate(step.outputs)}

    def _integer(self, step: Step, read: list[Array], runs: list[LayerRun]) -> Array:
        tensors = self.program.tensors
        x = read[0]
        if isinstance(step, Quantize):
            return quantize(x, _scale(tensors[step.output].scale))
        if isinstance(step, Dequantize):
            return x.astype(np.float32) * np.float32(_scale(tensors[step.input].scale))
        if isinstance(step, Conv):
            return self._conv(step, x, runs)
        if isinstance(step, Fc):
            return self._fc(step, x, runs)
        if isinstance(step, ResidualAdd):
            return self._add(step, x, read[1], runs)
        size = tensors[step_outputs(step)[0]].shape[2:]
        if isinstance(step, MaxPool):
            return largest_in_windows(x, step.kernel, step.strides, step.dilations, step.pads, size)
        if isinstance(step, AveragePool):
            sums = sum_windows(x, step.kernel, step.strides, step.pads, size)
            return saturate(rescale(sums, np.float32(step.multiplier)))
        if isinstance(step, Clamp):
            return np.clip(x, np.int8(step.low), np.int8(step.high))
        if isinstance(step, Concat):
            return np.concatenate(read, axis=step.axis)
        assert isinstance(step, Rearrange)
        shape = (len(x), *tensors[step.output].shape[1:])
        if step.index is None:
            return x.reshape(shape)
        flat = x.reshape(len(x), -1)
        moved = np.where(step.index < 0, np.int8(0), flat[:, step.index])
        return np.asarray(moved.reshape(shape), np.int8)

    def _conv(self, step: Conv, x: Int8s, runs: list[LayerRun]) -> Int8s:
        outputs = len(step.bias)
        # A step that is run again with another bias has the same sums.
        if self._sums is not None and self._sums[0] is x and self._sums[1] is step.weights:
            sums = self._sums[2]
        else:
            sums = self._convolved(step, x)
            self._sums = (x, step.weights, sums) if self._repeats else None
        y = self._finish(step.name, sums, step.bias[:, None, None], step.tiles, (outputs, 1, 1), step.relu, runs)
        if step.pool is None:
            return y
        p = step.pool
        size = self.program.tensors[step.output].shape[2:]
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
        return y.reshape(len(x), *self.program.tensors[step.output].shape[1:])

    def _k_tile(self, rows: int, columns: int, depth: int) -> int:
        if self._dataflow == "WS":
            return 0
        array = self.program.array
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
        if self.program.array.output_scale == "shift":
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


def simulate(
    program: Program,
    inputs: Mapping[str, Array],
    *,
    keep: Sequence[str] | None = None,
    rounding: Rounding = "even",
    dataflow: Dataflow = "WS",
) -> Simulation:
    """Run `program` on samples [N, ...]. See `Simulator.run`; use a `Simulator` to run the same program often.

    Args:
        rounding: "even" is the hardware; "header" the C macro of gemmini.h, which its CPU mode uses.
        dataflow: "OS" cuts each partial sum to 20 bits.
    """
    return Simulator(program, rounding=rounding, dataflow=dataflow).run(inputs, keep=keep)


def quantize(x: Array, scale: float) -> Int8s:
    """sat8(rne(f32(x / scale)))."""
    return saturate(np.rint(x.astype(np.float32) / np.float32(scale)))


def _scale(scale: float | None) -> float:
    assert scale is not None
    return scale


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


def _last_uses(program: Program) -> dict[str, int]:
    last = dict.fromkeys(program.tensors, -1)
    for number, step in enumerate(program.steps):
        for name in step_inputs(step):
            last[name] = number
    for name in program.outputs:
        last[name] = len(program.steps)
    return last
