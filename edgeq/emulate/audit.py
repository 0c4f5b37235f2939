"""Find the layers of a quantized model that can saturate where two products are added in 16 bits, count how often they
saturate, and measure the effect on the outputs.

`KernelSimulation` computes the outputs that a model has on a CPU whose kernels saturate in this way. ONNX Runtime first
optimises the model as usual. edgeq's exact reimplementation of those kernels (`kernels`) then computes the layers on
saturating paths. ONNX Runtime computes everything else, because there its results do not depend on the CPU. So any
machine of the same architecture computes the target's outputs. If the graph contains only integers, every bit is the
same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_ir as ir
from edgeq_device.engines.catalog import FLOAT
from edgeq_device.engines.variant import EXTERNAL_FOLDER
from edgeq_device.system.places import scratch_folder
from numpy.typing import NDArray

from edgeq.data.samples import Samples
from edgeq.emulate.kernels import Computed, SaturatingLayer, find_layers
from edgeq.measure.comparison import OutputSums
from edgeq.measure.inference import Session
from edgeq.model.graph import GraphIndex, name_of, reads
from edgeq.model.load import read_unchecked
from edgeq.model.macs import node_macs
from edgeq.model.saturation import SaturationTable, exact_options, pairs_vary
from edgeq.model.sessions import open_in_memory
from edgeq.run.session import SessionSettings, open_session
from edgeq.util.display import SILENT, Progress
from edgeq.util.records import computed

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, eq=False)
class ModelRun:
    """Hold the outputs of the model, and the result of every layer on a saturating path, by the layer's name."""

    outputs: Arrays
    layers: Mapping[str, Computed]


@dataclass(frozen=True, eq=False)
class _Segment:
    """Describe the part of the graph between two saturating layers by its inputs and outputs. ONNX Runtime runs it."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class KernelSimulation:
    """Simulate one model. The model is opened once, for any number of inputs.

    Args:
        model: a quantized model in any form that ONNX Runtime accepts.
        settings: the settings that the model runs with.
        saturating: whether the layers saturate; False computes the same layers exactly.
        watched: whether to count sums that would have been clipped. It is ignored if `saturating` is True.
        table: the kernels that saturate; None means ONNX Runtime's own. ONNX Runtime computes all other nodes.

    Raises:
        RuntimeUnavailableError: onnxruntime refuses the model.
    """

    def __init__(
        self,
        model: Path,
        settings: SessionSettings | None = None,
        *,
        saturating: bool = True,
        watched: bool = False,
        table: SaturationTable | None = None,
    ) -> None:
        settings = settings or SessionSettings()
        self.graph = read_optimised_graph(model, settings)
        layers = find_layers(self.graph, settings.config, table)
        # These layers can saturate too, but edgeq cannot compute them, so ONNX Runtime does.
        self.unmodelled = tuple(layer for layer in layers if not layer.path.modelled)
        self.layers = tuple(layer for layer in layers if layer.path.modelled)
        self._saturating, self._watched = saturating, watched
        self._steps = _split_steps(self.graph, self.layers)
        self._sessions: dict[int, Any] = {}

    def run(self, inputs: Arrays) -> ModelRun:
        """Return the model's outputs for one sample, and the results of its saturating layers."""
        values: dict[str, NDArray[Any]] = dict(inputs)
        runs = {}
        for place, step in enumerate(self._steps):
            if isinstance(step, SaturatingLayer):
                operands = [self._value(v.name or "", values) if v is not None else None for v in step.node.inputs]
                computed = step.compute(operands, saturating=self._saturating, watched=self._watched)
                values[name_of(step.node.outputs[0])] = computed.output
                runs[step.name] = computed
            else:
                feed = {name: values[name] for name in step.inputs}
                session = self._session(place, step, feed)
                values.update(zip(step.outputs, session.run(list(step.outputs), feed), strict=True))
        return ModelRun(MappingProxyType({name: self._value(name, values) for name in self.graph.outputs}), runs)

    def get_outputs(self) -> Sequence[ir.Value]:
        """Return the model's outputs."""
        return list(self.graph.graph.outputs)

    def _value(self, name: str, values: Arrays) -> NDArray[Any]:
        return self.graph.constant(name) if self.graph.is_constant(name) else values[name]

    def _session(self, place: int, step: _Segment, feed: Arrays) -> Any:
        if place not in self._sessions:
            part = ir.convenience.extract(self.graph.graph, step.inputs, step.outputs)
            for value in part.inputs:
                array = feed[name_of(value)]
                # The inferred shape of an inner value may be for another batch, so only the type is fixed.
                value.type, value.shape = ir.TensorType(ir.DataType.from_numpy(array.dtype)), None
            model = ir.Model(part, ir_version=self.graph.model.ir_version)
            # The graph is optimised already. Another optimisation could fuse nodes across the segments.
            settings = SessionSettings(optimization="none", intra_op_threads=1)
            self._sessions[place] = open_in_memory(model, settings)
        return self._sessions[place]


