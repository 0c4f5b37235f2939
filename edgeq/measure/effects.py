"""What the error of one layer alone does to the outputs of a float model.

The float model gets one more input for each layer in question, a disturbance that is added to its tensor; zero for all
layers but one. So one session serves all layers, and a run shows what becomes of one layer's error on its way to the
outputs, where it may be amplified, damped or cancelled, which no figure at the layer itself shows.

The error of a layer is what its weights and the rounding of its result cause, on inputs that are rounded for the float
layer too: each error counts once, where it arises.

A quantized model with some nodes in float, made of the two models: no backend is needed, whatever wrote the file.

The nodes come from the float model, with its weights. A tensor between two of them stays float unless a node outside
reads it, too; one that comes from outside is read as the quantized model has it. So the result is what a build with
these nodes excluded computes, up to roundings.

The float model that a quantized one was made from: as given, or as edgeq prepares models before it quantizes them.

Preparation folds BatchNormalization into weights and fuses MatMul with Add, so that a model as it was exported may hold
neither the weights nor the nodes that were quantized.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.errors import ModelError, RuntimeUnavailableError, UsageError
from edgeq.measure.accuracy import evaluate_sessions
from edgeq.measure.agreement import GOOD_DB, Agreement, worst_db
from edgeq.measure.comparison import Comparison
from edgeq.measure.latency import Outputs, infer
from edgeq.measure.layer_runs import (
    MEMORY,
    LayerArrays,
    LayerPair,
    LayerRuns,
    float_input,
    floats_only,
    instrumented_session,
    only_outputs,
    partition_layers,
)
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
from edgeq.model.macs import node_macs
from edgeq.model.prepare import prepare_model
from edgeq.model.shapes import element_types
from edgeq.run.session import SessionSettings
from edgeq.util.display import SILENT, Progress
from edgeq.util.records import NullIsInfinite

if TYPE_CHECKING:
    from edgeq.data.records import Sample
    from edgeq.data.samples import Samples

_TYPES_OF_SPLICE = (None, ir.DataType.FLOAT)


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
            if (
                match is not None
                and quantized_graph.values[match.computed].dtype not in _TYPES_OF_SPLICE
                and not match.integer
            ):
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
    return name_of(value) in quantized_graph.values and value.dtype not in _TYPES_OF_SPLICE


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


_TYPES = {"tensor(float16)": np.float16}


class Accumulator(Protocol):
    """Sums over samples of how outputs differ."""

    def update(self, reference: Outputs, candidate: Outputs) -> None:
        """Add one sample: outputs by name, without and with the disturbance."""
        ...


T = TypeVar("T", bound=Accumulator)


def output_effects(
    float_graph: GraphIndex,
    quantized_graph: GraphIndex,
    matches: Sequence[ActivationMatch],
    names: Collection[str],
    samples: Samples,
    *,
    count: int,
    settings: SessionSettings | None = None,
    memory: int = MEMORY,
    progress: Progress = SILENT,
) -> dict[str, Agreement]:
    """The float model's outputs with the error of one layer in them, against those without; by name of its tensor.

    A run of the float model a layer and sample. Layers without error on the samples are left out.

    Args:
        matches: all of the two models; `names`: the tensors to disturb.
        count: samples to take, evenly spread.

    Raises:
        DataError: a model refuses a sample.
    """
    matches = floats_only(float_graph, matches, settings or SessionSettings())
    groups = {match.name: (match.name,) for match in matches if match.name in names}
    found = group_effects(
        float_graph,
        quantized_graph,
        matches,
        groups,
        samples,
        Comparison,
        count=count,
        settings=settings,
        memory=memory,
        progress=progress,
    )
    return {name: accumulator.result() for name, (accumulator,) in found.items()}


def group_effects(
    float_graph: GraphIndex,
    quantized_graph: GraphIndex,
    matches: Sequence[ActivationMatch],
    groups: Mapping[str, Collection[str]],
    samples: Samples,
    accumulator: Callable[[], T],
    *,
    count: int,
    settings: SessionSettings | None = None,
    memory: int = MEMORY,
    progress: Progress = SILENT,
) -> dict[str, tuple[T, ...]]:
    """The float model's outputs with the errors of a group's tensors in them, against those without, for each group.

    Args:
        groups: group → tensors that are disturbed together; a tensor is in one group at most.
        accumulator: makes what takes up the differences of one group.
        Others: as `output_effects`.

    Returns:
        An accumulator by group. A group whose tensors do not fit into `memory` together has several, of parts of it.
        Groups without error are left out.
    """
    settings = settings or SessionSettings()
    group_of = {name: group for group, names in groups.items() for name in names}
    chosen = [m for m in matches if m.name in group_of and m.name not in float_graph.captured]
    places = {group: place for place, group in enumerate(groups)}
    chosen.sort(key=lambda match: places[group_of[match.name]])
    first = next(iter(samples), None)
    if not chosen or first is None:
        return {}
    pair = LayerPair(float_graph, quantized_graph, matches, settings)
    model = with_disturbances(float_graph.model, [match.name for match in chosen], pair.exact)
    session = instrumented_session(model, optimization="all", settings=settings)
    outputs = dict(zip((o.name for o in session.get_outputs()), float_graph.outputs, strict=True))
    types = {value.name: _TYPES.get(value.type, np.float32) for value in session.get_inputs()}
    disturbances = {m.name: (disturbance_name(m.name), exact_disturbance_name(m.name)) for m in chosen}
    zeros = {name: np.zeros((), types[name]) for pairs in disturbances.values() for name in pairs if name in types}

    def outputs_of(sample: Sample, disturbance: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """The float model's outputs for one sample, by name, with `disturbance` added to its layers."""
        fed = dataclasses.replace(sample, inputs={**sample.inputs, **zeros, **disturbance})
        return {outputs[name]: values for name, values in infer(session, fed, model="the float model").items()}

    def errors(layers: LayerArrays, tensor: str) -> dict[str, NDArray[Any]]:
        """What is added at `tensor`: its error from rounding alone, by the disturbance inputs' names."""
        from_rounded, made = layers.from_rounded[tensor], (layers.alone[tensor], layers.raw[tensor])
        return {
            name: _finite_difference(values, from_rounded).astype(types[name])
            for name, values in zip(disturbances[tensor], made, strict=True)
            if name in types
        }

    found: dict[str, list[T]] = {}
    partitions = list(partition_layers(float_graph, chosen, first, memory))
    with progress.stage("Following errors to the outputs", min(count, len(samples)) * len(chosen)) as advance:
        for partition in partitions:
            runs = LayerRuns(pair, partition)
            parts: dict[str, list[str]] = {}
            for match in partition:
                parts.setdefault(group_of[match.name], []).append(match.name)
            accumulators: dict[str, T] = {}
            for sample in _spread(samples, count):
                layers = runs.run(sample)
                undisturbed = outputs_of(sample, {})
                for group, tensors in parts.items():
                    given = {name: error for tensor in tensors for name, error in errors(layers, tensor).items()}
                    if any(error.any() for error in given.values()):
                        accumulators.setdefault(group, accumulator()).update(undisturbed, outputs_of(sample, given))
                    advance(len(tensors))
            for group, made in accumulators.items():
                found.setdefault(group, []).append(made)
    return {group: tuple(made) for group, made in found.items()}


