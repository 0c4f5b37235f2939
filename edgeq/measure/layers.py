"""Run a float model and its quantized form layer by layer, compare every tensor, and follow errors to the outputs.

This module has the four operations of ONNX Runtime's `qdq_loss_debug`, for every quantized format and without storing
activations:

    match_weights         pairs of integer weights and float weights (`compare_weights` measures the difference)
    with_outputs          a model whose inner tensors are also outputs
    collect_activations   the values of these tensors, one sample at a time
    match_activations     pairs of tensors and activations (`compare_activations` measures the difference)

`compare_layers` runs all four. `output_effects` measures the effect of each layer's error alone on the outputs, and
`LayerPair.output_noise` predicts it for all layers at once. Both run on a `LayerPair`, which contains the two models,
whole and cut into layers. The input of each layer is the float model's tensor, or that tensor rounded. Three figures
for each tensor distinguish layers that cause errors from layers that inherit them:

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

from collections import ChainMap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Unpack

import numpy as np
import onnx_ir as ir
from edgeq_device.measure.basis import Padding
from edgeq_device.measure.pairs import find_visible
from numpy.typing import NDArray

from edgeq.data.samples import Sample, Samples, spread_over
from edgeq.errors import DataError
from edgeq.measure.agreement import Agreement
from edgeq.measure.comparison import OutputSums
from edgeq.measure.error_sources import ErrorSource, find_error_sources
from edgeq.measure.inference import Outputs, infer
from edgeq.measure.layer_cuts import (
    add_disturbances,
    cut_layers,
    disturbance_name,
    entry_name,
    exact_disturbance_name,
    exact_entry_name,
)
from edgeq.measure.layer_noise import ActivationComparison, ActivationSums, LayerArrays
from edgeq.measure.match_activations import ActivationMatch, find_exact_readers, match_activations
from edgeq.measure.match_weights import WeightComparison, WeightMatch, compare_weights, match_weights, weight_values
from edgeq.measure.sensitivity import SAMPLES as PROBED
from edgeq.measure.sensitivity import Place, ProbeOptions, change_power, follow_gradients
from edgeq.model.graph import GraphIndex, name_of
from edgeq.model.memory import partitions, tensor_sizes
from edgeq.model.padding import find_padding
from edgeq.model.parts import with_outputs
from edgeq.model.sessions import Loadable
from edgeq.model.shapes import element_types
from edgeq.run.session import OptimizationLevel, SessionSettings
from edgeq.util.display import SILENT, Progress
from edgeq.util.heap import return_freed_memory

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
MEMORY = 2**28
"""Limit in bytes for fetched tensors in memory. If a model needs more, edgeq compares it in several passes."""
# Number of copies of each tensor in memory. They are the float model's tensor, the quantized model's, the layer's in
# integers and in float, the rounded input, and one copy in float64, which counts twice.
_COPIES = 7
_FLOAT_TYPES: Mapping[str, type[np.floating[Any]]] = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
# Number of samples for each of these tensors. If there is an effect on the outputs, a few samples show it.
_FOLLOWED = 4


def instrumented_session(
    model: ir.Model | GraphIndex | Loadable, *, optimization: OptimizationLevel, settings: SessionSettings
) -> Any:
    """Open a session of a model in memory. External data is read from the model's data folder. The session keeps no
    memory between runs.

    Of `settings`, only the threads, providers and configuration apply.
    """
    return Loadable.of(model).open(
        SessionSettings(
            providers=settings.providers,
            config=settings.config,
            intra_op_threads=settings.intra_op_threads,
            optimization=optimization,
            arena=False,
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


@dataclass(frozen=True)
class LayerComparison:
    """Hold the figures of weights and activations over `samples` samples, in the float model's order of execution."""

    weights: tuple[WeightComparison, ...]
    activations: tuple[ActivationComparison, ...]
    samples: int


