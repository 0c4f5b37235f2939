"""What of a model an engine takes: asked of the engine itself, in a process of its own."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
from edgeq_device.engines import find_library, installed_version
from edgeq_device.errors import DeviceError
from edgeq_device.plainjson import parse_json

from edgeq.backends.base import Alternative, Artifact, check_names, require_fields
from edgeq.backends.qnn.rewrite import rewrite, wide_share, write_pairs
from edgeq.backends.systolic.fixed_batch import part_of
from edgeq.calibrate.ranges import Range
from edgeq.data.samples import Samples
from edgeq.errors import EngineError, UsageError
from edgeq.hardware.target import Target
from edgeq.measure.coverage import Coverage, coverage_of
from edgeq.measure.node_runs import NodeRun, source_name
from edgeq.model.compatibility import require_fixed_sizes
from edgeq.model.graph import is_op, name_of
from edgeq.model.load import read_model, save_model
from edgeq.model.macs import node_macs
from edgeq.model.prepare import PreparedModel
from edgeq.model.structure import structure_digest
from edgeq.run.engines import Engine, EngineChoice, engine_for
from edgeq.run.session import SessionSettings, onnxruntime
from edgeq.run.workers import Engines
from edgeq.scheme import ALL_NODES, Scheme
from edgeq.util.records import parse

_PAIR = ("QuantizeLinear", "DequantizeLinear")


def failing_node(model: Path, fails: Callable[[Path], bool], folder: Path) -> ir.Node | None:
    """The first node with which a beginning of `model` fails as the whole does; None where none does.

    Args:
        model: a Q/DQ model, whose nodes are in order.
        fails: whether a model fails.
        folder: for the beginnings.
    """
    graph = read_model(model)
    nodes = [node for node in graph.graph if not is_op(node, *_PAIR)]
    works, broken = 0, len(nodes)
    while broken - works > 1:
        middle = (works + broken) // 2
        file = folder / f"first-{middle}.onnx"
        save_model(_beginning(graph, nodes[:middle]), file)
        works, broken = (works, middle) if fails(file) else (middle, broken)
    return nodes[broken - 1] if nodes else None


def _beginning(model: ir.Model, nodes: list[ir.Node]) -> ir.Model:
    """`nodes` and all that they read, as far as the pairs behind them."""
    wanted = set(nodes)
    stack = list(nodes)
    while stack:
        node = stack.pop()
        before = [value.producer() for value in node.inputs if value is not None]
        behind = [reader for value in node.outputs for reader, _ in value.uses()] if node in wanted else []
        for other in (*before, *(reader for reader in behind if is_op(reader, *_PAIR))):
            if other is not None and other not in wanted:
                wanted.add(other)
                stack.append(other)
    kept = [node for node in model.graph if node in wanted]
    made = [value for node in kept for value in node.outputs]
    outputs = [value for value in made if not any(reader in wanted for reader, _ in value.uses())]
    for value in outputs:
        value.type = value.type or ir.TensorType(ir.DataType.FLOAT)
    return part_of(model, kept, [v for v in model.graph.inputs if v.uses()], outputs)


_LISTED = 6


@dataclass(frozen=True)
class Delegation:
    """Where the nodes of a float model run once it is quantized.

    Attributes:
        source: the model that was quantized.
        graphs: names of the nodes that the engine takes, one set for each graph that it compiles.
        reasons: node → why it stays in float, where that is known.
        how: where that is known from.
    """

    source: ir.Model
    graphs: tuple[frozenset[str], ...]
    reasons: Mapping[str, str]
    how: str

    @property
    def left(self) -> tuple[ir.Node, ...]:
        """Nodes that run on the CPU: those that no graph holds, nor a node that its result was merged into."""
        taken = frozenset().union(*self.graphs)
        return tuple(n for n in self.source.graph if n.name not in taken and not self._merged(n, taken))

    @property
    def floating(self) -> tuple[ir.Node, ...]:
        """Nodes that the engine takes though nothing quantized them: it computes them in 16-bit floats."""
        taken = frozenset().union(*self.graphs)
        return tuple(n for n in self.source.graph if n.name in taken and n.name in self.reasons)

    def _merged(self, node: ir.Node, taken: frozenset[str]) -> bool:
        """Whether the quantizer removed `node` because the range of what it reads does its work."""
        maker = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
        return node.op_type in ("Relu", "Clip") and maker is not None and maker.name in taken

    def crossing(self) -> tuple[str, ...]:
        """Tensors that go from the NPU to the CPU or back, in the order of the graph."""
        left = frozenset(self.left)
        made = ((value, node in left) for node in self.source.graph for value in node.outputs)
        return tuple(
            name_of(value) for value, on_cpu in made if any((reader in left) != on_cpu for reader, _ in value.uses())
        )

    def notes(self) -> tuple[str, ...]:
        """Where the nodes run, and the split where there is one, in sentences."""
        count, left = len(self.source.graph), self.left
        share = f"{count - len(left)} of {count}" if left else f"all {count}"
        found = [f"{share} nodes run on the NPU, in {len(self.graphs)} graph{'s' * (len(self.graphs) != 1)}"]
        if self.floating:
            found.append(f"in 16-bit floats there: {_listed(self._named(self.floating))}")
        if left:
            found += [f"on the CPU: {_listed(self._named(left))}", f"tensors that cross: {_listed(self.crossing())}"]
        return tuple(found)

    def coverage(self) -> Coverage:
        """The same in the terms of `edgeq.measure.coverage`."""
        macs, floats = node_macs(self.source), frozenset((*self.left, *self.floating))
        runs = [
            NodeRun(str(n.name), str(n.name), n.op_type, "float" if n in floats else "int8", macs.get(n.name or "", 0))
            for n in self.source.graph
        ]
        return coverage_of(runs, lambda run: self._why(run.name), basis="modelled", how=self.how)

    def _named(self, nodes: tuple[ir.Node, ...]) -> list[str]:
        return [f"{n.name} ({n.op_type}: {self._why(str(n.name))})" for n in nodes]

    def _why(self, name: str) -> str:
        return self.reasons.get(name, "the provider does not take it")


def forecast(source: ir.Model, reasons: Mapping[str, str], absent: str) -> Coverage:
    """What would run in int8 if the engine took every node; `absent`: why it was not asked."""
    everything = frozenset(str(node.name) for node in source.graph)
    found = Delegation(source, (everything,), reasons, "the model's pairs").coverage()
    return dataclasses.replace(found, basis="forecast", reason=absent)


def delegated(
    source: ir.Model, model: Path, engine: Engine, reasons: Mapping[str, str], how: str, folder: Path
) -> Delegation:
    """Ask `engine` what it takes of `model`, which was made from `source`.

    Args:
        reasons: node → why it was left in float.
        how: for the record.
        folder: a private one, for what was found of a model: one of the same structure is not compiled again.

    Raises:
        EngineError: the engine refuses the model, crashes or hangs.
    """
    known = {str(node.name) for node in source.graph}
    found = folder / f"delegated-{structure_digest(model, {'engine': repr(engine)})}.json"
    if not found.exists():
        with Engines() as engines:
            try:
                taken = engines.assigned_nodes(engine, model)
            except EngineError as error:
                raise _at_node(error, engine, engines, model) from error
        found.write_text(json.dumps({"graphs": taken}), encoding="utf-8")
    graphs_of = parse_json(found.read_bytes(), found.name)["graphs"]
    assigned = parse(graphs_of, tuple[tuple[str, ...], ...], found, EngineError)
    graphs = [frozenset(source_name(name, known) for name in nodes) & known for nodes in assigned]
    return Delegation(source, tuple(nodes for nodes in graphs if nodes), reasons, how)


def _at_node(error: EngineError, engine: Engine, engines: Engines, model: Path) -> EngineError:
    """`error` with the node in it at which the engine fails, where it does so again."""

    def fails(beginning: Path) -> bool:
        """Whether the engine refuses this beginning of the model."""
        try:
            engines.assigned_nodes(engine, beginning)
        except EngineError:
            return True
        return False

    with tempfile.TemporaryDirectory(prefix="edgeq-failing-") as folder:
        node = failing_node(model, fails, Path(folder)) if fails(model) else None
    if node is None:
        return EngineError(f"{engine.name} failed once: {error.problem}", "Try again")
    where = f"at node {node.name!r} ({node.op_type})"
    # The engine takes a node in float, too, and may fail at it then.
    fix = "Keep it in float with --exclude or, where that does not help, export the model without it"
    return EngineError(f"{engine.name} fails {where}: {error.problem}", fix)


def _listed(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")


_CPU = "CPUExecutionProvider"
_FIELDS: Mapping[str, Any] = {
    "mode": "static",
    "format": "QDQ",
    "activation_type": "uint8",
    "rest": "float32",
    "reduce_range": False,
    "fit_pairs": False,
}
_NEEDS = "Leave the scheme to the target: static Q/DQ, uint8 activations, int8 weights"


@dataclass(frozen=True)
class QnnBackend:
    """Attributes:
    target: what it builds for, whose [device] engine_options the simulator is set to; None: the engine's defaults.
    """

    name: str = "qnn"
    title: str = "Qualcomm's NPU, through ONNX Runtime"
    simulated: bool = True
    recoverable: bool = True
    adopts_quantized: bool = False
    target: Target | None = None

    def configured(self, target: Target, observed: Mapping[str, Range], cut: Mapping[str, float]) -> QnnBackend:
        """This backend for one target."""
        del observed, cut
        return dataclasses.replace(self, target=target)

    def check(self, scheme: Scheme) -> None:
        """Refuse a scheme that the NPU cannot do. See `Backend.check`."""
        require_fields(scheme, _FIELDS, self.name, _NEEDS)
        if scheme.per_channel and scheme.weight_type != "int8":
            raise UsageError("weights with a scale per channel are int8 there", "Add --no-per-channel")

    def build(
        self,
        prepared: PreparedModel,
        ranges: Mapping[str, Range],
        scheme: Scheme,
        destination: Path,
        *,
        samples: Samples | None = None,
    ) -> Artifact:
        """Write the Q/DQ model to `destination`; it takes nothing from samples. See `Backend.build`."""
        self.check(scheme)
        require_fixed_sizes(prepared.model, prepared.source, self.title)
        check_names(prepared, (*scheme.exclude, *(name for name in scheme.wide if name != ALL_NODES)))
        place = Path(tempfile.mkdtemp(prefix="qnn-", dir=prepared.path.parent))
        changed, ranges = rewrite(prepared, ranges, place / "rewritten.onnx")
        left = write_pairs(changed, ranges, scheme, destination)
        engine, absent = engine_for(self.name, self._options), ""
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
            settings = SessionSettings(optimization="none")
            notes = (*artifact.notes, f"not run in the simulator: {absent}")
            return dataclasses.replace(
                artifact,
                simulation=destination,
                simulation_settings=settings,
                notes=notes,
                coverage=forecast(changed.model, left, absent),
            )
        how = f"the simulator of {engine.packages[0]} {installed_version(engine)}"
        found = delegated(changed.model, destination, engine, left, how, prepared.path.parent)
        return dataclasses.replace(
            artifact,
            notes=(*artifact.notes, *found.notes(), f"answers are those of {how}: nothing was run on a chip"),
            coverage=found.coverage(),
        )

    @property
    def _options(self) -> Mapping[str, str]:
        return self.target.device.get("engine_options", {}) if self.target is not None else {}

    def _on_cpu(self, model: Path, scheme: Scheme) -> Alternative:
        where = self.target.name if self.target is not None else self.name
        artifact = Artifact(model=model, scheme=scheme, provider=_CPU)
        return Alternative(f"{where}-cpu", "any CPU, the same Q/DQ model", 0, artifact)
