"""A Q/DQ model in an engine and in onnxruntime's CPU kernels, tensor by tensor: where their answers part.

Both run the same file, so what differs is arithmetic alone. Every tensor that is quantized is given out by a
DequantizeLinear of its own, which leaves the pairs of the model whole for the engine. Layers behind which most is lost
run once more by themselves, in both fed with what the CPU's kernels made."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.data.samples import Subset, open_samples
from edgeq.errors import UsageError
from edgeq.measure.agreement import HEALTHY_DB, Agreement, Closeness, closeness
from edgeq.measure.bench import LoadedModel, open_model, refuse_ignored
from edgeq.measure.comparison import compare_many, decibels
from edgeq.measure.effects import ORDER, Exclusion, find_exclusions, find_reference
from edgeq.measure.effects import SAMPLES as FEW
from edgeq.measure.error_sources import ErrorSource, LayerNoise, layer_noise, nodes_to_exclude, sets_to_exclude
from edgeq.measure.latency import infer
from edgeq.measure.layer_runs import MEMORY, instrumented_session
from edgeq.measure.layers import LayerComparison, attribute_error, compare_layers
from edgeq.model.edit import Editor
from edgeq.model.graph import GraphIndex, is_constant, is_op, name_of
from edgeq.model.load import is_quantized, path_of, save_model
from edgeq.run.engines import EngineChoice, as_engine
from edgeq.run.session import Engines, SessionSettings, open_session
from edgeq.util.display import SILENT, Page, Progress
from edgeq.util.records import plain

if TYPE_CHECKING:
    from edgeq.data.samples import Sample, Samples

_SEEN = "/seen"
# Samples in a simulator, which takes seconds for one: a tensor has thousands of elements.
_SIMULATED = 2
# Tensors of 8 bits that are this close are equal but for roundings here and there.
_CLEAN_DB = 60.0


@dataclass(frozen=True)
class EngineLayer:
    """A tensor of the quantized model in the engine, held against the same in the CPU's kernels.

    Attributes:
        name: of the tensor, as it is before it is quantized.
        node, op_type: what makes it; "" and "Input" for an input of the model.
        sqnr_db: when the model runs as a whole; infinite where both are equal.
        inputs_db: the least of the tensors that the node reads.
        alone_db: of the layer by itself, fed with the CPU's tensors; None where it was not run so.
        steps: the largest difference of its own, alone where it was run so, in steps of its scale.
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
        """What is lost from the tensors that the node reads to the one that it makes."""
        return min(self.inputs_db, _CLEAN_DB) - min(self.sqnr_db, _CLEAN_DB)


def compare_engine(
    model: ir.Model, samples: Samples, choice: EngineChoice, folder: Path, *, most: int, progress: Progress = SILENT
) -> tuple[EngineLayer, ...]:
    """Every quantized activation of `model` in both, in the order of the graph.

    Args:
        folder: an existing one for models.
        most: layers to run alone, at most.

    Raises:
        EngineError, RuntimeUnavailableError: the engine refuses a model.
    """
    observed = _Observed(model)
    places = {name_of(place.tensor): place for place in observed.places}
    few = _SIMULATED if choice.engine.simulated else len(samples)
    chosen = [sample for sample, _ in zip(samples, range(few), strict=False)]
    title = f"Comparing {choice.engine.name} with the CPU's kernels"
    with Engines() as engines, progress.stage(title, len(chosen)) as advance:
        whole = _Both(engines, choice, observed.model, folder / "observed.onnx")
        sums = {name: _Sums(place.step) for name, place in places.items()}
        first: Mapping[str, NDArray[Any]] = {}
        for sample in chosen:
            here, there = whole.run(sample)
            first = first or here
            for name, found in sums.items():
                found.add(here[name + _SEEN], there[name + _SEEN])
            advance(1)
        layers = [place.layer(sums) for place in places.values()]
        suspects = sorted((x for x in layers if x.lost_db > 0), key=lambda x: -x.lost_db)[:most]
        for number, layer in enumerate(suspects):
            place = places[layer.name]
            if place.node is None or not place.reads or place.open:
                continue
            fed = {name: first[name + _SEEN] for name in place.reads}
            part = observed.part(place, fed)
            by_itself = _Sums(place.step)
            both = _Both(engines, choice, part, folder / f"layer-{number}.onnx")
            here, there = both.run(replace(chosen[0], inputs=fed))
            by_itself.add(here[layer.name + _SEEN], there[layer.name + _SEEN])
            layers[layers.index(layer)] = replace(layer, alone_db=by_itself.sqnr_db, steps=by_itself.steps)
    return tuple(layers)


