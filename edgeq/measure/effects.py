"""What the error of one layer alone does to the outputs of a float model.

The float model gets one more input for each layer in question, a disturbance that is added to its tensor; zero for all
layers but one. So one session serves all layers, and a run tells what becomes of one layer's error on its way to the
outputs, where it may be amplified, damped or cancelled, which no figure at the layer itself can tell.

The error of a layer is what its weights and the rounding of its result cause, on inputs that are rounded for the float
layer too: each error counts once, where it arises.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from edgeq.measure.agreement import Agreement, Comparison
from edgeq.measure.graphs import GraphIndex
from edgeq.measure.inference import infer
from edgeq.measure.layer_runs import MEMORY, LayerPair, LayerRuns, in_waves
from edgeq.measure.match_activations import ActivationMatch, element_types
from edgeq.measure.observe import observing_session
from edgeq.progress import SILENT, Progress
from edgeq.session import SessionSettings

if TYPE_CHECKING:
    from edgeq.data.samples import Sample, Samples


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
    settings = settings or SessionSettings()
    chosen = [m for m in matches if m.name in names and m.name not in float_graph.captured]
    first = next(iter(samples), None)
    if not chosen or first is None:
        return {}
    pair = LayerPair(float_graph, quantized_graph, matches, settings)
    model = with_disturbances(float_graph.model, [match.name for match in chosen])
    session = observing_session(model, float_graph, optimization="all", settings=settings)
    outputs = dict(zip((o.name for o in session.get_outputs()), float_graph.outputs, strict=True))
    kinds = {
        value.name: np.float16 if value.type == "tensor(float16)" else np.float32 for value in session.get_inputs()
    }
    calm = {name: np.zeros((), kinds[name]) for name in (disturbance_name(match.name) for match in chosen)}
    found: dict[str, Comparison] = {}

    def answers(sample: Sample, disturbance: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        fed = dataclasses.replace(sample, inputs={**sample.inputs, **calm, **disturbance})
        return {outputs[name]: values for name, values in infer(session, fed, model="the float model").items()}

    waves = list(in_waves(float_graph, chosen, first, memory))
    with progress.stage("Following errors to the outputs", min(count, len(samples)) * len(chosen)) as advance:
        for wave in waves:
            runs = LayerRuns(pair, wave)
            for sample in _spread(samples, count):
                layers = runs.run(sample)
                undisturbed = answers(sample, {})
                for match in wave:
                    name = disturbance_name(match.name)
                    error = _finite_difference(layers.alone[match.name], layers.excused[match.name])
                    if error.any():
                        disturbed = answers(sample, {name: error.astype(kinds[name], copy=False)})
                        found.setdefault(match.name, Comparison()).update(undisturbed, disturbed)
                    advance(1)
    return {name: comparison.result() for name, comparison in found.items()}


def _finite_difference(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """a - b, and 0 where an infinity (of a mask, say) or NaN stands in one of them."""
    with np.errstate(invalid="ignore"):
        difference = np.asarray(a - b)
    return np.where(np.isfinite(difference), difference, 0)


def _spread(samples: Samples, count: int) -> Iterator[Sample]:
    total = len(samples)
    wanted = {position * total // count for position in range(count)} if total > count else set(range(total))
    return (sample for position, sample in enumerate(samples) if position in wanted)


def with_disturbances(model: onnx.ModelProto, names: Collection[str]) -> onnx.ModelProto:
    """A copy of a float model in which readers of each tensor of `names` get it plus the new input
    `disturbance_name(name)`, of the tensor's type and shape or a shape that broadcasts to it. An output that is among
    them is called `<name>/disturbed`, in its place."""
    types = element_types(model)
    disturbed = onnx.ModelProto()
    disturbed.CopyFrom(model)
    graph = disturbed.graph
    wanted = dict.fromkeys(names)
    for node in graph.node:
        for place, name in enumerate(node.input):
            if name in wanted:
                node.input[place] = _disturbed_name(name)
    nodes = [_adder(value.name) for value in graph.input if value.name in wanted]
    for node in graph.node:
        nodes.append(node)
        nodes += [_adder(name) for name in node.output if name in wanted]
    del graph.node[:]
    graph.node.extend(nodes)
    for output in graph.output:
        if output.name in wanted:
            output.name = _disturbed_name(output.name)
    for name in wanted:
        value = onnx.ValueInfoProto(name=disturbance_name(name))
        half = types.get(name) == TensorProto.FLOAT16
        value.type.tensor_type.elem_type = TensorProto.FLOAT16 if half else TensorProto.FLOAT
        graph.input.append(value)
    return disturbed


def disturbance_name(name: str) -> str:
    return f"{name}/disturbance"


def _disturbed_name(name: str) -> str:
    return f"{name}/disturbed"


def _adder(name: str) -> onnx.NodeProto:
    return onnx.helper.make_node("Add", [name, disturbance_name(name)], [_disturbed_name(name)])