class SimulatedSession:
    """Wrap a `KernelSimulation` as a session, for code that measures sessions."""

    def __init__(self, simulation: KernelSimulation) -> None:
        self._simulation = simulation

    def get_outputs(self) -> Sequence[Any]:
        """Return the model's outputs, like an onnxruntime session."""
        return self._simulation.get_outputs()

    def run(self, output_names: Sequence[str] | None, input_feed: Arrays) -> Sequence[Any]:
        """Return the outputs for one sample, like an onnxruntime session."""
        outputs = self._simulation.run(input_feed).outputs
        return [outputs[name] for name in output_names or outputs]


def build_graph_settings(settings: SessionSettings) -> SessionSettings:
    """Return settings with which ONNX Runtime makes a model's graph, given the `settings` with which a plug-in runs the
    model.

    The plug-in's own graph cannot be read. The options that make ONNX Runtime's kernels exact are left out, because
    they do not affect a plug-in's kernels.
    """
    config = {key: value for key, value in settings.config.items() if key not in exact_options()}
    return replace(settings, engine=None, precision=FLOAT, providers=SessionSettings().providers, config=config)


def read_optimised_graph(model: Path, settings: SessionSettings) -> GraphIndex:
    """Return the graph that ONNX Runtime makes of `model` before it runs the model.

    Raises:
        RuntimeUnavailableError: onnxruntime refuses the model.
    """
    with scratch_folder("edgeq-optimised-") as folder:
        path = Path(folder) / "model.onnx"
        open_session(model, replace(settings, save_optimized_to=path))
        # onnxruntime copies the references to external weights unchanged, so the weights are read from the original
        # folder.
        weights = Path(settings.config.get(EXTERNAL_FOLDER, model.parent))
        return GraphIndex(read_unchecked(path, weights))


def _split_steps(graph: GraphIndex, layers: Sequence[SaturatingLayer]) -> tuple[SaturatingLayer | _Segment, ...]:
    """Return the graph as steps in order. Each of `layers` is a step. The nodes between them are joined into as few
    segments as possible.
    """
    layers_by_node = {layer.node: layer for layer in layers}
    runs: list[SaturatingLayer | list[ir.Node]] = []
    for node in graph.graph:
        layer = layers_by_node.get(node)
        if layer is not None:
            runs.append(layer)
        elif runs and isinstance(runs[-1], list):
            runs[-1].append(node)
        else:
            runs.append([node])
    steps: list[SaturatingLayer | _Segment] = []
    required = set(graph.graph.outputs)
    # Backwards, so that the values that later steps need are known when a segment's outputs are chosen.
    for run in reversed(runs):
        if isinstance(run, SaturatingLayer):
            steps.append(run)
            required.update(v for v in run.node.inputs if v is not None)
            continue
        produced = {output for node in run for output in node.outputs}
        consumed = {value for node in run for value in reads(node)} - produced
        segment_inputs = {v for v in consumed if v.producer() is not None or v.is_graph_input()}
        steps.append(_Segment(_sort_names(segment_inputs), _sort_names(produced & required)))
        required |= segment_inputs
    return tuple(reversed(steps))


def _sort_names(values: Iterable[ir.Value]) -> tuple[str, ...]:
    return tuple(sorted(value.name for value in values if value.name))


# Multiply-accumulates to simulate in total. A model with n multiply-accumulates gets about this number / n samples.
_WORK = 8e9
# Two samples at least, so that one odd sample is not the whole picture.
_FEWEST, _MOST = 2, 8


