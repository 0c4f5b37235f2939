"""What of a model an engine takes: asked of the engine itself, in a process of its own."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
from edgeq_device.plainjson import parse_json

from edgeq.backends.qnn.failing_node import failing_node
from edgeq.engines import Engine
from edgeq.errors import EngineError
from edgeq.graph.query import name_of
from edgeq.measure.coverage import Coverage, coverage_of
from edgeq.measure.node_runs import NodeRun, source_name
from edgeq.model.macs import node_macs
from edgeq.model.structure import structure_digest
from edgeq.records import parse
from edgeq.workers.engine import Engines

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
