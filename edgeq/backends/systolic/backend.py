"""The systolic backend: a prepared model to an integer program, its reference model and the array runtime's file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from edgeq.backends.base import Artifact, check_names, refuse_wide, require_fields
from edgeq.backends.systolic.array import array_config
from edgeq.backends.systolic.compile import compile_program
from edgeq.backends.systolic.dialect import write_dialect
from edgeq.backends.systolic.origin_order import in_origin_order
from edgeq.backends.systolic.placement import coverage, place
from edgeq.backends.systolic.program import Conv, Fc
from edgeq.backends.systolic.reference_model import host_reference_model
from edgeq.backends.systolic.save import save_program
from edgeq.calibrate.ranges import Range
from edgeq.data.samples import Samples
from edgeq.errors import ModelError
from edgeq.hardware.target import Target
from edgeq.model.load import save_model
from edgeq.model.macs import node_macs
from edgeq.model.prepare import PreparedModel
from edgeq.scheme import Scheme

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


class SystolicBackend:
    """Builds integer programs for systolic arrays.

    Args:
        table: a target's [systolic] table; empty for the generator's defaults.
    """

    name = "systolic"
    title = "a systolic array: a static int8 program, with its simulator"
    simulated = True
    adopts_quantized = True

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
