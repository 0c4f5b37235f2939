"""Build a prepared model for TensorRT, and add models for devices without TensorRT."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import onnx
import onnx_ir as ir
from edgeq_device.engines.catalog import engine_options, parse_version
from edgeq_device.engines.tensorrt import read_tensorrt
from edgeq_device.system.gpus import format_capability, read_gpus

from edgeq.backends.base import (
    FREE_SCALES,
    Alternative,
    Artifact,
    Backend,
    DoctorCheck,
    check_names,
    refuse_wide,
    require_fields,
)
from edgeq.backends.tensorrt import options
from edgeq.backends.tensorrt.biases import shield_biases
from edgeq.backends.tensorrt.check import PlacementReport, check_placement
from edgeq.backends.tensorrt.half_precision import cast_float_nodes
from edgeq.backends.tensorrt.implicit import FILES, check_version, write_implicit
from edgeq.backends.tensorrt.pairs import insert_pairs
from edgeq.backends.tensorrt.placement import plan_placement, weighted_operators
from edgeq.backends.tensorrt.simulate import SETTINGS, simulation
from edgeq.calibration.groups import share_ranges
from edgeq.calibration.ranges import Range
from edgeq.calibration.table import FLATBUFFERS, is_table
from edgeq.data.samples import Samples
from edgeq.errors import EdgeqError, HardwareError, ModelError, UsageError, one_line
from edgeq.hardware.detect import Machine
from edgeq.hardware.target import Target
from edgeq.measure.coverage import Coverage
from edgeq.model.int8_rules import int8_rules
from edgeq.model.load import check_valid, save_model
from edgeq.model.names import name_nodes
from edgeq.model.opset import raise_opset
from edgeq.model.prepare import PreparedModel
from edgeq.model.skeleton import proto_skeleton
from edgeq.run.engines import load_engines
from edgeq.run.session import onnxruntime
from edgeq.scheme import Scheme
from edgeq.util.records import plain

# The runner uses the highest-ranked variant that fits the device. TensorRT variants have the ranks of their profiles.
# CUDA ranks below these and above every CPU. The float32 model on the CPU ranks last.
_CUDA_RANK, _FLOAT_RANK = 100, 0
_CUDA = "cuda"


@dataclass(frozen=True)
class TensorrtBackend(Backend):
    """Build for TensorRT.

    Attributes:
        target: the target to build for; None if neither the TensorRT version nor the GPU is known.
        observed: smallest and largest value of each tensor in calibration, not clipped. edgeq checks whether these
            values fit the range of 16-bit types.
        cut: share of each tensor's power that its range cuts off.
    """

    name = "tensorrt"
    title = "TensorRT, through ONNX Runtime"
    targeted = True
    simulated = True
    recoverable = False
    target: Target | None = None
    observed: Mapping[str, Range] = field(default_factory=dict)
    cut: Mapping[str, float] = field(default_factory=dict)

    def configured(self, target: Target, observed: Mapping[str, Range], cut: Mapping[str, float]) -> TensorrtBackend:
        """Return this backend configured for one target."""
        return dataclasses.replace(self, target=target, observed=observed, cut=cut)

    def check(self, scheme: Scheme) -> None:
        """Refuse a scheme that cannot be built, whatever the model is. See `Backend.check`."""
        refuse_wide(scheme, self.title)
        if scheme.mode != "static":
            raise UsageError(f"TensorRT has no {scheme.mode} int8: its scales are fixed in the engine", "Leave it out")
        if scheme.format == "QOperator":
            raise UsageError("TensorRT has no QLinear operators", "Use ⟨format⟩ QDQ")
        if scheme.activation_type != "int8" or scheme.weight_type != "int8":
            raise UsageError("TensorRT's integers are signed", "Set ⟨activation_type⟩ and ⟨weight_type⟩ to int8")
        if not (scheme.activation_symmetric and scheme.weight_symmetric):
            raise UsageError("TensorRT supports no zero point other than 0", "Keep ⟨activation_symmetric⟩")
        require_fields(scheme, FREE_SCALES, self.name, "Leave it out: the scales of TensorRT are free")
        if scheme.reduce_range:
            raise UsageError("tensor cores sum in 32 bits: 7-bit weights would only lose accuracy", "Leave it out")
        self._check_float_type(scheme)
        if scheme.format == "table":
            check_version(self._tensorrt, self._target_name)
            if scheme.exclude or scheme.op_types is not None:
                raise UsageError(
                    "with a table TensorRT itself chooses what runs in int8",
                    "Use ⟨format⟩ QDQ, or leave out ⟨exclude⟩ and ⟨op_types⟩",
                )
        quantizable = sorted({*weighted_operators(int8_rules(self.name)), "Add"})
        foreign = next((op for op in scheme.op_types or () if op not in quantizable), None)
        if foreign is not None:
            raise UsageError(f"TensorRT does not quantize {foreign} by itself", f"It can be {', '.join(quantizable)}")

    def build(
        self,
        prepared: PreparedModel,
        ranges: Mapping[str, Range],
        scheme: Scheme,
        destination: Path,
        *,
        samples: Samples | None = None,
    ) -> Artifact:
        """Write the model for TensorRT to `destination`. See `Backend.build`."""
        self.check(scheme)
        check_names(prepared, scheme.exclude)
        # The extra files must outlive this call, because the bundle is packed later. They go with the prepared model's
        # folder.
        place = Path(tempfile.mkdtemp(prefix="tensorrt-", dir=prepared.path.parent))
        if scheme.format == "table":
            return self._implicit(prepared, ranges, scheme, destination, place)
        return self._explicit(prepared, ranges, scheme, destination, place)

    def owns(self, place: Path) -> bool:
        """Return whether `place` is a calibration table. See `Backend.owns`."""
        return is_table(place)

    def doctor(self, machine: Machine) -> Iterator[DoctorCheck]:
        """Look for GPUs, TensorRT and CUDA, and check that the provider supports the options that artifacts set."""
        gpus, problem = read_gpus()
        for gpu in gpus:
            capability = format_capability(gpu.compute_capability)
            size = f", {gpu.memory_bytes >> 20} MiB" if gpu.memory_bytes else ""
            driver = f", driver {gpu.driver}" if gpu.driver else ""
            yield DoctorCheck("GPU", "ok", f"{gpu.name}, compute capability {capability}{size}{driver}")
        if not gpus:
            yield DoctorCheck("GPU", "absent", problem)
        ort = onnxruntime()
        version, problem = read_tensorrt(ort)
        # A machine with a GPU should have TensorRT or the CUDA provider.
        nothing = gpus and options.CUDA not in ort.get_available_providers()
        yield DoctorCheck("TensorRT", "ok" if version else "failed" if nothing else "absent", version or problem)
        cuda = machine.runtimes.get("cuda", "")
        yield DoctorCheck(
            "CUDA", "ok" if cuda else "absent", cuda or "no CUDA runtime is installed as a Python package"
        )
        option_sets = {"explicit": options.explicit_options("float16"), "table": options.table_options(FLATBUFFERS)}
        for name, provider_options in option_sets.items():
            try:
                # ONNX Runtime would report an unknown option only on the device.
                options.check_options(options.TENSORRT, provider_options)
                _, source = options.known_options(options.TENSORRT)
                yield DoctorCheck(f"provider options ({name})", "ok", f"all listed in {source}")
            except EdgeqError as error:
                yield DoctorCheck(f"provider options ({name})", "failed", error.text)

    def _explicit(
        self, prepared: PreparedModel, ranges: Mapping[str, Range], scheme: Scheme, destination: Path, place: Path
    ) -> Artifact:
        facts = options.facts()
        # Pairs with 16-bit scales, and bfloat16, need a later opset than most models have.
        model = _raised(prepared, scheme.rest)
        place_pairs = partial(
            plan_placement,
            model,
            int8_rules(self.name),
            exclude=scheme.excluded,
            op_types=scheme.op_types,
            cut=self.cut,
            most_cut=facts.most_cut,
            hazards=prepared.hazards,
        )
        # The first plan quantizes only layers that int8 is expected to make faster.
        plan = place_pairs()
        doubt: tuple[str, ...] = ()
        if not plan.edges and not scheme.exclude:
            name, reason = next(iter(plan.reasons.items()), ("", ""))
            doubt = (
                f"no layer is expected to be faster in int8 ({name}: {reason}); all layers that can be are quantized",
            )
            # The user asked for int8, so a slower int8 model with a note is a better answer than none.
            plan = place_pairs(gains=False)
        if not plan.edges:
            refusal = next(iter(plan.reasons.items()), ("the model", "it has no Conv, ConvTranspose, Gemm or MatMul"))
            raise ModelError(
                f"{prepared.source}: nothing in it was quantized: {refusal[0]}: {refusal[1]}",
                "Deploy the float model, or exclude fewer nodes",
            )
        # Q and DQ can move past data movement only if the tensors on both sides have one scale.
        ranges = {**ranges, **share_ranges(model, {name: ranges[name] for name in plan.activations if name in ranges})}
        # The order matters: casts depend on the pairs, whose scales get the 16-bit type, and the biases change form
        # last, because their final type decides what they add.
        insert_pairs(model, plan, ranges, per_channel=scheme.per_channel, float_type=scheme.rest)
        in_float32 = (
            {} if scheme.rest == "float32" else cast_float_nodes(model, scheme.rest, self._value_ranges(ranges))
        )
        shield_biases(model)
        # The checker reads what was really written. A plan that the writer did not follow must not become a report.
        placement = check_placement(model, prepared.model, {**in_float32, **plan.reasons})
        if placement.findings:
            raise ModelError(
                f"{prepared.source}: a Q/DQ pair is misplaced: {placement.findings[0]}",
                "This is a bug in edgeq: report it with the model",
            )
        _save(model, destination, prepared)
        simulated_path = place / "simulation.onnx"
        save_model(simulation(model), simulated_path)
        provider_options = options.explicit_options(scheme.rest)
        options.check_options(options.TENSORRT, provider_options)
        return Artifact(
            model=destination,
            scheme=scheme,
            provider=options.TENSORRT,
            provider_options=provider_options,
            notes=(*doubt, *_notes(placement, in_float32)),
            device="gpu",
            requires={**self._gpu, "min_tensorrt": facts.rest_types[scheme.rest].min_tensorrt},
            simulation=simulated_path,
            simulation_settings=SETTINGS,
            coverage=placement.coverage(),
            details={"placement": plain(placement)},
            alternatives=self._alternatives(prepared, scheme, place),
        )

    def _implicit(
        self, prepared: PreparedModel, ranges: Mapping[str, Range], scheme: Scheme, destination: Path, place: Path
    ) -> Artifact:
        facts = options.facts()
        model = prepared.model.clone()
        tables = place / "tables"
        notes = write_implicit(model, ranges, tables, self._tensorrt)
        save_model(model, destination)
        provider_options = options.table_options(FLATBUFFERS)
        options.check_options(options.TENSORRT, provider_options)
        return Artifact(
            model=destination,
            scheme=scheme,
            provider=options.TENSORRT,
            provider_options=provider_options,
            notes=(*notes, "TensorRT chooses what runs in int8: the proof here is of the float model"),
            device="gpu",
            requires={
                **self._gpu,
                "min_tensorrt": facts.table["min_tensorrt"],
                "below_tensorrt": facts.table["below_tensorrt"],
                "table": FLATBUFFERS,
            },
            # The float model itself: which nodes TensorRT runs in int8 is not known, so no rounding can be simulated.
            simulation=destination,
            coverage=Coverage(basis="unknown", how="TensorRT chooses when it builds the engine"),
            tables=tuple(tables / name for name in FILES),
            alternatives=self._alternatives(prepared, scheme, place),
        )

    def _alternatives(self, prepared: PreparedModel, scheme: Scheme, place: Path) -> tuple[Alternative, ...]:
        """Return the same model for devices without TensorRT: in 16 bits for CUDA, and in float32 for a CPU."""
        float32 = Scheme(mode="static", format="QDQ")
        alternatives = []
        if scheme.rest != "float32":
            model = _raised(prepared, scheme.rest)
            in_float32 = cast_float_nodes(model, scheme.rest, self._value_ranges({}))
            path, simulated_path = place / "cuda.onnx", place / "cuda-simulation.onnx"
            _save(model, path, prepared)
            save_model(simulation(model), simulated_path)
            artifact = Artifact(
                model=path,
                scheme=float32.replace(rest=scheme.rest),
                provider=options.CUDA,
                provider_options=engine_options(load_engines()[_CUDA]),
                device="gpu",
                requires={"min_compute_capability": options.facts().rest_types[scheme.rest].min_compute_capability},
                simulation=simulated_path,
                simulation_settings=SETTINGS,
                notes=tuple(f"{name}: {reason}" for name, reason in in_float32.items()),
            )
            alternatives.append(
                Alternative(f"cuda-{scheme.rest}", f"any NVIDIA GPU, {scheme.rest}", _CUDA_RANK, artifact)
            )
        # The last resort needs no conversion: the prepared float model runs on every CPU.
        cpu = Artifact(model=prepared.path, scheme=float32, provider=options.CPU)
        alternatives.append(Alternative("cpu-float32", "any CPU, the float32 model", _FLOAT_RANK, cpu))
        return tuple(alternatives)

    def _value_ranges(self, ranges: Mapping[str, Range]) -> Mapping[str, Range]:
        return self.observed or ranges

    def _check_float_type(self, scheme: Scheme) -> None:
        required = options.facts().rest_types[scheme.rest].min_compute_capability
        # A target without a known GPU is not refused: the requirement of the artifact then decides on the device.
        have = self._gpu.get("min_compute_capability", "")
        if required and have and parse_version(have) < parse_version(required):
            raise HardwareError(
                f"{self._target_name} has compute capability {have}, but {scheme.rest} needs {required}",
                "Use ⟨rest⟩ float16",
            )

    @property
    def _gpu(self) -> dict[str, str]:
        capability = self.target.profile.min_compute_capability if self.target is not None else None
        return {} if capability is None else {"min_compute_capability": format_capability(capability)}

    @property
    def _tensorrt(self) -> str:
        return str(self.target.runtime.get("tensorrt", "")) if self.target is not None else ""

    @property
    def _target_name(self) -> str:
        return self.target.name if self.target is not None else "the target"


def _raised(prepared: PreparedModel, float_type: str) -> ir.Model:
    """Return a copy of the prepared model with the opset and IR version that a file with `float_type` needs."""
    requirements = options.facts().rest_types[float_type]
    raised = raise_opset(
        prepared.model.clone(),
        prepared.source,
        lowest=requirements.opset,
        to=requirements.opset,
        ir_version=requirements.ir_version,
    )
    # `raise_opset` leaves a model alone whose opset is new enough, whatever its IR version is.
    raised.ir_version = max(raised.ir_version, requirements.ir_version)
    # The conversion may add nodes without names, and the reasons and the checker refer to nodes by name.
    name_nodes(raised)
    return raised


def _save(model: ir.Model, path: Path, prepared: PreparedModel) -> None:
    save_model(model, path)
    proto = onnx.load(path, load_external_data=False)
    try:
        check_valid(proto, path)
        # The checker of ONNX does not look at types of tensors. Strict inference finds a Cast that is missing between
        # two types.
        onnx.shape_inference.infer_shapes(proto_skeleton(proto), check_type=True, strict_mode=True)
    except Exception as error:  # onnx raises InferenceError and other exceptions from its C++ code
        problem = f"{prepared.source}: the file for TensorRT is not valid: {one_line(error, most=200)}"
        raise EdgeqError(problem, "This is a bug in edgeq: report it") from error


def _notes(placement: PlacementReport, in_float32: Mapping[str, str]) -> tuple[str, ...]:
    macs = placement.macs
    total = sum(macs.values()) or 1
    shares = ", ".join(f"{name} {count / total:.1%}" for name, count in macs.items() if count)
    pairs = sum(not pair.weight for pair in placement.pairs)
    notes = [f"by the placement checker: {shares} of the multiply-accumulates, {pairs} activations between Q and DQ"]
    notes += [f"{name} {reason}" for name, reason in in_float32.items()]
    return tuple(notes)