class LayerPair:
    """Pair a float model with its quantized form, whole and cut into layers.

    The quantized graph runs as it is written, without the runtime's fusions, because fetching a tensor would prevent
    the fusions around it. `edgeq.measure.agreement` measures the optimised graph. Only sums are stored. If the tensors
    do not fit into `memory` together, edgeq compares them in several passes, each over all samples.

    Attributes:
        matches: the float activations that both models have.
        exact: the result of `find_exact_readers`.
        layers, float_layers: the two models cut by `cut_layers`.
        entries, float_entries: inputs of the cut models, each with its match and whether the tensor is rounded first.

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
        # Indices and other integers have no rounding error.
        self.matches = self._floats_only(
            match_activations(float_graph, quantized_graph) if matches is None else matches
        )
        self.exact = find_exact_readers(float_graph, quantized_graph, self.matches)
        # In the float model, the computed tensor has the same name as the match.
        counterparts = [replace(match, computed=match.name, integer=False) for match in self.matches]
        # Both models are cut at the same tensors, so their layers can run on the same inputs.
        self.float_layers = Loadable.of(cut_layers(float_graph, counterparts, self.exact))
        self.layers = GraphIndex(cut_layers(quantized_graph, self.matches))
        self.entries = {entry_name(match): (match, False) for match in self.matches}
        # If all tensors fit into the memory, `_errors` uses these sessions again.
        self._whole_runs: LayerRuns | None = None
        pairs = list(zip(counterparts, self.matches, strict=True))
        self.float_entries = {entry_name(counterpart): (match, True) for counterpart, match in pairs}
        self.float_entries |= {exact_entry_name(counterpart): (match, False) for counterpart, match in pairs}

    def _floats_only(self, matches: Sequence[ActivationMatch]) -> list[ActivationMatch]:
        """Return the matches whose tensors are floats. If the type of a tensor is unknown, the runtime determines
        it.
        """
        types = element_types(self.float_graph)
        unknown = [match.name for match in matches if match.name not in types]
        session = self.session(self.float_graph, unknown)
        outputs = session.get_outputs() if session is not None else []
        excluded_names = {output.name for output in outputs if output.type not in _FLOAT_TYPES}
        return [match for match in matches if match.name not in excluded_names]

    def session(self, model: GraphIndex | Loadable, names: Sequence[str]) -> Any:
        """Open a session with the outputs `names`. Return None if `names` is empty.

        If the model is a cut model, the session keeps only the inputs that it needs.
        """
        if not names:
            return None
        part = Loadable.of(model).only(names, inputs={*self.float_graph.inputs, *self.quantized_graph.inputs})
        return instrumented_session(part, optimization="none", settings=self.settings)

    def parts(self, matches: Sequence[ActivationMatch], first_sample: Sample) -> list[list[ActivationMatch]]:
        """Split matches into parts. The tensors of a part are fetched in the same run.

        Neighbours are in one part as far as memory allows. A tensor of unknown size counts as the largest one.
        """
        sizes = tensor_sizes(Loadable.of(self.float_graph).proto, first_sample.inputs)
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
        first_sample = next(iter(samples), None)
        if first_sample is None:
            raise DataError(f"{samples.source}: no samples to compare the models on", "Point ⟨data⟩ at samples")
        parts = self.parts(self.matches, first_sample)
        comparisons: list[ActivationComparison] = []
        with self.progress.stage("Comparing layers", len(samples) * len(parts)) as advance:
            for part in parts:
                runs = LayerRuns(self, part)
                # If all tensors fit into the memory, the sessions are opened once.
                self._whole_runs = runs if len(parts) == 1 else None
                names = [match.computed for match in part if not match.is_input]
                whole_session = self.session(self.quantized_graph, names)
                sums = [self._sums(match) for match in part]
                for sample in samples:
                    layer_arrays, real = runs.run(sample), _real_elements(sample, find_padding(self.float_graph))
                    whole_outputs = _run(whole_session, sample, "the quantized model")
                    for activation_sums in sums:
                        activation_sums.update(layer_arrays, whole_outputs[activation_sums.match.computed], real)
                    advance(1)
                comparisons.extend(activation_sums.result() for activation_sums in sums)
        return tuple(comparisons)

    def _sums(self, match: ActivationMatch) -> ActivationSums:
        """Return empty sums for an activation, with the names of the activations that its layer reads.

        edgeq finds these names by going back from the layer's result to the inputs of the cut model.
        """
        read_names: dict[str, None] = {}
        pending, visited = [] if match.is_input else [self.layers.values[match.computed]], set()
        while pending:
            value = pending.pop()
            maker = value.producer()
            if name_of(value) in self.entries:
                read_names[self.entries[name_of(value)][0].name] = None
            elif maker is not None and value not in visited:
                visited.add(value)
                pending.extend(v for v in reversed(maker.inputs) if v is not None)
        exact = tuple(name for name in read_names if (name, match.node) in self.exact)
        return ActivationSums(match, tuple(read_names), exact)

    def output_effects(self, names: Collection[str], samples: Samples, *, count: int) -> dict[str, Agreement]:
        """Return tensor → agreement between the float model's outputs with and without the error of the layer that
        computes this tensor.

        This takes one run of the float model for each layer and sample. Layers without an error on the samples are left
        out. `output_noise` ranks all layers for much less.

        Args:
            names: the tensors to disturb.
            count: number of samples, evenly spread.

        Raises:
            DataError: a model refuses a sample.
        """
        followed = [m for m in self.matches if m.name in names and m.name not in self.float_graph.captured]
        if not followed or not len(samples):
            return {}
        # One session with an input for every disturbance serves all tensors.
        disturbed = _Disturbed(self, [match.name for match in followed])
        effects: dict[str, OutputSums] = {}
        with self.progress.stage(
            "Following errors to the outputs", min(count, len(samples)) * len(followed)
        ) as advance:
            for sample, parts in self._errors(followed, samples, count):
                errors = dict(ChainMap(*parts))
                # The same session runs without errors, so that fusions are the same in both runs.
                undisturbed = disturbed.run(sample, {})
                for match in followed:
                    given = {place: error for place, error in errors.items() if place[0] == match.name}
                    # Without an error nothing changes, and a run of the float model takes time.
                    if any(error.any() for error in given.values()):
                        sums = effects.setdefault(match.name, OutputSums())
                        sums.update(undisturbed, disturbed.run(sample, given))
                    advance(1)
        return {name: sums.result() for name, sums in effects.items()}

    def output_noise(self, samples: Samples, **options: Unpack[ProbeOptions]) -> dict[str, float]:
        """Predict the noise at the float model's outputs from the error of each layer, by gradients
        (`edgeq.measure.sensitivity`).

        Args:
            options: see `follow_gradients`.

        Returns:
            Tensor → noise power divided by signal power, if only the layer that computes this tensor has its error.
            Noises add up. The tensors that bodies of If, Loop and Scan read, and those on which no output depends, are
            left out.

        Raises:
            DataError: there are no samples, or a model refuses one.
        """
        followed = [match for match in self.matches if match.name not in self.float_graph.captured]
        noise: dict[str, float] = {}
        options = {"settings": self.settings, "progress": self.progress, **options, "apart": self.exact}
        followers = follow_gradients(self.float_graph, [match.name for match in followed], samples, **options)
        errors_by_sample = self._errors(followed, samples, options.get("count", PROBED))
        for gradients in followers:
            _, parts = next(errors_by_sample)
            for errors in parts:
                # Gradients are as large as their tensors, so those of one part are in memory at a time.
                for slopes in gradients.probe({name for name, _ in errors}):
                    for name in {name for name, _ in slopes}:
                        # Readers before and after the rounding get errors that agree in part, so they add up first.
                        places = [p for p in ((name, False), (name, True)) if p in slopes and p in errors]
                        power = change_power([slopes[place] for place in places], [errors[place] for place in places])
                        noise[name] = noise.get(name, 0.0) + power
                    # Free the arrays before the next are computed.
                    del slopes
                del errors
                return_freed_memory()
            del gradients
        return noise

    def _errors(
        self, matches: Sequence[ActivationMatch], samples: Samples, count: int
    ) -> Iterator[tuple[Sample, Iterator[dict[Place, NDArray[np.float32]]]]]:
        """Yield, for each of `count` samples, the error of the layer alone that computes each tensor: first those of
        one part of the tensors (see `parts`), then those of the next.

        A tensor in `exact` has two errors: that of the readers before the rounding (True), and that of all others. An
        element is 0 if the difference is NaN or infinite, for example because of a mask.
        """
        tensors_exact = {tensor for tensor, _ in self.exact}
        runs: list[LayerRuns] = []
        for sample in spread_over(samples, count):
            if not runs:
                whole = self._whole_runs
                parts = self.parts(matches, sample) if whole is None else []
                runs = [LayerRuns(self, part) for part in parts] if whole is None else [whole]
            yield sample, map(partial(_layer_errors, sample, matches, tensors_exact), runs)

    def attribute_error(
        self, comparison: LayerComparison, outputs: Agreement, samples: Samples, *, limit: int = 10
    ) -> tuple[LayerComparison, tuple[ErrorSource, ...]]:
        """Follow the errors of the layers that may be error sources to the outputs, one layer at a time. Gradients
        choose these layers.

        Return the comparison with these effects added, and at most `limit` error sources, the worst first.

        Args:
            outputs: agreement of the whole quantized model's outputs, on the graph as written.
        """
        noise = self.output_noise(samples)
        likely = sorted((name for name in noise if noise[name] > 0), key=lambda name: -noise[name])[:limit]
        effects = self.output_effects(likely, samples, count=_FOLLOWED)
        activations = tuple(replace(a, effect=effects.get(a.name)) for a in comparison.activations)
        comparison = replace(comparison, activations=activations)
        return comparison, find_error_sources(activations, comparison.weights, outputs, limit)


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
        computed = [match for match in part if not match.is_input]
        self._part = part
        self._layers = pair.session(pair.layers, [match.computed for match in computed])
        self._float_layers = pair.session(pair.float_layers, [match.name for match in computed])
        self._entries = _find_entries(self._layers, pair.entries)
        self._float_entries = _find_entries(self._float_layers, pair.float_entries)
        fetched = [*computed, *(match for match, _, _ in (*self._entries.values(), *self._float_entries.values()))]
        names = list(dict.fromkeys(match.name for match in fetched if not match.is_input))
        self._float = pair.session(pair.float_graph, names)

    def run(self, sample: Sample) -> LayerArrays:
        """Run the layers once on one sample.

        Raises:
            DataError: a model refuses the sample.
        """
        # The float model's tensors are the inputs of the layers of both models.
        exact = _run(self._float, sample, "the float model")
        alone = _run(self._layers, sample, "a layer of the quantized model", self._entries, exact)
        from_rounded = _run(self._float_layers, sample, "a layer of the float model", self._float_entries, exact)
        raw = {match.name: alone[match.computed] for match in self._part}
        as_read = {match.name: match.as_read(raw[match.name]) for match in self._part}
        return LayerArrays(exact=exact, raw=raw, alone=as_read, from_rounded=from_rounded)


_Entries = Mapping[str, tuple[ActivationMatch, bool, type[np.floating[Any]]]]
"""Input of a cut model → its match, whether the tensor is rounded first, and the input's type."""


