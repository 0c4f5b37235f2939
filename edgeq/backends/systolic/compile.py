"""From a prepared model with its ranges to the integer program that loses least."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.backends.systolic.array import ArrayConfig
from edgeq.backends.systolic.bias import channel_means, correct_biases, corrected_layers
from edgeq.backends.systolic.build import build_network
from edgeq.backends.systolic.lower import lower
from edgeq.backends.systolic.order import sort_channels
from edgeq.backends.systolic.program import Program
from edgeq.backends.systolic.scales import activation_scales
from edgeq.backends.systolic.simulate import Array, Simulator
from edgeq.calibrate.ranges import Range
from edgeq.data.samples import Samples
from edgeq.graph.edit import with_outputs
from edgeq.graph.index import GraphIndex
from edgeq.model.prepare import PreparedModel
from edgeq.model.session import open_in_memory
from edgeq.scheme import Scheme

SAMPLES = 32
"""Samples that biases are corrected on."""
_JUDGED = 8
_MEMORY = 2**29
# Decibels of the outputs that depthwise layers on the array have to cost before they leave it.
_WORTH_LEAVING = 3.0
# Above this, what leaving the array could gain is not worth its time.
_GOOD_ENOUGH = 12.0


@dataclass(frozen=True)
class Reference:
    """What the float model gives on some samples.

    Attributes:
        inputs: [N, ...] by name.
        outputs: [N, ...] by name, of float32 outputs.
        means: float64 [channels] by tensor.
    """

    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    means: Mapping[str, NDArray[np.float64]]


def compile_program(
    prepared: PreparedModel,
    ranges: Mapping[str, Range],
    scheme: Scheme,
    array: ArrayConfig,
    samples: Samples | None = None,
) -> Program:
    """Quantize a prepared model for an array.

    Channels are sorted by range, so that each tile of output channels has a scale that suits it. With samples, biases
    are corrected, and where depthwise layers lose too much with the array's one scale a tile, they run on the core with
    one scale a channel.

    Raises:
        CalibrationError: a range is missing.
        ModelError: sizes are not fixed beforehand.
    """
    network = build_network(
        prepared.model,
        prepared.source,
        exclude=scheme.exclude,
        op_types=scheme.quantized_types,
        hazards=prepared.hazards,
    )
    network, channels = sort_channels(network, array.dim)
    scales = activation_scales(network, ranges, powers_of_two=array.output_scale == "shift")
    name = prepared.source.stem
    plain = lower(name, network, scales, array, channels=channels)
    if samples is None:
        return plain
    reference = observe(prepared.model, plain, samples)
    corrected = correct_biases(plain, reference.inputs, reference.means)
    if not any(getattr(layer, "depthwise", False) for layer in network.layers):
        return corrected
    quality = _sqnr_db(corrected, reference)
    if quality >= _GOOD_ENOUGH:
        return corrected
    off = lower(name, network, scales, array, channels=channels, depthwise_tile=1)
    off = correct_biases(off, reference.inputs, reference.means)
    return off if _sqnr_db(off, reference) >= quality + _WORTH_LEAVING else corrected


def observe(model: ir.Model, program: Program, samples: Samples) -> Reference:
    """Run the float model on samples spread over all of them (files are sorted, by class as often as not), as many as
    fit into memory."""
    size = 4 * sum(math.prod(t.shape) for t in program.tensors.values() if t.dtype == "int8")
    count = max(min(SAMPLES, _MEMORY // max(size, 1)), 1)
    outputs = GraphIndex(model).outputs
    made = {value.name for node in model.graph for value in node.outputs}
    names = {name: axis for name, axis in corrected_layers(program).items() if name in made}
    observed = with_outputs(model, names)
    session = open_in_memory(observed)
    taken: list[Mapping[str, Array]] = []
    sums: dict[str, list[Array]] = {name: [] for name in names}
    results: dict[str, list[Array]] = {name: [] for name in outputs}
    apart = max(len(samples) // count, 1)
    for sample in itertools.islice(samples, 0, apart * count, apart):
        feed = {name: np.asarray(sample.inputs[name]) for name in program.inputs}
        if any(len(value) != 1 for value in feed.values()):
            feed = {name: value[:1] for name, value in feed.items()}
        taken.append(feed)
        fetched = dict(zip([*outputs, *names], session.run([*outputs, *names], feed), strict=True))
        for name in names:
            sums[name].append(channel_means(fetched[name], names[name]))
        for name in outputs:
            results[name].append(np.atleast_1d(fetched[name]))
    return Reference(
        {name: np.concatenate([feed[name] for feed in taken]) for name in program.inputs},
        {name: np.concatenate(parts) for name, parts in results.items() if parts[0].dtype == np.float32},
        {name: np.asarray(np.mean(parts, axis=0), np.float64) for name, parts in sums.items()},
    )


def _sqnr_db(program: Program, reference: Reference) -> float:
    """Signal to quantization noise of the outputs, over all of them."""
    inputs = {name: value[:_JUDGED] for name, value in reference.inputs.items()}
    found = Simulator(program).run(inputs).tensors
    signal = noise = 0.0
    for name, wanted in reference.outputs.items():
        # A tensor without the batch in front has several rows a sample.
        exact = wanted[: len(found[name])].astype(np.float64)
        signal += float((exact**2).sum())
        noise += float(((found[name] - exact) ** 2).sum())
    return 10 * math.log10(signal / noise) if noise and signal else math.inf
