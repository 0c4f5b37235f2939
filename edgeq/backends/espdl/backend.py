"""Build int8 models for ESP-DL, the runtime of Espressif's chips.

The artifact is a Q/DQ model with power-of-two scales. onnxruntime computes with it what a chip that rounds half to even
computes. The .espdl file next to it is made from it for one chip: rounding, layouts of weights and tables depend on the
chip's family. An interpreter gives the chip's integers, to the bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.backends.base import (
    Artifact,
    DeviceSimulator,
    SerialLog,
    TargetBackend,
    check_names,
    require_fields,
)
from edgeq.backends.espdl.arena import memory_of
from edgeq.backends.espdl.chips import EspChip, EspFamily, chip_named, family_named
from edgeq.backends.espdl.convert import at_batch_one, lower, lower_file
from edgeq.backends.espdl.network import EspGraph, EspTensor
from edgeq.backends.espdl.pairs import align_sums, remove_float_pairs
from edgeq.backends.espdl.project import PROJECT_FILE, EspProject
from edgeq.backends.espdl.reader import read
from edgeq.backends.espdl.schema import MAGIC
from edgeq.backends.espdl.selftest import checked_values, compare_chip, first_rows
from edgeq.backends.espdl.serial import read_serial_log
from edgeq.backends.espdl.session import opened
from edgeq.backends.espdl.wide import mark_wide_pairs, wide_share, widen_nodes
from edgeq.backends.espdl.writer import write
from edgeq.calibration.groups import share_ranges
from edgeq.calibration.ranges import Range
from edgeq.data.samples import Samples
from edgeq.errors import ModelError, UsageError
from edgeq.hardware.target import Target
from edgeq.measure.coverage import Coverage, coverage_of
from edgeq.measure.node_runs import NodeRun
from edgeq.model.int8_prediction import predict_int8
from edgeq.model.int8_rules import int8_rules
from edgeq.model.load import read_unchecked, save_model
from edgeq.model.macs import node_macs
from edgeq.model.pools import write_global_pools, write_whole_pools
from edgeq.model.prepare import PreparedModel
from edgeq.quantization.qdq import write_qdq
from edgeq.scheme import ALL_NODES, Scheme
from edgeq.util.display import SILENT, Progress

SUFFIX = ".espdl"
CHIP = "chip"
"""The key of `[device] engine_options` that names the chip."""
_DEFAULT_CHIP = "esp32-c6"
UNFUSED = {
    "session.disable_quant_qdq": "1",
    "optimization.disable_specified_optimizers": "DoubleQDQPairsRemover",
}
"""onnxruntime's fused kernels add the inputs of a sum in float, and its optimiser removes one of two pairs in a row.
Without both, every Q/DQ pair rounds, as on the chip.
"""
# The file has exponents and no zero points.
_FIELDS: Mapping[str, Any] = {
    "mode": "static",
    "format": "QDQ",
    "activation_type": "int8",
    "activation_symmetric": True,
    "weight_type": "int8",
    "weight_symmetric": True,
    "scale": "power-of-two",
    "rest": "float32",
    "fit_pairs": False,
}
_NEEDS = "Leave the scheme to the target: static Q/DQ, symmetric int8, power-of-two scales"


@dataclasses.dataclass(frozen=True)
class EspdlBackend(TargetBackend):
    """Build models for ESP-DL. Without a target, the chip is one without SIMD."""

    name = "espdl"
    title = "ESP-DL (.espdl)"
    simulated = True
    widens_weights = True
    runs_engines = False

    @property
    def chip(self) -> EspChip:
        """Return the target's chip."""
        options = self.target.device.get("engine_options", {}) if self.target is not None else {}
        return chip_named(options.get(CHIP, _DEFAULT_CHIP))

    @property
    def family(self) -> EspFamily:
        """Return the family of the target's chip."""
        return family_named(self.chip.family)

    def check(self, scheme: Scheme) -> None:
        """Refuse a scheme that the kernels cannot run. See `Backend.check`."""
        require_fields(scheme, _FIELDS, self.name, _NEEDS)
        if scheme.per_channel and not self.family.per_channel:
            raise UsageError(
                f"the kernels of {self.chip.title} take one scale for each tensor", "Leave ⟨per_channel⟩ out"
            )

    def build(
        self,
        prepared: PreparedModel,
        ranges: Mapping[str, Range],
        scheme: Scheme,
        destination: Path,
        *,
        samples: Samples | None = None,
    ) -> Artifact:
        """Write to `destination` the Q/DQ model from which the .espdl file is made. See `Backend.build`."""
        del samples
        self.check(scheme)
        check_names(prepared, (*scheme.exclude, *(name for name in scheme.wide if name != ALL_NODES)))
        rules = int8_rules(self.name)
        predicted = predict_int8(prepared.graph, rules, scheme, hazards=prepared.hazards)
        reasons = {node.name: node.reason for node in predicted if node.verdict == "float"}
        _refuse_floats(prepared, reasons)
        model = prepared.model.clone()
        write_global_pools(model)
        write_whole_pools(model)
        nodes = {str(node.name) for node in model.graph} - reasons.keys()
        float_results = {op_type for op_type, rule in rules.items() if rule.float_result}
        write_qdq(
            model,
            share_ranges(model, ranges, excluded=reasons.keys()),
            scheme,
            nodes,
            source=prepared.source,
            float_results=float_results,
        )
        remove_float_pairs(model, float_results)
        notes = widen_nodes(model, prepared.model, scheme)
        align_sums(model)
        mark_wide_pairs(model)
        save_model(model, destination)
        # The model is lowered at once, to refuse here what the conversion would refuse later.
        graph = lower(read_unchecked(destination), self.family, prepared.source)
        return Artifact(
            model=destination,
            scheme=scheme,
            provider="CPUExecutionProvider",
            notes=notes,
            details={"wide_share": wide_share(graph)} if scheme.wide else {},
            proof_options=UNFUSED,
            coverage=_coverage(prepared.model, reasons),
        )

    def finished(
        self,
        artifact: Artifact,
        prepared: PreparedModel,
        samples: Samples,
        folder: Path,
        *,
        progress: Progress = SILENT,
    ) -> Artifact:
        """Return `artifact` with the .espdl file for the target's chip. See `Backend.finished`."""
        del progress
        family = self.family
        content, tests = self._file(artifact.model, samples)
        # The file itself is read and run, so that an error in its layouts or attributes cannot hide.
        graph = read(content, artifact.model.with_suffix(SUFFIX)).graph
        agreement = compare_chip(graph, family, artifact.model, prepared.path, samples, UNFUSED)
        notes = (
            f"the .espdl file is for {self.chip.title}: {agreement.sentence}",
            f"the chip checks itself: the file states {len(tests) - len(graph.inputs)} tensors of one sample",
            memory_of(graph, len(content)).note,
        )
        files = dict(artifact.files)
        # In a bundle, the project for the chip already has the file.
        if PROJECT_FILE not in files:
            name = f"{artifact.model.stem}{SUFFIX}"
            files[name] = folder / name
            files[name].write_bytes(content)
        return dataclasses.replace(artifact, files=files, notes=(*artifact.notes, *notes))

    def with_companions(self, artifact: Artifact, samples: Samples, folder: Path, *, count: int) -> Artifact:
        """Return `artifact` with a project for ESP-IDF that runs the model on the target's chip. See
        `Backend.with_companions`.
        """
        del count  # The file has the values of one sample, because every value takes flash.
        family, chip = self.family, self.chip
        content, values = self._file(artifact.model, samples)
        graph = read(content, artifact.model.with_suffix(SUFFIX)).graph
        # Next to the project, because every file of the project becomes part of the bundle.
        file = folder.with_name(f"{folder.name}{SUFFIX}")
        file.write_bytes(content)
        never_run = self.target.profile.never_run if self.target is not None else ""
        title = artifact.title or artifact.model.stem
        memory = memory_of(graph, len(content))
        by_name = {tensor.name: array for tensor, array in values.items()}
        preprocess = getattr(samples, "preprocess", None)
        project = EspProject(title, file, graph, chip, family, memory, by_name, never_run, preprocess)
        files = project.write(folder)
        return dataclasses.replace(artifact, files={**artifact.files, **files})

    def _file(self, model: Path, samples: Samples) -> tuple[bytes, dict[EspTensor, NDArray[Any]]]:
        """Return the bytes of a model's file, and the values that it states for the first sample."""
        graph = lower_file(model, self.family)
        values = checked_values(graph, self.family, first_rows(samples, 1)[0])
        return write(graph, blocked=self.family.blocked, name=model.stem, tests=values), values

    def refusals(self, model: ir.Model, source: Path) -> Mapping[str, str]:
        """Return the input whose sizes are not fixed, if there is one. See `Backend.refusals`."""
        try:
            at_batch_one(model, source)
        except ModelError as error:
            return {"": error.text.removeprefix(f"{source}: ")}
        return {}

    def write_file(self, model: Path, destination: Path) -> None:
        """Write the .espdl file of a model with Q/DQ pairs, without test values. See `Backend.write_file`."""
        graph = lower_file(model, self.family)
        destination.write_bytes(write(graph, blocked=self.family.blocked, name=model.stem))

    def owns(self, place: Path) -> bool:
        """Return whether `place` is an .espdl file. See `Backend.owns`."""
        if place.suffix != SUFFIX or not place.is_file():
            return False
        with place.open("rb") as stream:
            return stream.read(len(MAGIC)) == MAGIC

    def read_log(self, text: str) -> SerialLog | None:
        """Return the check that a chip printed. See `Backend.read_log`."""
        return read_serial_log(text)

    def simulator(self) -> DeviceSimulator:
        """Return a simulator that runs models in the integers of a target's chip."""
        return _simulated


