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
    FREE_SCALES,
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
from edgeq.calibration.precision import ANGLE, INDEX
from edgeq.calibration.ranges import Range
from edgeq.data.samples import Samples
from edgeq.errors import HardwareError, ModelError, RuntimeUnavailableError
from edgeq.hardware.detect import Machine
from edgeq.measure.coverage import Coverage, coverage_of
from edgeq.measure.node_runs import HALF, NodeRun
from edgeq.model.digests import model_digest
from edgeq.model.int8_prediction import predict_int8
from edgeq.model.int8_rules import int8_rules
from edgeq.model.load import save_model, unchecked_signature
from edgeq.model.macs import node_macs
from edgeq.model.prepare import PreparedModel
from edgeq.model.sizes import require_fixed_sizes
from edgeq.run.engines import EngineChoice, find_backend_engine
from edgeq.run.toolkit import Toolkit, find_python
from edgeq.scheme import Scheme
from edgeq.util.display import SILENT, Progress
from edgeq.util.marker import is_plain

_CPU = "CPUExecutionProvider"
# The compiler keeps the numbers of such files only; see targets/rknn/dialect.toml.
_FIELDS: Mapping[str, Any] = {
    "mode": "static",
    "format": "QDQ",
    "activation_type": "int8",
    "weight_type": "int8",
    "rest": "float32",
    "fit_pairs": False,
    **FREE_SCALES,
    "activation_symmetric": False,
}
_NEEDS = "Leave the scheme to the target: static Q/DQ, int8 activations and weights"
# The first bytes of each kind of file, by suffix. The file of another program may have the same suffix.
_MAGICS = {".rknn": b"RKNN", ".bin": MAGIC, ".json": FORMS}
# Samples that the simulator runs: enough for an interval of its loss, and few enough for the largest models.
_SIMULATED, _VECTORS, _LISTED = 8, 2, 6
# The compiler appends its own text to a node's name behind one of these characters.
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
        # A job must not calibrate for minutes and then end because the compiler is missing.
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
        float_reasons = _in_float(prepared, scheme)
        # An excluded layer gets pairs around it like all others, and only its weights stay in float: the NPU then
        # computes it in float16. An excluded node without work simply gets no pairs.
        floats = {n for n in scheme.exclude if node_macs(prepared.model).get(n) and n not in float_reasons}
        paired = {str(n.name) for n in prepared.model.graph} - float_reasons.keys() - (set(scheme.exclude) - floats)
        # Pairs around float layers alone would compile, but would be a float16 model.
        if not paired - floats:
            reason = next(iter(float_reasons.values()), "")
            raise ModelError(f"{prepared.source}: no node can run in integers on the NPU", reason)
        # An excluded layer has no kernel there, so the advice is to exclude none.
        if floats and not self._chip.float16:
            fix = "Leave ⟨exclude⟩ and ⟨min_sqnr_db⟩ out"
            raise ModelError(f"{self._chip.title} has no float16 for {min(floats)!r}", fix)
        save_model(write_dialect(prepared, ranges, scheme, paired, floats), destination)
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
        chip, signature = self._chip, unchecked_signature(artifact.model, artifact.model)
        simulated = tuple(itertools.islice(samples, _SIMULATED))
        with progress.stage(f"Compiling for {chip.title}"):
            names = [spec.name for spec in signature.inputs]
            compiled = compile_model(artifact.model, chip.name, folder, names, simulated)
        expected, stem = unfused(artifact.model, simulated), artifact.model.stem
        answers = compare_answers(
            compiled, expected, unfused(prepared.path, simulated), artifact.model, _coarse_tensor_note(prepared)
        )
        maker, file = toolkit().needs, folder / f"{artifact.model.stem}.onnx"
        write_context(compiled.file, signature, chip.name, toolkit().version, file)
        notes = (
            f"compiled for {chip.title} by {maker}: {answers}; never run on a chip",
            *placement_sentences(compiled.layers),
            f"the compiler's cycle estimate is {compiled.cycles / 1e6:.3g} million; it orders models on one chip; "
            "no latency was measured",
        )
        # edgeq's runner needs Python on the device. Small chips have none, so a C program gets the same self-test.
        more = {} if chip.python else write_for_c(signature, simulated[:_VECTORS], expected[:_VECTORS], stem, folder)
        if more:
            notes += (f"{chip.title} is programmed in C, because edgeq's runner does not run there (docs/rknn.md)",)
        by_layer = coverage(prepared.model, compiled, artifact.scheme, f"the compiler's table, {maker}")
        return dataclasses.replace(
            artifact,
            notes=(*artifact.notes, *notes),
            coverage=by_layer,
            files={**artifact.files, f"{stem}.rknn": compiled.file, **more},
            alternatives=(*self._alternatives(artifact, file, maker), *artifact.alternatives),
        )

    def _alternatives(self, artifact: Artifact, file: Path, maker: str) -> Iterator[Alternative]:
        """Yield the compiled form, and the same model built for any CPU."""
        assert self.target is not None
        # The compiled form ships as a variant of its own, so a device with another chip still has the Q/DQ model.
        target, on_cpu = self.target, dataclasses.replace(artifact, alternatives=(), coverage=None, files={})
        requires = {
            "target": target.name,
            "profile": target.profile.name,
            "compiled_by": maker,
            # The runner can then tell that a compiled form belongs to the Q/DQ model next to it.
            "compiled_of": model_digest(artifact.model),
            PLATFORM: self._chip.name,
            "optimization_level": str(dialect().level.optimization_level),
            "disable_rules": " ".join(rule.name for rule in dialect().disable_rule),
        }
        compiled = dataclasses.replace(
            on_cpu,
            model=file,
            device="npu",
            requires=requires,
            simulation=artifact.model,
            engine=EngineChoice(find_backend_engine(self.name, {})),
        )
        title = f"{target.title}, compiled by {maker}"
        if self._chip.python:
            yield Alternative(f"{target.name}-compiled", title, target.profile.rank + 1, compiled, target.architecture)
        yield Alternative(f"{target.name}-cpu", "any CPU, the same Q/DQ model", 0, on_cpu)

    def owns(self, place: Path) -> bool:
        """Return whether `place` is a compiled file or one of the files for C programs. See `Backend.owns`."""
        if not is_plain(place):
            return False
        with place.open("rb") as stream:
            # `FORMS` is the longest of the three.
            begins = stream.read(len(FORMS))
        return any(begins.startswith(magic) and place.suffix == suffix for suffix, magic in _MAGICS.items())

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