@dataclass(frozen=True)
class LayerAudit:
    """Report one layer on a saturating path.

    Attributes:
        name, op_type: name and operator type in the optimised graph.
        channels: number of output channels; None if the weight is computed at run time.
        suspects: number of channels that may saturate for some input, judged by their weights alone.
        worst_pair: the largest sum of two neighbouring weights with the same sign. If it is above 128, the channel can
            saturate.
        modelled: whether edgeq can compute the layer as the kernel does.
        sums, clipped: number of sums of two products over all samples, and how many of them were clipped.
        clipped_channels: number of channels with clipped sums.
    """

    name: str
    op_type: str
    channels: int | None
    suspects: int | None
    worst_pair: int | None
    modelled: bool
    sums: int = 0
    clipped: int = 0
    clipped_channels: int = 0

    @computed
    def can_saturate(self) -> bool:
        """Return whether a channel can saturate for some input. A layer with unknown weights counts as one that can
        saturate.
        """
        return self.suspects is None or self.suspects > 0


@dataclass(frozen=True)
class Audit:
    """Report the effect of saturation on a model.

    Attributes:
        layers: the layers on saturating paths, in graph order.
        samples: number of simulated samples; 0 if only the weights were checked.
        effect_db: SQNR of the worst output with saturation against the exact output; infinity if the outputs are
            identical, None without samples.
        float_db: SQNRs of the outputs against the float model's, as (with saturation, exact); None without a float
            model.
    """

    layers: tuple[LayerAudit, ...]
    samples: int = 0
    effect_db: float | None = None
    float_db: tuple[float, float] | None = None

    @property
    def safe(self) -> bool:
        """Return whether no layer can saturate, whatever the input."""
        return not any(layer.can_saturate for layer in self.layers)

    @property
    def clipped(self) -> int:
        """Return the number of sums of two products that were clipped, over all layers and samples."""
        return sum(layer.clipped for layer in self.layers)

    def summary(self) -> str:
        """Return the result in one line."""
        if self.safe:
            return "no layer can saturate, whatever the input"
        suspects = [layer for layer in self.layers if layer.can_saturate]
        text = f"{len(suspects)} of {len(self.layers)} layers can saturate"
        if not self.samples:
            return text
        really = sum(layer.clipped > 0 for layer in self.layers)
        if not really:
            return f"{text}; none did on {self.samples} samples"
        share = self.clipped / max(1, sum(layer.sums for layer in self.layers))
        lost = "" if self.float_db is None else f", {self.float_db[1] - self.float_db[0]:.1f} dB lost"
        return f"{text}; {really} did on {self.samples} samples ({share:.2%} of the sums of two products{lost})"

    def __record__(self) -> dict[str, Any]:
        return {
            "safe": self.safe,
            "summary": self.summary(),
            "samples": self.samples,
            "effect_db": self.effect_db,
            "float_db": None if self.float_db is None else {"saturating": self.float_db[0], "exact": self.float_db[1]},
            "layers": self.layers,
        }


def audit(
    model: Path,
    settings: SessionSettings | None = None,
    *,
    samples: Samples | None = None,
    reference: Session | None = None,
    exact: Session | None = None,
    count: int | None = None,
    table: SaturationTable | None = None,
    progress: Progress = SILENT,
) -> Audit:
    """Audit a quantized model.

    Args:
        settings: the settings that the model will run with.
        samples: samples to simulate; None checks the weights alone.
        reference: the float model's session, for measuring the loss from saturation.
        exact: a session of the same model on kernels that do not saturate. If it is None, the exact kernels are
            simulated as well, which doubles the time.
        count: number of samples to simulate; None means 2 to 8, fewer for larger models.
        table: the kernels that saturate; None means ONNX Runtime's own.

    Raises:
        RuntimeUnavailableError: onnxruntime refuses the model.
        DataError: a sample does not fit the model.
    """
    simulation = KernelSimulation(model, settings, table=table)
    bounds = {layer.name: _audit_weights(layer) for layer in (*simulation.layers, *simulation.unmodelled)}
    # If no weight can saturate, no input can, so nothing needs to run.
    if samples is None or not any(bound.can_saturate for bound in bounds.values()):
        return Audit(tuple(bounds.values()))
    exact_session = exact or SimulatedSession(KernelSimulation(model, settings, saturating=False, table=table))
    total = min(len(samples), count or count_samples(count_macs(simulation)))
    names = ("saturating", "exact")
    against_float = {name: OutputSums() for name in names}
    effect = OutputSums()
    clipped: dict[str, NDArray[np.int64]] = {}
    sums: dict[str, int] = {}
    with progress.stage("Simulating saturation", total) as advance:
        for sample, _ in zip(samples, range(total), strict=False):
            run, outputs = simulation.run(sample.inputs), _run_session(exact_session, sample.inputs)
            # Compared with the exact kernels, so that the loss from quantization itself does not count.
            effect.update(outputs, run.outputs, sample.inputs)
            for name, layer in run.layers.items():
                clipped[name] = clipped.get(name, np.zeros(1, np.int64)) + layer.stats.clipped
                sums[name] = sums.get(name, 0) + layer.stats.sums
            if reference is not None:
                float_outputs = _run_session(reference, sample.inputs)
                against_float["saturating"].update(float_outputs, run.outputs, sample.inputs)
                against_float["exact"].update(float_outputs, outputs, sample.inputs)
            advance(1)
    layer_audits = tuple(_add_counts(bound, sums.get(name, 0), clipped.get(name)) for name, bound in bounds.items())
    both = tuple(against_float[name].result() for name in names)
    return Audit(
        layer_audits,
        total,
        effect.result().sqnr_db,
        (both[0].sqnr_db, both[1].sqnr_db) if reference is not None else None,
    )


