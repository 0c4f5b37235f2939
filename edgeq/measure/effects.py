"""What the error of one layer alone does to the outputs of a float model.

The float model gets one more input for each layer in question, a disturbance that is added to its tensor; zero for all
layers but one. So one session serves all layers, and a run shows what becomes of one layer's error on its way to the
outputs, where it may be amplified, damped or cancelled, which no figure at the layer itself shows.

The error of a layer is what its weights and the rounding of its result cause, on inputs that are rounded for the float
layer too: each error counts once, where it arises.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.graph.edit import Editor
from edgeq.graph.index import GraphIndex
from edgeq.measure.agreement import Agreement
from edgeq.measure.comparison import Comparison
from edgeq.measure.inference import Outputs, infer
from edgeq.measure.instrument import float_input, instrumented_session
from edgeq.measure.layer_runs import MEMORY, LayerArrays, LayerPair, LayerRuns, floats_only, partition_layers
from edgeq.measure.match_activations import ActivationMatch
from edgeq.model.shapes import element_types
from edgeq.progress import SILENT, Progress
from edgeq.session import SessionSettings

if TYPE_CHECKING:
    from edgeq.data.samples import Sample, Samples


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