def _coarse_tensor_note(prepared: PreparedModel) -> str:
    """Return advice if a tensor must be more exact than the NPU's float16, else ""."""
    tensor = next((name for name, reason in prepared.hazards.items() if reason in (ANGLE, INDEX)), "")
    return f"Compute {tensor!r}, for which float16 may be too coarse, outside of the model" if tensor else ""


def _in_float(prepared: PreparedModel, scheme: Scheme) -> dict[str, str]:
    """Return the nodes that get no Q/DQ pairs of their own, each with its reason."""
    # The prediction gets no exclusions, because the scheme's exclusions mean float16 here and not "without pairs".
    rules, every_type = int8_rules("rknn"), scheme.replace(exclude=(), op_types=None)
    predicted = predict_int8(prepared.model, rules, every_type, hazards=prepared.hazards)
    types = scheme.op_types
    no_kernel = {node.name: node.reason for node in predicted if node.verdict == "float"}
    excluded_types = (node for node in predicted if types is not None and node.op_type not in types)
    return {
        **{node.name: f"{node.op_type} is not one of the types to quantize" for node in excluded_types},
        **no_kernel,
    }


def placement_sentences(layers: Sequence[CompiledLayer]) -> tuple[str, ...]:
    """Return sentences that state which layers run on the NPU, in int8 or in float16, and which run on the CPU."""
    layers = [layer for layer in layers if layer.op_type not in dialect().table.conversions]
    npu = [layer for layer in layers if layer.place == "NPU"]
    integer = [layer for layer in npu if layer.dtype == "INT8"]
    sentences = [f"{len(integer)} of {len(layers)} layers run on the NPU in int8"]
    half = [layer for layer in npu if layer.dtype != "INT8"]
    if half:
        sentences.append(f"on the NPU in float16: {_named(half)}")
    cpu = [layer for layer in layers if layer.place != "NPU"]
    if cpu:
        sentences.append(f"on the board's CPU, by the compiler's choice: {_named(cpu)}")
    return tuple(sentences)


def _named(layers: Sequence[CompiledLayer]) -> str:
    names = [f"{layer.name} ({layer.op_type})" for layer in layers[:_LISTED]]
    return ", ".join(names) + (f" and {len(layers) - _LISTED} more" if len(layers) > _LISTED else "")


def coverage(source: ir.Model, compiled: Compiled, scheme: Scheme, method: str) -> Coverage:
    """Return the precision of each node of `source`, derived from the compiler's layers."""
    node_names = {str(node.name) for node in source.graph}
    # One node may become several layers, and one layer may stand for several nodes.
    of: dict[str, list[CompiledLayer]] = {}
    for layer in (row for row in compiled.layers if row.op_type not in dialect().table.conversions):
        of.setdefault(origin(layer.name, node_names), []).append(layer)
    macs = node_macs(source)

    def kind(name: str) -> str:
        """Return "int8" or "float" for a node, judged by its layers. The scheme decides for a node that was merged into
        another.
        """
        layers = of.get(name, ())
        in_float = any(layer.dtype != "INT8" for layer in layers) if layers else name in scheme.exclude
        return "float" if in_float else "int8"

    runs = []
    for node in source.graph:
        name = str(node.name)
        precision_kind = kind(name)
        precision = "int8" if precision_kind == "int8" else HALF
        runs.append(
            NodeRun(
                name, name, node.op_type, "int8" if precision_kind == "int8" else "float", macs.get(name, 0), precision
            )
        )
    return coverage_of(runs, lambda run: _float_reason(of.get(run.name, ())), basis="modelled", how=method)


def _float_reason(layers: Sequence[CompiledLayer]) -> str:
    places = {layer.place for layer in layers}
    return "the compiler runs it in float on the board's CPU" if places == {"CPU"} else "the NPU computes it in float16"


def origin(layer: str, node_names: set[str]) -> str:
    """Return the name of the node from which a layer was made, without the text that the compiler appends. If no such
    node is known, return `layer`.
    """
    # A node's own name may contain such characters, so the longest prefix that is a node's name wins.
    ends = [match.start() for match in _APPENDED.finditer(layer)]
    return next((layer[:end] for end in (len(layer), *reversed(ends)) if layer[:end] in node_names), layer)
