"""Implement `edgeq.debug`: compare a float model and its quantized form, layer by layer.

To find where an engine's results diverge, edgeq compares its tensors with those of onnxruntime's CPU kernels. The
engine and the CPU's kernels run the same file, so only their arithmetic can differ. Every quantized tensor becomes an
output through an additional DequantizeLinear, so the engine still finds the model's Q/DQ pairs unchanged. Then edgeq
runs the layers with the largest losses once more, one at a time. Both the engine and the CPU's kernels run each layer
on the tensors that the CPU's kernels computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import onnx_ir as ir
from edgeq_device.engines.catalog import engine_of_file
from edgeq_device.measure.basis import Basis
from edgeq_device.system.places import scratch_folder

from edgeq.data.open_source import Data, as_data
from edgeq.data.samples import SampleOptions, Samples, spread_over
from edgeq.errors import ModelError, UsageError
from edgeq.measure.accuracy import evaluate_sessions
from edgeq.measure.agreement import HEALTHY_DB, Agreement, Closeness, Outputs, closeness, infer
from edgeq.measure.basis import sampled_basis
from edgeq.measure.bench import LoadedModel, open_model, refuse_ignored
from edgeq.measure.comparison import OutputComparison
from edgeq.measure.error_sources import ErrorSource, LayerNoise, nodes_to_exclude, sets_to_exclude
from edgeq.measure.exclusions import SAMPLES as FEW
from edgeq.measure.exclusions import Exclusion, find_exclusions
from edgeq.measure.layers import MEMORY, LayerComparison, LayerPair, instrumented_session
from edgeq.measure.match_layers import (
    INPUT,
    NODE_SUFFIX,
    compare_weights,
    count_quantized_weights,
    match_activations,
    match_weights,
)
from edgeq.measure.preprocess_search import open_or_search
from edgeq.model.edit import Editor
from edgeq.model.graph import GraphIndex, is_constant, is_op, name_of
from edgeq.model.load import is_quantized, path_of, read_model, save_model
from edgeq.model.prepare import prepare_model
from edgeq.run.engines import EngineChoice, as_engine
from edgeq.run.session import Engines, SessionSettings, open_session
from edgeq.util.display import SILENT, Page, Progress
from edgeq.util.records import marked

SAMPLES = 32
"""Default number of samples. Sums over all elements of a tensor become stable after a few samples."""
ORDER = "Give the float model first, then its int8 form"
_ORIGIN = "Give the float model that it was made from"
# Fusions change how results are rounded. A loss of more decibels than this means that they also changed the outputs.
_OPTIMISER_LOSS_DB = 3.0
_DISABLED = "optimization.disable_specified_optimizers"
_REQUANTIZER = "WeightBiasQuantization"
_LISTED = 3
_SEEN = "/seen"
# Number of samples to run in a simulator, which takes seconds for each. Two are enough, because a tensor has thousands
# of elements.
_SIMULATED = 2
# If 8-bit tensors are this close, they differ only by a few roundings.
_CLEAN_DB = 60.0


@dataclass(frozen=True)
class ReferenceModel:
    """Hold a float model to compare with.

    Attributes:
        graph: the model.
        path: file of the model: the one that the caller gave, or the prepared one in a work directory.
        prepared: whether the model was prepared.
        notes: facts about the choice that the user should know.
    """

    graph: GraphIndex
    path: Path
    prepared: bool = False
    notes: tuple[str, ...] = ()


def find_reference(
    path: Path, quantized: GraphIndex, name: str, workdir: Path, progress: Progress = SILENT
) -> ReferenceModel:
    """Return the float model from which a quantized model was made.

    It is the model at `path`, or the prepared form of this model (`edgeq.model.prepare`) if that matches more of the
    quantized model. Preparation folds BatchNormalization into weights and fuses MatMul with Add. So an exported model
    may contain neither the weights nor the nodes that were quantized.

    Args:
        name: name of the quantized model, for messages.
        workdir: folder for the prepared model.

    Raises:
        UsageError: the model at `path` is quantized, or the quantized model was not made from it.
        ModelError: the file is not a model.
    """
    given = GraphIndex(read_model(path))
    if is_quantized(given.model):
        raise UsageError(f"{path} is quantized", ORDER)
    missing = sorted(set(quantized.inputs) - set(given.inputs))
    if missing:
        raise UsageError(f"{path} has no input {missing[0]!r}, which {name} takes", _ORIGIN)
    weights, activations = _fit(given, quantized)
    named = all(node.name for node in given.graph) and len(given.nodes) == len(given.graph)
    # If the name of a layer is missing in the quantized model, another node was quantized, such as a Gemm that was made
    # from a MatMul and an Add. `--exclude` would then refuse the layer's name.
    same = {*weights, *activations} <= {NODE_SUFFIX.sub("", node) for node in quantized.nodes}
    if named and same and len(weights) == count_quantized_weights(quantized):
        return ReferenceModel(given, path)
    try:
        made = prepare_model(path, workdir, loaded=given.model, progress=progress)
    except ModelError as error:
        return ReferenceModel(given, path, notes=(f"the float model is used unprepared: {error.problem}",))
    prepared = GraphIndex(made.model)
    its_weights, its_activations = _fit(prepared, quantized)
    if (len(its_weights), len(its_activations)) < (len(weights), len(activations)):
        return ReferenceModel(given, path)
    if not its_activations:
        raise UsageError(f"{name} has no activation of {path}, prepared or not", _ORIGIN)
    note = f"{path} was compared as `edgeq quantize` prepares it"
    if len(its_weights) > len(weights):
        note += f": {len(its_weights)} quantized weights match then, {len(weights)} without preparation"
    return ReferenceModel(prepared, made.path, prepared=True, notes=(note,))


def _fit(graph: GraphIndex, quantized: GraphIndex) -> tuple[list[str], list[str]]:
    """Return two lists of nodes of the float model: those whose weight is in the quantized model in rounded form, and
    those whose activation both models have.
    """
    weights = compare_weights(graph, quantized, match_weights(graph, quantized))
    activations = match_activations(graph, quantized)
    return [w.node for w in weights if not w.changed], [a.node for a in activations if not a.is_input]


_VERDICTS: Mapping[Closeness, str] = {
    "healthy": "the outputs follow float32 closely; there is nothing to fix",
    "noisy": "the outputs follow float32, with noise; measure the task's metric with `edgeq eval`",
    "poor": "the outputs do not follow float32; keep the nodes that help in float, or see `edgeq tune`",
}


@dataclass(frozen=True)
class Diagnosis(Page):
    """Hold the result of `edgeq.debug`.

    Attributes:
        float_model, quantized, data: arguments of `edgeq.debug`.
        variant: variant of a bundle; None for a model file.
        settings: session settings of the quantized model.
        worst: maximum number of error sources to name.
        prepared: whether the float model had to be prepared (`edgeq.model.prepare`) to match.
        comparison: comparison of the weights and activations, on the graph as written.
        optimised: agreement of the outputs in the session that ships.
        written: agreement of the outputs without graph optimisation.
        notes, warnings: sentences for the user.
        exclusions: sets of nodes that, as measured, improve the outputs when they stay in float, the best first. Empty
            if the outputs are healthy, because edgeq then does not search.
        engine: comparison of the quantized activations in the engine `engine_name`; empty if no engine was compared.
    """

    float_model: Path
    quantized: Path
    data: Any
    variant: str | None
    settings: SessionSettings
    worst: int
    prepared: bool
    comparison: LayerComparison
    error_sources: tuple[ErrorSource, ...]
    optimised: Agreement
    written: Agreement
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    exclusions: tuple[Exclusion, ...] = ()
    engine: tuple[EngineDifference, ...] = ()
    engine_name: str = ""

    @property
    def verdict(self) -> Closeness:
        """Return "healthy", "noisy" or "poor". The worst output or slice in the session that ships decides."""
        return closeness(self.optimised)

    @property
    def verdict_text(self) -> str:
        """Return the verdict as a sentence."""
        worst = self.optimised.worst
        missing = [output.name for output in self.optimised.outputs if output.mismatched and not output.compared]
        if missing or worst is None:
            figure = f"output {missing[0]!r} could not be compared" if missing else "no output could be compared"
        else:
            where = next((f", {part.where}" for part in worst.slices if part.least_db == worst.least_db), "")
            part = f" in output {worst.name!r}{where}" if worst.least_db < worst.sqnr_db else ""
            figure = f"{worst.least_db:.1f} dB SQNR{part}"
        return f"{self.verdict}: {_VERDICTS[self.verdict]} ({figure})"

    @property
    def noise(self) -> tuple[LayerNoise, ...]:
        """Return the noise of the layers that compute the activations, in the order of the comparison."""
        return tuple(activation.noise for activation in self.comparison.activations)

    @property
    def effects(self) -> dict[str, Agreement]:
        """Return tensor → agreement of the float model's outputs if only the error of the layer that computes this
        tensor is added.

        Only layers that may cause the error are included.
        """
        return {a.name: a.effect for a in self.comparison.activations if a.effect is not None}

    @property
    def exclude(self) -> tuple[str, ...]:
        """Return the nodes to keep in float so that all error sources disappear."""
        return nodes_to_exclude(self.error_sources)

    def __brief__(self) -> dict[str, Any]:
        models = {"float_model": self.float_model, "quantized": self.quantized}
        sources = {"error_sources": self.error_sources, "exclude": self.exclude, "helps": self.exclusions[:1]}
        agreement = {
            "verdict": self.verdict_text,
            "sqnr_db": self.optimised.sqnr_db,
            "as_written_db": self.written.sqnr_db,
        }
        return {**models, **agreement, **sources, "samples": self.comparison.samples, "warnings": self.warnings}

    def __page__(self) -> dict[str, Any]:
        shown = {"samples": self.comparison.samples, "warnings": list(self.warnings)}
        variant = {"agreement": marked(self.optimised), "layers": marked(self), **shown}
        return {"name": self.quantized.name, "variants": {"int8": variant}, "notes": list(self.notes)}

    def __record__(self) -> dict[str, Any]:
        """Return plain JSON values. Every key is always present."""
        return {
            "float_model": str(self.float_model),
            "quantized_model": str(self.quantized),
            "variant": self.variant,
            "data": str(self.data),
            "samples": self.comparison.samples,
            "prepared": self.prepared,
            "verdict": self.verdict,
            "verdict_text": self.verdict_text,
            "outputs": {"optimised": self.optimised, "as_written": self.written},
            "error_sources": self.error_sources,
            "exclude": self.exclude,
            "exclusions": self.exclusions,
            "weights": self.comparison.weights,
            "activations": self.comparison.activations,
            "engine": self.engine,
            "notes": self.notes,
            "warnings": self.warnings,
        }


def debug(
    float_model: Path | str,
    quantized: Path | str,
    data: Any,
    *,
    worst: int = 10,
    variant: str | None = None,
    session_options: Mapping[str, str] | None = None,
    threads: int = 0,
    memory: int | None = None,
    engine: EngineChoice | str = "",
    progress: Progress = SILENT,
    **selection: Unpack[SampleOptions],
) -> Diagnosis:
    """Compare a quantized model with its float model, and name the layers that lose the accuracy.

    Only sums are stored. For the individual steps (matching and comparing weights and activations, adding inner tensors
    to the outputs of a model), see the functions of `edgeq.measure.layers`.

    Args:
        float_model: the float32 model.
        quantized: the quantized model, a file or a bundle.
        data: samples, in any form that `edgeq.open_samples` accepts.
        preprocess: preprocessing of the samples; a bundle contains its own.
        count: maximum number of samples, by default 32; None uses all.
        start, stride: number of samples to skip at the start, and distance between the samples after that.
        worst: maximum number of error sources to name.
        variant: variant of a bundle; None uses the one that fits this machine.
        session_options: session options that the quantized file needs; a bundle has its own.
        threads: number of threads within an operator; 0 for one thread per core.
        memory: limit in bytes for tensors in memory; a lower limit means more passes. None means 512 MiB.
        engine: a plug-in such as "qnn". Its tensors are also compared with those of onnxruntime's CPU kernels.

    Raises:
        UsageError: the models are not a float model and its quantized form.
        EdgeqError: an error in a model, the bundle or the data.
    """
    float_model, quantized = path_of(float_model, "float model"), path_of(quantized, "quantized model")
    choice, preprocess = as_engine(engine) if engine else None, selection.get("preprocess")
    settings = SessionSettings(config=dict(session_options or {}), intra_op_threads=threads)
    refuse_ignored(settings, quantized)
    with (
        open_model(quantized, settings, variant=variant) as loaded,
        scratch_folder("edgeq-debug-") as workdir,
    ):
        own = engine_of_file(loaded.model.name)
        if own is not None:
            fix = "Name a variant that onnxruntime runs with --variant, or the Q/DQ model that it was made from"
            raise UsageError(f"{loaded.name} is a {own.suffix} file: its layers cannot be compared", fix)
        if not is_quantized(loaded.graph):
            raise UsageError(f"{loaded.name} contains no quantized operator", ORDER)
        graph = GraphIndex(loaded.graph)
        reference = find_reference(float_model, graph, loaded.name, Path(workdir), progress)
        samples = open_or_search(
            as_data(data) or Data(data),
            loaded.signature,
            session=lambda: open_session(reference.path),
            preprocess=preprocess if preprocess is not None else loaded.preprocess,
            count=selection.get("count", SAMPLES),
            start=selection.get("start", 0),
            stride=selection.get("stride", 1),
            model=float_model,
            progress=progress,
        )
        pair = LayerPair(reference.graph, graph, settings=loaded.settings, memory=memory or MEMORY, progress=progress)
        comparison = pair.compare(samples)
        with progress.stage("Opening the float model"):
            basis = sampled_basis(reference.graph, open_session(reference.path), samples)
        outputs = _outputs(reference.path, loaded, samples, basis, progress)
        comparison, error_sources = pair.attribute_error(comparison, outputs["written"], samples, most=worst)
        exclusions: tuple[Exclusion, ...] = ()
        if closeness(outputs["optimised"]) != "healthy":
            few = spread_over(samples, FEW)
            exclusions = find_exclusions(
                pair, sets_to_exclude(error_sources, comparison.activations, worst), few, basis
            )
        layers: tuple[EngineDifference, ...] = ()
        if choice is not None:
            layers = compare_engine(loaded.graph, samples, choice, Path(workdir), most=worst, progress=progress)
    return Diagnosis(
        float_model=float_model,
        quantized=quantized,
        data=data,
        variant=loaded.variant,
        settings=loaded.settings,
        worst=worst,
        prepared=reference.prepared,
        comparison=comparison,
        error_sources=error_sources,
        optimised=outputs["optimised"],
        written=outputs["written"],
        exclusions=exclusions,
        notes=reference.notes,
        warnings=_warnings(outputs, comparison),
        engine=layers,
        engine_name=choice.name if choice is not None else "",
    )


def _outputs(
    float_model: Path, loaded: LoadedModel, samples: Samples, basis: Basis, progress: Progress
) -> dict[str, Agreement]:
    """Compare the quantized model's outputs with the float model's, once as shipped and once without graph
    optimisation.

    If the optimisation loses accuracy, also compare outputs that are computed without the one optimiser that is known
    to cause such a loss.
    """
    settings = loaded.settings
    reference = open_session(float_model, SessionSettings(intra_op_threads=settings.intra_op_threads))

    def compared(**sessions: Any) -> dict[str, Agreement]:
        """Compare sessions with the float model, and return the agreement by name."""
        every = {"reference": reference, **sessions}
        evaluation = evaluate_sessions(every, samples, reference="reference", basis=basis, progress=progress)
        return dict(evaluation.agreement)

    written = instrumented_session(loaded.graph, optimization="none", settings=settings)
    found = compared(optimised=loaded.session, written=written)
    disabled = settings.config.get(_DISABLED, "")
    if _loss(found) > _OPTIMISER_LOSS_DB and _REQUANTIZER not in disabled:
        config = {**settings.config, _DISABLED: ";".join(filter(None, [disabled, _REQUANTIZER]))}
        without = replace(settings, config=config)
        found |= compared(
            without=instrumented_session(loaded.graph, optimization=settings.optimization, settings=without)
        )
    return found


def _loss(outputs: Mapping[str, Agreement]) -> float:
    """Return how many decibels the optimiser loses, or NaN if both outputs are exact."""
    return outputs["written"].sqnr_db - outputs["optimised"].sqnr_db


def optimiser_warning(outputs: Mapping[str, Agreement]) -> str | None:
    """Return a warning if the outputs of the optimised session differ from those of the graph as written. Otherwise
    return None.
    """
    if not abs(_loss(outputs)) > _OPTIMISER_LOSS_DB:
        return None
    optimised, written = outputs["optimised"].sqnr_db, outputs["written"].sqnr_db
    text = (
        f"the outputs have {optimised:.1f} dB SQNR in the optimised session, but {written:.1f} dB in the graph as "
        "written: the figures of the layers are from the graph as written"
    )
    without = outputs.get("without")
    if without is not None and without.sqnr_db > optimised + _OPTIMISER_LOSS_DB:
        text += f"; with the session option {_DISABLED}={_REQUANTIZER} the outputs have {without.sqnr_db:.1f} dB"
    return text


def _warnings(outputs: Mapping[str, Agreement], comparison: LayerComparison) -> tuple[str, ...]:
    found = [warning for warning in [optimiser_warning(outputs)] if warning is not None]
    worst = outputs["optimised"].worst
    if worst is not None and worst.unlike and worst.least_db < HEALTHY_DB:
        found.append(worst.unlike)
    changed = [weight.name for weight in comparison.weights if weight.changed]
    if changed:
        found.append(
            f"{len(changed)} weights differ by more than rounding ({', '.join(changed[:_LISTED])}): they were changed "
            "before they were quantized, by folding or equalization; compare with the float model that has the changed "
            "weights"
        )
    found.extend(outputs["optimised"].left_out())
    broken = [a.name for a in comparison.activations if a.accumulated.nonfinite]
    if broken:
        found.append(f"{len(broken)} tensors contain NaN or infinities in only one model, first {broken[0]}")
    return tuple(found)


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
    model: ir.Model, samples: Samples, choice: EngineChoice, folder: Path, *, most: int, progress: Progress = SILENT
) -> tuple[EngineDifference, ...]:
    """Compare every quantized activation of `model` in the engine and in the CPU's kernels. Return the layers in graph
    order.

    Args:
        folder: an existing folder for temporary models.
        most: maximum number of layers to run alone.

    Raises:
        EngineError, RuntimeUnavailableError: the engine refuses a model.
    """
    observed, places = _observed(model)
    few = _SIMULATED if choice.engine.simulated else len(samples)
    chosen = [sample for sample, _ in zip(samples, range(few), strict=False)]
    sums = {name: OutputComparison(name) for name in places}
    first: Outputs = {}
    title = f"Comparing {choice.engine.name} with the CPU's kernels"
    with Engines() as engines, progress.stage(title, len(chosen)) as advance:

        def opened(model: ir.Model, file: Path) -> tuple[Any, Any]:
            """Return two sessions of a model: one on the CPU's kernels without graph optimisation, and one on the
            engine.
            """
            save_model(model, file)
            there = SessionSettings(engine=choice.engine, precision=choice.precision)
            return engines.open(file, SessionSettings(optimization="none")), engines.open(file, there)

        cpu, engine = opened(observed, folder / "observed.onnx")
        for sample in chosen:
            here = infer(cpu, sample, model="the quantized model")
            there = infer(engine, sample, model="the engine")
            first = first or here
            for name, found in sums.items():
                found.update(here[name + _SEEN], there[name + _SEEN])
            advance(1)
        layers = {name: place.layer(name, sums) for name, place in places.items()}
        suspects = sorted((x for x in layers.values() if x.lost_db > 0), key=lambda x: -x.lost_db)[:most]
        for number, layer in enumerate(suspects):
            place = places[layer.name]
            if place.node is None or not place.reads or place.open:
                continue
            fed = replace(chosen[0], inputs={name: first[name + _SEEN] for name in place.reads})
            alone = OutputComparison(layer.name)
            answers = [
                infer(session, fed, model="a layer")[layer.name + _SEEN]
                for session in opened(_layer_alone(observed, layer.name, fed.inputs), folder / f"layer-{number}.onnx")
            ]
            alone.update(answers[0], answers[1])
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
        least = min((sums[read].result().sqnr_db for read in self.reads if read in sums), default=math.inf)
        node, op_type = ("", INPUT) if self.node is None else (str(self.node.name), self.node.op_type)
        return EngineDifference(name, node, op_type, sums[name].result().sqnr_db, least, None, self.steps(sums[name]))

    def steps(self, sums: OutputComparison) -> float:
        """Return the largest difference in steps of the tensor's scale, or 0 if the scale is not constant."""
        return sums.max_abs_error / self.step if self.step else 0.0


