"""Find where an engine's results diverge: compare its tensors with those of onnxruntime's CPU kernels.

The engine and the CPU's kernels run the same file, so only their arithmetic can differ. Every quantized tensor becomes
an output through an additional DequantizeLinear, so the engine still finds the model's Q/DQ pairs unchanged. Then edgeq
runs the layers with the largest losses once more, one at a time. Both the engine and the CPU's kernels run each layer
on the tensors that the CPU's kernels computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from edgeq.data.samples import Samples
from edgeq.measure.comparison import OutputComparison
from edgeq.measure.inference import Outputs, infer
from edgeq.measure.match_activations import INPUT
from edgeq.model.edit import Editor
from edgeq.model.graph import is_constant, is_op, name_of
from edgeq.model.load import save_model
from edgeq.run.engines import EngineChoice
from edgeq.run.session import Engines, SessionSettings
from edgeq.util.display import SILENT, Progress

# Suffix of the outputs that show the quantized tensors in float.
_SEEN = "/seen"
# Number of samples to run in a simulator, which takes seconds for each. Two are enough, because a tensor has thousands
# of elements.
_SIMULATED = 2
# If 8-bit tensors are this close, they differ only by a few roundings.
_CLEAN_DB = 60.0


@dataclass(frozen=True)
class EngineDifference:
    """Compare a tensor of the quantized model in the engine with the same tensor in the CPU's kernels.

    Attributes:
        name: name of the tensor before it is quantized.
        node, op_type: the node that computes the tensor; "" and "Input" for an input of the model.
        sqnr_db: SQNR when the whole model runs; infinity if both tensors are equal.
        inputs_db: lowest SQNR of the tensors that the node reads.
        alone_db: SQNR when only this layer runs, on the CPU's tensors; None if it was not run alone.
        steps: largest difference in steps of the tensor's scale. If the layer was run alone, it is the difference in
            that run.
    """

    name: str
    node: str
    op_type: str
    sqnr_db: float
    inputs_db: float
    alone_db: float | None
    steps: float

    @property
    def lost_db(self) -> float:
        """Return how many decibels are lost between the tensors that the node reads and the tensor that it computes."""
        return min(self.inputs_db, _CLEAN_DB) - min(self.sqnr_db, _CLEAN_DB)


def compare_engine(
    model: ir.Model, samples: Samples, choice: EngineChoice, folder: Path, *, limit: int, progress: Progress = SILENT
) -> tuple[EngineDifference, ...]:
    """Compare every quantized activation of `model` in the engine and in the CPU's kernels. Return the layers in graph
    order.

    Args:
        folder: an existing folder for temporary models.
        limit: maximum number of layers to run alone.

    Raises:
        EngineError, RuntimeUnavailableError: the engine refuses a model.
    """
    observed, places = _observe_activations(model)
    sample_count = _SIMULATED if choice.engine.simulated else len(samples)
    subset = [sample for sample, _ in zip(samples, range(sample_count), strict=False)]
    sums = {name: OutputComparison(name) for name in places}
    first_outputs: Outputs = {}
    title = f"Comparing {choice.engine.name} with the CPU's kernels"
    with Engines() as engines, progress.stage(title, len(subset)) as advance:

        def open_pair(model: ir.Model, file: Path) -> tuple[Any, Any]:
            """Return two sessions of a model: one on the CPU's kernels without graph optimisation, and one on the
            engine.
            """
            save_model(model, file)
            engine_settings = SessionSettings(engine=choice.engine, precision=choice.precision)
            return engines.open(file, SessionSettings(optimization="none")), engines.open(file, engine_settings)

        cpu, engine = open_pair(observed, folder / "observed.onnx")
        for sample in subset:
            cpu_outputs = infer(cpu, sample, model="the quantized model")
            engine_outputs = infer(engine, sample, model="the engine")
            # Single layers run on the first sample only, because the tensors of all samples may not fit into memory.
            first_outputs = first_outputs or cpu_outputs
            for name, tensor_sums in sums.items():
                tensor_sums.update(cpu_outputs[name + _SEEN], engine_outputs[name + _SEEN])
            advance(1)
        layers = {name: place.layer(name, sums) for name, place in places.items()}
        # When the whole model runs, an inherited error looks like the layer's own. A run of the layer alone decides.
        suspects = sorted((x for x in layers.values() if x.lost_db > 0), key=lambda x: -x.lost_db)[:limit]
        for number, layer in enumerate(suspects):
            place = places[layer.name]
            # A layer can run alone only if all that it reads are quantized tensors or constants.
            if place.node is None or not place.reads or place.open:
                continue
            fed = replace(subset[0], inputs={name: first_outputs[name + _SEEN] for name in place.reads})
            sessions = open_pair(_extract_layer(observed, layer.name, fed.inputs), folder / f"layer-{number}.onnx")
            cpu_output, engine_output = (infer(s, fed, model="a layer")[layer.name + _SEEN] for s in sessions)
            alone = OutputComparison(layer.name)
            alone.update(cpu_output, engine_output)
            layers[layer.name] = replace(layer, alone_db=alone.result().sqnr_db, steps=place.steps(alone))
    return tuple(layers.values())


@dataclass(frozen=True)
class _Place:
    """Describe a tensor that is quantized.

    Attributes:
        node: the node that computes the tensor; None for an input.
        reads: the quantized tensors that the node reads.
        open: whether the node also reads a float tensor that is not constant.
        step: scale of the tensor; 0 if the scale is not constant.
    """

    node: ir.Node | None
    reads: tuple[str, ...]
    open: bool
    step: float

    def layer(self, name: str, sums: Mapping[str, OutputComparison]) -> EngineDifference:
        """Return the figures of this tensor, with the lowest SQNR of the tensors that its node reads."""
        lowest_db = min((sums[tensor].result().sqnr_db for tensor in self.reads if tensor in sums), default=math.inf)
        node, op_type = ("", INPUT) if self.node is None else (str(self.node.name), self.node.op_type)
        return EngineDifference(
            name, node, op_type, sums[name].result().sqnr_db, lowest_db, None, self.steps(sums[name])
        )

    def steps(self, sums: OutputComparison) -> float:
        """Return the largest difference in steps of the tensor's scale, or 0 if the scale is not constant."""
        return sums.max_abs_error / self.step if self.step else 0.0


