"""The TensorRT backend: from a prepared model, ranges and a scheme to a file for TensorRT and its stand-ins."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import onnx
import onnx_ir as ir
from edgeq_device.cuda import capability_text, read_gpus
from edgeq_device.engines import engine_options
from edgeq_device.tensorrt import read_tensorrt
from edgeq_device.version import parse_version

from edgeq.backends.base import Alternative, Artifact, Backend, Check, check_names, refuse_wide
from edgeq.backends.tensorrt import explicit, options
from edgeq.backends.tensorrt.check import SETTINGS, Placement, check_placement, simulation
from edgeq.backends.tensorrt.explicit import insert_pairs, plan_placement, shield_biases, weighted_operators
from edgeq.backends.tensorrt.facts import facts
from edgeq.backends.tensorrt.half_precision import cast_float_nodes
from edgeq.calibrate.ranges import Range, share_ranges
from edgeq.calibrate.table import FLATBUFFERS, is_table
from edgeq.data.samples import Samples
from edgeq.errors import EdgeqError, HardwareError, ModelError, UsageError, one_line
from edgeq.hardware.detect import Machine
from edgeq.hardware.target import Target
from edgeq.measure.coverage import Coverage, NodeRun, coverage_of
from edgeq.model.clean import name_nodes
from edgeq.model.fold import raise_opset
from edgeq.model.int8_prediction import int8_rules
from edgeq.model.load import check_valid, save_model
from edgeq.model.macs import node_macs
from edgeq.model.prepare import PreparedModel
from edgeq.model.tensors import proto_skeleton
from edgeq.run.engines import load_engines
from edgeq.run.session import onnxruntime
from edgeq.scheme import Scheme
from edgeq.util.records import plain

# The runner takes the highest rank that fits: TensorRT's own are the profiles', CUDA's lies under them and over every
# CPU's, and float32 on the CPU is what is left.
_CUDA_RANK, _FLOAT_RANK = 100, 0
_CUDA = "cuda"


@dataclass(frozen=True)
class TensorrtBackend(Backend):
    """Attributes:
    target: what it builds for; None: no TensorRT version and no GPU is known.
    observed: what calibration saw, by tensor, unclipped: what 16-bit types are held against.
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
        """This backend for one target."""
        return dataclasses.replace(self, target=target, observed=observed, cut=cut)

    def check(self, scheme: Scheme) -> None:
        """Refuse a scheme that no model could be built with. See `Backend.check`."""
        refuse_wide(scheme, self.title)
        if scheme.mode != "static":
            raise UsageError(f"TensorRT has no {scheme.mode} int8: its scales are fixed in the engine", "Leave it out")
        if scheme.format == "QOperator":
            raise UsageError("TensorRT has no QLinear operators", "Make --format QDQ")
        if scheme.activation_type != "int8" or scheme.weight_type != "int8":
            raise UsageError("TensorRT's integers are signed", "Make --activation-type and --weight-type int8")
        if not (scheme.activation_symmetric and scheme.weight_symmetric):
            raise UsageError("TensorRT takes no zero point other than 0", "Leave --activation-symmetric")
        if scheme.reduce_range:
            raise UsageError("tensor cores sum in 32 bits: 7-bit weights would only lose accuracy", "Leave it out")
        self._check_float_type(scheme)
        if scheme.format == "table":
            explicit.check_version(self._tensorrt, self._where)
            if scheme.exclude or scheme.op_types is not None:
                raise UsageError(
                    "with a table TensorRT itself chooses what runs in int8",
                    "Make --format QDQ, or leave out --exclude and --op-type",
                )
        known = sorted({*weighted_operators(int8_rules(self.name)), "Add"})
        foreign = next((op for op in scheme.op_types or () if op not in known), None)
        if foreign is not None:
            raise UsageError(f"TensorRT quantizes no {foreign} by itself", f"It can be {', '.join(known)}")

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
        place = Path(tempfile.mkdtemp(prefix="tensorrt-", dir=prepared.path.parent))
        if scheme.format == "table":
            return self._implicit(prepared, ranges, scheme, destination, place)
        return self._explicit(prepared, ranges, scheme, destination, place)

    def owns(self, place: Path) -> bool:
        """Return whether `place` is a calibration table. See `Backend.owns`."""
        return is_table(place)

    def doctor(self, machine: Machine) -> Iterator[Check]:
        """Look for GPUs, TensorRT and CUDA, and hold the options of artifacts against the provider's."""
        gpus, problem = read_gpus()
        for gpu in gpus:
            capability = capability_text(gpu.compute_capability)
            size = f", {gpu.memory_bytes >> 20} MiB" if gpu.memory_bytes else ""
            driver = f", driver {gpu.driver}" if gpu.driver else ""
            yield Check("GPU", "ok", f"{gpu.name}, compute capability {capability}{size}{driver}")
        if not gpus:
            yield Check("GPU", "absent", problem)
        ort = onnxruntime()
        version, problem = read_tensorrt(ort)
        # A machine with a GPU is expected to have one of the two that run on it.
        nothing = gpus and options.CUDA not in ort.get_available_providers()
        yield Check("TensorRT", "ok" if version else "failed" if nothing else "absent", version or problem)
        cuda = machine.runtimes.get("cuda", "")
        yield Check("CUDA", "ok" if cuda else "absent", cuda or "no CUDA runtime is installed as a Python package")
        given = {"explicit": options.explicit_options("float16"), "table": options.table_options(FLATBUFFERS)}
        for name, chosen in given.items():
            try:
                options.check_options(options.TENSORRT, chosen)
                _, source = options.known_options(options.TENSORRT)
                yield Check(f"provider options ({name})", "ok", f"all known by {source}")
            except EdgeqError as error:
                yield Check(f"provider options ({name})", "failed", str(error))

    def _explicit(
        self, prepared: PreparedModel, ranges: Mapping[str, Range], scheme: Scheme, destination: Path, place: Path
    ) -> Artifact:
        known = facts()
        model = _raised(prepared, scheme.rest)
        place_pairs = partial(
            plan_placement,
            model,
            int8_rules(self.name),
            exclude=scheme.exclude,
            op_types=scheme.op_types,
            cut=self.cut,
            most_cut=known.most_cut,
            hazards=prepared.hazards,
        )
        plan = place_pairs()
        doubt: tuple[str, ...] = ()
        if not plan.edges and not scheme.exclude:
            name, reason = next(iter(plan.reasons.items()), ("", ""))
            doubt = (f"no layer is expected to be faster in int8 ({name}: {reason}); those that can be are quantized",)
            plan = place_pairs(gains=False)
        if not plan.edges:
            first = next(iter(plan.reasons.items()), ("the model", "it has no Conv, ConvTranspose, Gemm or MatMul"))
            raise ModelError(
                f"{prepared.source}: nothing in it was quantized: {first[0]}: {first[1]}",
                "Deploy the float model, or exclude fewer nodes",
            )
        ranges = {**ranges, **share_ranges(model, {name: ranges[name] for name in plan.activations if name in ranges})}
        insert_pairs(model, plan, ranges, per_channel=scheme.per_channel, float_type=scheme.rest)
        in_float32 = {} if scheme.rest == "float32" else cast_float_nodes(model, scheme.rest, self._seen(ranges), known)
        shield_biases(model)
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
            requires={**self._gpu, "min_tensorrt": known.rest[scheme.rest].min_tensorrt},
            simulation=simulated_path,
            simulation_settings=SETTINGS,
            coverage=placement.coverage(),
            details={"placement": plain(placement)},
            alternatives=self._alternatives(prepared, scheme, place),
        )

    def _implicit(
        self, prepared: PreparedModel, ranges: Mapping[str, Range], scheme: Scheme, destination: Path, place: Path
    ) -> Artifact:
        known = facts()
        model = prepared.model.clone()
        tables = place / "tables"
        notes = explicit.write_implicit(model, ranges, tables, self._tensorrt)
        save_model(model, destination)
        provider_options = options.table_options(FLATBUFFERS)
        options.check_options(options.TENSORRT, provider_options)
        return Artifact(
            model=destination,
            scheme=scheme,
            provider=options.TENSORRT,
            provider_options=provider_options,
            notes=(*notes, "what runs in int8 is TensorRT's choice: the proof here is of the float model"),
            device="gpu",
            requires={
                **self._gpu,
                "min_tensorrt": known.table_min_tensorrt,
                "below_tensorrt": known.table_below_tensorrt,
                "table": FLATBUFFERS,
            },
            simulation=destination,
            coverage=_unknown_coverage(model),
            tables=tuple(tables / name for name in explicit.FILES),
            alternatives=self._alternatives(prepared, scheme, place),
        )

    def _alternatives(self, prepared: PreparedModel, scheme: Scheme, place: Path) -> tuple[Alternative, ...]:
        """The same model where there is no TensorRT: in 16 bits on CUDA, in float32 on a CPU."""
        float32 = Scheme(mode="static", format="QDQ")
        found = []
        if scheme.rest != "float32":
            model = _raised(prepared, scheme.rest)
            in_float32 = cast_float_nodes(model, scheme.rest, self._seen({}), facts())
            path, simulated_path = place / "cuda.onnx", place / "cuda-simulation.onnx"
            _save(model, path, prepared)
            save_model(simulation(model), simulated_path)
            artifact = Artifact(
                model=path,
                scheme=float32.replace(rest=scheme.rest),
                provider=options.CUDA,
                provider_options=engine_options(load_engines()[_CUDA]),
                device="gpu",
                requires={"min_compute_capability": facts().rest[scheme.rest].min_compute_capability},
                simulation=simulated_path,
                simulation_settings=SETTINGS,
                notes=tuple(f"{name}: {reason}" for name, reason in in_float32.items()),
            )
            found.append(Alternative(f"cuda-{scheme.rest}", f"any NVIDIA GPU, {scheme.rest}", _CUDA_RANK, artifact))
        cpu = Artifact(model=prepared.path, scheme=float32, provider=options.CPU)
        found.append(Alternative("cpu-float32", "any CPU, the float32 model", _FLOAT_RANK, cpu))
        return tuple(found)

    def _seen(self, ranges: Mapping[str, Range]) -> Mapping[str, Range]:
        return self.observed or ranges

    def _check_float_type(self, scheme: Scheme) -> None:
        needed = facts().rest[scheme.rest].min_compute_capability
        have = self._gpu.get("min_compute_capability", "")
        if needed and have and parse_version(have) < parse_version(needed):
            raise HardwareError(
                f"{self._where} has compute capability {have}, and {scheme.rest} needs {needed}",
                "Make --rest float16",
            )

    @property
    def _gpu(self) -> dict[str, str]:
        least = self.target.profile.min_compute_capability if self.target is not None else None
        return {} if least is None else {"min_compute_capability": capability_text(least)}

    @property
    def _tensorrt(self) -> str:
        return str(self.target.runtime.get("tensorrt", "")) if self.target is not None else ""

    @property
    def _where(self) -> str:
        return self.target.name if self.target is not None else "the target"


