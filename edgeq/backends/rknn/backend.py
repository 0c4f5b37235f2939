"""Build for Rockchip's NPUs: a Q/DQ file in the form that Rockchip's compiler supports, and its compiled form."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from edgeq.backends.base import (
    Alternative,
    Artifact,
    DeviceSimulator,
    DoctorCheck,
    TargetBackend,
    check_names,
    refuse_wide,
    require_fields,
)
from edgeq.backends.rknn.compile import (
    PLATFORM,
    UNFUSED,
    Compiled,
    CompiledLayer,
    compare_answers,
    compile_model,
    platform_of,
    simulated_chip,
    unfused,
)
from edgeq.backends.rknn.context import write_context
from edgeq.backends.rknn.data import Chip, chip_named, dialect, toolkit
from edgeq.backends.rknn.dialect import write_dialect
from edgeq.backends.rknn.for_c import FORMS, MAGIC, write_for_c
from edgeq.calibration.hazards import ANGLE, INDEX
from edgeq.calibration.ranges import Range
from edgeq.data.samples import Samples
from edgeq.errors import HardwareError, ModelError, RuntimeUnavailableError
from edgeq.hardware.detect import Machine
from edgeq.measure.coverage import HALF, Coverage, NodeRun, coverage_of
from edgeq.model.compatibility import require_fixed_sizes
from edgeq.model.int8_prediction import int8_rules, predict_int8
from edgeq.model.load import model_digest, own_signature, save_model
from edgeq.model.prepare import PreparedModel
from edgeq.model.products import node_macs
from edgeq.run.engines import EngineChoice, engine_for
from edgeq.run.toolkit import Toolkit, find_python
from edgeq.scheme import Scheme
from edgeq.util.display import SILENT, Progress
from edgeq.util.outputs import is_plain

_CPU = "CPUExecutionProvider"
_FIELDS: Mapping[str, Any] = {
    "mode": "static",
    "format": "QDQ",
    "activation_type": "int8",
    "weight_type": "int8",
    "rest": "float32",
    "fit_pairs": False,
    "activation_symmetric": False,
}
_NEEDS = "Leave the scheme to the target: static Q/DQ, int8 activations and weights"
_OWN = {".rknn": b"RKNN", ".bin": MAGIC, ".json": FORMS}
# Samples that the simulator runs: enough for an interval of its loss, and few enough for the largest models.
_SIMULATED, _VECTORS, _LISTED = 8, 2, 6
_APPENDED = re.compile(r"[#_/:]")


@dataclass(frozen=True)
class RknnBackend(TargetBackend):
    """Build for Rockchip's NPUs.

    Attributes:
        target: the target to build for, whose `[device] engine_options` name the chip.
    """

    name = "rknn"
    title = "Rockchip's NPU"
    simulated = True
    runs_engines = False

    def check(self, scheme: Scheme) -> None:
        """Refuse a scheme that the compiler does not support. See `Backend.check`."""
        _check_fields(scheme)
        find_python(toolkit())

    def build(
        self,
        prepared: PreparedModel,
        ranges: Mapping[str, Range],
        scheme: Scheme,
        destination: Path,
        *,
        samples: Samples | None = None,
    ) -> Artifact:
        """Write the Q/DQ model to `destination`. The samples are not used. See `Backend.build`."""
        del samples
        _check_fields(scheme)
        require_fixed_sizes(prepared.model, prepared.source, self.title)
        check_names(prepared, scheme.exclude)
        left = _in_float(prepared, scheme)
        floats = {n for n in scheme.exclude if node_macs(prepared.model).get(n) and n not in left}
        chosen = {str(n.name) for n in prepared.model.graph} - left.keys() - (set(scheme.exclude) - floats)
        if not chosen - floats:
            reason = next(iter(left.values()), "")
            raise ModelError(f"{prepared.source}: no node can run in integers on the NPU", reason)
        if floats and not self._chip.float16:
            fix = "Leave --exclude and --min-sqnr out"
            raise ModelError(f"{self._chip.title} has no float16 for {min(floats)!r}", fix)
        save_model(write_dialect(prepared, ranges, scheme, chosen, floats), destination)
        return Artifact(
            model=destination,
            scheme=scheme,
            provider=_CPU,
            simulation=destination,
            simulation_settings=UNFUSED,
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
        """Return `artifact` with its compiled form, after checking that form in the compiler's simulator. See
        `Backend.finished`.
        """
        chip, signature = self._chip, own_signature(artifact.model, artifact.model)
        few = tuple(itertools.islice(samples, _SIMULATED))
        with progress.stage(f"Compiling for {chip.title}"):
            names = [spec.name for spec in signature.inputs]
            compiled = compile_model(artifact.model, chip.name, folder, names, few)
        wanted, stem = unfused(artifact.model, few), artifact.model.stem
        answers = compare_answers(compiled, wanted, unfused(prepared.path, few), artifact.model, _coarse(prepared))
        maker, file = toolkit().needs, folder / f"{artifact.model.stem}.onnx"
        write_context(compiled.file, signature, chip.name, toolkit().version, file)
        notes = (
            f"compiled for {chip.title} by {maker}: {answers}; never run on a chip",
            *placement(compiled.layers),
            f"the compiler's cycle estimate is {compiled.cycles / 1e6:.3g} million; it orders models on one chip; "
            "no latency was measured",
        )
        more = {} if chip.python else write_for_c(signature, few[:_VECTORS], wanted[:_VECTORS], stem, folder)
        if more:
            notes += (f"{chip.title} is programmed in C, because edgeq's runner does not run there (docs/rknn.md)",)
        found = coverage(prepared.model, compiled, artifact.scheme, f"the compiler's table, {maker}")
        return dataclasses.replace(
            artifact,
            notes=(*artifact.notes, *notes),
            coverage=found,
            files={**artifact.files, f"{stem}.rknn": compiled.file, **more},
            alternatives=(*self._alternatives(artifact, file, maker), *artifact.alternatives),
        )

    def _alternatives(self, artifact: Artifact, file: Path, maker: str) -> Iterator[Alternative]:
        """Yield the compiled form, and the same model built for any CPU."""
        assert self.target is not None
        target, plain = self.target, dataclasses.replace(artifact, alternatives=(), coverage=None, files={})
        requires = {
            "target": target.name,
            "profile": target.profile.name,
            "compiled_by": maker,
            "compiled_of": model_digest(artifact.model),
            PLATFORM: self._chip.name,
            "optimization_level": str(dialect().level.optimization_level),
            "disable_rules": " ".join(rule.name for rule in dialect().disable_rule),
        }
        made = dataclasses.replace(
            plain,
            model=file,
            device="npu",
            requires=requires,
            simulation=artifact.model,
            engine=EngineChoice(engine_for(self.name, {})),
        )
        title = f"{target.title}, compiled by {maker}"
        if self._chip.python:
            yield Alternative(f"{target.name}-compiled", title, target.profile.rank + 1, made, target.architecture)
        yield Alternative(f"{target.name}-cpu", "any CPU, the same Q/DQ model", 0, plain)

    def owns(self, place: Path) -> bool:
        """Return whether `place` is a compiled file or one of the files for C programs. See `Backend.owns`."""
        if not is_plain(place):
            return False
        with place.open("rb") as stream:
            begins = stream.read(len(FORMS))
        return any(begins.startswith(known) and place.suffix == suffix for suffix, known in _OWN.items())

    def simulator(self) -> DeviceSimulator:
        """Return the compiler's simulator, which is the same for all chips."""
        return simulated_chip

    def toolkit(self) -> Toolkit:
        """Return the toolkit that contains the compiler."""
        return toolkit()

    def doctor(self, machine: Machine) -> Iterator[DoctorCheck]:
        """Check whether the compiler is installed. See `Backend.doctor`."""
        del machine
        try:
            yield DoctorCheck(f"toolkit {self.name}", "ok", f"{toolkit().needs}: {find_python(toolkit())}")
        except RuntimeUnavailableError as error:
            yield DoctorCheck(f"toolkit {self.name}", "absent", error.text)

    @property
    def _chip(self) -> Chip:
        if self.target is None:
            raise HardwareError(
                f"the {self.name} backend needs a target with a chip", "Name a target, such as -t rk3588"
            )
        return chip_named(platform_of(self.target))


