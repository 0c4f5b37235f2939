"""Compile a prepared model for an array: make the integer program and the files that go with it.

edgeq first lowers the program without samples, and then fits it to samples (`fit`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from edgeq.backends.base import (
    FREE_SCALES,
    Artifact,
    Backend,
    DeviceSimulator,
    check_names,
    refuse_wide,
    require_fields,
)
from edgeq.backends.systolic.array import ArrayConfig, array_config
from edgeq.backends.systolic.build import build_network
from edgeq.backends.systolic.channels import sort_channels
from edgeq.backends.systolic.dialect import write_dialect
from edgeq.backends.systolic.emit_c.folder import with_c
from edgeq.backends.systolic.estimate import coverage, place
from edgeq.backends.systolic.fit import fit_program, observe
from edgeq.backends.systolic.idle_weights import without_idle_weights
from edgeq.backends.systolic.lower import lower
from edgeq.backends.systolic.offsets import with_offsets
from edgeq.backends.systolic.program import Program, Weighted
from edgeq.backends.systolic.save import belongs_to_program, save_program
from edgeq.backends.systolic.scales import activation_scales
from edgeq.backends.systolic.session import simulated_array
from edgeq.backends.systolic.to_onnx import host_reference_model, in_origin_order
from edgeq.calibration.ranges import Range
from edgeq.data.samples import Samples
from edgeq.errors import ModelError
from edgeq.hardware.target import Target
from edgeq.model.load import save_model
from edgeq.model.macs import node_macs
from edgeq.model.prepare import PreparedModel
from edgeq.scheme import Scheme

# Minimum gain, in decibels, for which depthwise layers move from the array to the core.
_WORTH_LEAVING = 3.0

# If the SQNR is at least this many decibels, edgeq does not try depthwise layers on the core, because the gain would
# not be worth the time.
_GOOD_ENOUGH = 12.0


def compile_program(
    prepared: PreparedModel,
    ranges: Mapping[str, Range],
    scheme: Scheme,
    array: ArrayConfig,
    samples: Samples | None = None,
) -> Program:
    """Quantize a prepared model for an array.

    Channels are sorted by range, so that the scale of each tile suits all its channels. With `samples`, edgeq also
    tries to round weights for the least error of each layer and to correct biases. It keeps a change if it brings the
    outputs closer to the float model's. If depthwise layers lose too much because the array has one scale for each
    tile, they run on the core with one scale for each channel.

    Raises:
        CalibrationError: a range is missing.
        ModelError: an input's size is not fixed.
    """
    network = build_network(
        prepared.model,
        prepared.source,
        exclude=scheme.excluded,
        op_types=scheme.quantized_types,
        hazards=prepared.hazards,
    )
    shift = array.output_scale == "shift"
    scales = activation_scales(network, ranges, powers_of_two=shift)
    # Idle weights go first, because they would widen the range of a tile. Offsets change scales of tensors, which the
    # tiles' multipliers depend on.
    network, scales = with_offsets(without_idle_weights(network, scales), scales, ranges, powers_of_two=shift)
    network = sort_channels(network, array.dim)
    name = prepared.source.stem
    on_array = lower(name, network, scales, array)
    if samples is None:
        return on_array
    reference = observe(prepared.model, on_array, samples, network.shifted)
    best = fit_program(on_array, network, reference)
    if not any(getattr(layer, "depthwise", False) for layer in network.layers) or best.sqnr_db >= _GOOD_ENOUGH:
        return best.program
    # Tried only if the array loses much accuracy, because it takes another lowering and another fit.
    on_core = lower(name, network, scales, array, depthwise_tile=1)
    off = fit_program(on_core, network, reference)
    return (off if off.sqnr_db >= best.sqnr_db + _WORTH_LEAVING else best).program


# What the array's multipliers can express.
_FIELDS: Mapping[str, Any] = {
    "mode": "static",
    "activation_type": "int8",
    "weight_type": "int8",
    "activation_symmetric": True,
    "weight_symmetric": True,
    "per_channel": False,
    "reduce_range": False,
    **FREE_SCALES,
}

_NEEDS = "The array needs static, symmetric int8 with one scale for each tensor. Leave the scheme to the target"


class SystolicBackend(Backend):
    """Build integer programs for systolic arrays.

    Args:
        table: a target's [systolic] table; an empty table means the defaults of Gemmini's generator.
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
        """Return this backend configured for one target's array."""
        del observed, cut
        return SystolicBackend(target.systolic)

    def check(self, scheme: Scheme) -> None:
        """Refuse a scheme that the array does not support. See `Backend.check`."""
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
        """Write the reference model to `destination`, and the files for the array next to it. See `Backend.build`.

        Args:
            samples: calibration samples, for rounding weights and correcting biases; None leaves both out.
        """
        self.check(scheme)
        check_names(prepared, scheme.exclude)
        program = compile_program(prepared, ranges, scheme, array_config(self._table), samples)
        # Pooling and clamps alone run on the core, where int8 gains nothing.
        if not any(isinstance(step, Weighted) for step in program.steps):
            raise ModelError(
                f"{prepared.source}: no layer of it runs on the array",
                "Deploy the float model, exclude fewer nodes, or leave this target out",
            )
        macs = node_macs(prepared.model)
        notes = [place(program, macs).sentence(), *program.notes]
        program = replace(program, notes=tuple(notes))
        # The reference model is for comparison with the float model, tensor by tensor, so it has the float model's
        # order.
        save_model(host_reference_model(in_origin_order(program), prepared.signature), destination)
        files = {f"{destination.stem}.program.npz": destination.with_name(f"{destination.stem}.program.npz")}
        save_program(program, next(iter(files.values())))
        dialect = destination.with_name(f"{destination.stem}.dialect.onnx")
        problem = write_dialect(program, prepared.signature, dialect)
        # The program and the simulator do not need the dialect file, so a model that it cannot express is still built.
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
        """Return `artifact` with the C code of its program. See `Backend.with_companions`."""
        return with_c(artifact, samples, folder, count=count)

    def owns(self, place: Path) -> bool:
        """Return whether `place` is a program, or a model next to its program. See `Backend.owns`."""
        return belongs_to_program(place)

    def simulator(self) -> DeviceSimulator:
        """Return the simulator, which runs programs in the array's arithmetic, bit by bit."""
        return simulated_array
