"""Run a program with the array's own integers, bit by bit. What is not modelled is time; see `estimate`.

Bias correction: each layer's mean error, channel by channel, is subtracted where it arises.

Rounding weights and clipping activations shift the mean of what a layer gives, and the shifts add up. The program runs
once over some samples; at each layer, fed by the corrected layers before it, the mean difference from the float model
goes into the int32 bias (Nagel et al. 2019, "Data-Free Quantization Through Weight Equalization and Bias Correction",
section 4.2, with data instead of their assumptions). With y the float output behind the activation, z the integer one
and p the share of z that is not cut, the shift is one Newton step, (mean y - mean z) / p. Channels that are nearly
always cut are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.backends.systolic.integer_steps import IntegerSteps, LayerRun, Rounding
from edgeq.backends.systolic.program import (
    Conv,
    Dataflow,
    Fc,
    Float,
    Program,
    Step,
    Tensor,
    step_inputs,
    step_outputs,
    tile_values,
)
from edgeq.backends.systolic.weights import Change
from edgeq.errors import DataError
from edgeq.run.session import SessionSettings, open_session

Array = NDArray[Any]
Values = Array | list[Array]
"""Samples of a tensor, one after the other in front; where the tensor has no batch there, a list of them."""
_BATCH = 32


@dataclass(frozen=True)
class Simulation:
    """What a program computed.

    Attributes:
        tensors: the kept tensors by name, samples in front.
        layers: in the order of the program.
    """

    tensors: Mapping[str, Array]
    layers: tuple[LayerRun, ...]


class Simulator:
    """A program that is ready to run; keeps the sessions of its float steps.

    Args:
        rounding: "even" is the hardware; "header" the C macro of gemmini.h, which its CPU mode uses.
        dataflow: "OS" cuts each partial sum to 20 bits.
        keep_sums: see `IntegerSteps`.

    Attributes:
        steps: runs single steps.
    """

    def __init__(
        self, program: Program, *, rounding: Rounding = "even", dataflow: Dataflow = "WS", keep_sums: bool = False
    ) -> None:
        self.program = program
        self.steps = IntegerSteps(program, rounding=rounding, dataflow=dataflow, keep_sums=keep_sums)
        self._sessions = {
            step.name: open_session(step.model, SessionSettings(intra_op_threads=1))
            for step in program.steps
            if isinstance(step, Float)
        }
        self._last_use = _last_uses(program)

    def run(self, inputs: Mapping[str, Array], *, keep: Sequence[str] | None = None, batch: int = _BATCH) -> Simulation:
        """Run samples [N, ...]; [N] of an input without axes.

        Args:
            keep: names of tensors to return; None returns the program's outputs, "*" among them all.
            batch: samples at a time.

        Raises:
            DataError: an input is missing or does not have the model's shape or type.
        """
        count = self._check(inputs)
        named = self.program.outputs if keep is None else self.program.tensors if "*" in keep else keep
        wanted = tuple(dict.fromkeys(named))
        parts: dict[str, list[Array]] = {name: [] for name in wanted}
        totals: dict[str, LayerRun] = {}
        for start in range(0, count, batch):
            values = self._values({name: inputs[name][start : start + batch] for name in self.program.inputs})
            runs: list[LayerRun] = []
            for number, step in enumerate(self.program.steps):
                self._run(number, step, values, runs, wanted)
            for name in wanted:
                found = values[name]
                # A value without axes has no batch either: one for each sample, then.
                parts[name] += map(np.atleast_1d, found) if isinstance(found, list) else [found]
            for run in runs:
                before = totals.get(run.name, LayerRun(run.name, 0, 0, 0))
                totals[run.name] = LayerRun(
                    run.name,
                    before.values + run.values,
                    before.overflows + run.overflows,
                    before.saturated + run.saturated,
                )
        return Simulation({name: np.concatenate(part) for name, part in parts.items()}, tuple(totals.values()))

    def walk(self, inputs: Mapping[str, Array], change: Callable[[Conv | Fc, Array], Conv | Fc]) -> tuple[Step, ...]:
        """Run all samples at once, each Conv and Fc as `change` (given the step and what it reads) makes it.

        Returns:
            The program's steps, as they were run.
        """
        self._check(inputs)
        values = self._values(inputs)
        steps: list[Step] = []
        for number, step in enumerate(self.program.steps):
            if isinstance(step, Conv | Fc):
                step = change(step, np.asarray(values[step.input]))
            steps.append(step)
            self._run(number, step, values, [], ())
        return tuple(steps)

    def _run(
        self, number: int, step: Step, values: dict[str, Values], runs: list[LayerRun], wanted: Sequence[str]
    ) -> None:
        """Add what a step makes to `values`, and drop what nothing reads any more."""
        if isinstance(step, Float):
            values.update(self._float(step, values))
        else:
            read = [np.asarray(values[name]) for name in step_inputs(step)]
            values[step_outputs(step)[0]] = self.steps.run(step, read, runs)
        for name in step_inputs(step):
            if self._last_use[name] == number and name not in wanted:
                values.pop(name, None)

    def _values(self, inputs: Mapping[str, Array]) -> dict[str, Values]:
        """Return samples as steps read them: a list where the model's input has no axis for them."""
        shapes = {name: self.program.tensors[name].shape for name in inputs}
        return {name: value if shapes[name] else [np.asarray(v) for v in value] for name, value in inputs.items()}

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

    def _float(self, step: Float, values: Mapping[str, Values]) -> dict[str, Values]:
        """Sample by sample: a float part may hold the batch of 1 in its constants."""
        session = self._sessions[step.name]
        # A part may read nothing but constants.
        count = len(values[step.inputs[0]] if step.inputs else next(iter(values.values())))
        rows = [
            session.run(list(step.outputs), {name: _sample(values[name], i) for name in step.inputs})
            for i in range(count)
        ]
        made = {name: [row[place] for row in rows] for place, name in enumerate(step.outputs)}
        return {
            name: np.concatenate(found) if self.program.tensors[name].shape[:1] == (1,) else found
            for name, found in made.items()
        }


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


