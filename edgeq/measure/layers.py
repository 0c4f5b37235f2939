"""Run a float model and its quantized form layer by layer, compare every tensor, and follow errors to the outputs.

This module has the four operations of ONNX Runtime's `qdq_loss_debug`, for every quantized format and without storing
activations:

    match_weights         pairs of integer weights and float weights (`compare_weights` measures the difference)
    with_outputs          a model whose inner tensors are also outputs
    collect_activations   the values of these tensors, one sample at a time
    match_activations     pairs of tensors and activations (`compare_activations` measures the difference)

`compare_layers` runs all four. `output_effects` measures the effect of each layer's error alone on the outputs. Both
run on a `LayerPair`, which contains the two models, whole and cut into layers. The input of each layer is the float
model's tensor, or that tensor rounded. Three figures for each tensor distinguish layers that cause errors from layers
that inherit them:

    accumulated   the tensor when the whole quantized model runs: all errors so far
    layer         the integer layer's result on the float model's inputs: the error of this layer
    rounding      the float tensor quantized with the model's scale and zero point: the error of its range alone

A fourth figure helps to find the cause in a layer. `inputs` is the result of the float layer on quantized inputs. If
neither `inputs` nor the rounding of the result explains the noise of a layer, the weights cause it.

To follow errors, edgeq gives the float model one more input for each layer in question: a disturbance that is added to
the layer's tensor. Because the disturbances are inputs, one session serves all layers: each run sets one of them and
leaves the others at zero. A run shows what happens to one layer's error on its way to the outputs: it may be amplified,
damped or cancelled. No figure at the layer itself shows this. The error of a layer is the difference between the
results of the quantized and the float layer. Both read the same rounded inputs, so the error comes only from the
layer's weights and from the rounding of its result. Each error thus counts only once, at the layer that causes it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.data.samples import Sample, Samples
from edgeq.errors import DataError
from edgeq.measure.agreement import Agreement, Outputs, infer
from edgeq.measure.comparison import OutputSums
from edgeq.measure.error_sources import (
    ActivationComparison,
    ActivationSums,
    ErrorSource,
    LayerArrays,
    candidates,
    find_error_sources,
)
from edgeq.measure.match_layers import (
    ActivationMatch,
    WeightComparison,
    WeightMatch,
    compare_weights,
    exact_readers,
    match_activations,
    match_weights,
    weight_values,
)
from edgeq.model.edit import Editor
from edgeq.model.graph import GraphIndex, name_of, named_values
from edgeq.model.memory import partitions, tensor_sizes
from edgeq.model.parts import with_outputs
from edgeq.model.sessions import Loadable
from edgeq.model.shapes import element_types
from edgeq.run.session import OptimizationLevel, SessionSettings
from edgeq.util.display import SILENT, Progress

__all__ = [
    "ActivationComparison",
    "ActivationMatch",
    "GraphIndex",
    "LayerComparison",
    "LayerPair",
    "WeightComparison",
    "WeightMatch",
    "collect_activations",
    "compare_activations",
    "compare_layers",
    "compare_weights",
    "cut_layers",
    "match_activations",
    "match_weights",
    "output_effects",
    "weight_values",
    "with_outputs",
]

MEMORY = 2**29
"""Limit in bytes for fetched tensors in memory. If a model needs more, edgeq compares it in several passes."""
# Number of copies of each tensor in memory. They are the float model's tensor, the quantized model's, the layer's in
# integers and in float, the rounded input, and one copy in float64, which counts twice.
_COPIES = 7
_FLOAT_TYPES: Mapping[str, type[np.floating[Any]]] = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
# Number of tensors to try for each error source that may be named at the end.
_CANDIDATES = 4
# Number of samples for each of these tensors. If there is an effect on the outputs, a few samples show it.
_FOLLOWED = 4


def instrumented_session(
    model: ir.Model | GraphIndex | Loadable, *, optimization: OptimizationLevel, settings: SessionSettings
) -> Any:
    """Open a session of a model in memory. External data is read from the model's data folder.

    Of `settings`, only the threads, providers and configuration apply.
    """
    return Loadable.of(model).open(
        SessionSettings(
            providers=settings.providers,
            config=settings.config,
            intra_op_threads=settings.intra_op_threads,
            optimization=optimization,
        ),
    )


def collect_activations(
    model: ir.Model,
    names: Collection[str],
    samples: Samples,
    *,
    optimization: OptimizationLevel = "none",
    settings: SessionSettings | None = None,
) -> Iterator[tuple[Sample, Outputs]]:
    """Yield each sample with the values of the model's tensors `names`, one sample at a time. Nothing is stored.

    Raises:
        DataError: the model refuses a sample.
    """
    observed = Loadable.of(model).only(names)
    session = instrumented_session(observed, optimization=optimization, settings=settings or SessionSettings())
    for sample in samples:
        yield sample, infer(session, sample, model="the model")


def cut_layers(
    graph: GraphIndex, matches: Sequence[ActivationMatch], exact: Collection[tuple[str, str]] = ()
) -> ir.Model:
    """Return a copy of a model in which the inputs of every layer become inputs of the model.

    A node that reads the tensor `computed` of a match reads the new float input `given_name(match)` instead. If the
    node needs integers, the input is quantized first. So the tensor `computed` of each match is the result of its layer
    alone, on exact inputs. Tensors that the bodies of If, Loop and Scan read stay connected.

    Args:
        exact: (tensor, node) pairs from `exact_readers`. These nodes read `exact_name(match)` instead.
    """
    given = {m.computed: m for m in matches if m.computed not in graph.captured}
    types = element_types(graph)
    cut = graph.model.clone()
    editor, values = Editor(cut), named_values(cut.graph)
    first = next(iter(cut.graph), None)
    for name, match in given.items():
        entries: dict[str, ir.Value] = {}
        for node, place in list(values[name].uses()):
            entry = exact_name(match) if (match.name, node.name) in exact else given_name(match)
            if entry not in entries:
                entries[entry] = _float_input(cut.graph, entry, types.get(name))
                if match.integer:
                    assert match.params is not None, "integers that are matched have a scale"
                    entries[entry] = editor.quantize(entries[entry], match.params, f"{entry}/integers", before=first)
            node.replace_input_with(place, entries[entry])
    return cut


def given_name(match: ActivationMatch) -> str:
    """Return the name of the cut model's input for the float tensor of a match."""
    return f"{match.computed}/given"