def _check_fields(scheme: Scheme) -> None:
    refuse_wide(scheme, RknnBackend.title)
    require_fields(scheme, _FIELDS, RknnBackend.name, _NEEDS)


def _coarse(prepared: PreparedModel) -> str:
    """Return advice if a tensor must be more exact than the NPU's float16, else ""."""
    tensor = next((name for name, reason in prepared.hazards.items() if reason in (ANGLE, INDEX)), "")
    return f"Compute {tensor!r}, for which float16 may be too coarse, outside of the model" if tensor else ""


def _in_float(prepared: PreparedModel, scheme: Scheme) -> dict[str, str]:
    """Return the nodes that get no Q/DQ pairs of their own, each with its reason."""
    rules, own = int8_rules("rknn"), scheme.replace(exclude=(), op_types=None)
    predicted = predict_int8(prepared.model, rules, own, hazards=prepared.hazards)
    types = scheme.op_types
    left = {node.name: node.reason for node in predicted if node.verdict == "float"}
    others = (node for node in predicted if types is not None and node.op_type not in types)
    return {**{node.name: f"{node.op_type} is not one of the types to quantize" for node in others}, **left}


def placement(layers: Sequence[CompiledLayer]) -> tuple[str, ...]:
    """Return sentences that state which layers run on the NPU, in int8 or in float16, and which run on the CPU."""
    layers = [layer for layer in layers if layer.op_type not in dialect().table.conversions]
    npu = [layer for layer in layers if layer.place == "NPU"]
    integer = [layer for layer in npu if layer.dtype == "INT8"]
    found = [f"{len(integer)} of {len(layers)} layers run on the NPU in int8"]
    half = [layer for layer in npu if layer.dtype != "INT8"]
    if half:
        found.append(f"on the NPU in float16: {_named(half)}")
    cpu = [layer for layer in layers if layer.place != "NPU"]
    if cpu:
        found.append(f"on the board's CPU, by the compiler's choice: {_named(cpu)}")
    return tuple(found)


