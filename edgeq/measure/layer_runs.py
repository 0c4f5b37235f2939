"""Layers of two models, run one by one: fed with the float model's tensors, or with those tensors rounded."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.measure.error_sources import as_read
from edgeq.measure.latency import Session, infer
from edgeq.measure.match_layers import ActivationMatch, exact_readers
from edgeq.model.edit import Editor
from edgeq.model.graph import GraphIndex, name_of
from edgeq.model.load import partitions, tensor_sizes
from edgeq.model.prepare import open_in_memory
from edgeq.model.shapes import element_types
from edgeq.run.session import OptimizationLevel, SessionSettings

if TYPE_CHECKING:
    from edgeq.data.records import Sample
    from edgeq.data.samples import Samples


def only_outputs(model: ir.Model, names: Iterable[str], *, inputs: Collection[str] | None = None) -> ir.Model:
    """A copy of a model whose outputs are `names`, with only the nodes and constants that they need.

    Args:
        inputs: graph inputs to keep although nothing needs them; None keeps all.
    """
    graph = ir.convenience.extract(model.graph, list(model.graph.inputs), list(dict.fromkeys(names)))
    kept = [v for v in graph.inputs if inputs is None or v.name in inputs or v.uses() or v.is_graph_output()]
    graph.inputs[:] = kept
    return ir.Model(graph, ir_version=model.ir_version, functions=list(model.functions.values()))


def cut_layers(
    graph: GraphIndex, matches: Sequence[ActivationMatch], exact: Collection[tuple[str, str]] = ()
) -> ir.Model:
    """A copy of a model in which every layer gets its inputs from outside.

    Wherever a node reads the tensor of a match (`computed`), it reads the new float input `given_name(match)`,
    quantized on the way where it takes integers. So `computed` of each match becomes what its layer alone makes of
    exact inputs. Tensors that the bodies of If, Loop and Scan read stay connected.

    Args:
        exact: (tensor, node) as `exact_readers` gives them: these nodes read `exact_name(match)` instead.
    """
    given = {m.computed: m for m in matches if m.computed not in graph.captured}
    types = element_types(graph.model)
    cut = graph.model.clone()
    editor, values = Editor(cut), GraphIndex(cut).values
    first = next(iter(cut.graph), None)
    for name, match in given.items():
        half = types.get(name) == ir.DataType.FLOAT16
        entries: dict[str, ir.Value] = {}
        for node, place in list(values[name].uses()):
            entry = exact_name(match) if (match.name, node.name) in exact else given_name(match)
            if entry not in entries:
                entries[entry] = float_input(cut.graph, entry, half=half)
                if match.integer:
                    assert match.params is not None, "integers that are matched have a scale"
                    entries[entry] = editor.quantize(entries[entry], match.params, f"{entry}/integers", before=first)
            node.replace_input_with(place, entries[entry])
    return cut


def given_name(match: ActivationMatch) -> str:
    """The input of a cut model that takes the float tensor of a match."""
    return f"{match.computed}/given"


def exact_name(match: ActivationMatch) -> str:
    """The input for readers that read the tensor before it is quantized."""
    return f"{match.computed}/exact"


def float_input(graph: ir.Graph, name: str, *, half: bool) -> ir.Value:
    """A new float32 (float16 if `half`) input of a graph, of unknown shape."""
    dtype = ir.DataType.FLOAT16 if half else ir.DataType.FLOAT
    value = ir.Value(name=name, type=ir.TensorType(dtype))
    graph.inputs.append(value)
    return value


def instrumented_session(model: ir.Model, *, optimization: OptimizationLevel, settings: SessionSettings) -> Any:
    """A session of a model in memory; external data is found where it is.

    Only threads, providers and configuration are taken from `settings`.
    """
    return open_in_memory(
        model,
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
) -> Iterator[tuple[Sample, Mapping[str, NDArray[Any]]]]:
    """Each sample with the tensors `names` that the model makes of it, one sample at a time and nothing kept.

    Raises:
        DataError: the model refuses a sample.
    """
    observed = only_outputs(model, names)
    session = instrumented_session(observed, optimization=optimization, settings=settings or SessionSettings())
    for sample in samples:
        yield sample, infer(session, sample, model="the model")


MEMORY = 2**29
"""Bytes that fetched tensors may take at once; a model with more is run in several passes."""
# Of each tensor: the float model's, the quantized model's, the layer's in integers and in float, its input rounded, and
# one copy in float64.
_COPIES = 7
_FLOAT_TYPES = ("tensor(float)", "tensor(float16)")


class LayerPair:
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
        self.exact = exact_readers(float_graph, quantized_graph, matches)
        # In the float model, a tensor is what its name stands for.
        counterparts = [dataclasses.replace(match, computed=match.name, integer=False) for match in matches]
        self.given = {given_name(match): match for match in matches}
        self.given_counterparts = {
            given_name(counterpart): match for counterpart, match in zip(counterparts, matches, strict=True)
        }
        self.exact_counterparts = {
            exact_name(counterpart): match for counterpart, match in zip(counterparts, matches, strict=True)
        }
        self.float_layers = GraphIndex(cut_layers(float_graph, counterparts, self.exact))
        self.layers = GraphIndex(cut_layers(quantized_graph, matches))

    def session(self, graph: GraphIndex, names: Sequence[str]) -> Any:
        """A session that gives `names`; of tensors given from outside it takes those that it needs. None for none."""
        if not names:
            return None
        part = only_outputs(graph.model, names, inputs={*self.float_graph.inputs, *self.quantized_graph.inputs})
        return instrumented_session(part, optimization="none", settings=self.settings)


@dataclass(frozen=True)
class LayerArrays:
    """What one sample makes of each layer, by name of the float tensor.

    Attributes:
        exact: the float model's tensor.
        raw: what the quantized layer makes of the float model's tensors: floats before they are quantized, or integers.
        alone: the same as its readers get it.
        from_rounded: what the float layer makes of the same tensors rounded as the quantized model rounds them.
    """

    exact: Mapping[str, NDArray[Any]]
    raw: Mapping[str, NDArray[Any]]
    alone: Mapping[str, NDArray[Any]]
    from_rounded: Mapping[str, NDArray[Any]]


class LayerRuns:
    """Sessions for the layers that make the tensors of `partition`."""

    def __init__(self, pair: LayerPair, partition: Sequence[ActivationMatch]) -> None:
        made = [match for match in partition if not match.is_input]
        self._partition = partition
        self._layers = pair.session(pair.layers, [m.computed for m in made])
        self._float_layers = pair.session(pair.float_layers, [m.name for m in made])
        self._given = _fed(self._layers, pair.given)
        self._given_counterparts = _fed(self._float_layers, pair.given_counterparts)
        self._exact_counterparts = _fed(self._float_layers, pair.exact_counterparts)
        fed = [*self._given.values(), *self._given_counterparts.values(), *self._exact_counterparts.values()]
        read = [*made, *(match for match, _ in fed)]
        self._float = pair.session(pair.float_graph, list(dict.fromkeys(m.name for m in read if not m.is_input)))

    def run(self, sample: Sample) -> LayerArrays:
        """Run the layers once on one sample.

        Raises:
            DataError: a model refuses the sample.
        """
        exact = {**sample.inputs, **_run(self._float, sample, "the float model")}
        fed = {name: exact[match.name].astype(kind, copy=False) for name, (match, kind) in self._given.items()}
        alone = {**sample.inputs, **_run(self._layers, _with(sample, fed), "a layer of the quantized model")}
        rounded = {
            name: as_read(match, exact[match.name]).astype(kind, copy=False)
            for name, (match, kind) in self._given_counterparts.items()
        } | {
            name: exact[match.name].astype(kind, copy=False) for name, (match, kind) in self._exact_counterparts.items()
        }
        from_rounded = {
            **sample.inputs,
            **_run(self._float_layers, _with(sample, rounded), "a layer of the float model"),
        }
        raw = {m.name: alone[m.computed] for m in self._partition}
        return LayerArrays(
            exact=exact,
            raw=raw,
            alone={m.name: as_read(m, raw[m.name]) for m in self._partition},
            from_rounded=from_rounded,
        )


def partition_layers(
    graph: GraphIndex, matches: Sequence[ActivationMatch], first: Sample, memory: int
) -> Iterator[list[ActivationMatch]]:
    """Matches in parts that run together, neighbours in one as long as they fit into `memory` bytes; an unknown size
    counts as the largest."""
    sizes = tensor_sizes(graph.model, first.inputs)
    largest = max((sizes[m.name] for m in matches if m.name in sizes), default=0)
    return partitions(((match, _COPIES * sizes.get(match.name, largest)) for match in matches), memory)


def floats_only(
    graph: GraphIndex, matches: Sequence[ActivationMatch], settings: SessionSettings
) -> list[ActivationMatch]:
    """Without the tensors that are no floats after all, which only the runtime may know."""
    types = element_types(graph.model)
    unknown = [match.name for match in matches if match.name not in types]
    if not unknown:
        return list(matches)
    session = instrumented_session(only_outputs(graph.model, unknown), optimization="none", settings=settings)
    others = {output.name for output in session.get_outputs() if output.type not in _FLOAT_TYPES}
    return [match for match in matches if match.name not in others]


def _fed(
    session: Any, given: Mapping[str, ActivationMatch]
) -> dict[str, tuple[ActivationMatch, type[np.floating[Any]]]]:
    """Those of the given tensors that a session takes, and as which type."""
    values = session.get_inputs() if session is not None else []
    kinds = {value.name: np.float16 if value.type == "tensor(float16)" else np.float32 for value in values}
    return {name: (given[name], kind) for name, kind in kinds.items() if name in given}


def layer_reads(layers: GraphIndex, match: ActivationMatch, given: Mapping[str, ActivationMatch]) -> tuple[str, ...]:
    """Names of the activations that a layer reads: back from its result to the inputs of the cut model."""
    if match.is_input:
        return ()
    found: dict[str, None] = {}
    pending, seen = [layers.values[match.computed]], set()
    while pending:
        value = pending.pop()
        maker = value.producer()
        if name_of(value) in given:
            found[given[name_of(value)].name] = None
        elif maker is not None and value not in seen:
            seen.add(value)
            pending.extend(v for v in reversed(maker.inputs) if v is not None)
    return tuple(found)


def _with(sample: Sample, given: Mapping[str, NDArray[Any]]) -> Sample:
    return dataclasses.replace(sample, inputs={**sample.inputs, **given})


def _run(session: Session | None, sample: Sample, model: str) -> Mapping[str, NDArray[Any]]:
    return infer(session, sample, model=model) if session is not None else {}