@dataclass
class _Sums:
    step: float
    signal: float = 0.0
    noise: float = 0.0
    largest: float = 0.0

    def add(self, here: NDArray[Any], there: NDArray[Any]) -> None:
        """Add what both computed of the tensor for one sample."""
        exact, differences = here.astype(np.float64), there.astype(np.float64) - here
        self.signal += float((exact**2).sum())
        self.noise += float((differences**2).sum())
        self.largest = max(self.largest, float(np.abs(differences).max(initial=0.0)))

    @property
    def sqnr_db(self) -> float:
        """Power of the tensor over that of the differences, dB, over all samples so far."""
        return decibels(self.signal, self.noise)

    @property
    def steps(self) -> float:
        """Largest difference in steps of the tensor's scale; 0 where it has none."""
        return self.largest / self.step if self.step else 0.0


class _Both:
    """A model in the CPU's kernels, as it is written, and in the engine."""

    def __init__(self, engines: Engines, choice: EngineChoice, model: ir.Model, file: Path) -> None:
        save_model(model, file)
        there = SessionSettings(engine=choice.engine, precision=choice.precision)
        self._here = engines.open(file, SessionSettings(optimization="none"))
        self._there = engines.open(file, there)

    def run(self, sample: Sample) -> tuple[Mapping[str, NDArray[Any]], Mapping[str, NDArray[Any]]]:
        """Every observed tensor by name, as onnxruntime's own kernels and as the engine computed it."""
        return infer(self._here, sample, model="the quantized model"), infer(self._there, sample, model="the engine")


@dataclass(frozen=True, eq=False)
class _Place:
    """A tensor that is quantized.

    Attributes:
        quantizer: its QuantizeLinear; `node`: what makes it, None for an input.
        pairs: the nodes between what `node` reads and the tensors `reads`, which are quantized too.
        open: whether `node` reads a float tensor besides.
        step: its scale.
    """

    tensor: ir.Value
    quantizer: ir.Node
    node: ir.Node | None
    pairs: tuple[ir.Node, ...]
    reads: tuple[str, ...]
    open: bool
    step: float

    def layer(self, sums: Mapping[str, _Sums]) -> EngineLayer:
        """The figures of this tensor, beside the worst of those that its node reads."""
        name, mine = name_of(self.tensor), sums[name_of(self.tensor)]
        least = min((sums[read].sqnr_db for read in self.reads if read in sums), default=math.inf)
        node, op_type = ("", "Input") if self.node is None else (str(self.node.name), self.node.op_type)
        return EngineLayer(name, node, op_type, mine.sqnr_db, least, None, mine.steps)


class _Observed:
    """A copy of a model that gives every quantized activation, dequantized, and nothing else."""

    def __init__(self, model: ir.Model) -> None:
        self.model = model.clone()
        editor = Editor(self.model)
        self.places = tuple(_places(self.model))
        self._seen: dict[str, ir.Value] = {}
        for place in self.places:
            integers, scale, zero = place.quantizer.outputs[0], *place.quantizer.inputs[1:3]
            name = name_of(place.tensor)
            seen = editor.node(
                "DequantizeLinear",
                [integers, scale, zero],
                name + _SEEN,
                like=place.tensor,
                dtype=ir.DataType.FLOAT,
                domain=place.quantizer.domain,
            )
            self._seen[name] = seen
        self.model.graph.outputs[:] = self._seen.values()

    def part(self, place: _Place, fed: Mapping[str, NDArray[Any]]) -> ir.Model:
        """The layer that makes a tensor, from quantizing what it reads to dequantizing what it makes."""
        seen = self._seen[name_of(place.tensor)]
        maker = seen.producer()
        assert place.node is not None
        assert maker is not None
        wanted = {*place.pairs, place.node, place.quantizer, maker}
        nodes = [node for node in self.model.graph if node in wanted]
        values = {name_of(v): v for node in place.pairs for v in node.inputs if v is not None}
        used = {value for node in nodes for value in node.inputs if value is not None}
        view = ir.GraphView(
            [values[name] for name in fed],
            [seen],
            nodes=nodes,
            initializers=[v for v in self.model.graph.initializers.values() if v in used],
            opset_imports=self.model.graph.opset_imports,
            name="layer",
        )
        part = view.clone()
        for value in part.inputs:
            value.shape, value.type = ir.Shape(fed[name_of(value)].shape), ir.TensorType(ir.DataType.FLOAT)
        return ir.Model(part, ir_version=self.model.ir_version)