def _named(layers: Sequence[CompiledLayer]) -> str:
    names = [f"{layer.name} ({layer.op_type})" for layer in layers[:_LISTED]]
    return ", ".join(names) + (f" and {len(layers) - _LISTED} more" if len(layers) > _LISTED else "")


def coverage(source: ir.Model, compiled: Compiled, scheme: Scheme, how: str) -> Coverage:
    """Return the precision of each node of `source`, derived from the compiler's layers."""
    known = {str(node.name) for node in source.graph}
    of: dict[str, list[CompiledLayer]] = {}
    for layer in (one for one in compiled.layers if one.op_type not in dialect().table.conversions):
        of.setdefault(origin(layer.name, known), []).append(layer)
    macs = node_macs(source)

    def kind(name: str) -> str:
        """Return "int8" or "float" for a node, judged by its layers. The scheme decides for a node that was merged into
        another.
        """
        own = of.get(name, ())
        in_float = any(layer.dtype != "INT8" for layer in own) if own else name in scheme.exclude
        return "float" if in_float else "int8"

    runs = []
    for node in source.graph:
        name = str(node.name)
        found = kind(name)
        precision = "int8" if found == "int8" else HALF
        runs.append(
            NodeRun(name, name, node.op_type, "int8" if found == "int8" else "float", macs.get(name, 0), precision)
        )
    return coverage_of(runs, lambda run: _why(of.get(run.name, ())), basis="modelled", how=how)


def _why(layers: Sequence[CompiledLayer]) -> str:
    places = {layer.place for layer in layers}
    return "the compiler runs it in float on the board's CPU" if places == {"CPU"} else "the NPU computes it in float16"


def origin(layer: str, known: set[str]) -> str:
    """Return the name of the node from which a layer was made, without the text that the compiler appends. If no such
    node is known, return `layer`.
    """
    ends = [found.start() for found in _APPENDED.finditer(layer)]
    return next((layer[:end] for end in (len(layer), *reversed(ends)) if layer[:end] in known), layer)