def exact_name(match: ActivationMatch) -> str:
    """Return the name of the input for nodes that read the tensor before it is quantized."""
    return f"{match.computed}/exact"


def with_disturbances(
    float_graph: GraphIndex, names: Collection[str], exact: Collection[tuple[str, str]] = ()
) -> ir.Model:
    """Return a copy of a float model in which a new input is added to each tensor of `names`. All readers read the sum.

    The input is called `disturbance_name(name)`. It has the tensor's type, and the tensor's shape or one that
    broadcasts to it. If the tensor is an output, the sum replaces it at the same position under another name.

    Args:
        exact: (tensor, node) pairs from `exact_readers`. For these nodes, the input is `exact_disturbance_name(name)`.
    """
    types = element_types(float_graph)
    disturbed = float_graph.model.clone()
    editor, values = Editor(disturbed), named_values(disturbed.graph)
    graph, nodes = disturbed.graph, list(disturbed.graph)
    following = dict(zip(nodes, [*nodes[1:], None], strict=True))

    def entry_of(name: str, reader: str) -> str:
        """Return the name of the disturbance that a reader of the tensor gets. The reader "" means the graph's
        outputs.
        """
        return exact_disturbance_name(name) if (name, reader) in exact else disturbance_name(name)

    for name in dict.fromkeys(names):
        value = values[name]
        maker = value.producer()
        before = following[maker] if maker is not None else nodes[0]
        uses = [(use, entry_of(name, use.node.name or "")) for use in value.uses() if use.node.graph is graph]
        outputs = [(place, entry_of(name, "")) for place, output in enumerate(graph.outputs) if output is value]
        sums = {}
        for entry in dict.fromkeys(entry for _, entry in [*uses, *outputs]):
            added = _float_input(graph, entry, types.get(name))
            sums[entry] = editor.node("Add", [value, added], f"{entry}/added", before=before, like=value)
        for use, entry in uses:
            use.node.replace_input_with(use.idx, sums[entry])
        for place, entry in outputs:
            graph.outputs[place] = sums[entry]
    return disturbed


def disturbance_name(name: str) -> str:
    """Return the name of the input that is added to a tensor for all readers except those in `exact_readers`."""
    return f"{name}/disturbance"