def _places(model: ir.Model) -> Iterator[_Place]:
    known: set[ir.Value] = set()
    for node in model.graph:
        tensor = node.inputs[0] if is_op(node, "QuantizeLinear") else None
        if tensor is None or tensor in known or is_constant(tensor):
            continue
        known.add(tensor)
        maker = tensor.producer()
        pairs, reads, floats = _reads(maker) if maker is not None else ((), (), False)
        step = node.inputs[1].const_value if node.inputs[1] is not None else None
        yield _Place(tensor, node, maker, pairs, reads, floats, float(step.numpy().max()) if step is not None else 0.0)


def _reads(node: ir.Node) -> tuple[tuple[ir.Node, ...], tuple[str, ...], bool]:
    """(pairs in front of a node, the tensors that they quantize, whether it reads a float that is not constant)."""
    pairs: list[ir.Node] = []
    reads: list[str] = []
    floats = False
    restored: Sequence[ir.Node | None] = (
        [node]
        if is_op(node, "DequantizeLinear")
        else [value.producer() if value is not None else None for value in node.inputs]
    )
    for value, maker in zip(node.inputs, restored, strict=False):
        if maker is None or not is_op(maker, "DequantizeLinear"):
            floats |= value is not None and not is_constant(value)
            continue
        source = maker.inputs[0].producer() if maker.inputs[0] is not None else None
        pairs.append(maker)
        if source is not None and is_op(source, "QuantizeLinear") and source.inputs[0] is not None:
            pairs.append(source)
            if not is_constant(source.inputs[0]):
                reads.append(name_of(source.inputs[0]))
    return tuple(dict.fromkeys(pairs)), tuple(dict.fromkeys(reads)), floats


_VERDICTS: Mapping[Closeness, str] = {
    "healthy": "the outputs follow float32 closely, and nothing needs to be mended",
    "noisy": "the outputs follow float32, with noise; measure the task's metric with `edgeq eval`",
    "poor": "the outputs do not follow float32; keep the nodes that help in float, or see `edgeq tune`",
}