def _find_entries(session: Any, entries: Mapping[str, tuple[ActivationMatch, bool]]) -> _Entries:
    """Return the given tensors that a session has as inputs."""
    values = session.get_inputs() if session is not None else []
    return {v.name: (*entries[v.name], _FLOAT_TYPES.get(v.type, np.float32)) for v in values if v.name in entries}


def _run(
    session: Any, sample: Sample, model: str, entries: _Entries | None = None, exact: Outputs | None = None
) -> Mapping[str, NDArray[Any]]:
    """Run a session on a sample, and return the sample's inputs and the session's outputs. The session also gets the
    `entries` tensors, with values from `exact`.
    """
    if session is None:
        return sample.inputs
    fed = {}
    for name, (match, rounded, kind) in (entries or {}).items():
        assert exact is not None
        values = exact[match.name]
        # An input of a cut model may be float16.
        fed[name] = (match.as_read(values) if rounded else values).astype(kind, copy=False)
    outputs = infer(session, replace(sample, inputs={**sample.inputs, **fed}), model=model)
    return {**sample.inputs, **outputs}


class _Disturbed:
    """Run the float model with errors added to some of its tensors."""

    def __init__(self, pair: LayerPair, names: Sequence[str]) -> None:
        model = add_disturbances(pair.float_graph, names, pair.exact)
        # Only outputs are fetched here, so the runtime may fuse what it likes.
        self._session = instrumented_session(model, optimization="all", settings=pair.settings)
        output_names = (output.name for output in self._session.get_outputs())
        # An output that is disturbed has the name of the sum, at its old position.
        self._outputs = dict(zip(output_names, pair.float_graph.outputs, strict=True))
        types = {value.name: _FLOAT_TYPES.get(value.type, np.float32) for value in self._session.get_inputs()}
        entries = {entry for name in names for entry in (disturbance_name(name), exact_disturbance_name(name))}
        # A zero without axes can be added to a tensor of any shape.
        self._zeros = {entry: np.zeros((), types[entry]) for entry in entries if entry in types}

    def run(self, sample: Sample, errors: Mapping[Place, NDArray[Any]]) -> Outputs:
        """Return the float model's outputs for one sample, by name, with `errors` added to its tensors. Each error is
        for a tensor, and for the readers before its rounding (True) or for all others.
        """
        entries = {(exact_disturbance_name if apart else disturbance_name)(n): e for (n, apart), e in errors.items()}
        added = {entry: e.astype(self._zeros[entry].dtype) for entry, e in entries.items() if entry in self._zeros}
        fed = replace(sample, inputs={**sample.inputs, **self._zeros, **added})
        outputs = infer(self._session, fed, model="the float model")
        return {self._outputs[name]: values for name, values in outputs.items()}


