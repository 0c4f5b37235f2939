"""Looking inside a model while it runs: outputs added for tensors in the middle, nodes left out that they do not need,
and layers cut loose from what feeds them."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from edgeq.measure.graphs import GraphIndex, captured_by
from edgeq.measure.inference import infer
from edgeq.measure.match_activations import ActivationMatch, element_types
from edgeq.session import OptimizationLevel, SessionSettings, open_session

if TYPE_CHECKING:
    from edgeq.data.samples import Sample, Samples

_AS_INTEGERS = "/integers"


def with_outputs(model: onnx.ModelProto, names: Iterable[str]) -> onnx.ModelProto:
    """A copy of a model that gives the tensors `names` too, behind its own outputs. Their types are left to the
    runtime."""
    observed = onnx.ModelProto()
    observed.CopyFrom(model)
    present = {output.name for output in model.graph.output}
    observed.graph.output.extend(onnx.ValueInfoProto(name=n) for n in dict.fromkeys(names) if n not in present)
    return observed


def only_outputs(
    model: onnx.ModelProto, names: Iterable[str], *, inputs: Collection[str] | None = None
) -> onnx.ModelProto:
    """A copy of a model whose outputs are `names`, with only the nodes and constants that they need.

    Args:
        inputs: graph inputs to keep although nothing needs them; None keeps all.
    """
    wanted = list(dict.fromkeys(names))
    needed = set(wanted)
    kept = []
    for node in reversed(model.graph.node):
        if needed.intersection(node.output):
            needed.update(node.input)
            needed.update(captured_by(node))
            kept.append(node)
    part = onnx.ModelProto(ir_version=model.ir_version)
    part.opset_import.extend(model.opset_import)
    part.functions.extend(model.functions)
    part.graph.name = model.graph.name
    part.graph.node.extend(reversed(kept))
    part.graph.initializer.extend(t for t in model.graph.initializer if t.name in needed)
    part.graph.sparse_initializer.extend(t for t in model.graph.sparse_initializer if t.values.name in needed)
    part.graph.input.extend(i for i in model.graph.input if inputs is None or i.name in needed or i.name in inputs)
    typed = {output.name: output for output in model.graph.output}
    part.graph.output.extend(typed.get(name, onnx.ValueInfoProto(name=name)) for name in wanted)
    return part


def cut_layers(
    graph: GraphIndex, matches: Sequence[ActivationMatch], exact: Collection[tuple[str, str]] = ()
) -> onnx.ModelProto:
    """A copy of a model in which every layer is fed from outside.

    Wherever a node reads the tensor that a match speaks of (`computed`), it reads the new float input
    `given_name(match)`, quantized on the way where it takes integers. So `computed` of each match becomes what its
    layer alone makes of exact inputs. Tensors that the bodies of If, Loop and Scan read stay connected.

    Args:
        exact: (tensor, node) as `exact_readers` gives them: these nodes read `exact_name(match)` instead.
    """
    given = {m.computed: m for m in matches if m.computed not in graph.captured}
    types = element_types(graph.model)
    cut = onnx.ModelProto()
    cut.CopyFrom(graph.model)
    read: dict[str, ActivationMatch] = {}
    for node in cut.graph.node:
        for place, name in enumerate(node.input):
            if name in given:
                match = given[name]
                entry = exact_name(match) if (match.name, node.name) in exact else given_name(match)
                node.input[place] = entry + (_AS_INTEGERS if match.integer else "")
                read[entry] = match
    quantizers = []
    for entry, match in read.items():
        half = types.get(match.computed) == TensorProto.FLOAT16
        cut.graph.input.append(float_input(entry, half=half))
        if match.integer:
            assert match.quantization is not None, "integers that are matched have a scale"
            scale, zero_point = match.quantization.to_tensors(entry + "/scale", entry + "/zero_point")
            cut.graph.initializer.extend([scale, zero_point])
            quantizers.append(
                onnx.helper.make_node("QuantizeLinear", [entry, scale.name, zero_point.name], [entry + _AS_INTEGERS])
            )
    nodes = [*quantizers, *cut.graph.node]
    del cut.graph.node[:]
    cut.graph.node.extend(nodes)
    return cut


def given_name(match: ActivationMatch) -> str:
    """The input of a cut model that takes the float tensor of a match."""
    return f"{match.computed}/given"


def exact_name(match: ActivationMatch) -> str:
    """The input for readers that read the tensor before it is quantized."""
    return f"{match.computed}/exact"


def float_input(name: str, *, half: bool) -> onnx.ValueInfoProto:
    """A graph input of unknown shape."""
    value = onnx.ValueInfoProto(name=name)
    value.type.tensor_type.elem_type = TensorProto.FLOAT16 if half else TensorProto.FLOAT
    return value


def instrumented_session(
    model: onnx.ModelProto, graph: GraphIndex, *, optimization: OptimizationLevel, settings: SessionSettings
) -> Any:
    """A session of a changed copy of a graph's model; external data is found where the original has it.

    Only threads, providers and configuration are taken from `settings`.
    """
    folder = os.fspath(graph.path.absolute().parent)
    return open_session(
        model.SerializeToString(),
        SessionSettings(
            providers=settings.providers,
            config={**settings.config, "session.model_external_initializers_file_folder_path": folder},
            intra_op_threads=settings.intra_op_threads,
            optimization=optimization,
        ),
    )


def collect_activations(
    graph: GraphIndex,
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
    observed = only_outputs(graph.model, names)
    session = instrumented_session(observed, graph, optimization=optimization, settings=settings or SessionSettings())
    for sample in samples:
        yield sample, infer(session, sample, model=str(graph.path))
