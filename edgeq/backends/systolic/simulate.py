"""Run a program with the array's own integers, bit by bit. Time is not modelled; see `estimate`.

The arithmetic of single steps is in `arithmetic`. On request, the simulator models the output-stationary array, whose
partial sums leave the array with 20 bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeq.backends.systolic import program as steps
from edgeq.backends.systolic.arithmetic import (
    Rounding,
    convolve,
    exact_type,
    largest_in_windows,
    multiply,
    rescale,
    round_values,
    saturate,
    shift_right,
    sum_windows,
    wrapped,
)
from edgeq.backends.systolic.array import Dataflow, product_tiles
from edgeq.backends.systolic.program import Array, Int8s, Program, Step, Weighted, step_inputs, step_outputs
from edgeq.errors import DataError
from edgeq.run.session import SessionSettings, open_session

Values = Array | list[Array]
"""The samples of a tensor: an array with the samples along its first axis. If the first axis is not the batch, a list
with one array for each sample.
"""

# Large enough for fast products, small enough for the memory of large images.
_BATCH = 32


@dataclass(frozen=True)
class LayerRun:
    """Record how often a step that accumulates or adds overflowed and saturated, over all samples.

    Attributes:
        values: number of results before pooling.
        overflows: number of accumulators that left the int32 range and wrapped.
        saturated: number of results that were cut to -128 or 127.
    """

    name: str
    values: int = 0
    overflows: int = 0
    saturated: int = 0

    @property
    def saturation(self) -> float:
        """Return the share of results that were cut; 0 if there are no results."""
        return self.saturated / self.values if self.values else 0.0


Runs = dict[str, LayerRun]


@dataclass(frozen=True)
class ProgramRun:
    """Record the results of a program's run.

    Attributes:
        tensors: the kept tensors by name, with samples along the first axis.
        layers: records of the steps, in the order of the program.
    """

    tensors: Mapping[str, Array]
    layers: tuple[LayerRun, ...]


class Simulator:
    """Run a prepared program. The sessions of its float steps stay open.

    Args:
        rounding: "even", as in the hardware, or "header", as in the macro of gemmini.h that its CPU mode uses.
        dataflow: "OS" cuts each partial sum to 20 bits.
        keep_sums: whether to keep the sums of the last convolution, so that it can run again with another bias.
    """

    def __init__(
        self, program: Program, *, rounding: Rounding = "even", dataflow: Dataflow = "WS", keep_sums: bool = False
    ) -> None:
        self.program = program
        self._tensors, self._array = program.tensors, program.array
        self._rounding, self._dataflow = rounding, dataflow
        self._keep_sums = keep_sums
        self._sums: tuple[Array, Array, Array] | None = None
        self._sessions = {
            # One thread: with several, float sums could change their order between runs.
            step.name: open_session(step.model, SessionSettings(intra_op_threads=1))
            for step in program.steps
            if isinstance(step, steps.Float)
        }
        # Tensors are dropped after their last reader, so memory holds only what is still needed.
        self._last_use = {name: number for number, step in enumerate(program.steps) for name in step_inputs(step)}
        self._last_use |= dict.fromkeys(program.outputs, len(program.steps))

    def run(self, inputs: Mapping[str, Array], *, keep: Sequence[str] | None = None, batch: int = _BATCH) -> ProgramRun:
        """Run samples [N, ...]. For a model input without axes, pass an array [N].

        Args:
            keep: names of tensors to return; None returns the program's outputs, and a list with "*" returns all
                tensors.
            batch: number of samples that run at a time.

        Raises:
            DataError: an input is missing or does not have the model's shape or type.
        """
        count = self._check(inputs)
        named = self.program.outputs if keep is None else self._tensors if "*" in keep else keep
        parts: dict[str, list[Array]] = {name: [] for name in named}
        runs: Runs = {}
        for start in range(0, count, batch):
            values = self._values({name: inputs[name][start : start + batch] for name in self.program.inputs})
            for number, step in enumerate(self.program.steps):
                self._run(number, step, values, runs, parts)
            for name, part in parts.items():
                samples = values[name]
                # A value without axes has no batch axis, so it is represented by a list with one value for each sample.
                part += map(np.atleast_1d, samples) if isinstance(samples, list) else [samples]
        return ProgramRun({name: np.concatenate(part) for name, part in parts.items()}, tuple(runs.values()))

    def walk(self, inputs: Mapping[str, Array], change: Callable[[Weighted, Array], Weighted]) -> tuple[Step, ...]:
        """Run all samples at once. Replace each Conv and Fc before it runs.

        Args:
            change: a function that returns the step to run, given the program's step and its input.

        Returns:
            The steps that ran.
        """
        self._check(inputs)
        values = self._values(inputs)
        ran: list[Step] = []
        for number, step in enumerate(self.program.steps):
            if isinstance(step, Weighted):
                step = change(step, np.asarray(values[step.input]))
            ran.append(step)
            self._run(number, step, values, {}, ())
        return tuple(ran)

    def compute(self, step: Step, inputs: list[Array], runs: Runs | None = None) -> Array:
        """Return the output of an integer step.

        Args:
            inputs: the step's inputs, each [N, ...].
            runs: dictionary that receives a record under the step's name if the step accumulates or adds.
        """
        runs = {} if runs is None else runs
        x = inputs[0]
        output = self._tensors[step_outputs(step)[0]]
        match step:
            case steps.Quantize():
                return output.params.quantize(x)
            case steps.Dequantize():
                return self._tensors[step.input].params.dequantize(x)
            case steps.Conv():
                return self._conv(step, x, runs)
            case steps.Fc():
                return self._fc(step, x, runs)
            case steps.ResidualAdd():
                return self._add(step, x, inputs[1], runs)
            case steps.MaxPool():
                return largest_in_windows(x, step.kernel, step.strides, step.dilations, step.pads, output.shape[2:])
            case steps.AveragePool():
                sums = sum_windows(x, step.kernel, step.strides, step.pads, output.shape[2:])
                return saturate(rescale(sums, np.float32(step.multiplier)))
            case steps.Clamp():
                return np.clip(x, np.int8(step.low), np.int8(step.high))
            case steps.Concat():
                return np.concatenate(inputs, axis=step.axis)
            case steps.Rearrange():
                if step.index is not None:
                    x = np.where(step.index < 0, np.int8(0), x.reshape(len(x), -1)[:, step.index])
                return x.reshape(len(x), *output.shape[1:])
        raise TypeError(f"{type(step).__name__} is not an integer step")

    def _run(self, number: int, step: Step, values: dict[str, Values], runs: Runs, keep: Collection[str]) -> None:
        """Run a step and add its outputs to `values`. Drop values that no later step reads."""
        if isinstance(step, steps.Float):
            values.update(self._float(step, values))
        else:
            inputs = [np.asarray(values[name]) for name in step_inputs(step)]
            values[step_outputs(step)[0]] = self.compute(step, inputs, runs)
        for name in step_inputs(step):
            if self._last_use[name] == number and name not in keep:
                values.pop(name, None)

    def _values(self, inputs: Mapping[str, Array]) -> dict[str, Values]:
        """Return samples in the form that steps read: one array, or a list if the model's input has no axis for
        samples.
        """
        shapes = {name: self._tensors[name].shape for name in inputs}
        return {name: value if shapes[name] else [np.asarray(v) for v in value] for name, value in inputs.items()}

    def _check(self, inputs: Mapping[str, Array]) -> int:
        """Check the inputs and return the number of samples."""
        counts = set()
        for name in self.program.inputs:
            tensor = self._tensors[name]
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
            raise DataError("the inputs have no samples, or different numbers of them", "Give the same number for each")
        return counts.pop()

    def _float(self, step: steps.Float, values: Mapping[str, Values]) -> dict[str, Values]:
        """Run a float part sample by sample, because its constants may depend on batch 1."""
        session = self._sessions[step.name]
        # A part without inputs reads only constants.
        count = len(values[step.inputs[0]] if step.inputs else next(iter(values.values())))
        rows = [
            session.run(list(step.outputs), {name: _sample(values[name], i) for name in step.inputs})
            for i in range(count)
        ]
        outputs = {name: [row[place] for row in rows] for place, name in enumerate(step.outputs)}
        return {
            name: np.concatenate(samples) if self._tensors[name].shape[:1] == (1,) else samples
            for name, samples in outputs.items()
        }

    def _conv(self, step: steps.Conv, x: Int8s, runs: Runs) -> Int8s:
        # If a step runs again and only its bias has changed, its sums are the same.
        if self._sums is not None and self._sums[0] is x and self._sums[1] is step.weights:
            sums = self._sums[2]
        else:
            sums = self._convolved(step, x)
            self._sums = (x, step.weights, sums) if self._keep_sums else None
        y = self._finish(step, sums, (-1, 1, 1), runs)
        if step.pool is None:
            return y
        # The hardware pads a fused pooling with 0, not with the lowest value.
        p = step.pool
        size = self._tensors[step.output].shape[2:]
        return largest_in_windows(
            y, (p.size, p.size), (p.stride, p.stride), (1, 1), (p.padding,) * 4, size, fill=0 if p.padding else -128
        )

    def _convolved(self, step: steps.Conv, x: Int8s) -> Array:
        """Return the sums of a convolution.

        An output-stationary array computes a separate product for each group of channels and each tile with its own
        scale.
        """
        # Weight-stationary sums stay in the 32-bit accumulator, so tiles do not change them.
        if self._dataflow == "WS":
            return convolve(x, step.weights, step.groups, step.strides, step.dilations, step.pads)
        depth = step.weights.shape[1]
        parts = []
        for start, stop in _slices(step.tiles, len(step.bias) // step.groups):
            group = start * step.groups // len(step.bias)
            group_input, weights = x[:, group * depth : (group + 1) * depth], step.weights[start:stop]
            k_tile = self._k_tile(step.conv_shape[2] * step.conv_shape[3], stop - start, weights[0].size)
            parts.append(convolve(group_input, weights, 1, step.strides, step.dilations, step.pads, k_tile=k_tile))
        return np.concatenate(parts, axis=1)

    def _fc(self, step: steps.Fc, x: Int8s, runs: Runs) -> Int8s:
        outputs, depth = step.weights.shape
        kind = exact_type(step.weights)
        matrix = x.reshape(-1, depth).astype(kind)
        weights, rows = step.weights.astype(kind), len(matrix) // len(x)
        slices = [(0, outputs)] if self._dataflow == "WS" else _slices(step.tiles, outputs)
        parts = [
            multiply(weights[start:stop], matrix.T, self._k_tile(rows, stop - start, depth)) for start, stop in slices
        ]
        y = self._finish(step, np.concatenate(parts).T, (-1,), runs)
        return y.reshape(len(x), *self._tensors[step.output].shape[1:])

    def _k_tile(self, rows: int, columns: int, depth: int) -> int:
        if self._dataflow == "WS":
            return 0
        return product_tiles(rows, columns, depth, self._array).k * self._array.dim

    def _finish(self, step: Weighted, sums: Array, shape: tuple[int, ...], runs: Runs) -> Int8s:
        """Add the bias to sums, then rescale and saturate them.

        Args:
            shape: the shape to which biases and multipliers [outputs] are reshaped, so that they broadcast.
        """
        accumulator, overflows = wrapped(sums, step.bias.reshape(shape))
        multipliers = steps.tile_values(step.tiles, "multiplier").reshape(shape)
        if self._array.output_scale == "shift":
            scaled = shift_right(accumulator, -np.log2(multipliers).astype(np.int64))
        else:
            scaled = rescale(accumulator, multipliers, rounding=self._rounding)
        return self._saturated(step, scaled, overflows, runs)

    def _add(self, step: steps.ResidualAdd, lhs: Int8s, rhs: Int8s, runs: Runs) -> Int8s:
        parts = [
            np.clip(round_values(x.astype(np.float32) * np.float32(factor), rounding=self._rounding), -128, 127)
            for x, factor in ((lhs, step.left_multiplier), (rhs, step.right_multiplier))
        ]
        return self._saturated(step, parts[0] + parts[1], 0, runs)

    def _saturated(
        self, step: steps.Conv | steps.Fc | steps.ResidualAdd, results: NDArray[np.float32], overflows: int, runs: Runs
    ) -> Int8s:
        """Saturate results, and count in `runs` how many of them were cut."""
        cut = int(np.count_nonzero(results > 127))
        if not step.relu:
            cut += int(np.count_nonzero(results < -128))
        record = runs.get(step.name, LayerRun(step.name))
        counts = record.values + results.size, record.overflows + overflows, record.saturated + cut
        runs[step.name] = LayerRun(step.name, *counts)
        return saturate(results, relu=step.relu)


def simulate(
    program: Program,
    inputs: Mapping[str, Array],
    *,
    keep: Sequence[str] | None = None,
    rounding: Rounding = "even",
    dataflow: Dataflow = "WS",
) -> ProgramRun:
    """Run `program` on samples [N, ...]. See `Simulator.run`. To run the same program often, use a `Simulator`.

    Args:
        rounding: "even", as in the hardware, or "header", as in the macro of gemmini.h that its CPU mode uses.
        dataflow: "OS" cuts each partial sum to 20 bits.
    """
    return Simulator(program, rounding=rounding, dataflow=dataflow).run(inputs, keep=keep)


def _sample(values: Values, place: int) -> Array:
    return values[place] if isinstance(values, list) else values[place : place + 1]


def _slices(tiles: tuple[steps.Tile, ...], group: int) -> list[tuple[int, int]]:
    """Return (start, stop) for each part of a tile that is within one group of `group` channels."""
    edges = {0, *(tile.stop for tile in tiles), *range(group, tiles[-1].stop + 1, group)}
    return list(itertools.pairwise(sorted(edges)))
