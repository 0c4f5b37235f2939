"""Models changed to see inside: outputs added for inner tensors, nodes that they do not need left out, and layers
separated from what feeds them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.graph.edit import Editor
from edgeq.graph.index import GraphIndex
from edgeq.measure.inference import infer
from edgeq.measure.match_activations import ActivationMatch
from edgeq.model.session import open_in_memory
from edgeq.model.shapes import element_types
from edgeq.session import OptimizationLevel, SessionSettings

if TYPE_CHECKING:
    from edgeq.data.samples import Sample, Samples


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