@dataclass(frozen=True)
class Diagnosis(Page):
    """What was found.

    Attributes:
        float_model, quantized, data: as `edgeq.debug` was given them.
        variant: of a bundle; None for a model file.
        settings: what the quantized model was opened with.
        worst: error sources that are named at most.
        prepared: whether the float model had to be prepared (`edgeq.model.prepare`) to match.
        comparison: weights and activations, on the graph as written.
        noise: what each activation's layer adds itself, in the same order.
        effects: the float model's outputs with the error of one layer alone, for the layers that may cause the error.
        optimised: the model's outputs in the session that ships; `written`: without graph optimisation.
        notes, warnings: one sentence each.
        exclusions: nodes that help when they stay in float, as it was computed, the best first; looked for where the
            outputs are not healthy.
        engine: the quantized activations in the engine `engine_name`, if one was to be compared.
    """

    float_model: Path
    quantized: Path
    data: Any
    variant: str | None
    settings: SessionSettings
    worst: int
    prepared: bool
    comparison: LayerComparison
    noise: tuple[LayerNoise, ...]
    effects: Mapping[str, Agreement]
    error_sources: tuple[ErrorSource, ...]
    optimised: Agreement
    written: Agreement
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    exclusions: tuple[Exclusion, ...] = ()
    engine: tuple[EngineLayer, ...] = ()
    engine_name: str = ""

    @property
    def verdict(self) -> Closeness:
        """ "healthy", "noisy" or "poor", by the worst output, or slice of one, of the session that ships."""
        return closeness(self.optimised)

    @property
    def verdict_text(self) -> str:
        """The verdict as a sentence."""
        worst = self.optimised.worst
        missing = [output.name for output in self.optimised.outputs if output.mismatched and not output.compared]
        if missing or worst is None:
            figure = f"output {missing[0]!r} could not be compared" if missing else "no output could be compared"
        else:
            part = f" in output {worst.name!r}, {worst.worst_slice.where}" if worst.worst_slice is not None else ""
            figure = f"{worst.least_db:.1f} dB SQNR{part}"
        return f"{self.verdict}: {_VERDICTS[self.verdict]} ({figure})"

    @property
    def exclude(self) -> tuple[str, ...]:
        """Nodes that would keep all error sources in float."""
        return nodes_to_exclude(self.error_sources)

    def __brief__(self) -> dict[str, Any]:
        models = {"float_model": self.float_model, "quantized": self.quantized}
        sources = {"error_sources": self.error_sources, "exclude": self.exclude, "helps": self.exclusions[:1]}
        agreement = {
            "verdict": self.verdict_text,
            "sqnr_db": self.optimised.sqnr_db,
            "as_written_db": self.written.sqnr_db,
        }
        return {**models, **agreement, **sources, "samples": self.comparison.count, "warnings": self.warnings}

    def __page__(self) -> dict[str, Any]:
        shown = {"samples": self.comparison.count, "warnings": list(self.warnings)}
        variant = {"agreement": plain(self.optimised), "layers": plain(self), **shown}
        return {"name": self.quantized.name, "variants": {"int8": variant}, "notes": list(self.notes)}

    def __record__(self) -> dict[str, Any]:
        """Plain JSON values; every key is always there."""
        compared = plain(self.comparison)
        for activation, noise in zip(compared["activations"], self.noise, strict=True):
            effect = self.effects.get(noise.name)
            activation["noise"] = noise
            activation["output_sqnr_db"] = None if effect is None else effect.sqnr_db
        return {
            "float_model": str(self.float_model),
            "quantized_model": str(self.quantized),
            "variant": self.variant,
            "data": str(self.data),
            "count": self.comparison.count,
            "prepared": self.prepared,
            "verdict": self.verdict,
            "verdict_text": self.verdict_text,
            "outputs": {"optimised": self.optimised, "as_written": self.written},
            "culprits": self.error_sources,
            "exclude": self.exclude,
            "exclusions": self.exclusions,
            "weights": compared["weights"],
            "activations": compared["activations"],
            "engine": self.engine,
            "notes": self.notes,
            "warnings": self.warnings,
        }


SAMPLES = 32
"""Samples by default: sums over all elements of a tensor settle after a few."""

# Fusing changes roundings; what costs more than this changes the outputs.
_OPTIMISER_LOSS_DB = 3.0
_DISABLED = "optimization.disable_specified_optimizers"
_REQUANTIZER = "WeightBiasQuantization"
_LISTED = 3