def _sample(values: Values, place: int) -> Array:
    return values[place] if isinstance(values, list) else values[place : place + 1]


def _last_uses(program: Program) -> dict[str, int]:
    last = dict.fromkeys(program.tensors, -1)
    for number, step in enumerate(program.steps):
        for name in step_inputs(step):
            last[name] = number
    for name in program.outputs:
        last[name] = len(program.steps)
    return last


Floats = NDArray[np.float64]
_FLAT = 0.05
_LARGEST = 2.0**30


def corrected_layers(program: Program) -> dict[str, int]:
    """Tensors of the float model whose means bias correction compares with, in the order of the program, and the axis
    of their channels."""
    layers = (step for step in program.steps if isinstance(step, Conv | Fc))
    return {program.tensors[step.output].origin: _channel_axis(step) for step in layers}


def _channel_axis(step: Conv | Fc) -> int:
    """Of the output: a product may have several rows a sample in front of it."""
    return 1 if isinstance(step, Conv) else -1


def correct_biases(
    program: Program, inputs: Mapping[str, Array], means: Mapping[str, Floats], *, first: Change | None = None
) -> Program:
    """`program` with the mean errors of its layers subtracted.

    Args:
        inputs: some samples [N, ...].
        means: by name in `corrected_layers`, the float model's mean of each channel over the same samples.
        first: changes each step before its bias is corrected.
    """
    simulator = Simulator(program, keep_sums=True)

    def corrected(step: Conv | Fc, x: Array) -> Conv | Fc:
        """`step` with its bias moved by the mean error of each output channel for input `x`, in units of the sums."""
        step = first(step, x) if first is not None else step
        tensor = program.tensors[step.output]
        if tensor.origin not in means:
            return step
        y = simulator.steps.run(step, [x])
        shift = _shift(np.moveaxis(y, _channel_axis(step), 0), means[tensor.origin], tensor, relu=step.relu)
        if shift is None or len(shift) != len(step.bias):
            return step
        scale = program.tensors[step.input].scale
        assert scale is not None
        units = tile_values(step.tiles, "weight_scale").astype(np.float64) * scale
        bias = np.clip(np.rint(step.bias + shift / units), -_LARGEST, _LARGEST).astype(np.int32)
        return replace(step, bias=bias)

    return replace(program, steps=simulator.walk(inputs, corrected))


def channel_means(values: Array, axis: int) -> Floats:
    """float64 [channels]: mean over everything but the `axis` of the channels."""
    return np.asarray(np.moveaxis(values, axis, 0).reshape(values.shape[axis], -1).mean(axis=1, dtype=np.float64))


def _shift(y: Array, mean: Floats, tensor: Tensor, *, relu: bool) -> Floats | None:
    """By how much the mean of each channel of `y`, [channels, ...], is to move; None where `mean` has others."""
    if len(y) != len(mean):
        return None
    assert tensor.scale is not None
    wanted = mean if tensor.channels is None else mean[list(tensor.channels)]
    axes = tuple(range(1, y.ndim))
    found = y.astype(np.float64).mean(axis=axes) * tensor.scale
    free = ((y > (0 if relu else -128)) & (y < 127)).mean(axis=axes)
    return np.where((free > _FLAT) & np.isfinite(wanted), (wanted - found) / np.maximum(free, _FLAT), 0.0)