def count_samples(macs: int) -> int:
    """Return the number of samples to simulate for a model with `macs` multiply-accumulates."""
    return max(_FEWEST, min(_MOST, int(_WORK / max(1, macs))))


def count_macs(simulation: KernelSimulation) -> int:
    """Return the model's multiply-accumulates. If the graph has no shapes, use the weight sizes of the simulated
    layers.
    """
    macs = sum(node_macs(simulation.graph.model).values())
    return macs or sum(layer.rows.size for layer in simulation.layers if layer.rows is not None)


def _run_session(session: Session, inputs: Arrays) -> Arrays:
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(inputs)), strict=True))


def _audit_weights(layer: SaturatingLayer) -> LayerAudit:
    suspects = layer.suspects
    sums = layer.pair_sums
    if layer.rows is None or suspects is None or sums is None:
        return LayerAudit(layer.name, layer.node.op_type, None, None, None, layer.path.modelled)
    return LayerAudit(
        layer.name,
        layer.node.op_type,
        channels=len(layer.rows),
        suspects=int(suspects.sum()),
        worst_pair=int(sums.max(initial=0)),
        modelled=layer.path.modelled,
    )


def _add_counts(bound: LayerAudit, sums: int, clipped: NDArray[np.int64] | None) -> LayerAudit:
    if clipped is None:
        return bound
    return replace(bound, sums=sums, clipped=int(clipped.sum()), clipped_channels=int(np.count_nonzero(clipped)))


# The largest 16-bit value, above which kernels clip.
_HELD = 2**15 - 1


def find_largest_sums(
    model: Path,
    settings: SessionSettings,
    samples: Samples,
    source: Callable[[str], str],
) -> dict[str, NDArray[np.float64]]:
    """Return the largest sum of two products for each output channel of each layer, by the name of the layer's source
    node.

    The sums are relative to the largest 16-bit value. A channel gets 0 if none of its sums can exceed that value.
    Grouped layers, and layers whose kernels pair products in different ways, are left out.

    Args:
        model: a model quantized with the full range of its weights.
        samples: samples to run; 2 to 8 of them are used, fewer for larger models.
        source: function from a name in the optimised graph to the name of its source node.

    Raises:
        RuntimeUnavailableError: onnxruntime refuses the model.
    """
    simulation = KernelSimulation(model, settings, saturating=False, watched=True)
    source_names = {
        layer.name: source(layer.name)
        for layer in simulation.layers
        if layer.rows is not None
        # If pairs differ between kernels, a sum of this kernel says nothing about another one.
        and not pairs_vary(layer.rows.shape[1], layer.channels)
        and layer.node.attributes.get_int("group", 1) == 1
    }
    largest: dict[str, NDArray[np.float64]] = {}
    count = min(len(samples), count_samples(count_macs(simulation)))
    for sample in itertools.islice(samples, count):
        for name, layer in simulation.run(sample.inputs).layers.items():
            if name in source_names:
                reached = layer.stats.largest / _HELD
                largest[source_names[name]] = np.maximum(largest.get(source_names[name], 0.0), reached)
    return largest