def _layer_errors(
    sample: Sample, matches: Sequence[ActivationMatch], tensors_exact: Collection[str], runs: LayerRuns
) -> dict[Place, NDArray[np.float32]]:
    """Return the errors of the layers of one part, as `LayerPair._errors` yields them."""
    arrays = runs.run(sample)
    errors: dict[Place, NDArray[np.float32]] = {}
    for match in matches:
        if match.name in arrays.alone:
            exact = arrays.from_rounded[match.name]
            errors[match.name, False] = _difference(arrays.alone[match.name], exact)
            if match.name in tensors_exact:
                errors[match.name, True] = _difference(arrays.raw[match.name], exact)
    return errors


def _difference(values: NDArray[Any], exact: NDArray[Any]) -> NDArray[np.float32]:
    with np.errstate(invalid="ignore"):
        difference = np.asarray(values - exact, np.float32)
    return np.where(np.isfinite(difference), difference, np.float32(0))


def _real_elements(sample: Sample, padding: Padding) -> Callable[[str, NDArray[Any]], NDArray[Any]]:
    """Return a function that removes padding from the arrays of a tensor of the float model: the rows that fill up a
    gathered batch, and the positions that a mask hides.
    """
    contexts = sample.context.get("rows")
    size = len(next(iter(sample.inputs.values())))

    def real(name: str, array: NDArray[Any]) -> NDArray[Any]:
        """Return the array without padded rows, or the flat list of the real elements if some positions are hidden."""
        count = len(contexts) if contexts is not None and array.ndim and len(array) == size else None
        visible = find_visible(padding, name, array.shape, sample.inputs)
        rows = array[:count] if count is not None else array
        return rows if visible is None else rows[np.broadcast_to(visible, array.shape)[: len(rows)]]

    return real