def _simulated(target: Target) -> AbstractContextManager[Any]:
    family = EspdlBackend(target).family
    return opened(family, partial(_lowered, family))


def _lowered(family: EspFamily, model: Path) -> EspGraph:
    return lower_file(model, family)


def _refuse_floats(prepared: PreparedModel, reasons: Mapping[str, str]) -> None:
    """Refuse a model with nodes that would stay in float.

    Raises:
        ModelError: there is such a node; the message names the first and the reason.
    """
    if not reasons:
        return
    name, reason = next(iter(reasons.items()))
    op_types = {str(node.name): node.op_type for node in prepared.model.graph}
    more = f", and {len(reasons) - 1} more nodes" if len(reasons) > 1 else ""
    raise ModelError(
        f"{prepared.source}: node {name!r} ({op_types.get(name, 'in a body')}) cannot run in integers{more}: {reason}",
        "ESP-DL has no float kernels for layers: export the model without these nodes, or choose another target",
    )


def _coverage(source: ir.Model, reasons: Mapping[str, str]) -> Coverage:
    macs = node_macs(source)
    runs = [
        NodeRun(
            str(n.name), str(n.name), n.op_type, "float" if n.name in reasons else "int8", macs.get(n.name or "", 0)
        )
        for n in source.graph
    ]
    return coverage_of(
        runs, lambda run: reasons.get(run.name, ""), basis="modelled", how="the nodes of the .espdl file"
    )
