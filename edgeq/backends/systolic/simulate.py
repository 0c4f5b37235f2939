"""Run a program with the array's own integers, bit by bit. Time is not modelled; see `estimate`.

The simulator models int8 operands, int32 accumulators that wrap, and the float32 multiplier, whose product is rounded
once. The rounding is half to even or, on request, that of the header's macro. The simulator also models saturation,
relu, and max pooling of the results. On request, it models the output-stationary array, whose partial sums leave the
array with 20 bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgeq.backends.systolic import program as steps
from edgeq.backends.systolic.array import Dataflow, product_tiles
from edgeq.backends.systolic.program import Array, Int8s, Pair, Program, Step, Weighted, step_inputs, step_outputs
from edgeq.errors import DataError
from edgeq.run.session import SessionSettings, open_session

_FLOAT32_EXACT = 2**24
_LARGEST_INPUT = 128
PARTIAL_BITS = 20
"""Bits of a partial sum that leaves an output-stationary array."""


def exact_type(weights: Int8s) -> type[np.floating[Any]]:
    """Return the narrowest float type that represents every partial sum of int8 inputs times `weights` [O, ...]
    exactly.
    """
    sums = np.abs(weights.reshape(len(weights), -1).astype(np.int64)).sum(axis=1)
    return np.float32 if int(sums.max(initial=0)) * _LARGEST_INPUT < _FLOAT32_EXACT else np.float64


def convolve(
    x: Int8s, weights: Int8s, groups: int, strides: Pair, dilations: Pair, pads: steps.Pads, *, k_tile: int = 0
) -> NDArray[Any]:
    """Return the exact sums Σ a·w of a convolution, as a float array [N, O, rows, columns].

    Args:
        x: int8 [N, I, H, W].
        weights: int8 [O, I / groups, kh, kw].
        k_tile: number of products after which a partial sum is cut to 20 bits; 0 means no cutting. Products are added
            in the order kh, kw, channel.
    """
    kind = exact_type(weights)
    padded = np.pad(x, ((0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3]))).astype(kind)
    outputs, depth, kh, kw = weights.shape
    rows, columns = (
        (size - (k - 1) * dilation - 1) // stride + 1
        for size, k, stride, dilation in zip(padded.shape[2:], (kh, kw), strides, dilations, strict=True)
    )
    spans = _spans((kh, kw), strides, dilations, (rows, columns))
    if depth == 1 and groups == outputs == x.shape[1] and not k_tile:
        total = np.zeros((len(x), outputs, rows, columns), kind)
        for i, j, vertical, horizontal in spans:
            total += padded[:, :, vertical, horizontal] * weights[:, 0, i, j].astype(kind)[:, None, None]
        return total
    # Multiply once for all samples. With one product for each sample, BLAS would start its threads each time.
    channels_first = padded.transpose(1, 0, 2, 3)
    patches = np.empty((kh * kw, x.shape[1], len(x), rows, columns), kind)
    for tap, (_, _, vertical, horizontal) in enumerate(spans):
        patches[tap] = channels_first[:, :, vertical, horizontal]
    share = outputs // groups
    sums = np.empty((outputs, len(x), rows, columns), kind)
    for group in range(groups):
        group_patches = patches[:, group * depth : (group + 1) * depth]
        taps = weights[group * share : (group + 1) * share].transpose(0, 2, 3, 1).reshape(share, -1).astype(kind)
        product = multiply(taps, group_patches.reshape(kh * kw * depth, -1), k_tile)
        sums[group * share : (group + 1) * share] = product.reshape(share, len(x), rows, columns)
    return sums.transpose(1, 0, 2, 3)


def multiply(lhs: NDArray[Any], rhs: NDArray[Any], k_tile: int = 0) -> NDArray[Any]:
    """Return left [M, K] @ right [..., K, P]. With `k_tile`, cut each partial sum of `k_tile` products to 20 bits."""
    if not k_tile:
        return np.asarray(lhs @ rhs)
    limit = 2 ** (PARTIAL_BITS - 1) - 1
    parts = (
        np.clip(lhs[:, start : start + k_tile] @ rhs[..., start : start + k_tile, :], -limit - 1, limit)
        for start in range(0, lhs.shape[1], k_tile)
    )
    return np.asarray(sum(parts))


def wrapped(sums: NDArray[Any], bias: steps.Int32s) -> tuple[steps.Int32s, int]:
    """Add the bias to exact sums, and wrap the results like the int32 accumulator. The bias broadcasts.

    Returns:
        The accumulators, and the number of accumulators that wrapped.
    """
    if sums.dtype == np.float32:
        # float32 sums are below 2^24 in magnitude, so only a large bias can push the result out of the int32 range.
        largest = int(np.abs(bias.astype(np.int64)).max(initial=0)) + _FLOAT32_EXACT
        if largest < 2**31:
            accumulator = sums.astype(np.int32)
            accumulator += bias
            return accumulator, 0
    wide = sums.astype(np.int64) + bias
    accumulator = wide.astype(np.int32)
    return accumulator, int(np.count_nonzero(accumulator != wide))


def largest_in_windows(
    x: Int8s, kernel: Pair, strides: Pair, dilations: Pair, pads: steps.Pads, size: Sequence[int], *, fill: int = -128
) -> Int8s:
    """Return the max pooling of `x`.

    Args:
        size: rows and columns of the output.
        fill: the value of the padding.
    """
    padded = np.pad(x, ((0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3])), constant_values=fill)
    best: Int8s | None = None
    for _, _, vertical, horizontal in _spans(kernel, strides, dilations, (size[0], size[1])):
        window = padded[:, :, vertical, horizontal]
        best = window.copy() if best is None else np.maximum(best, window, out=best)
    assert best is not None
    return best


def sum_windows(x: Int8s, kernel: Pair, strides: Pair, pads: steps.Pads, size: Sequence[int]) -> steps.Int32s:
    """Return the sums over windows of the zero-padded input."""
    padded = np.pad(x, ((0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3]))).astype(np.int32)
    if kernel == padded.shape[2:]:
        return np.asarray(padded.sum(axis=(2, 3), keepdims=True, dtype=np.int32), np.int32)
    total = np.zeros((*x.shape[:2], *size), np.int32)
    for _, _, vertical, horizontal in _spans(kernel, strides, (1, 1), (size[0], size[1])):
        total += padded[:, :, vertical, horizontal]
    return total


def _spans(kernel: Pair, strides: Pair, dilations: Pair, size: Pair) -> list[tuple[int, int, slice, slice]]:
    """Return (row tap, column tap, the rows that it reads, the columns that it reads) for every tap of the kernel."""

    def span(tap: int, axis: int) -> slice:
        """Return the input positions that one kernel tap reads along one axis (0: rows, 1: columns)."""
        start = tap * dilations[axis]
        return slice(start, start + (size[axis] - 1) * strides[axis] + 1, strides[axis])

    return [(i, j, span(i, 0), span(j, 1)) for i in range(kernel[0]) for j in range(kernel[1])]


Rounding = Literal["even", "header"]
"""How products with a float32 scale become integers.

