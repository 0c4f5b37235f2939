"""Build for Qualcomm's NPU, and find out which nodes of a model the NPU's engine accepts. The engine runs in a separate
process.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import onnx_ir as ir
from edgeq_device.engines.catalog import find_library, read_installed_version
from edgeq_device.errors import DeviceError
from edgeq_device.system.places import scratch_folder
from edgeq_device.system.plainjson import parse_json

from edgeq.backends.base import (
    FREE_SCALES,
    Alternative,
    Artifact,
    DeviceSimulator,
    TargetBackend,
    check_names,
    require_fields,
)
from edgeq.calibration.groups import share_ranges
from edgeq.calibration.ranges import Range
from edgeq.data.samples import Samples
from edgeq.errors import EngineError, HardwareError, ModelError, UsageError
from edgeq.hardware.target import Target
from edgeq.measure.coverage import Coverage, coverage_of
from edgeq.measure.inference import Session
from edgeq.measure.node_runs import NodeRun, find_source_name
from edgeq.model.digests import structure_digest
from edgeq.model.graph import DATA_MOVEMENT, is_constant, is_op, name_of, sizes
from edgeq.model.int8_prediction import predict_int8
from edgeq.model.int8_rules import Int8Rule, int8_rules
from edgeq.model.load import read_model, save_model
from edgeq.model.macs import node_macs
from edgeq.model.parts import part_of
from edgeq.model.prepare import PreparedModel
from edgeq.model.sizes import require_fixed_sizes
from edgeq.quantization.clamps import find_lasting_clamps
from edgeq.quantization.norms import norms_as_convolutions
from edgeq.quantization.params import range_params
from edgeq.quantization.quantizer import quant_type, quantize_with_ranges, quiet
from edgeq.run.engines import Engine, EngineChoice, find_backend_engine
from edgeq.run.session import Engines, SessionSettings, onnxruntime, open_simulator
from edgeq.scheme import ALL_NODES, Scheme
from edgeq.util.folders import shipped
from edgeq.util.record_files import read_toml
from edgeq.util.records import parse

# Bits of the activations, in a row of the table.
_NARROW = 8


def write_pairs(
    prepared: PreparedModel,
    ranges: Mapping[str, Range],
    scheme: Scheme,
    destination: Path,
    rules: Mapping[str, Int8Rule] | None = None,
) -> dict[str, str]:
    """Write the quantized model and return the nodes that stay in float, each with its reason.

    Args:
        rules: the rules that decide which nodes are quantized; None means the rules for the NPU.

    Raises:
        CalibrationError: a tensor has no range.
        ModelError: the quantizer refuses the model, or nothing in it can be quantized.
    """
    from onnxruntime.quantization import QuantType
    from onnxruntime.quantization.execution_providers.qnn import get_qnn_qdq_config

    rules = rules or int8_rules("qnn")
    # The prediction would refuse scales per channel for some products, as the CPU does; the NPU takes them.
    predicted = predict_int8(prepared.model, rules, scheme.replace(per_channel=False), hazards=prepared.hazards)
    float_reasons = {node.name: node.reason for node in predicted if node.verdict == "float"}
    types = sorted({node.op_type for node in predicted if node.verdict == "int8"})
    if not types:
        raise ModelError(
            f"{prepared.source}: no node can run in integers on the NPU", next(iter(float_reasons.values()), "")
        )
    # The provider's configuration takes the types of single tensors, in addition to the type of all others.
    overrides = {name_of(v): [{"quant_type": QuantType.QUInt16}] for v in _wide(prepared.model, scheme)}
    overrides |= {name: [{"quant_type": QuantType.QUInt8}] for name in _unsigned(prepared.model)}
    # See `_grouped_transposed`.
    one_scale = [{"quant_type": quant_type(scheme.weight_type), "symmetric": scheme.weight_symmetric}]
    overrides |= dict.fromkeys(_grouped_transposed(prepared.model), one_scale)
    activation = QuantType.QUInt16 if ALL_NODES in scheme.wide else quant_type(scheme.activation_type)
    with quiet():
        # The provider's own configuration knows which operators need which types. edgeq keeps its options and gives the
        # ranges.
        config = get_qnn_qdq_config(
            str(prepared.path),
            None,  # The ranges are already known.
            activation_type=activation,
            weight_type=quant_type(scheme.weight_type),
            per_channel=scheme.per_channel,
            init_overrides=overrides or None,
            activation_symmetric=scheme.activation_symmetric,
            weight_symmetric=scheme.weight_symmetric,
            op_types_to_quantize=types,
            nodes_to_exclude=sorted(float_reasons),
        )
    shared_ranges = {**ranges, **share_ranges(prepared.model, ranges, DATA_MOVEMENT, float_reasons)}
    # An option that is None would replace the quantizer's own default.
    options = {k: v for k, v in config.extra_options.items() if v is not None}
    dtype = ir.DataType(int(activation.tensor_type))
    if find_lasting_clamps(
        prepared.model.graph, range_params(shared_ranges, dtype, symmetric=scheme.activation_symmetric)
    ):
        # Otherwise the quantizer removes every Relu and Clip behind a quantized layer, also one that cuts into the
        # range.
        options["QDQKeepRemovableActivations"] = True
    quantize_with_ranges(
        prepared,
        destination,
        shared_ranges,
        float_nodes=float_reasons,
        fix="Keep the node in float with ⟨exclude⟩",
        fix_ranges="The calibration does not cover this tensor: calibrate this model again",
        op_types_to_quantize=types,
        per_channel=scheme.per_channel,
        activation_type=activation,
        weight_type=quant_type(scheme.weight_type),
        extra_options=options,
    )
    return float_reasons


def _unsigned(model: ir.Model) -> set[str]:
    """Return the constant weights of operators that accept only uint8 weights. targets/qnn/htp.toml lists these
    operators, which were found in test runs.
    """
    types = {row.operator for row in dialect() if row.right and row.weights == "uint8" and row.bits == _NARROW}
    # An operator may take both types in different forms. Then int8 works in one of them, and the scheme's type stays.
    types -= {row.operator for row in dialect() if row.right and row.weights == "int8" and row.bits == _NARROW}
    second = (node.inputs[1] for node in model.graph if node.op_type in types and len(node.inputs) > 1)
    return {name_of(value) for value in second if value is not None and is_constant(value)}


def _grouped_transposed(model: ir.Model) -> set[str]:
    """Return the weights of transposed convolutions with groups.

    Their shape is [C_in, C_out / groups, ...]. The bias needs one scale for each output channel, but the output axis of
    the weights has only C_out / groups indices.
    """
    layers = [node for node in model.graph if is_op(node, "ConvTranspose")]
    return {name_of(node.inputs[1]) for node in layers if node.attributes.get_int("group", 1) > 1}


@dataclass(frozen=True)
class HtpRow:
    """Describe how the NPU runs one form of an operator. targets/qnn/htp.toml explains the fields."""

    operator: str
    form: str
    bits: int
    weights: str
    taken_by: tuple[str, ...]
    right: bool = False
    db: float = 0.0
    arithmetic_db: float = 0.0
    steps: float = 0.0
    problem: str = ""


@dataclass(frozen=True)
class _HtpTable:
    version: str
    line: tuple[HtpRow, ...]


@cache
def dialect() -> tuple[HtpRow, ...]:
    """Return the rows of targets/qnn/htp.toml."""
    return read_toml(shipped("targets") / "qnn" / "htp.toml", _HtpTable, HardwareError, "Install edgeq again").line


def wide_share(model: ir.Model, scheme: Scheme) -> float:
    """Return the share of all activation elements that a scheme keeps in 16 bits."""
    every = {name_of(v): prod(sizes(v) or (1,)) for v in _activations(model) if v.producer() is not None}
    wide = every if ALL_NODES in scheme.wide else {name_of(value) for value in _wide(model, scheme)}
    return sum(size for name, size in every.items() if name in wide) / max(1, sum(every.values()))


def _wide(model: ir.Model, scheme: Scheme) -> list[ir.Value]:
    """Return the 16-bit tensors: the outputs of the scheme's wide nodes, and model inputs that only those nodes read.

    The quantizer's rules insert conversions for the other inputs of those nodes, and for other readers of their
    outputs.
    """
    nodes = frozenset(scheme.wide) - {ALL_NODES}

    def is_wide(value: ir.Value) -> bool:
        """Return whether a tensor has 16 bits: its producer is wide or, for a model input, all its readers are."""
        maker = value.producer()
        among = [maker] if maker is not None else [reader for reader, _ in value.uses()]
        return bool(among) and all(node.name in nodes for node in among)

    return [value for value in _activations(model) if is_wide(value)]


def _activations(model: ir.Model) -> list[ir.Value]:
    """Return the float tensors that are not constant."""
    inputs = [value for value in model.graph.inputs if not value.is_initializer()]
    outputs = [value for node in model.graph for value in node.outputs]
    return [value for value in (*inputs, *outputs) if value.dtype in (None, ir.DataType.FLOAT)]


_PAIR = ("QuantizeLinear", "DequantizeLinear")


def failing_node(model: Path, fails: Callable[[Path], bool], folder: Path) -> ir.Node | None:
    """Find the shortest leading part of `model` that fails as the whole model does, and return its last node.

    Args:
        model: a Q/DQ model, whose nodes are in order.
        fails: function that returns whether a model fails.
        folder: folder for the partial models.

    Returns:
        That node, or None if the model has no nodes.
    """
    graph = read_model(model)
    # The pairs are no steps of their own: each belongs to the node next to it.
    nodes = [node for node in graph.graph if not is_op(node, *_PAIR)]
    # The search assumes that a part fails if it contains a part that fails, so it compiles only a few of the models.
    works, broken = 0, len(nodes)
    while broken - works > 1:
        middle = (works + broken) // 2
        file = folder / f"first-{middle}.onnx"
        save_model(_leading_part(graph, nodes[:middle]), file)
        works, broken = (works, middle) if fails(file) else (middle, broken)
    return nodes[broken - 1] if nodes else None


def _leading_part(model: ir.Model, nodes: list[ir.Node]) -> ir.Model:
    """Return a model with `nodes`, all the nodes that they depend on, and the Q/DQ pairs after them."""
    members = set(nodes)
    stack = list(nodes)
    while stack:
        node = stack.pop()
        makers = [value.producer() for value in node.inputs if value is not None]
        # Only the requested nodes take the pairs behind them along. A node that was added as a dependence already has
        # its reader.
        behind = [reader for value in node.outputs for reader, _ in value.uses()] if node in members else []
        for neighbour in (*makers, *(reader for reader in behind if is_op(reader, *_PAIR))):
            if neighbour is not None and neighbour not in members:
                members.add(neighbour)
                stack.append(neighbour)
    ordered = [node for node in model.graph if node in members]
    values = [value for node in ordered for value in node.outputs]
    outputs = [value for value in values if not any(reader in members for reader, _ in value.uses())]
    for value in outputs:
        # An output of a model must have a type, but inner tensors may have lost theirs.
        value.type = value.type or ir.TensorType(ir.DataType.FLOAT)
    return part_of(model, ordered, [v for v in model.graph.inputs if v.uses()], outputs)


# More names than this would make a note longer than the rest of the report.
_LISTED = 6


@dataclass(frozen=True)
class Delegation:
    """Describe where the nodes of a float model run once it is quantized.

    Attributes:
        source: the model that was quantized.
        graphs: names of the nodes that the engine accepts, one set for each graph that it compiles.
        reasons: the reason why a node stays in float, by node name, if known.
        method: how edgeq found out which nodes the engine accepts.
    """

    source: ir.Model
    graphs: tuple[frozenset[str], ...]
    reasons: Mapping[str, str]
    method: str

    @property
    def on_cpu(self) -> tuple[ir.Node, ...]:
        """Return the nodes that run on the CPU: nodes that are in no graph and not merged into a node of a graph."""
        accepted = frozenset().union(*self.graphs)
        return tuple(n for n in self.source.graph if n.name not in accepted and not self._merged(n, accepted))

    @property
    def floating(self) -> tuple[ir.Node, ...]:
        """Return the nodes that are not quantized, but that the engine accepts. The engine computes these nodes in
        float16.
        """
        accepted = frozenset().union(*self.graphs)
        return tuple(n for n in self.source.graph if n.name in accepted and n.name in self.reasons)

    def _merged(self, node: ir.Node, accepted: frozenset[str]) -> bool:
        """Return whether `node` is a Relu or Clip that the quantizer removed because the range of its input already has
        the same effect.
        """
        maker = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
        return node.op_type in ("Relu", "Clip") and maker is not None and maker.name in accepted

    def crossing(self) -> tuple[str, ...]:
        """Return the tensors that pass between the NPU and the CPU, in graph order."""
        cpu_nodes = frozenset(self.on_cpu)
        values = ((value, node in cpu_nodes) for node in self.source.graph for value in node.outputs)
        return tuple(
            name_of(value)
            for value, made_on_cpu in values
            if any((reader in cpu_nodes) != made_on_cpu for reader, _ in value.uses())
        )

    def notes(self) -> tuple[str, ...]:
        """Return sentences that describe where the nodes run and which tensors pass between the NPU and the CPU."""
        count, cpu_nodes = len(self.source.graph), self.on_cpu
        share = f"{count - len(cpu_nodes)} of {count}" if cpu_nodes else f"all {count}"
        sentences = [f"{share} nodes run on the NPU, in {len(self.graphs)} graph{'s' * (len(self.graphs) != 1)}"]
        if self.floating:
            sentences.append(f"in 16-bit floats there: {_listed(self._named(self.floating))}")
        if cpu_nodes:
            sentences += [
                f"on the CPU: {_listed(self._named(cpu_nodes))}",
                f"tensors that cross: {_listed(self.crossing())}",
            ]
        return tuple(sentences)

    def coverage(self) -> Coverage:
        """Return a `Coverage` that states where the nodes run (`edgeq.measure.coverage`)."""
        macs, floats = node_macs(self.source), frozenset((*self.on_cpu, *self.floating))
        runs = [
            NodeRun(str(n.name), str(n.name), n.op_type, "float" if n in floats else "int8", macs.get(n.name or "", 0))
            for n in self.source.graph
        ]
        return coverage_of(runs, lambda run: self._reason(run.name), basis="modelled", how=self.method)

    def _named(self, nodes: tuple[ir.Node, ...]) -> list[str]:
        return [f"{n.name} ({n.op_type}: {self._reason(str(n.name))})" for n in nodes]

    def _reason(self, name: str) -> str:
        return self.reasons.get(name, "the provider does not support it")


def forecast(source: ir.Model, reasons: Mapping[str, str], absent: str) -> Coverage:
    """Return the nodes that would run in int8 if the engine accepted every node.

    Args:
        absent: the reason why the engine itself was not used.
    """
    everything = frozenset(str(node.name) for node in source.graph)
    coverage = Delegation(source, (everything,), reasons, "the model's pairs").coverage()
    return dataclasses.replace(coverage, basis="forecast", reason=absent)


def find_delegation(
    source: ir.Model, model: Path, engine: Engine, reasons: Mapping[str, str], method: str, folder: Path
) -> Delegation:
    """Find out which nodes the engine accepts in `model`, which was made from `source`.

    Args:
        reasons: the reason why a node was left in float, by node name.
        method: how edgeq finds out which nodes the engine accepts, for the record.
        folder: private folder for the results. A model with the same structure as an earlier one is not compiled again.

    Raises:
        EngineError: the engine refuses the model, crashes or hangs.
    """
    source_names = {str(node.name) for node in source.graph}
    record = folder / f"delegated-{structure_digest(model, {'engine': repr(engine)})}.json"
    # Compiling is slow, and a search builds many models of one structure with other numbers.
    if not record.exists():
        with Engines() as engines:
            try:
                accepted = engines.assigned_nodes(engine, model)
            except EngineError as error:
                raise _failure_at_node(error, engine, engines, model) from error
        record.write_text(json.dumps({"graphs": accepted}), encoding="utf-8")
    graphs_of = parse_json(record.read_bytes(), record.name)["graphs"]
    # The file may be left over from an interrupted run, so its content is checked like a stranger's.
    assigned = parse(graphs_of, tuple[tuple[str, ...], ...], record, EngineError)
    # The engine reports nodes of the optimised graph, whose names come from the model's nodes or have additions.
    graphs = [frozenset(find_source_name(name, source_names) for name in nodes) & source_names for nodes in assigned]
    return Delegation(source, tuple(nodes for nodes in graphs if nodes), reasons, method)


def _failure_at_node(error: EngineError, engine: Engine, engines: Engines, model: Path) -> EngineError:
    """Return `error` with the node at which the engine fails. If the engine does not fail again, return an error that
    advises the user to try again.
    """

    def fails(beginning: Path) -> bool:
        """Return whether the engine refuses this leading part of the model."""
        try:
            engines.assigned_nodes(engine, beginning)
        except EngineError:
            return True
        return False

    with scratch_folder("edgeq-failing-") as folder:
        # A failure that does not come again has no node to blame: the search would find a random one.
        node = failing_node(model, fails, Path(folder)) if fails(model) else None
    if node is None:
        return EngineError(f"{engine.name} failed once: {error.problem}", "Try again")
    location = f"at node {node.name!r} ({node.op_type})"
    # The engine also accepts float nodes, and may fail at one of these as well.
    fix = "Keep it in float with ⟨exclude⟩. If that does not help, export the model without it"
    return EngineError(f"{engine.name} fails {location}: {error.problem}", fix)


def _listed(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")


_CPU = "CPUExecutionProvider"
# Values that every scheme for the NPU has.
_FIELDS: Mapping[str, Any] = {
    "mode": "static",
    "format": "QDQ",
    "activation_type": "uint8",
    "rest": "float32",
    "reduce_range": False,
    "fit_pairs": False,
    **FREE_SCALES,
}
_NEEDS = "Leave the scheme to the target: static Q/DQ, uint8 activations, int8 weights"


@dataclass(frozen=True)
class QnnBackend(TargetBackend):
    """Build for Qualcomm's NPU.

    Attributes:
        target: the target to build for, whose `[device] engine_options` configure the simulator. None means the
            engine's defaults.
    """

    name = "qnn"
    title = "Qualcomm's NPU, through ONNX Runtime"
    simulated = True

    def check(self, scheme: Scheme) -> None:
        """Refuse a scheme that the NPU cannot run. See `Backend.check`."""
        require_fields(scheme, _FIELDS, self.name, _NEEDS)
        # The NPU's weights with a scale per channel are symmetric, and symmetric numbers need signed integers.
        if scheme.per_channel and scheme.weight_type != "int8":
            raise UsageError("weights with a scale per channel must be int8 on the NPU", "Add ⟨per_channel=False⟩")

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
        self.check(scheme)
        # The engine compiles a graph for its sizes.
        require_fixed_sizes(prepared.model, prepared.source, self.title)
        check_names(prepared, (*scheme.exclude, *(name for name in scheme.wide if name != ALL_NODES)))
        place = Path(tempfile.mkdtemp(prefix="qnn-", dir=prepared.path.parent))
        # A BatchNormalization that follows no layer would stay in float. As a depthwise convolution it runs in
        # integers.
        changed, ranges = norms_as_convolutions(prepared, ranges, place / "rewritten.onnx")
        float_reasons = write_pairs(changed, ranges, scheme, destination)
        # Without the simulator the file is still right, but nothing can show what the engine accepts.
        engine, absent = find_backend_engine(self.name, self._options), ""
        try:
            find_library(engine, str(onnxruntime().__version__))
        except DeviceError as error:
            absent = str(error)
        artifact = Artifact(
            model=destination,
            scheme=scheme,
            provider=_CPU,
            device="npu",
            notes=changed.notes[len(prepared.notes) :],
            details={"wide_share": wide_share(changed.model, scheme)},
            engine=EngineChoice(engine),
            alternatives=(self._on_cpu(destination, scheme),),
        )
        if absent:
            # The unfused kernels compute from the pairs as they are written. The optimiser would fuse them by the rules
            # of a CPU.
            settings = SessionSettings(optimization="none")
            notes = (*artifact.notes, f"not run in the simulator: {absent}")
            return dataclasses.replace(
                artifact,
                simulation=destination,
                simulation_settings=settings,
                notes=notes,
                coverage=forecast(changed.model, float_reasons, absent),
            )
        method = f"the simulator of {engine.packages[0]} {read_installed_version(engine)}"
        delegation = find_delegation(changed.model, destination, engine, float_reasons, method, prepared.path.parent)
        return dataclasses.replace(
            artifact,
            notes=(*artifact.notes, *delegation.notes(), f"the answers come from {method}; nothing was run on a chip"),
            coverage=delegation.coverage(),
        )

    def simulator(self) -> DeviceSimulator:
        """Return the engine that this backend builds for. This engine also simulates the hardware."""
        return _simulated

    @property
    def _options(self) -> Mapping[str, str]:
        return self.target.device.get("engine_options", {}) if self.target is not None else {}

    def _on_cpu(self, model: Path, scheme: Scheme) -> Alternative:
        target_name = self.target.name if self.target is not None else self.name
        artifact = Artifact(model=model, scheme=scheme, provider=_CPU)
        return Alternative(f"{target_name}-cpu", "any CPU, the same Q/DQ model", 0, artifact)


def _simulated(target: Target) -> AbstractContextManager[Callable[[Path, SessionSettings], Session]]:
    return open_simulator(find_backend_engine(target.backend, target.device.get("engine_options", {})))
