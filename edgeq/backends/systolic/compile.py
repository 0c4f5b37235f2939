"""From a prepared model with its ranges to the integer program that loses least."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.backends.base import Artifact, Backend, DeviceSimulator, check_names, refuse_wide, require_fields
from edgeq.backends.systolic.build import build_network
from edgeq.backends.systolic.channels import OFFSET, Shifted, sort_channels, with_offsets, without_idle_weights
from edgeq.backends.systolic.dialect import write_dialect
from edgeq.backends.systolic.emit_c.folder import with_c
from edgeq.backends.systolic.estimate import coverage, place
from edgeq.backends.systolic.lower import lower
from edgeq.backends.systolic.network import (
    SAME_SCALE,
    AddLayer,
    ClampLayer,
    Floats,
    Network,
    integer_tensors,
    layer_inputs,
    layer_outputs,
    readers,
)
from edgeq.backends.systolic.program import ArrayConfig, Conv, Fc, Program, array_config
from edgeq.backends.systolic.reference_model import host_reference_model, in_origin_order
from edgeq.backends.systolic.save import belongs_to_program, save_program
from edgeq.backends.systolic.session import simulated_array
from edgeq.backends.systolic.simulate import Array, Simulator, channel_means, correct_biases, corrected_layers
from edgeq.backends.systolic.weights import rounded_weights
from edgeq.calibrate.ranges import Range
from edgeq.data.samples import Samples
from edgeq.errors import CalibrationError, ModelError
from edgeq.hardware.target import Target
from edgeq.model.edit import with_outputs
from edgeq.model.graph import GraphIndex
from edgeq.model.load import save_model
from edgeq.model.macs import node_macs
from edgeq.model.prepare import PreparedModel
from edgeq.model.sessions import open_in_memory
from edgeq.scheme import Scheme

LARGEST = 127
_NOTHING = 1e-8


def activation_scales(network: Network, ranges: Mapping[str, Range], *, powers_of_two: bool) -> dict[str, float]:
    """Scale by tensor, float32 values; largest magnitude / 127, or 1 where there is nothing.

    - Inputs and outputs of layers that pass integers on (pooling, clamps, concatenation, data movement) share the scale
      of those tensors that other layers read: what is clipped or pooled away does not widen the range.
    - The scale of a sum is at least that of both operands, or an operand would saturate before it is added. An operand
      in which there is nothing has that of the sum.
    - On an array that shifts, all scales are powers of two, so that their quotients are.

    Raises:
        CalibrationError: no range for a tensor.
    """
    groups = _groups(network)
    used = _used(network)
    clamps = {layer.output: max(-layer.low, layer.high) for layer in network.layers if isinstance(layer, ClampLayer)}
    scales: dict[str, float] = {}
    empty: set[str] = set()
    for members in {id(g): g for g in groups.values()}.values():
        known = [name for name in members if name in ranges]
        chosen = [name for name in known if name in used] or known
        if not chosen:
            raise CalibrationError(
                f"tensor {members[0]!r} has no calibrated range", "Calibrate this model again, with all its tensors"
            )
        bound = max(min(ranges[name].bound, clamps.get(name, math.inf)) for name in chosen)
        if bound <= _NOTHING:
            empty.update(members)
        scale = _scale(bound, powers_of_two)
        scales.update(dict.fromkeys(members, scale))
    additions = [layer for layer in network.layers if isinstance(layer, AddLayer)]
    changed = True
    while changed:
        changed = False
        for layer in additions:
            least = max((scales[name] for name in (layer.left, layer.right) if name not in empty), default=0.0)
            if scales[layer.output] < least:
                scales.update(dict.fromkeys(groups[layer.output], least))
                empty.difference_update(groups[layer.output])
                changed = True
    # The last sums first: an empty one takes the scale of the sum that reads it before its own operands do.
    widest = dict.fromkeys(empty, math.inf)
    for layer in reversed(additions):
        for name in {layer.left, layer.right} & empty:
            widest[name] = min(widest[name], scales[layer.output])
            scales.update(dict.fromkeys(groups[name], widest[name]))
    return scales


def _scale(bound: float, powers_of_two: bool) -> float:
    if bound <= _NOTHING:
        return 1.0
    if powers_of_two:
        return float(2.0 ** math.ceil(math.log2(bound / LARGEST)))
    return float(np.float32(bound / LARGEST))


def _groups(network: Network) -> dict[str, list[str]]:
    """Tensor → all tensors of its scale, itself among them; one list object a group."""
    groups: dict[str, list[str]] = {name: [name] for name in sorted(integer_tensors(network))}
    for layer in network.layers:
        if not isinstance(layer, SAME_SCALE):
            continue
        first, *others = (*layer_outputs(layer), *layer_inputs(layer))
        for other in others:
            if groups[first] is not groups[other]:
                joined = groups[first] + groups[other]
                groups.update(dict.fromkeys(joined, joined))
    return groups


def _used(network: Network) -> set[str]:
    """Tensors that something other than `SAME_SCALE` layers reads."""
    read = readers(network.layers)
    return {
        name
        for name in integer_tensors(network)
        if name in network.outputs or not read[name] or any(not isinstance(r, SAME_SCALE) for r in read[name])
    }


SAMPLES = 48
"""Samples that weights and biases are fitted to. Before, each third of them judges what the others were fitted to."""
_FOLDS = 3
# Decibels behind the best on some samples from which on the others need not be asked.
_BEHIND = 6.0
# Decibels that fitting has to gain: less may be the luck of these samples.
_WORTH_FITTING = 1.0
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
        outputs: of each sample, by name, of float32 outputs.
        channels: float64 [N, channels] by tensor: means over all but the channels.
    """

    inputs: Mapping[str, Array]
    outputs: Mapping[str, Sequence[Array]]
    channels: Mapping[str, Floats]

    @property
    def means(self) -> dict[str, Floats]:
        """Return the mean of each channel over all samples: float64 [channels] by tensor."""
        return {name: rows.mean(axis=0) for name, rows in self.channels.items()}

    def folds(self) -> Iterator[tuple[Reference, Reference]]:
        """Yield samples to fit to and others to judge on; each judges once. Where there are few, all do both."""
        count = len(next(iter(self.inputs.values())))
        if count < _FOLDS:
            yield self, self
            return
        for fold in range(_FOLDS):
            held_out = np.arange(count) % _FOLDS == fold
            yield self._taken(np.flatnonzero(~held_out)), self._taken(np.flatnonzero(held_out))

    def _taken(self, places: NDArray[np.intp]) -> Reference:
        outputs = {name: [rows[place] for place in places] for name, rows in self.outputs.items()}
        inputs, channels = ({n: v[places] for n, v in part.items()} for part in (self.inputs, self.channels))
        return Reference(inputs, outputs, channels)


