"""Bias correction: each layer's mean error, channel by channel, is subtracted where it arises.

Rounding weights and clipping activations shift the mean of what a layer gives, and the shifts add up. The program runs
once over some samples; at each layer, fed by the corrected layers before it, the mean difference from the float model
goes into the int32 bias (Nagel et al. 2019, "Data-Free Quantization Through Weight Equalization and Bias Correction",
section 4.2, with data instead of their assumptions). With y the float output behind the activation, z the integer one
and p the share of z that is not cut, the shift is one Newton step, (mean y - mean z) / p. Channels that are nearly
always cut are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgeq.backends.systolic.program import Conv, Fc, Program, Tensor, tile_values
from edgeq.backends.systolic.simulate import Array, Simulator
from edgeq.backends.systolic.weights import Change

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
