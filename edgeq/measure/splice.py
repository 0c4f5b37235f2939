"""A quantized model with some nodes in float, made of the two models: no backend is needed, whatever wrote the file.

The nodes come from the float model, with its weights. A tensor between two of them stays float unless a node outside
reads it, too; one that comes from outside is read as the quantized model has it. So the result is what a build with
these nodes excluded computes, up to roundings.

The float model that a quantized one was made from: as given, or as edgeq prepares models before it quantizes them.

Preparation folds BatchNormalization into weights and fuses MatMul with Add, so that a model as it was exported may hold
neither the weights nor the nodes that were quantized.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from edgeq.errors import ModelError, UsageError
from edgeq.measure.layer_runs import only_outputs
from edgeq.measure.match_layers import (
    NODE_SUFFIX,
    ActivationMatch,
    compare_weights,
    count_quantized_weights,
    match_activations,
    match_weights,
)
from edgeq.model.edit import Editor, replace_value
from edgeq.model.graph import GraphIndex, bodies, consumers, name_of
from edgeq.model.load import is_quantized, read_model
from edgeq.model.prepare import prepare_model
from edgeq.util.display import SILENT, Progress

_TYPES = (None, ir.DataType.FLOAT)


def with_nodes_in_float(
    float_graph: GraphIndex, quantized_graph: GraphIndex, matches: Sequence[ActivationMatch], nodes: Collection[str]
) -> ir.Model | None:
    """Return a copy of the quantized model that computes `nodes` of the float model in float.

    Nodes that the quantized model holds fused with one of them go along. None where that cannot be done: nodes with
    bodies, tensors without a counterpart, or a model that computes in another type than float32.
    """
    by_name = {match.name: match for match in matches}
    region = _closed(float_graph, quantized_graph, by_name, nodes)
    if region is None:
        return None
    model = quantized_graph.model.clone()
    splicer = _Splicer(float_graph, GraphIndex(model), by_name, region)
    for node in float_graph.graph:
        if node.name in region:
            splicer.add(node)
    model.graph.sort()
    return only_outputs(model, [name_of(value) for value in model.graph.outputs])


def _closed(
    float_graph: GraphIndex, quantized_graph: GraphIndex, matches: Mapping[str, ActivationMatch], nodes: Collection[str]
) -> frozenset[str] | None:
    """Return `nodes` with those that the quantized model cannot be parted from them; None where it cannot be at all."""
    region, waiting = set(nodes), list(nodes)
    while waiting:
        node = float_graph.nodes.get(waiting.pop())
        if node is None or list(bodies(node)) or set(map(name_of, node.outputs)) & float_graph.captured:
            return None
        near: list[ir.Node | None] = []
        for value in filter(None, node.inputs):
            if name_of(value) not in matches and not value.is_initializer() and not _as_it_is(value, quantized_graph):
                near.append(value.producer())
        for value in node.outputs:
            match = matches.get(name_of(value))
            if match is None and value.is_graph_output():
                return None
            if match is not None and quantized_graph.values[match.computed].dtype not in _TYPES and not match.integer:
                return None
            if match is None:
                near.extend(reader for reader, _ in consumers(value))
        for other in near:
            if other is None:
                return None
            if other.name not in region:
                region.add(other.name or "")
                waiting.append(other.name or "")
    return frozenset(region)


def _as_it_is(value: ir.Value, quantized_graph: GraphIndex) -> bool:
    """Return whether the quantized model has the tensor and it is not of floats: a shape, an index, a mask."""
    return name_of(value) in quantized_graph.values and value.dtype not in _TYPES


class _Splicer:
    def __init__(
        self,
        float_graph: GraphIndex,
        quantized: GraphIndex,
        matches: Mapping[str, ActivationMatch],
        region: frozenset[str],
    ) -> None:
        self._float_graph, self._matches, self._region = float_graph, matches, region
        self._values, self._editor = dict(quantized.values), Editor(quantized.model)
        self._outputs = frozenset(quantized.outputs)
        self._made: dict[str, ir.Value | None] = {}

    def add(self, node: ir.Node) -> None:
        """Add a node of the float model behind those of the region that it reads, and let the others read it."""
        inputs = [None if value is None else self._read(value) for value in node.inputs]
        names = [name_of(output) for output in node.outputs]
        made = self._editor.nodes(
            node.op_type,
            inputs,
            f"{node.name}/float",
            [f"{name}/float" if name else "" for name in names],
            attributes=dict(node.attributes),
            domain=node.domain,
        )
        for name, old, new in zip(names, node.outputs, made, strict=True):
            new.type, new.shape = old.type, old.shape
            if name:
                self._made[name] = self._handed_over(name, new)

    def _read(self, value: ir.Value) -> ir.Value | None:
        name = name_of(value)
        if name in self._made:
            return self._made[name]
        if value.is_initializer() and not value.is_graph_input() and value.const_value is not None:
            return self._editor.constant(f"{name}/float", value.const_value)
        match = self._matches.get(name)
        if match is None:
            return self._values[name]
        given = self._values[match.computed]
        alone = match.is_input and self._all_inside(name)
        return given if alone else self._rounded(match, given)

    def _handed_over(self, name: str, new: ir.Value) -> ir.Value:
        """Let readers outside the region read `new` as they read the tensor before; return what those inside read."""
        match = self._matches.get(name)
        if match is None:
            return new
        if self._all_inside(name):
            if name in self._outputs:
                replace_value(self._values[name], new)
            return new
        old = self._values[match.computed]
        if match.integer and match.params is not None:
            integers = self._editor.quantize(new, match.params, f"{name}/integers")
            replace_value(old, integers)
            return self._editor.dequantize(integers, match.params, f"{name}/rounded")
        replace_value(old, new)
        return self._rounded(match, new)

    def _rounded(self, match: ActivationMatch, value: ir.Value) -> ir.Value:
        """Return the floats that readers of a quantized tensor get."""
        if match.params is None:
            return value
        if not match.integer:
            value = self._editor.quantize(value, match.params, f"{match.name}/integers")
        return self._editor.dequantize(value, match.params, f"{match.name}/rounded")

    def _all_inside(self, name: str) -> bool:
        readers = [reader.name for reader, _ in consumers(self._float_graph.values[name])]
        return all(reader in self._region for reader in readers) and name not in self._float_graph.captured


ORDER = "Give the float model first, then its int8 form"


@dataclass(frozen=True)
class Reference:
    """A float model to compare with.

    Attributes:
        graph: the model.
        path: its file: the given one, or the prepared one in a work directory.
        prepared: whether it was prepared.
        notes: what the user should know about the choice.
    """

    graph: GraphIndex
    path: Path
    prepared: bool
    notes: tuple[str, ...] = ()


def find_reference(
    path: Path, quantized: GraphIndex, name: str, workdir: Path, progress: Progress = SILENT
) -> Reference:
    """The float model at `path` as it is or, where that explains more of the quantized one, prepared in `workdir`.

    Args:
        name: of the quantized model, for messages.

    Raises:
        UsageError: the model at `path` is quantized, or no float model of this quantized one.
        ModelError: it is no model.
    """
    given = GraphIndex(read_model(path))
    if is_quantized(given.model):
        raise UsageError(f"{path} is quantized", ORDER)
    missing = sorted(set(quantized.inputs) - set(given.inputs))
    if missing:
        raise UsageError(
            f"{path} has no input {missing[0]!r}, which {name} takes",
            "Give the float model that it was made from",
        )
    fit = _fit(given, quantized)
    names = [node.name for node in given.graph]
    whole = fit.weights == count_quantized_weights(quantized)
    if whole and all(names) and len(set(names)) == len(names) and fit.nodes <= _node_names(quantized):
        return Reference(given, path, prepared=False)
    try:
        made = prepare_model(path, workdir, loaded=given.model, progress=progress)
    except ModelError as error:
        return Reference(given, path, prepared=False, notes=(f"the float model is taken as it is: {error.problem}",))
    prepared = GraphIndex(made.model)
    better = _fit(prepared, quantized)
    if (better.weights, better.activations) < (fit.weights, fit.activations):
        return Reference(given, path, prepared=False)
    if not better.activations:
        raise UsageError(
            f"{name} has no activation of {path}, prepared or not",
            "Give the float model that it was made from",
        )
    note = f"{path} was compared as `edgeq quantize` prepares it"
    if better.weights > fit.weights:
        note += f": {better.weights} quantized weights match then, {fit.weights} as it is"
    return Reference(prepared, made.path, prepared=True, notes=(note,))


@dataclass(frozen=True)
class _Fit:
    """Quantized weights that are rounded weights of a float model, activations that both have, and the names of the
    float model's nodes that read those weights or make those activations."""

    weights: int
    activations: int
    nodes: frozenset[str]


def _fit(graph: GraphIndex, quantized: GraphIndex) -> _Fit:
    weights = [w for w in compare_weights(graph, quantized, match_weights(graph, quantized)) if not w.changed]
    activations = [a for a in match_activations(graph, quantized) if not a.is_input]
    nodes = frozenset(w.node for w in weights) | frozenset(a.node for a in activations)
    return _Fit(len(weights), len(activations), nodes)


def _node_names(quantized: GraphIndex) -> frozenset[str]:
    """The names of nodes, as the float model has them. Where that of a layer is not among them, another node was
    quantized, such as the Gemm that a MatMul and an Add became, and `--exclude` would refuse the layer's name."""
    return frozenset(NODE_SUFFIX.sub("", name) for name in quantized.nodes)