def exact_disturbance_name(name: str) -> str:
    """Return the name of the input that is added for nodes that read the tensor before it is quantized."""
    return f"{name}/exact disturbance"


def _float_input(graph: ir.Graph, name: str, like: ir.DataType | None) -> ir.Value:
    """Add an input of unknown shape to a graph. Its type is float16 if `like` is float16, else float32."""
    dtype = ir.DataType.FLOAT16 if like == ir.DataType.FLOAT16 else ir.DataType.FLOAT
    value = ir.Value(name=name, type=ir.TensorType(dtype))
    graph.inputs.append(value)
    return value


@dataclass(frozen=True)
class LayerComparison:
    """Hold the figures of weights and activations over `samples` samples, in the float model's order of execution."""

    weights: tuple[WeightComparison, ...]
    activations: tuple[ActivationComparison, ...]
    samples: int


class Accumulator(Protocol):
    """Accumulate the differences of outputs over samples."""

    def update(self, reference: Outputs, candidate: Outputs) -> None:
        """Add one sample: the outputs by name, once without and once with the disturbance."""
        ...


T = TypeVar("T", bound=Accumulator)


class LayerPair:
    """Pair a float model with its quantized form, whole and cut into layers.

    The quantized graph runs as it is written, without the runtime's fusions, because fetching a tensor would prevent
    the fusions around it. `edgeq.measure.agreement` measures the optimised graph. Only sums are stored. If the tensors
    do not fit into `memory` together, edgeq compares them in several passes, each over all samples.

    Attributes:
        matches: the float activations that both models have.
        exact: the result of `exact_readers`.
        layers, float_layers: the two models cut by `cut_layers`.
        given, given_to_float: inputs of the cut models, each with its match and whether the tensor is rounded first.

    Args:
        float_graph: the float model from which the quantized model was made (after `edgeq.model.prepare`), so names and
            weights match.
        matches: the activations that both models have; None finds them here.
        settings: threads, providers and configuration.
        memory: limit in bytes for fetched tensors in memory.

    Raises:
        RuntimeUnavailableError: the runtime refuses a model.
    """

    def __init__(
        self,
        float_graph: GraphIndex,
        quantized_graph: GraphIndex,
        matches: Sequence[ActivationMatch] | None = None,
        *,
        settings: SessionSettings | None = None,
        memory: int = MEMORY,
        progress: Progress = SILENT,
    ) -> None:
        self.float_graph, self.quantized_graph = float_graph, quantized_graph
        self.settings, self.memory, self.progress = settings or SessionSettings(), memory, progress
        self.matches = self._floats_only(
            match_activations(float_graph, quantized_graph) if matches is None else matches
        )
        self.exact = exact_readers(float_graph, quantized_graph, self.matches)
        # In the float model, the computed tensor has the same name as the match.
        counterparts = [replace(match, computed=match.name, integer=False) for match in self.matches]
        self.float_layers = Loadable.of(cut_layers(float_graph, counterparts, self.exact))
        self.layers = GraphIndex(cut_layers(quantized_graph, self.matches))
        self.given = {given_name(match): (match, False) for match in self.matches}
        self._whole: LayerRuns | None = None
        pairs = list(zip(counterparts, self.matches, strict=True))
        self.given_to_float = {given_name(counterpart): (match, True) for counterpart, match in pairs}
        self.given_to_float |= {exact_name(counterpart): (match, False) for counterpart, match in pairs}

    def _floats_only(self, matches: Sequence[ActivationMatch]) -> list[ActivationMatch]:
        """Return the matches whose tensors are floats. If the type of a tensor is unknown, the runtime determines
        it.
        """
        types = element_types(self.float_graph)
        unknown = [match.name for match in matches if match.name not in types]
        session = self.session(self.float_graph, unknown)
        outputs = session.get_outputs() if session is not None else []
        others = {output.name for output in outputs if output.type not in _FLOAT_TYPES}
        return [match for match in matches if match.name not in others]

    def session(self, model: GraphIndex | Loadable, names: Sequence[str]) -> Any:
        """Open a session with the outputs `names`. Return None if `names` is empty.

        If the model is a cut model, the session keeps only the inputs that it needs.
        """
        if not names:
            return None
        part = Loadable.of(model).only(names, inputs={*self.float_graph.inputs, *self.quantized_graph.inputs})
        return instrumented_session(part, optimization="none", settings=self.settings)

    def parts(self, matches: Sequence[ActivationMatch], first: Sample) -> list[list[ActivationMatch]]:
        """Split matches into parts. The tensors of a part are fetched in the same run.

        Neighbours are in one part as far as memory allows. A tensor of unknown size counts as the largest one.
        """
        sizes = tensor_sizes(Loadable.of(self.float_graph).proto, first.inputs)
        largest = max((sizes[m.name] for m in matches if m.name in sizes), default=0)
        return list(partitions(((m, _COPIES * sizes.get(m.name, largest)) for m in matches), self.memory))

    def compare(self, samples: Samples) -> LayerComparison:
        """Match and compare all weights and activations.

        Raises:
            DataError: there are no samples, or a model refuses one.
        """
        weights = match_weights(self.float_graph, self.quantized_graph)
        compared = compare_weights(self.float_graph, self.quantized_graph, weights)
        return LayerComparison(compared, self.compare_activations(samples), len(samples))

    def compare_activations(self, samples: Samples) -> tuple[ActivationComparison, ...]:
        """Run both models, and the quantized model's layers alone, over the samples, and compare the activations.

        For the errors, see `compare`.
        """
        first = next(iter(samples), None)
        if first is None:
            raise DataError(f"{samples.source}: no samples to compare the models on", "Point --data at samples")
        parts = self.parts(self.matches, first)
        done: list[ActivationComparison] = []
        with self.progress.stage("Comparing layers", len(samples) * len(parts)) as advance:
            for part in parts:
                runs = LayerRuns(self, part)
                # If all tensors fit into the memory, the sessions are opened once.
                self._whole = runs if len(parts) == 1 else None
                names = [match.computed for match in part if not match.is_input]
                whole = self.session(self.quantized_graph, names)
                sums = [self._sums(match) for match in part]
                for sample in samples:
                    made, real = runs.run(sample), _real_rows(sample)
                    seen = _run(whole, sample, "the quantized model")
                    for one in sums:
                        one.update(made, seen[one.match.computed], real)
                    advance(1)
                done.extend(one.result() for one in sums)
        return tuple(done)

    def _sums(self, match: ActivationMatch) -> ActivationSums:
        """Return empty sums for an activation, with the names of the activations that its layer reads.

        edgeq finds these names by going back from the layer's result to the inputs of the cut model.
        """
        found: dict[str, None] = {}
        pending, seen = [] if match.is_input else [self.layers.values[match.computed]], set()
        while pending:
            value = pending.pop()
            maker = value.producer()
            if name_of(value) in self.given:
                found[self.given[name_of(value)][0].name] = None
            elif maker is not None and value not in seen:
                seen.add(value)
                pending.extend(v for v in reversed(maker.inputs) if v is not None)
        exact = tuple(name for name in found if (name, match.node) in self.exact)
        return ActivationSums(match, tuple(found), exact)

    def output_effects(self, names: Collection[str], samples: Samples, *, count: int) -> dict[str, Agreement]:
        """Return tensor → agreement between the float model's outputs with and without the error of the layer that
        computes this tensor.

        This takes one run of the float model for each layer and sample. Layers without an error on the samples are left
        out.

        Args:
            names: the tensors to disturb.
            count: number of samples, evenly spread.

        Raises:
            DataError: a model refuses a sample.
        """
        groups = {match.name: (match.name,) for match in self.matches if match.name in names}
        found = self.group_effects(groups, samples, OutputSums, count=count)
        return {name: sums.result() for name, (sums,) in found.items()}

    def group_effects(
        self, groups: Mapping[str, Collection[str]], samples: Samples, accumulator: Callable[[], T], *, count: int
    ) -> dict[str, tuple[T, ...]]:
        """Compare the float model's outputs with and without errors, for groups of tensors. The errors of all tensors
        of a group are added at the same time.

        Args:
            groups: group → its tensors. A tensor can be in only one group.
            accumulator: function that returns a new accumulator for the differences of one group.
            count: number of samples, evenly spread.

        Returns:
            Accumulators by group. If the tensors of a group do not fit into the memory together, the group has several
            accumulators, each for a part of the tensors. Groups without errors are left out.
        """
        group_of = {name: group for group, names in groups.items() for name in names}
        places = {group: place for place, group in enumerate(groups)}
        known = [m for m in self.matches if m.name in group_of and m.name not in self.float_graph.captured]
        chosen = sorted(known, key=lambda match: places[group_of[match.name]])
        first = next(iter(samples), None)
        if not chosen or first is None:
            return {}
        disturbed = _Disturbed(self, [match.name for match in chosen])
        found: dict[str, list[T]] = {}
        with self.progress.stage("Following errors to the outputs", min(count, len(samples)) * len(chosen)) as advance:
            for part in self.parts(chosen, first) if self._whole is None else [chosen]:
                runs = self._whole or LayerRuns(self, part)
                tensors: dict[str, list[str]] = {}
                for match in part:
                    tensors.setdefault(group_of[match.name], []).append(match.name)
                sums: dict[str, T] = {}
                for sample in _spread(samples, count):
                    made = runs.run(sample)
                    undisturbed = disturbed.run(sample, {})
                    for group, names in tensors.items():
                        errors = {entry: e for name in names for entry, e in disturbed.errors(made, name).items()}
                        if any(error.any() for error in errors.values()):
                            sums.setdefault(group, accumulator()).update(undisturbed, disturbed.run(sample, errors))
                        advance(len(names))
                for group, one in sums.items():
                    found.setdefault(group, []).append(one)
        return {group: tuple(parts) for group, parts in found.items()}

    def attribute_error(
        self, comparison: LayerComparison, outputs: Agreement, samples: Samples, *, most: int = 10
    ) -> tuple[LayerComparison, tuple[ErrorSource, ...]]:
        """Follow the errors of the layers that may be error sources to the outputs, one layer at a time.

        Return the comparison with these effects added, and at most `most` error sources, the worst first.

        Args:
            outputs: agreement of the whole quantized model's outputs, on the graph as written.
        """
        likely = candidates(comparison.activations, self.float_graph.outputs, _CANDIDATES * most)
        effects = self.output_effects(likely, samples, count=_FOLLOWED)
        activations = tuple(replace(a, effect=effects.get(a.name)) for a in comparison.activations)
        comparison = replace(comparison, activations=activations)
        return comparison, find_error_sources(activations, comparison.weights, outputs, most)