def _finite_difference(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """a - b, and 0 where an infinity (of a mask, say) or NaN stands in one of them."""
    with np.errstate(invalid="ignore"):
        difference = np.asarray(a - b)
    return np.where(np.isfinite(difference), difference, 0)


def _spread(samples: Samples, count: int) -> Iterator[Sample]:
    total = len(samples)
    wanted = {position * total // count for position in range(count)} if total > count else set(range(total))
    return (sample for position, sample in enumerate(samples) if position in wanted)


def with_disturbances(model: ir.Model, names: Collection[str], exact: Collection[tuple[str, str]] = ()) -> ir.Model:
    """A copy of a float model in which readers of each tensor of `names` get it plus the new input
    `disturbance_name(name)`, of the tensor's type and of its shape or one that broadcasts to it. An output that is
    among them is given under another name, in its place.

    Args:
        exact: (tensor, node) as `exact_readers` gives them: these get `exact_disturbance_name(name)` instead.
    """
    types = element_types(model)
    disturbed = model.clone()
    editor, values = Editor(disturbed), GraphIndex(disturbed).values
    graph, nodes = disturbed.graph, list(disturbed.graph)
    following = dict(zip(nodes, [*nodes[1:], None], strict=True))
    for name in dict.fromkeys(names):
        value = values[name]
        maker = value.producer()
        before = following[maker] if maker is not None else nodes[0]
        uses = [(use, _entry(name, use.node.name or "", exact)) for use in value.uses() if use.node.graph is graph]
        outputs = [(place, _entry(name, "", exact)) for place, output in enumerate(graph.outputs) if output is value]
        sums = {}
        for entry in dict.fromkeys(entry for _, entry in [*uses, *outputs]):
            added = float_input(graph, entry, half=types.get(name) == ir.DataType.FLOAT16)
            sums[entry] = editor.node("Add", [value, added], f"{entry}/added", before=before, like=value)
        for use, entry in uses:
            use.node.replace_input_with(use.idx, sums[entry])
        for place, entry in outputs:
            graph.outputs[place] = sums[entry]
    return disturbed


def _entry(name: str, reader: str, exact: Collection[tuple[str, str]]) -> str:
    return exact_disturbance_name(name) if (name, reader) in exact else disturbance_name(name)


def disturbance_name(name: str) -> str:
    """The input that is added to a tensor for most of its readers."""
    return f"{name}/disturbance"


def exact_disturbance_name(name: str) -> str:
    """The input that is added for those that read the tensor before it is quantized."""
    return f"{name}/exact disturbance"


SAMPLES = 4
# Nodes that are tried by themselves, those of the worst sets.
_SINGLES = 8
# Nodes that are put back into integers, at most, as long as that costs nothing.
_PUT_BACK = 4
_FLOAT = "float32"
# What gains less does not help.
_WORTH_DB = 1.0


@dataclass(frozen=True)
class Exclusion:
    """Nodes in float, and what that gives.

    Attributes:
        nodes: names, in the order in which the sets were given.
        sqnr_db: of the outputs with them in float, in dB, on the graph as written.
        plain_db: of the outputs as they are, on the same samples.
    """

    nodes: tuple[str, ...]
    sqnr_db: NullIsInfinite
    plain_db: NullIsInfinite


def find_exclusions(
    float_graph: GraphIndex,
    quantized_graph: GraphIndex,
    sets: Sequence[tuple[str, ...]],
    samples: Samples,
    *,
    settings: SessionSettings,
    progress: Progress = SILENT,
) -> tuple[Exclusion, ...]:
    """Return what helps of `sets`, of nodes in them, and of the first 1, 2, 4 ... sets together, the best first.

    Sets go together in the order given, and those that help most first; these once more with the nodes around them that
    have no multiply-accumulates: beside a node in integers, a tensor is quantized. Of two that are good, the
    one with fewer nodes is the better.

    Args:
        samples: few; all of them are run for each set.
    """
    matches = match_activations(float_graph, quantized_graph)
    macs = {name: work for name, work in node_macs(float_graph.model).items() if work}
    reference = instrumented_session(float_graph.model, optimization="all", settings=settings)
    known = {_FLOAT: [infer(reference, sample, model="the float model") for sample in samples]}

    def judged(model: ir.Model) -> float:
        """Return the SQNR in dB of a model's outputs."""
        sessions = {_FLOAT: reference, "": instrumented_session(model, optimization="none", settings=settings)}
        return worst_db(evaluate_sessions(sessions, samples, reference=_FLOAT, known=known).agreement[""])

    plain = judged(quantized_graph.model)
    found: dict[frozenset[str], Exclusion] = {}

    def measure(nodes: tuple[str, ...]) -> float:
        """Return the SQNR with `nodes` in float; that of the model as it is where they cannot be parted from it."""
        key = frozenset(nodes)
        if key not in found:
            model = with_nodes_in_float(float_graph, quantized_graph, matches, nodes)
            sqnr_db = plain
            if model is not None:
                try:
                    sqnr_db = judged(model)
                except RuntimeUnavailableError as error:
                    progress.note(f"{', '.join(nodes)} in float: {error.problem}")
            found[key] = Exclusion(nodes, sqnr_db, plain)
        return found[key].sqnr_db

    singles = list(dict.fromkeys((node,) for nodes in sets for node in nodes))[:_SINGLES]
    order = [nodes for nodes in dict.fromkeys(sets) if nodes]
    with progress.stage("What helps in float", len(singles) + len(order)) as advance:
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
        for name in _costliest(kept, macs):
            fewer = tuple(node for node in kept if node != name)
            if fewer and min(measure(fewer), GOOD_DB) >= min(best.sqnr_db, GOOD_DB) - _WORTH_DB:
                kept = fewer
    worth = [
        one for one in found.values() if one.sqnr_db >= plain + _WORTH_DB and (not macs or macs.keys() - {*one.nodes})
    ]
    return tuple(sorted(worth, key=_rank))


def _rank(one: Exclusion) -> tuple[float, int, tuple[str, ...]]:
    """Sort by decibels, to the precision that counts, then by how many nodes it takes."""
    return -round(min(one.sqnr_db, GOOD_DB) / _WORTH_DB), len(one.nodes), one.nodes


def _costliest(nodes: tuple[str, ...], macs: Mapping[str, int]) -> tuple[str, ...]:
    """Return the nodes that cost most in float, at most `_PUT_BACK`."""
    return tuple(sorted(nodes, key=lambda node: -macs.get(node, 0))[:_PUT_BACK])


def _together(sets: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the nodes of all sets, each once."""
    return tuple(dict.fromkeys(itertools.chain.from_iterable(sets)))


def _with_neighbours(float_graph: GraphIndex, nodes: tuple[str, ...], macs: Mapping[str, int]) -> tuple[str, ...]:
    """Return `nodes` and those without multiply-accumulates that make what they read, or read what they make."""
    found = dict.fromkeys(nodes)
    for name in nodes:
        node = float_graph.nodes.get(name)
        if node is not None:
            makers = (value.producer() for value in node.inputs if value is not None)
            readers = (reader for value in node.outputs for reader, _ in consumers(value))
            near = (other.name for other in (*makers, *readers) if other is not None)
            found |= {other: None for other in near if other in float_graph.nodes and not macs.get(other)}
    return tuple(found)