def compile_program(
    prepared: PreparedModel,
    ranges: Mapping[str, Range],
    scheme: Scheme,
    array: ArrayConfig,
    samples: Samples | None = None,
) -> Program:
    """Quantize a prepared model for an array.

    Channels are sorted by range, so that each tile of output channels has a scale that suits it. With samples, weights
    are rounded for the least error of each layer and biases are corrected where that brings the outputs closer, and
    where depthwise layers lose too much with the array's one scale a tile, they run on the core with one scale a
    channel.

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
    shift = array.output_scale == "shift"
    scales = activation_scales(network, ranges, powers_of_two=shift)
    shifted = with_offsets(without_idle_weights(network, scales), scales, ranges, powers_of_two=shift)
    network, channels = sort_channels(shifted.network, array.dim)
    name = prepared.source.stem
    plain = lower(name, network, shifted.scales, array, channels=channels)
    if samples is None:
        return plain
    reference = observe(prepared.model, plain, samples, shifted)
    best = _fitted(plain, network, reference)
    if not any(getattr(layer, "depthwise", False) for layer in network.layers) or best.sqnr_db >= _GOOD_ENOUGH:
        return best.program
    apart = lower(name, network, shifted.scales, array, channels=channels, depthwise_tile=1)
    off = _fitted(apart, network, reference)
    return (off if off.sqnr_db >= best.sqnr_db + _WORTH_LEAVING else best).program


class _Judged(NamedTuple):
    """A program, and the SQNR of the outputs of what was fitted like it, on samples that it was not fitted to."""

    program: Program
    sqnr_db: float


def _fitted(plain: Program, network: Network, reference: Reference) -> _Judged:
    """Return `plain` with weights rounded and biases corrected, with one of them, or as it is: what does best on each
    third of the samples, fitted to the others; then fitted to all."""
    rounded = rounded_weights(network)
    ways: tuple[Callable[[Reference], Program], ...] = (
        lambda seen: plain,
        lambda seen: correct_biases(plain, seen.inputs, seen.means, first=rounded),
        lambda seen: correct_biases(plain, seen.inputs, seen.means),
        lambda seen: correct_biases(plain, seen.inputs, {}, first=rounded),
    )
    powers = dict.fromkeys(ways, np.zeros(2))
    for fit, judge in reference.folds():
        for way in powers:
            powers[way] = powers[way] + _powers(way(fit), judge)
        best = max(powers, key=lambda way: _decibels(powers[way]))
        least = _decibels(powers[best]) - _BEHIND
        powers = {way: found for way, found in powers.items() if _decibels(found) >= least}
        if len(powers) == 1:
            break
    unchanged = powers.get(ways[0])
    if unchanged is not None and _decibels(powers[best]) < _decibels(unchanged) + _WORTH_FITTING:
        return _Judged(plain, _decibels(unchanged))
    return _Judged(best(reference), _decibels(powers[best]))


def observe(model: ir.Model, program: Program, samples: Samples, shifted: Shifted) -> Reference:
    """Run the float model on samples spread over all of them (files are sorted, by class as often as not), as many as
    fit into memory."""
    size = 4 * sum(math.prod(t.shape) for t in program.tensors.values() if t.dtype == "int8")
    count = max(min(SAMPLES, _MEMORY // max(size, 1)), 1)
    outputs = GraphIndex(model).outputs
    made = {value.name for node in model.graph for value in node.outputs}
    axes = {shifted.origins.get(name, name): axis for name, axis in corrected_layers(program).items()}
    names = {name: axis for name, axis in axes.items() if name in made}
    observed = with_outputs(model, names)
    session = open_in_memory(observed)
    taken: list[Mapping[str, Array]] = []
    sums: dict[str, list[Array]] = {name: [] for name in names}
    results: dict[str, list[Array]] = {name: [] for name in outputs}
    apart = max(len(samples) // count, 1)
    for sample in itertools.islice(samples, 0, apart * count, apart):
        feed = {name: np.asarray(sample.inputs[name]) for name in program.inputs}
        feed = {name: value[:1] if value.ndim else value for name, value in feed.items()}
        taken.append(feed)
        fetched = dict(zip([*outputs, *names], session.run([*outputs, *names], feed), strict=True))
        for name in names:
            sums[name].append(channel_means(fetched[name], names[name]))
        for name in outputs:
            results[name].append(np.atleast_1d(fetched[name]))
    channels = {name: np.asarray(parts, np.float64) for name, parts in sums.items()}
    for name, origin in shifted.origins.items():
        if origin in channels:
            channels[name] = channels[origin] - OFFSET * shifted.scales[name]
    return Reference(
        {name: np.concatenate([np.atleast_1d(feed[name]) for feed in taken]) for name in program.inputs},
        {name: parts for name, parts in results.items() if parts[0].dtype == np.float32},
        channels,
    )


def _powers(program: Program, reference: Reference) -> Floats:
    """Return the power of the float model's outputs and that of their errors, summed over all of them."""
    found = Simulator(program).run(reference.inputs).tensors
    signal = noise = 0.0
    for name, parts in reference.outputs.items():
        # A tensor without the batch in front has several rows a sample.
        exact = np.concatenate(parts).astype(np.float64)
        finite = np.isfinite(exact)
        signal += float((exact[finite] ** 2).sum())
        noise += float(((found[name][finite] - exact[finite]) ** 2).sum())
    return np.array([signal, noise])


