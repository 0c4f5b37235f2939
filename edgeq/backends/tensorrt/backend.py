"""Build a prepared model for TensorRT, add models for devices without TensorRT, and predict how TensorRT will run the
file.

The checker reads the written file, not the plan for it. For every Q/DQ pair, it names the fusions that the pair
enables. For every node of the float model, it names the type: int8, 16 bits or fp32. Its findings are placement rules
that the file breaks. A file without findings has none of the known problems.

`simulation` turns the graph into a float32 graph that computes the same results on ONNX Runtime's CPU kernels. The
original graph cannot be used for that. ONNX Runtime's CPU provider has hardly any 16-bit kernels, so it computes 16-bit
nodes in float32 and drops the roundings between them. (Seen in 1.31.1: 200 times 1000 times 0.001 is infinite in
float16, but the provider gives 200.) So the simulation stores every 16-bit tensor in float32. Where a tensor is made, a
pair of Cast nodes rounds it to its type. No optimisation level removes these Cast nodes. Q/DQ pairs stay as they are,
so integers times their scale are multiplied and summed in float32.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from edgeq_device.engines.catalog import engine_options, parse_version
from edgeq_device.engines.cuda import capability_text, read_gpus
from edgeq_device.engines.sessions import read_tensorrt

from edgeq.backends.base import Alternative, Artifact, Backend, DoctorCheck, check_names, refuse_wide
from edgeq.backends.tensorrt import explicit, options
from edgeq.calibration.ranges import Range, share_ranges
from edgeq.calibration.table import FLATBUFFERS, is_table
from edgeq.data.samples import Samples
from edgeq.errors import EdgeqError, HardwareError, ModelError, UsageError, one_line
from edgeq.hardware.detect import Machine
from edgeq.hardware.target import Target
from edgeq.measure.coverage import Coverage, NodeRun, coverage_of
from edgeq.model.clean import name_nodes
from edgeq.model.edit import Editor, insert_behind, replace_node
from edgeq.model.fold import raise_opset
from edgeq.model.graph import DATA_MOVEMENT, constant, is_op, name_of, node_input, only_reader
from edgeq.model.int8_prediction import int8_rules
from edgeq.model.load import check_valid, save_model
from edgeq.model.prepare import PreparedModel
from edgeq.model.products import node_macs
from edgeq.model.shapes import element_types
from edgeq.model.tensors import proto_skeleton
from edgeq.run.engines import load_engines
from edgeq.run.session import SessionSettings, onnxruntime
from edgeq.scheme import Scheme
from edgeq.util.records import computed, plain

_DQ = "DequantizeLinear"
_PRECISION = {ir.DataType.FLOAT16: "fp16", ir.DataType.BFLOAT16: "bf16", ir.DataType.FLOAT: "fp32"}
_PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_SHIFT = "BatchNormalization"
_ACTIVATIONS = ("Relu", "Clip", "LeakyRelu", "Sigmoid", _SHIFT)
_BIAS = 2


@dataclass(frozen=True)
class QdqPair:
    """Describe a Q/DQ pair by its tensor and the fusions that it enables. A weight has only a DQ, because the file
    contains its integers.
    """

    tensor: str
    weight: bool
    serves: tuple[str, ...]


@dataclass(frozen=True)
class NodeType:
    """Record the type of a node with float data ("int8", "fp16", "bf16" or "fp32") and the reason for it."""

    name: str
    op_type: str
    precision: str
    macs: int
    reason: str


@dataclass(frozen=True)
class PlacementReport:
    """Hold the checker's result. `findings` has one sentence for each rule that the file breaks, and is empty for a
    good file.
    """

    pairs: tuple[QdqPair, ...]
    nodes: tuple[NodeType, ...]
    findings: tuple[str, ...]

    @computed
    def macs(self) -> dict[str, int]:
        """Return the number of multiply-accumulates in each precision."""
        found: dict[str, int] = {}
        for node in self.nodes:
            found[node.precision] = found.get(node.precision, 0) + node.macs
        return {name: found[name] for name in ("int8", "fp16", "bf16", "fp32") if name in found}

    def coverage(self) -> Coverage:
        """Return which nodes run in int8, and why others do not, in the form that `measure_coverage` uses for a CPU."""
        runs = [
            NodeRun(n.name, n.name, n.op_type, "int8" if n.precision == "int8" else "float", n.macs) for n in self.nodes
        ]
        reasons = {n.name: f"{n.precision}: {n.reason}" for n in self.nodes}
        return coverage_of(
            runs,
            lambda run: reasons[run.name],
            basis="forecast",
            how="the placement checker, by TensorRT's rules for explicit quantization",
            reason="what TensorRT runs in int8 is only known when it builds the engine",
        )


def check_placement(model: ir.Model, source: ir.Model, reasons: Mapping[str, str]) -> PlacementReport:
    """Check `model`, which has explicit quantization, and return the placement.

    Args:
        source: the float model from which `model` was made. The MACs of this float model are counted.
        reasons: the reason why a node is not in int8 or not in 16 bits, by node name, for the report.
    """
    reader = _Reader(model, source, reasons)
    nodes = reader.node_types()
    return PlacementReport(reader.pairs(), nodes, tuple(reader.findings))


class _Reader:
    def __init__(self, model: ir.Model, source: ir.Model, reasons: Mapping[str, str]) -> None:
        self.findings: list[str] = []
        self._model, self._reasons = model, reasons
        self._types = element_types(model)
        self._macs = node_macs(source)
        self._own = {node.name for node in source.graph}
        self._order = {node: position for position, node in enumerate(model.graph)}
        self._layers = {node for node in model.graph if self._is_int8_layer(node)}
        self._fused = self._fusions()

    def _is_int8_layer(self, node: ir.Node) -> bool:
        multiplies = self._macs.get(str(node.name), 0) > 0 or node.op_type in _PRODUCTS
        return multiplies and len(node.inputs) > 1 and all(_is_restored(value) for value in node.inputs[:2])

    def _fusions(self) -> dict[ir.Node, ir.Node]:
        """Return a map from each fused node to the int8 layer into which it is fused.

        A BatchNormalization, a residual Add and an activation fuse in this order. Each must be the only reader of the
        result before it.
        """
        fused: dict[ir.Node, ir.Node] = {}
        for layer in sorted(self._layers, key=lambda node: self._order[node]):
            made = layer.outputs[0]
            behind = only_reader(made)
            if behind is not None and behind.op_type == _SHIFT:
                fused[behind] = layer
                made = behind.outputs[0]
                behind = only_reader(made)
            if behind is not None and behind.op_type == explicit.ADD and self._skips(behind, made):
                fused[behind] = layer
                behind = only_reader(behind.outputs[0])
            if behind is not None and behind.op_type in _ACTIVATIONS:
                fused[behind] = layer
        return fused

    def _skips(self, add: ir.Node, main: ir.Value) -> bool:
        return any(_is_restored(value) for value in add.inputs if value is not main)

    # Pairs.

    def pairs(self) -> tuple[QdqPair, ...]:
        """Return the pairs in graph order, each with its fusions. Add rules that the file breaks to `findings`."""
        found: dict[tuple[str, bool], list[str]] = {}
        for node in self._model.graph:
            if node.op_type != _DQ:
                continue
            integers = node.inputs[0]
            maker = integers.producer() if integers is not None else None
            tensor = name_of(integers if maker is None else maker.inputs[0])
            self._check_scale(node, maker is None)
            serves = found.setdefault((tensor, maker is None), [])
            readers = self._readers(node.outputs[0])
            serves.extend(self._serves(reader, place, tensor) for reader, place in readers)
            if not readers:
                self.findings.append(f"the pair on {tensor!r} has no reader")
        return tuple(QdqPair(tensor, weight, tuple(serves)) for (tensor, weight), serves in found.items())

    def _readers(self, value: ir.Value) -> list[tuple[ir.Node, int]]:
        """Return the main graph's nodes that read a value, in graph order, each with the index of the input that reads
        it.
        """
        uses = [use for use in value.uses() if use.node in self._order]
        return [(use.node, use.idx) for use in sorted(uses, key=lambda use: (self._order[use.node], use.idx))]

    def _serves(self, node: ir.Node, place: int, tensor: str) -> str:
        if node in self._layers and place < _BIAS:
            return f"{node.op_type} {node.name}: int8 operand {place}"
        if node in self._layers:
            self.findings.append(f"{node.op_type} {node.name}: its bias {tensor!r} is quantized")
            return f"{node.op_type} {node.name}: bias, which should be float"
        if node.op_type == explicit.ADD and node in self._fused:
            return f"{explicit.ADD} {node.name}: skip branch, fused into {self._fused[node].name}"
        if node.op_type == explicit.ADD:
            self.findings.append(f"Add {node.name} reads the pair on {tensor!r} but does not fuse into an int8 layer")
        else:
            self.findings.append(f"{node.op_type} {node.name} reads the pair on {tensor!r}, which serves no fusion")
        return f"{node.op_type} {node.name}: nothing"

    def _check_scale(self, node: ir.Node, weight: bool) -> None:
        scale, zero = (constant(node_input(node, place)) for place in (1, 2))
        if scale is None or zero is None:
            self.findings.append(f"{node.name}: its scale or zero point is not constant")
            return
        if np.any(zero):
            self.findings.append(f"{node.name}: its zero point is not 0")
        if zero.dtype != np.int8:
            self.findings.append(f"{node.name}: its integers are not int8")
        if not weight and scale.ndim:
            self.findings.append(f"{node.name}: an activation has a scale per channel")
        if not np.all(scale.astype(np.float64) > 0):
            self.findings.append(f"{node.name}: its scale is not above 0")
        integers = constant(node.inputs[0])
        if weight and scale.ndim and integers is not None:
            axis = node.attributes.get_int("axis", 1)
            for reader, _ in self._readers(node.outputs[0]):
                if explicit.weight_axis(reader, integers.ndim) != axis:
                    self.findings.append(f"{node.name}: its scales are along axis {axis}, not along the outputs")

    # Nodes.

    def node_types(self) -> tuple[NodeType, ...]:
        """Return the nodes of the float model that have float data. Add rules that the file breaks to `findings`."""
        found = []
        for node in self._model.graph:
            if node.name not in self._own:
                continue
            precision = self._precision(node)
            if precision:
                macs, reason = self._macs.get(str(node.name), 0), self._reason(node, precision)
                found.append(NodeType(str(node.name), node.op_type, precision, macs, reason))
            bias = constant(node_input(node, _BIAS)) if node in self._layers else None
            if bias is not None and bias.ndim == 1:
                self.findings.append(f"{node.op_type} {node.name}: ONNX Runtime makes its bias int32 at load")
            if node.op_type == explicit.ADD and all(_is_restored(value) for value in node.inputs):
                self.findings.append(f"Add {node.name}: both branches are quantized")
        return tuple(found)

    def _precision(self, node: ir.Node) -> str:
        if node in self._layers or node in self._fused:
            return "int8"
        kinds = (self._types.get(name_of(value), ir.DataType.UNDEFINED) for value in node.outputs)
        return next((_PRECISION[kind] for kind in kinds if kind in _PRECISION), "")

    def _reason(self, node: ir.Node, precision: str) -> str:
        if node in self._layers:
            return "both operands are int8"
        if node in self._fused:
            return f"fused into {self._fused[node].name}"
        return self._reasons.get(str(node.name), f"computes in {precision} next to the int8 layers")


def _is_restored(value: ir.Value | None) -> bool:
    return value is not None and is_op(value.producer(), _DQ)


SETTINGS = SessionSettings(optimization="none")
"""Settings that run the graph as written. The optimiser would quantize weights that stay in float, and fuse Q/DQ
differently.
"""
_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
# The results of these operators are values from their inputs, so there is nothing to round.
_EXACT = DATA_MOVEMENT | {
    "Concat",
    "Relu",
    "Clip",
    "Where",
    "Max",
    "Min",
    "Neg",
    "Abs",
    "GlobalMaxPool",
    "DequantizeLinear",
}


def simulation(model: ir.Model) -> ir.Model:
    """Return a float32 model that computes the same results as `model`, with the same signature and tensor names."""
    simulated = model.clone()
    graph, editor = simulated.graph, Editor(simulated)
    types = element_types(model)
    for value in graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and tensor.dtype in _HALVES:
            value.const_value = ir.tensor(tensor.numpy().astype(np.float32), name=value.name)
            value.type = ir.TensorType(ir.DataType.FLOAT)
    nodes = tuple(graph)
    for node, following in zip(nodes, [*nodes[1:], None], strict=True):
        kinds = [types.get(value.name or "", ir.DataType.UNDEFINED) for value in node.outputs]
        if node.op_type == "Cast" and _at_border(node):
            continue
        if node.op_type == "Cast" and kinds[0] in _HALVES:
            _, rounded = _rounding(editor, node.inputs[0], str(node.outputs[0].name), kinds[0], node)
            replace_node(node, rounded)
        elif node.op_type == "Cast" and kinds[0] == ir.DataType.FLOAT and types.get(name_of(node.inputs[0])) in _HALVES:
            node.op_type = "Identity"
            node.attributes.clear()
        elif node.op_type not in _EXACT and not _takes_in_its_reader(node):
            for value, kind in zip(node.outputs, kinds, strict=True):
                if kind in _HALVES:
                    name = str(value.name)
                    insert_behind(value, *_rounding(editor, value, name, kind, following), f"{name}_unrounded")
    for node in graph:
        for value in node.outputs:
            if value.dtype in _HALVES and not value.is_graph_output():
                value.type = ir.TensorType(ir.DataType.FLOAT)
    return simulated


def _takes_in_its_reader(node: ir.Node) -> bool:
    """Return whether TensorRT folds the next node into this one, and so does not round the tensor between the two."""
    return is_op(node, "Conv", "ConvTranspose") and is_op(only_reader(node.outputs[0]), "BatchNormalization")


def _at_border(cast: ir.Node) -> bool:
    """Return whether `cast` widens a 16-bit model input or makes a 16-bit model output. The model's inputs and outputs
    keep their types.
    """
    source, made = cast.inputs[0], cast.outputs[0]
    of_input = source is not None and source.is_graph_input() and source.dtype in _HALVES
    return of_input or (made.is_graph_output() and made.dtype in _HALVES)


def _rounding(
    editor: Editor, source: ir.Value | None, name: str, kind: ir.DataType, before: ir.Node | None
) -> tuple[ir.Value, ir.Value]:
    """Insert a Cast of the tensor `name` to the 16-bit type and a Cast back, and return the outputs of both."""
    down = editor.node(
        "Cast", [source], f"{name}_to_16_bits", output=f"{name}_16_bits", before=before, attributes={"to": kind}
    )
    to = {"to": ir.DataType.FLOAT}
    return down, editor.node("Cast", [down], f"{name}_from_16_bits", before=before, attributes=to)


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
            raise UsageError("TensorRT has no QLinear operators", "Use --format QDQ")
        if scheme.activation_type != "int8" or scheme.weight_type != "int8":
            raise UsageError("TensorRT's integers are signed", "Set --activation-type and --weight-type to int8")
        if not (scheme.activation_symmetric and scheme.weight_symmetric):
            raise UsageError("TensorRT supports no zero point other than 0", "Keep --activation-symmetric")
        if scheme.reduce_range:
            raise UsageError("tensor cores sum in 32 bits: 7-bit weights would only lose accuracy", "Leave it out")
        self._check_float_type(scheme)
        if scheme.format == "table":
            explicit.check_version(self._tensorrt, self._where)
            if scheme.exclude or scheme.op_types is not None:
                raise UsageError(
                    "with a table TensorRT itself chooses what runs in int8",
                    "Use --format QDQ, or leave out --exclude and --op-type",
                )
        known = sorted({*explicit.weighted_operators(int8_rules(self.name)), "Add"})
        foreign = next((op for op in scheme.op_types or () if op not in known), None)
        if foreign is not None:
            raise UsageError(f"TensorRT does not quantize {foreign} by itself", f"It can be {', '.join(known)}")

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

    def doctor(self, machine: Machine) -> Iterator[DoctorCheck]:
        """Look for GPUs, TensorRT and CUDA, and check that the provider supports the options that artifacts set."""
        gpus, problem = read_gpus()
        for gpu in gpus:
            capability = capability_text(gpu.compute_capability)
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
        given = {"explicit": options.explicit_options("float16"), "table": options.table_options(FLATBUFFERS)}
        for name, chosen in given.items():
            try:
                options.check_options(options.TENSORRT, chosen)
                _, source = options.known_options(options.TENSORRT)
                yield DoctorCheck(f"provider options ({name})", "ok", f"all listed in {source}")
            except EdgeqError as error:
                yield DoctorCheck(f"provider options ({name})", "failed", error.text)

    def _explicit(
        self, prepared: PreparedModel, ranges: Mapping[str, Range], scheme: Scheme, destination: Path, place: Path
    ) -> Artifact:
        known = options.facts()
        model = _raised(prepared, scheme.rest)
        place_pairs = partial(
            explicit.plan_placement,
            model,
            int8_rules(self.name),
            exclude=scheme.excluded,
            op_types=scheme.op_types,
            cut=self.cut,
            most_cut=known.most_cut,
            hazards=prepared.hazards,
        )
        plan = place_pairs()
        doubt: tuple[str, ...] = ()
        if not plan.edges and not scheme.exclude:
            name, reason = next(iter(plan.reasons.items()), ("", ""))
            doubt = (
                f"no layer is expected to be faster in int8 ({name}: {reason}); all layers that can be are quantized",
            )
            plan = place_pairs(gains=False)
        if not plan.edges:
            first = next(iter(plan.reasons.items()), ("the model", "it has no Conv, ConvTranspose, Gemm or MatMul"))
            raise ModelError(
                f"{prepared.source}: nothing in it was quantized: {first[0]}: {first[1]}",
                "Deploy the float model, or exclude fewer nodes",
            )
        ranges = {**ranges, **share_ranges(model, {name: ranges[name] for name in plan.activations if name in ranges})}
        explicit.insert_pairs(model, plan, ranges, per_channel=scheme.per_channel, float_type=scheme.rest)
        in_float32 = (
            {} if scheme.rest == "float32" else explicit.cast_float_nodes(model, scheme.rest, self._seen(ranges))
        )
        explicit.shield_biases(model)
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
        known = options.facts()
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
            notes=(*notes, "TensorRT chooses what runs in int8: the proof here is of the float model"),
            device="gpu",
            requires={
                **self._gpu,
                "min_tensorrt": known.table["min_tensorrt"],
                "below_tensorrt": known.table["below_tensorrt"],
                "table": FLATBUFFERS,
            },
            simulation=destination,
            coverage=Coverage(basis="unknown", how="TensorRT chooses when it builds the engine"),
            tables=tuple(tables / name for name in explicit.FILES),
            alternatives=self._alternatives(prepared, scheme, place),
        )

    def _alternatives(self, prepared: PreparedModel, scheme: Scheme, place: Path) -> tuple[Alternative, ...]:
        """Return the same model for devices without TensorRT: in 16 bits for CUDA, and in float32 for a CPU."""
        float32 = Scheme(mode="static", format="QDQ")
        found = []
        if scheme.rest != "float32":
            model = _raised(prepared, scheme.rest)
            in_float32 = explicit.cast_float_nodes(model, scheme.rest, self._seen({}))
            path, simulated_path = place / "cuda.onnx", place / "cuda-simulation.onnx"
            _save(model, path, prepared)
            save_model(simulation(model), simulated_path)
            artifact = Artifact(
                model=path,
                scheme=float32.replace(rest=scheme.rest),
                provider=options.CUDA,
                provider_options=engine_options(load_engines()[_CUDA]),
                device="gpu",
                requires={"min_compute_capability": options.facts().rest[scheme.rest].min_compute_capability},
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
        needed = options.facts().rest[scheme.rest].min_compute_capability
        have = self._gpu.get("min_compute_capability", "")
        if needed and have and parse_version(have) < parse_version(needed):
            raise HardwareError(
                f"{self._where} has compute capability {have}, but {scheme.rest} needs {needed}",
                "Use --rest float16",
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
    """Return a copy of the prepared model with the opset and IR version that a file with `float_type` needs."""
    requirements = options.facts().rest[float_type]
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
    except Exception as error:  # onnx raises InferenceError and other exceptions from its C++ code
        problem = f"{prepared.source}: the file for TensorRT is not valid: {one_line(error, most=200)}"
        raise EdgeqError(problem, "This is a bug in edgeq: report it") from error


def _notes(placement: PlacementReport, in_float32: Mapping[str, str]) -> tuple[str, ...]:
    macs = placement.macs
    whole = sum(macs.values()) or 1
    shares = ", ".join(f"{name} {count / whole:.1%}" for name, count in macs.items() if count)
    pairs = sum(not pair.weight for pair in placement.pairs)
    notes = [f"by the placement checker: {shares} of the multiply-accumulates, {pairs} activations between Q and DQ"]
    notes += [f"{name} {reason}" for name, reason in in_float32.items()]
    return tuple(notes)