def _observe_activations(model: ir.Model) -> tuple[ir.Model, dict[str, _Place]]:
    """Return a copy of a model whose only outputs are its quantized activations, dequantized. Also return these
    activations by name.
    """
    observed = model.clone()
    editor, places, outputs = Editor(observed), {}, []
    for node in list(observed.graph):
        tensor = node.inputs[0] if is_op(node, "QuantizeLinear") else None
        if tensor is None or name_of(tensor) in places or is_constant(tensor):
            continue
        maker, (scale, zero) = tensor.producer(), node.inputs[1:3]
        reads, floats = _find_reads(maker) if maker is not None else ((), False)
        step = scale.const_value if scale is not None else None
        places[name_of(tensor)] = _Place(maker, reads, floats, float(step.numpy().max()) if step is not None else 0.0)
        operands, name = [node.outputs[0], scale, zero], name_of(tensor) + _SEEN
        outputs.append(
            editor.node("DequantizeLinear", operands, name, like=tensor, dtype=ir.DataType.FLOAT, domain=node.domain)
        )
    # The model's own outputs would be fetched without being compared.
    observed.graph.outputs[:] = outputs
    return observed, places


def _extract_layer(observed: ir.Model, name: str, fed: Outputs) -> ir.Model:
    """Return a model that contains only the layer that computes a tensor.

    The model starts where the layer's inputs are quantized and ends where the tensor is dequantized.
    """
    part = ir.convenience.extract(observed.graph, list(fed), [name + _SEEN])
    for value in part.inputs:
        value.shape, value.type = ir.Shape(fed[name_of(value)].shape), ir.TensorType(ir.DataType.FLOAT)
    return ir.Model(part, ir_version=observed.ir_version)


def _find_reads(node: ir.Node) -> tuple[tuple[str, ...], bool]:
    """Return two facts about a node: the quantized tensors that it reads, and whether it also reads a float tensor that
    is not constant.
    """
    reads: list[str] = []
    floats = False
    # A node that dequantizes reads one tensor. Its scale and zero point are no activations.
    restores = is_op(node, "DequantizeLinear")
    for value in node.inputs[:1] if restores else node.inputs:
        maker = node if restores or value is None else value.producer()
        if maker is None or not is_op(maker, "DequantizeLinear"):
            floats |= value is not None and not is_constant(value)
            continue
        source = maker.inputs[0].producer() if maker.inputs[0] is not None else None
        if source is not None and is_op(source, "QuantizeLinear") and not is_constant(source.inputs[0]):
            reads.append(name_of(source.inputs[0]))
    return tuple(dict.fromkeys(reads)), floats