def _decibels(powers: Floats) -> float:
    signal, noise = powers
    if not math.isfinite(noise):
        return -math.inf
    return 10 * math.log10(signal / noise) if noise and signal else math.inf


_FIELDS: Mapping[str, Any] = {
    "mode": "static",
    "activation_type": "int8",
    "weight_type": "int8",
    "activation_symmetric": True,
    "weight_symmetric": True,
    "per_channel": False,
    "reduce_range": False,
}
_NEEDS = "The array needs static int8, symmetric, with one scale a tensor: leave the scheme to the target"


class SystolicBackend(Backend):
    """Builds integer programs for systolic arrays.

    Args:
        table: a target's [systolic] table; empty for the generator's defaults.
    """

    name = "systolic"
    title = "a systolic array: a static int8 program, with its simulator"
    adopts_quantized = True
    targeted = True
    simulated = True
    recoverable = False
    runs_engines = False

    def __init__(self, table: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._table = table

    def configured(self, target: Target, observed: Mapping[str, Range], cut: Mapping[str, float]) -> SystolicBackend:
        """This backend for one target's array."""
        del observed, cut
        return SystolicBackend(target.systolic)

    def check(self, scheme: Scheme) -> None:
        """Refuse a scheme that the array cannot do. See `Backend.check`."""
        refuse_wide(scheme, self.title)
        array_config(self._table)
        require_fields(scheme, _FIELDS, self.name, _NEEDS)

    def build(
        self,
        prepared: PreparedModel,
        ranges: Mapping[str, Range],
        scheme: Scheme,
        destination: Path,
        *,
        samples: Samples | None = None,
    ) -> Artifact:
        """Write the reference model to `destination`, and the files for the array beside it. See `Backend.build`.

        Args:
            samples: calibration samples, for bias correction; None leaves it out.
        """
        self.check(scheme)
        check_names(prepared, scheme.exclude)
        program = compile_program(prepared, ranges, scheme, array_config(self._table), samples)
        if not any(isinstance(step, Conv | Fc) for step in program.steps):
            raise ModelError(
                f"{prepared.source}: nothing in it runs on the array",
                "Deploy the float model, exclude fewer nodes, or leave this target out",
            )
        macs = node_macs(prepared.model)
        notes = [place(program, macs).sentence(), *program.notes]
        program = replace(program, notes=tuple(notes))
        save_model(host_reference_model(in_origin_order(program), prepared.signature), destination)
        files = {f"{destination.stem}.program.npz": destination.with_name(f"{destination.stem}.program.npz")}
        save_program(program, next(iter(files.values())))
        dialect = destination.with_name(f"{destination.stem}.dialect.onnx")
        problem = write_dialect(program, prepared.signature, dialect)
        if problem:
            notes.append(f"no file for onnxruntime-riscv: {problem}")
        else:
            files[dialect.name] = dialect
        return Artifact(
            model=destination,
            scheme=scheme,
            provider="CPUExecutionProvider",
            session_options=scheme.session_options,
            notes=tuple(notes),
            files=files,
            coverage=coverage(program, macs),
        )

    def with_companions(self, artifact: Artifact, samples: Samples, folder: Path, *, count: int) -> Artifact:
        """Return `artifact` with the C of its program. See `Backend.with_companions`."""
        return with_c(artifact, samples, folder, count=count)

    def owns(self, place: Path) -> bool:
        """Return whether `place` is a program, or a model beside one. See `Backend.owns`."""
        return belongs_to_program(place)

    def simulator(self) -> DeviceSimulator:
        """Return what runs programs in the array's arithmetic, bit by bit."""
        return simulated_array
