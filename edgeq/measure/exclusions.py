"""Find the nodes of a quantized model that improve its outputs when they stay in float.

edgeq combines the float and the quantized model into a quantized model with some nodes in float. This needs no backend,
so it works for files of any quantizer. The nodes are taken from the float model, with their weights. A tensor between
two of these nodes stays float unless another node also reads it. A tensor from any other node is read in its quantized
form. So the result computes the same values, up to rounding, as a build that excludes these nodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir
from edgeq_device.measure.basis import EVERYTHING, Basis

from edgeq.data.samples import Samples
from edgeq.errors import RuntimeUnavailableError
from edgeq.measure.accuracy import evaluate_sessions
from edgeq.measure.agreement import GOOD_DB, infer, worst_db
from edgeq.measure.layers import LayerPair, instrumented_session
from edgeq.measure.match_layers import ActivationMatch, match_activations
from edgeq.model.edit import Editor, replace_value
from edgeq.model.graph import GraphIndex, bodies, consumers, name_of
from edgeq.model.macs import node_macs
from edgeq.model.sessions import Loadable
from edgeq.util.records import NullIsInfinite

_FLOAT_TYPES = (None, ir.DataType.FLOAT)


def with_nodes_in_float(
    float_graph: GraphIndex, quantized_graph: GraphIndex, matches: Sequence[ActivationMatch], nodes: Collection[str]
) -> Loadable | None:
    """Return a quantized model in which the float model's nodes `nodes` compute in float.

    Nodes that are fused with one of them in the quantized model also become float. Return None for nodes with bodies,
    for tensors without a counterpart, and for a model that computes in a type other than float32.
    """
    by_name = {match.name: match for match in matches}
    region = _closed(float_graph, quantized_graph, by_name, nodes)
    if region is None:
        return None
    model = quantized_graph.model.clone()
    splicer = _Splicer(float_graph, GraphIndex(model), by_name, region)
    for node in (node for node in float_graph.graph if node.name in region):
        splicer.add(node)
    model.graph.sort()
    return Loadable.of(model).only(name_of(value) for value in model.graph.outputs)


def _closed(
    float_graph: GraphIndex, quantized_graph: GraphIndex, matches: Mapping[str, ActivationMatch], nodes: Collection[str]
) -> frozenset[str] | None:
    """Return `nodes`, and all nodes that cannot be separated from them in the quantized model. Return None if the whole
    set cannot be separated from the rest.
    """
    region, waiting = set(nodes), list(nodes)
    while waiting:
        node = float_graph.nodes.get(waiting.pop())
        if node is None or list(bodies(node)) or set(map(name_of, node.outputs)) & float_graph.captured:
            return None
        near: list[ir.Node | None] = []
        for value in filter(None, node.inputs):
            # Tensors that are not floats (a shape, an index, a mask) are the same in the quantized model.
            as_it_is = name_of(value) in quantized_graph.values and value.dtype not in _FLOAT_TYPES
            if name_of(value) not in matches and not value.is_initializer() and not as_it_is:
                near.append(value.producer())
        for value in node.outputs:
            match = matches.get(name_of(value))
            if match is None:
                near.extend([None] if value.is_graph_output() else [reader for reader, _ in consumers(value)])
            elif quantized_graph.values[match.computed].dtype not in _FLOAT_TYPES and not match.integer:
                return None
        for other in near:
            if other is None:
                return None
            if other.name not in region:
                region.add(other.name or "")
                waiting.append(other.name or "")
    return frozenset(region)


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
        """Add a node of the float model and connect the nodes that read its outputs. If the node reads outputs of other
        nodes of the region, those nodes must have been added before.
        """
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
        """Let nodes outside the region read `new` in place of the old tensor, as integers if the old tensor contains
        integers. Return the value that nodes inside the region read.
        """
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
        """Return the float values that the readers of a quantized tensor get in the quantized model."""
        if match.params is None:
            return value
        if not match.integer:
            value = self._editor.quantize(value, match.params, f"{match.name}/integers")
        return self._editor.dequantize(value, match.params, f"{match.name}/rounded")

    def _all_inside(self, name: str) -> bool:
        readers = [reader.name for reader, _ in consumers(self._float_graph.values[name])]
        return all(reader in self._region for reader in readers) and name not in self._float_graph.captured


SAMPLES = 4
# Number of nodes from the worst sets that are also tried one by one.
_SINGLES = 8
# Maximum number of nodes of the best set to try in integers again. If integers cost at most `_WORTH_DB` for a node, it
# stays in integers.
_PUT_BACK = 4
_FLOAT = "float32"
# Smallest gain that counts, in dB.
_WORTH_DB = 1.0


@dataclass(frozen=True)
class Exclusion:
    """Describe nodes that stay in float, and the effect on the outputs.

    Attributes:
        nodes: names of the nodes, in the order of the sets.
        sqnr_db: SQNR of the outputs in dB with these nodes in float, on the graph as written.
        plain_db: SQNR of the outputs in dB without nodes in float, on the same samples.
    """

    nodes: tuple[str, ...]
    sqnr_db: NullIsInfinite
    plain_db: NullIsInfinite


def find_exclusions(
    pair: LayerPair, sets: Sequence[tuple[str, ...]], samples: Samples, basis: Basis = EVERYTHING
) -> tuple[Exclusion, ...]:
    """Return the sets of nodes that improve the outputs when they stay in float, the best first.

    edgeq tries each of `sets`, and single nodes from them. Then it tries the first 1, 2, 4 ... sets together, once in
    the order of `sets` and once in the order of their gain. It also tries the sets with the largest gain together with
    neighbouring nodes that have no multiply-accumulates, because a tensor next to an integer node is quantized. If two
    results are about equally good, the one with fewer nodes ranks first.

    Args:
        samples: a few samples; all of them are run for each set.
        basis: what the figures of the outputs are taken over.
    """
    float_graph, quantized_graph = pair.float_graph, pair.quantized_graph
    matches = match_activations(float_graph, quantized_graph)
    macs = {name: work for name, work in node_macs(float_graph.model).items() if work}
    reference = instrumented_session(float_graph, optimization="all", settings=pair.settings)
    known = {_FLOAT: [infer(reference, sample, model="the float model") for sample in samples]}

    def judged(model: GraphIndex | Loadable) -> float:
        """Return the SQNR of a model's outputs in dB."""
        sessions = {_FLOAT: reference, "": instrumented_session(model, optimization="none", settings=pair.settings)}
        evaluation = evaluate_sessions(sessions, samples, reference=_FLOAT, known=known, basis=basis)
        return worst_db(evaluation.agreement[""])

    plain = judged(quantized_graph)
    found: dict[frozenset[str], Exclusion] = {}

    def measure(nodes: tuple[str, ...]) -> float:
        """Return the SQNR with `nodes` in float. If these nodes cannot be separated from the model, return the SQNR of
        the unchanged model.
        """
        key = frozenset(nodes)
        if key not in found:
            model, sqnr_db = with_nodes_in_float(float_graph, quantized_graph, matches, nodes), plain
            try:
                sqnr_db = plain if model is None else judged(model)
            except RuntimeUnavailableError as error:
                pair.progress.note(f"{', '.join(nodes)} in float: {error.problem}")
            found[key] = Exclusion(nodes, sqnr_db, plain)
        return found[key].sqnr_db

    singles = list(dict.fromkeys((node,) for nodes in sets for node in nodes))[:_SINGLES]
    order = [nodes for nodes in dict.fromkeys(sets) if nodes]
    with pair.progress.stage("Trying nodes in float", len(singles) + len(order)) as advance:
        for nodes in (*singles, *order):
            measure(nodes)
            advance(1)
        by_gain = sorted(order, key=lambda nodes: -measure(nodes))
        for count in itertools.takewhile(lambda count: count < 2 * len(order), (2**k for k in range(32))):
            measure(_together(order[:count]))
            measure(_together(by_gain[:count]))
            measure(_with_neighbours(float_graph, _together(by_gain[:count]), macs))
        best = min(found.values(), key=_rank, default=Exclusion((), plain, plain))
        kept = best.nodes
        for name in sorted(kept, key=lambda node: -macs.get(node, 0))[:_PUT_BACK]:
            fewer = tuple(node for node in kept if node != name)
            if fewer and min(measure(fewer), GOOD_DB) >= min(best.sqnr_db, GOOD_DB) - _WORTH_DB:
                kept = fewer
    worth = [
        one for one in found.values() if one.sqnr_db >= plain + _WORTH_DB and (not macs or macs.keys() - {*one.nodes})
    ]
    return tuple(sorted(worth, key=_rank))


def _rank(one: Exclusion) -> tuple[float, int, tuple[str, ...]]:
    """Return a sort key: the decibels, rounded to the precision that matters, then the number of nodes."""
    return -round(min(one.sqnr_db, GOOD_DB) / _WORTH_DB), len(one.nodes), one.nodes


def _together(sets: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the nodes of all sets, each once."""
    return tuple(dict.fromkeys(itertools.chain.from_iterable(sets)))


def _with_neighbours(float_graph: GraphIndex, nodes: tuple[str, ...], macs: Mapping[str, int]) -> tuple[str, ...]:
    """Return `nodes` and their neighbours without multiply-accumulates. Neighbours are the nodes that compute their
    inputs and the nodes that read their outputs.
    """
    found = dict.fromkeys(nodes)
    for name in nodes:
        node = float_graph.nodes.get(name)
        if node is not None:
            makers = (value.producer() for value in node.inputs if value is not None)
            readers = (reader for value in node.outputs for reader, _ in consumers(value))
            near = (other.name for other in (*makers, *readers) if other is not None)
            found |= {other: None for other in near if other in float_graph.nodes and not macs.get(other)}
    return tuple(found)