- "even": round half to even, as the hardware and ONNX Runtime do.
- "header": the macro of gemmini.h, which the CPU mode and the instruction-set simulator use. It truncates v ± 1 in
  float32. That differs from "even" only for the float32 values just below a power of two.
"""

_POWERS = 7


def rescale(accumulator: NDArray[np.int32], multiplier: Any, *, rounding: Rounding = "even") -> NDArray[np.float32]:
    """Return f32(f32(accumulator) · multiplier), rounded by `rounding` and not saturated.

    Args:
        multiplier: float32; it broadcasts.
    """
    product: NDArray[np.float32] = accumulator.astype(np.float32)
    np.multiply(product, multiplier, out=product)
    return round_values(product, rounding=rounding)


def round_values(values: NDArray[np.float32], *, rounding: Rounding = "even") -> NDArray[np.float32]:
    """Return `values` rounded by `rounding`. The function may overwrite `values`."""
    if rounding == "even":
        np.rint(values, out=values)
        return values
    rounded: NDArray[np.float32] = values.copy()
    np.rint(values, out=rounded)
    # For v just below 2^k, v + 1 rounds to 2^k + 1, and negative values mirror this. From 2^7 on, both ways of rounding
    # saturate.
    for power in range(_POWERS):
        below = np.nextafter(np.float32(2**power), np.float32(0))
        for sign in (1, -1):
            rounded[values == sign * below] = sign * (2**power + 1)
    return np.asarray(rounded, np.float32)


def shift_right(accumulator: NDArray[np.int32], shifts: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return accumulators divided by 2^shifts and rounded half to even, with integer arithmetic.

    Args:
        shifts: numbers of bits, which broadcast; negative shifts multiply.
    """
    wide = accumulator.astype(np.int64) << np.maximum(-shifts, 0)
    down = np.broadcast_to(np.maximum(shifts, 0), wide.shape)
    floor = wide >> down
    remaining = wide - (floor << down)
    half = np.where(down > 0, np.int64(1) << np.maximum(down - 1, 0), np.int64(1))
    up = (remaining > half) | ((remaining == half) & (floor & 1 == 1))
    return np.asarray(floor + (up & (down > 0)), np.float32)


def saturate(values: NDArray[np.float32], *, relu: bool = False) -> NDArray[np.int8]:
    """Return sat8 of the values. With `relu`, negative values also become 0."""
    np.clip(values, 0 if relu else -128, 127, out=values)
    return values.astype(np.int8)


Values = Array | list[Array]
"""The samples of a tensor: an array with the samples along its first axis. If the first axis is not the batch, a list
with one array for each sample.
"""
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
            step.name: open_session(step.model, SessionSettings(intra_op_threads=1))
            for step in program.steps
            if isinstance(step, steps.Float)
        }
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