def compare_layers(
    float_graph: GraphIndex, quantized_graph: GraphIndex, samples: Samples, **options: Any
) -> LayerComparison:
    """Match and compare all weights and activations of two models. See `LayerPair.compare`.

    `options` are the options of `LayerPair`.
    """
    return LayerPair(float_graph, quantized_graph, **options).compare(samples)


def compare_activations(
    float_graph: GraphIndex,
    quantized_graph: GraphIndex,
    matches: Sequence[ActivationMatch],
    samples: Samples,
    **options: Any,
) -> tuple[ActivationComparison, ...]:
    """Compare the activations `matches` of two models. `options` are the options of `LayerPair`."""
    return LayerPair(float_graph, quantized_graph, matches, **options).compare_activations(samples)


def output_effects(
    float_graph: GraphIndex,
    quantized_graph: GraphIndex,
    matches: Sequence[ActivationMatch],
    names: Collection[str],
    samples: Samples,
    *,
    count: int,
    **options: Any,
) -> dict[str, Agreement]:
    """Follow the errors of the tensors `names` to the outputs, one tensor at a time. See `LayerPair.output_effects`.

    `options` are the options of `LayerPair`.
    """
    return LayerPair(float_graph, quantized_graph, matches, **options).output_effects(names, samples, count=count)


