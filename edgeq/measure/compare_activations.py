"""Every activation of a quantized model against the float model's, in one pass over the samples with sums only.

Three figures a tensor, because one number cannot tell a culprit from a victim:

    accumulated   the quantized model's tensor when it runs as a whole: all errors so far
    layer         what its layer alone makes of the float model's inputs, in integers: the error where it arises
    rounding      the float tensor quantized with the model's scale and zero point: the error of its range alone

and, to tell what is wrong with a layer, `inputs`: what the float layer makes of quantized inputs. The noise of the
layer that neither these nor the rounding of its result account for is that of its weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgeq.errors import DataError
from edgeq.measure.activation_tally import ActivationComparison, ActivationTally, as_read
from edgeq.measure.graphs import GraphIndex
from edgeq.measure.inference import Session, infer
from edgeq.measure.match_activations import ActivationMatch, element_types
from edgeq.measure.observe import cut_layers, given_name, observing_session, only_outputs
from edgeq.model.sizes import tensor_sizes
from edgeq.progress import SILENT, Progress
from edgeq.session import SessionSettings

if TYPE_CHECKING:
    from edgeq.data.samples import Sample, Samples

MEMORY = 2**29
"""Bytes that fetched tensors may take at once; a model with more is run in several waves."""
# Of each tensor: the float model's, the quantized model's, the layer's in integers and in float, its input rounded, and
# one copy in float64.
_COPIES = 7
_FLOAT_TYPES = ("tensor(float)", "tensor(float16)")


def compare_activations(
    float_graph: GraphIndex,
    quantized_graph: GraphIndex,
    matches: Sequence[ActivationMatch],
    samples: Samples,
    *,
    settings: SessionSettings | None = None,
    memory: int = MEMORY,
    progress: Progress = SILENT,
) -> tuple[ActivationComparison, ...]:
    """Run both models, and the quantized one's layers alone, over the samples.

    The quantized graph runs as it is written, without the runtime's fusions, because looking at a tensor would break
    them: `edgeq.measure.agreement` tells what the optimised one answers. Nothing is kept but sums; tensors that do not
    fit into `memory` together are taken in waves, each over all samples.

    Raises:
        DataError: there are no samples, or a model refuses one.
        RuntimeUnavailableError: the runtime refuses a model.
    """
    settings = settings or SessionSettings()
    first = next(iter(samples), None)
    if first is None:
        raise DataError(f"{samples.source}: no samples to compare the models on", "Point --data at samples")
    matches = _floats_only(float_graph, matches, settings)
    pair = _Pair(float_graph, quantized_graph, matches, settings)
    waves = list(_waves(float_graph, matches, first, memory))
    done: list[ActivationComparison] = []
    with progress.stage("Comparing layers", len(samples) * len(waves)) as advance:
        for wave in waves:
            observer = _Observer(pair, wave)
            for sample in samples:
                observer.observe(sample)
                advance(1)
            done.extend(observer.results())
    return tuple(done)


class _Pair:
    """Two models, whole and cut into layers."""

    def __init__(
        self,
        float_graph: GraphIndex,
        quantized_graph: GraphIndex,
        matches: Sequence[ActivationMatch],
        settings: SessionSettings,
    ) -> None:
        self.float_graph, self.quantized_graph = float_graph, quantized_graph
        self.matches = matches
        self.settings = settings
        # In the float model, a tensor is what its name says.
        twins = [dataclasses.replace(match, computed=match.name, integer=False) for match in matches]
        self.given = {given_name(match): match for match in matches}
        self.given_twins = {given_name(twin): match for twin, match in zip(twins, matches, strict=True)}
        self.float_layers = GraphIndex(cut_layers(float_graph, twins), float_graph.path)
        self.layers = GraphIndex(cut_layers(quantized_graph, matches), quantized_graph.path)

    def session(self, graph: GraphIndex, names: Sequence[str]) -> Any:
        """A session that gives `names`; of tensors given from outside it takes those that it needs. None for none."""
        if not names:
            return None
        part = only_outputs(graph.model, names, inputs={*self.float_graph.inputs, *self.quantized_graph.inputs})
        return observing_session(part, graph, optimization="none", settings=self.settings)


class _Observer:
    """Four sessions and the sums of one wave of tensors."""

    def __init__(self, pair: _Pair, wave: Sequence[ActivationMatch]) -> None:
        made = [match for match in wave if not match.is_input]
        self._layers = pair.session(pair.layers, [m.computed for m in made])
        self._float_layers = pair.session(pair.float_layers, [m.name for m in made])
        self._given = _fed(self._layers, pair.given)
        self._given_twins = _fed(self._float_layers, pair.given_twins)
        read = [*made, *(match for match, _ in [*self._given.values(), *self._given_twins.values()])]
        names = dict.fromkeys(m.name for m in read if not m.is_input)
        self._float = pair.session(pair.float_graph, list(names))
        self._quantized = pair.session(pair.quantized_graph, [m.computed for m in made])
        self._tallies = [ActivationTally(match, _reads(pair.layers, match, pair.given)) for match in wave]

    def observe(self, sample: Sample) -> None:
        exact = {**sample.inputs, **_run(self._float, sample, "the float model")}
        whole = {**sample.inputs, **_run(self._quantized, sample, "the quantized model")}
        fed = {name: exact[match.name].astype(kind, copy=False) for name, (match, kind) in self._given.items()}
        alone = {**sample.inputs, **_run(self._layers, _with(sample, fed), "a layer of the quantized model")}
        rounded = {
            name: as_read(match, exact[match.name]).astype(kind, copy=False)
            for name, (match, kind) in self._given_twins.items()
        }
        blamed = {**sample.inputs, **_run(self._float_layers, _with(sample, rounded), "a layer of the float model")}
        real = _real_rows(sample)
        for tally in self._tallies:
            name, computed = tally.match.name, tally.match.computed
            tally.update(real(exact[name]), real(whole[computed]), real(alone[computed]), real(blamed[name]))

    def results(self) -> Iterator[ActivationComparison]:
        return (tally.result() for tally in self._tallies)


def _waves(
    graph: GraphIndex, matches: Sequence[ActivationMatch], first: Sample, memory: int
) -> Iterator[list[ActivationMatch]]:
    """Neighbours together as long as they fit; where a size is unknown, it is taken for that of the largest."""
    sizes = tensor_sizes(graph.model, first.inputs)
    largest = max((sizes[m.name] for m in matches if m.name in sizes), default=0)
    wave: list[ActivationMatch] = []
    used = 0
    for match in matches:
        size = _COPIES * sizes.get(match.name, largest)
        if wave and used + size > memory:
            yield wave
            wave, used = [], 0
        wave.append(match)
        used += size
    if wave:
        yield wave


def _floats_only(
    graph: GraphIndex, matches: Sequence[ActivationMatch], settings: SessionSettings
) -> list[ActivationMatch]:
    """Without the tensors that are no floats after all, which only the runtime may know."""
    types = element_types(graph.model)
    unknown = [match.name for match in matches if match.name not in types]
    if not unknown:
        return list(matches)
    session = observing_session(only_outputs(graph.model, unknown), graph, optimization="none", settings=settings)
    others = {output.name for output in session.get_outputs() if output.type not in _FLOAT_TYPES}
    return [match for match in matches if match.name not in others]


def _fed(
    session: Any, given: Mapping[str, ActivationMatch]
) -> dict[str, tuple[ActivationMatch, type[np.floating[Any]]]]:
    """Those of the given tensors that a session takes, and as which type."""
    values = session.get_inputs() if session is not None else []
    kinds = {value.name: np.float16 if value.type == "tensor(float16)" else np.float32 for value in values}
    return {name: (given[name], kind) for name, kind in kinds.items() if name in given}


def _reads(layers: GraphIndex, match: ActivationMatch, given: Mapping[str, ActivationMatch]) -> tuple[str, ...]:
    """Names of the activations that a layer reads: back from its result to the inputs of the cut model."""
    if match.is_input:
        return ()
    found: dict[str, None] = {}
    pending, seen = [match.computed], set()
    while pending:
        node = layers.producers.get(pending.pop())
        for name in node.input if node is not None else ():
            if name in given:
                found[given[name].name] = None
            elif name not in seen:
                seen.add(name)
                pending.append(name)
    return tuple(found)


def _with(sample: Sample, given: Mapping[str, NDArray[Any]]) -> Sample:
    return dataclasses.replace(sample, inputs={**sample.inputs, **given})


def _run(session: Session | None, sample: Sample, model: str) -> Mapping[str, NDArray[Any]]:
    return infer(session, sample, model=model) if session is not None else {}


def _real_rows(sample: Sample) -> Any:
    """Takes the padding off the arrays of a batch that was gathered and filled up."""
    contexts = sample.context.get("rows")
    size = len(next(iter(sample.inputs.values())))

    def real(array: NDArray[Any]) -> NDArray[Any]:
        return array[: len(contexts)] if contexts is not None and array.ndim and len(array) == size else array

    return real