def _raised(prepared: PreparedModel, float_type: str) -> ir.Model:
    """A copy of the prepared model with the opset and IR version that a file with that type needs."""
    requirements = facts().rest[float_type]
    raised = raise_opset(
        prepared.model.clone(),
        prepared.source,
        lowest=requirements.opset,
        to=requirements.opset,
        ir_version=requirements.ir_version,
    )
    raised.ir_version = max(raised.ir_version, requirements.ir_version)
    name_nodes(raised)
    return raised


def _save(model: ir.Model, path: Path, prepared: PreparedModel) -> None:
    save_model(model, path)
    written = onnx.load(path, load_external_data=False)
    try:
        check_valid(written, path)
        onnx.shape_inference.infer_shapes(proto_skeleton(written), check_type=True, strict_mode=True)
    except Exception as error:  # C++ raises InferenceError and others
        problem = f"{prepared.source}: the file for TensorRT is not valid: {one_line(error, most=200)}"
        raise EdgeqError(problem, "This is a bug in edgeq: report it") from error


def _notes(placement: Placement, in_float32: Mapping[str, str]) -> tuple[str, ...]:
    macs = placement.macs
    whole = sum(macs.values()) or 1
    shares = ", ".join(f"{name} {count / whole:.1%}" for name, count in macs.items() if count)
    pairs = sum(not pair.weight for pair in placement.pairs)
    notes = [f"by the placement checker: {shares} of the multiply-accumulates, {pairs} activations between Q and DQ"]
    notes += [f"{name} {reason}" for name, reason in in_float32.items()]
    return tuple(notes)


def _unknown_coverage(model: ir.Model) -> Coverage:
    macs = {name: count for name, count in node_macs(model).items() if count}
    types = {str(node.name): node.op_type for node in model.graph.all_nodes()}
    runs = [NodeRun(name, name, types[name], "float", count) for name, count in macs.items()]
    reason = "TensorRT chooses when it builds the engine"
    return coverage_of(runs, lambda run: reason, basis="unknown", how=reason)