class LayerRuns:
    """Hold open sessions for the layers that compute the tensors of `part`."""

    def __init__(self, pair: LayerPair, part: Sequence[ActivationMatch]) -> None:
        made = [match for match in part if not match.is_input]
        self._part = part
        self._layers = pair.session(pair.layers, [match.computed for match in made])
        self._float_layers = pair.session(pair.float_layers, [match.name for match in made])
        self._given = _given_to(self._layers, pair.given)
        self._given_to_float = _given_to(self._float_layers, pair.given_to_float)
        read = [*made, *(match for match, _, _ in (*self._given.values(), *self._given_to_float.values()))]
        names = list(dict.fromkeys(match.name for match in read if not match.is_input))
        self._float = pair.session(pair.float_graph, names)

    def run(self, sample: Sample) -> LayerArrays:
        """Run the layers once on one sample.

        Raises:
            DataError: a model refuses the sample.
        """
        exact = _run(self._float, sample, "the float model")
        alone = _run(self._layers, sample, "a layer of the quantized model", self._given, exact)
        from_rounded = _run(self._float_layers, sample, "a layer of the float model", self._given_to_float, exact)
        raw = {match.name: alone[match.computed] for match in self._part}
        read = {match.name: match.as_read(raw[match.name]) for match in self._part}
        return LayerArrays(exact=exact, raw=raw, alone=read, from_rounded=from_rounded)