def debug(
    float_model: Path | str,
    quantized: Path | str,
    data: Any,
    *,
    preprocess: Any = None,
    count: int | None = SAMPLES,
    start: int = 0,
    stride: int = 1,
    worst: int = 10,
    variant: str | None = None,
    session_options: Mapping[str, str] | None = None,
    threads: int = 0,
    memory: int | None = None,
    engine: EngineChoice | str = "",
    progress: Progress = SILENT,
) -> Diagnosis:
    """Compare a quantized model with its float model and name the layers that lose the accuracy.

    Nothing is kept but sums. The steps one by one (matching and comparing weights and activations, models that give
    tensors in the middle) are functions of `edgeq.measure.layers`.

    Args:
        float_model: the float32 model.
        quantized: its quantized form, a file or a bundle.
        data: samples, as `edgeq.open_samples` takes them.
        preprocess: of the samples; a bundle knows its own.
        count: samples at most; None takes all.
        start, stride: skip the first ones, then take every so many-th.
        worst: error sources to name at most.
        variant: of a bundle; None takes the one that fits this machine.
        session_options: that the quantized file needs; a bundle brings its own.
        memory: bytes that tensors may take at once; more passes if less. None for 512 MiB.
        engine: a plug-in such as "qnn", whose tensors are held against those of onnxruntime's CPU kernels, too.

    Raises:
        UsageError: the models are not a float model and a quantized form of it.
        EdgeqError: whatever is wrong with a model, the bundle or the data.
    """
    float_model, quantized = path_of(float_model, "float model"), path_of(quantized, "quantized model")
    choice, memory = as_engine(engine) if engine else None, memory or MEMORY
    settings = SessionSettings(config=dict(session_options or {}), intra_op_threads=threads)
    refuse_ignored(settings, quantized)
    with (
        open_model(quantized, settings, variant=variant) as loaded,
        tempfile.TemporaryDirectory(prefix="edgeq-debug-") as workdir,
    ):
        if not is_quantized(loaded.graph):
            raise UsageError(f"{loaded.name} holds no quantized operator", ORDER)
        graph = GraphIndex(loaded.graph)
        reference = find_reference(float_model, graph, loaded.name, Path(workdir), progress)
        samples = open_samples(
            data,
            loaded.signature,
            preprocess=preprocess if preprocess is not None else loaded.preprocess,
            count=count,
            start=start,
            stride=stride,
            model=float_model,
            progress=progress,
        )
        how: dict[str, Any] = {"settings": loaded.settings, "memory": memory, "progress": progress}
        comparison = compare_layers(reference.graph, graph, samples, **how)
        outputs = _outputs(reference.path, loaded, samples, progress)
        effects, error_sources = attribute_error(
            reference.graph, graph, comparison, outputs["written"], samples, most=worst, **how
        )
        exclusions: tuple[Exclusion, ...] = ()
        if closeness(outputs["optimised"]) != "healthy":
            sets = sets_to_exclude(error_sources, comparison.activations, effects, worst)
            few = Subset(samples, range(0, len(samples), max(1, len(samples) // FEW))[:FEW])
            exclusions = find_exclusions(reference.graph, graph, sets, few, settings=loaded.settings, progress=progress)
        layers: tuple[EngineLayer, ...] = ()
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
        noise=layer_noise(comparison.activations),
        effects=effects,
        error_sources=error_sources,
        optimised=outputs["optimised"],
        written=outputs["written"],
        exclusions=exclusions,
        notes=reference.notes,
        warnings=_warnings(outputs, comparison),
        engine=layers,
        engine_name=choice.name if choice is not None else "",
    )


def _outputs(float_model: Path, loaded: LoadedModel, samples: Samples, progress: Progress) -> dict[str, Agreement]:
    """The outputs against the float model's: as shipped, without graph optimisation and, where that makes a difference,
    without the optimiser that is known to."""
    plain = dataclasses.replace(loaded.settings, optimization="none")
    reference = open_session(float_model, SessionSettings(intra_op_threads=plain.intra_op_threads))
    sessions = {
        "optimised": loaded.session,
        "written": instrumented_session(loaded.graph, optimization="none", settings=plain),
    }
    found = compare_many(reference, sessions, samples, progress)
    disabled = loaded.settings.config.get(_DISABLED, "")
    if _loss(found) > _OPTIMISER_LOSS_DB and _REQUANTIZER not in disabled:
        config = {**loaded.settings.config, _DISABLED: ";".join(filter(None, [disabled, _REQUANTIZER]))}
        without = dataclasses.replace(loaded.settings, config=config)
        session = instrumented_session(loaded.graph, optimization=without.optimization, settings=without)
        found |= compare_many(reference, {"without": session}, samples, progress)
    return found


def _loss(outputs: Mapping[str, Agreement]) -> float:
    """Decibels that the optimiser costs; NaN where both are exact."""
    return outputs["written"].sqnr_db - outputs["optimised"].sqnr_db


def optimiser_warning(outputs: Mapping[str, Agreement]) -> str | None:
    """A warning where the outputs of the optimised session are not those of the graph as written; else None."""
    if not abs(_loss(outputs)) > _OPTIMISER_LOSS_DB:
        return None
    optimised, written = outputs["optimised"].sqnr_db, outputs["written"].sqnr_db
    text = (
        f"the outputs of the optimised session have {optimised:.1f} dB SQNR, of the graph as written {written:.1f} dB: "
        "the figures by layer are those of the graph as written"
    )
    without = outputs.get("without")
    if without is not None and without.sqnr_db > optimised + _OPTIMISER_LOSS_DB:
        text += f"; with the session option {_DISABLED}={_REQUANTIZER} it is {without.sqnr_db:.1f} dB"
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
            "before they were quantized, by folding or equalization; compare with the float model that has them so"
        )
    found.extend(outputs["optimised"].left_out())
    broken = [a.name for a in comparison.activations if a.accumulated.nonfinite]
    if broken:
        found.append(f"{len(broken)} tensors hold NaN or infinities in one model only, first {broken[0]}")
    return tuple(found)