def _observed(model: ir.Model) -> tuple[ir.Model, dict[str, _Place]]:
    """Return a copy of a model whose only outputs are its quantized activations, dequantized. Also return these
    activations by name.
    """
    observed = model.clone()
    editor, places, seen = Editor(observed), {}, []
    for node in list(observed.graph):
        tensor = node.inputs[0] if is_op(node, "QuantizeLinear") else None
        if tensor is None or name_of(tensor) in places or is_constant(tensor):
            continue
        maker, (scale, zero) = tensor.producer(), node.inputs[1:3]
        reads, floats = _reads(maker) if maker is not None else ((), False)
        step = scale.const_value if scale is not None else None
        places[name_of(tensor)] = _Place(maker, reads, floats, float(step.numpy().max()) if step is not None else 0.0)
        given, name = [node.outputs[0], scale, zero], name_of(tensor) + _SEEN
        seen.append(
            editor.node("DequantizeLinear", given, name, like=tensor, dtype=ir.DataType.FLOAT, domain=node.domain)
        )
    observed.graph.outputs[:] = seen
    return observed, places


def _layer_alone(observed: ir.Model, name: str, fed: Outputs) -> ir.Model:
    """Return a model that contains only the layer that computes a tensor.

    The model starts where the layer's inputs are quantized and ends where the tensor is dequantized.
    """
    part = ir.convenience.extract(observed.graph, list(fed), [name + _SEEN])
    for value in part.inputs:
        value.shape, value.type = ir.Shape(fed[name_of(value)].shape), ir.TensorType(ir.DataType.FLOAT)
    return ir.Model(part, ir_version=observed.ir_version)


def _reads(node: ir.Node) -> tuple[tuple[str, ...], bool]:
    """Return two facts about a node: the quantized tensors that it reads, and whether it also reads a float tensor that
    is not constant.
    """
    reads: list[str] = []
    floats = False
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