_Given = Mapping[str, tuple[ActivationMatch, bool, type[np.floating[Any]]]]
"""Input of a cut model → its match, whether the tensor is rounded first, and the input's type."""


def _given_to(session: Any, given: Mapping[str, tuple[ActivationMatch, bool]]) -> _Given:
    """Return the given tensors that a session has as inputs."""
    values = session.get_inputs() if session is not None else []
    return {v.name: (*given[v.name], _FLOAT_TYPES.get(v.type, np.float32)) for v in values if v.name in given}


def _run(
    session: Any, sample: Sample, model: str, given: _Given | None = None, exact: Outputs | None = None
) -> Mapping[str, NDArray[Any]]:
    """Run a session on a sample, and return the sample's inputs and the session's outputs. The session also gets the
    `given` tensors, with values from `exact`.
    """
    if session is None:
        return sample.inputs
    fed = {}
    for name, (match, rounded, kind) in (given or {}).items():
        assert exact is not None
        values = exact[match.name]
        fed[name] = (match.as_read(values) if rounded else values).astype(kind, copy=False)
    made = infer(session, replace(sample, inputs={**sample.inputs, **fed}), model=model)
    return {**sample.inputs, **made}


class _Disturbed:
    """Run the float model with errors added to some of its tensors."""

    def __init__(self, pair: LayerPair, names: Sequence[str]) -> None:
        model = with_disturbances(pair.float_graph, names, pair.exact)
        self._session = instrumented_session(model, optimization="all", settings=pair.settings)
        given = (output.name for output in self._session.get_outputs())
        self._outputs = dict(zip(given, pair.float_graph.outputs, strict=True))
        types = {value.name: _FLOAT_TYPES.get(value.type, np.float32) for value in self._session.get_inputs()}
        entries = {entry for name in names for entry in (disturbance_name(name), exact_disturbance_name(name))}
        self._zeros = {entry: np.zeros((), types[entry]) for entry in entries if entry in types}

    def run(self, sample: Sample, errors: Mapping[str, NDArray[Any]]) -> Outputs:
        """Return the float model's outputs for one sample, by name, with `errors` added to its tensors."""
        fed = replace(sample, inputs={**sample.inputs, **self._zeros, **errors})
        made = infer(self._session, fed, model="the float model")
        return {self._outputs[name]: values for name, values in made.items()}

    def errors(self, layers: LayerArrays, tensor: str) -> dict[str, NDArray[Any]]:
        """Return the error to add at `tensor`, by the names of the disturbance inputs.

        It is the error of this layer alone. An element is 0 if the difference is NaN or infinite, for example because
        of a mask.
        """
        found = {}
        seen = {disturbance_name(tensor): layers.alone[tensor], exact_disturbance_name(tensor): layers.raw[tensor]}
        for entry, values in seen.items():
            if entry in self._zeros:
                with np.errstate(invalid="ignore"):
                    difference = np.asarray(values - layers.from_rounded[tensor])
                found[entry] = np.where(np.isfinite(difference), difference, 0).astype(self._zeros[entry].dtype)
        return found


def _spread(samples: Samples, count: int) -> Iterator[Sample]:
    total = len(samples)
    wanted = {position * total // count for position in range(count)} if total > count else set(range(total))
    return (sample for position, sample in enumerate(samples) if position in wanted)


def _real_rows(sample: Sample) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """Return a function that removes the padding from arrays of a gathered batch."""
    contexts = sample.context.get("rows")
    size = len(next(iter(sample.inputs.values())))

    def real(array: NDArray[Any]) -> NDArray[Any]:
        return array[: len(contexts)] if contexts is not None and array.ndim and len(array) == size else array

    return real
