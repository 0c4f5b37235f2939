"""The outputs of a quantized model on a CPU whose kernels add two products in 16 bits.

The model is optimised by ONNX Runtime as always. Layers on saturating paths are then computed by edgeq's exact model of
those kernels; everything between them, which is exact there, by ONNX Runtime. So the outputs are those of the target,
to the last bit where the graph is all integers, on any machine of the same architecture.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import onnx_ir as ir
from edgeq_device.engines import FLOAT
from edgeq_device.variants import EXTERNAL_FOLDER
from numpy.typing import NDArray

from edgeq.emulate.saturation.layers import Layer, find_layers
from edgeq.emulate.saturation.operators import Computed
from edgeq.graph.index import GraphIndex
from edgeq.graph.query import name_of, reads
from edgeq.model.load import read_own
from edgeq.model.saturation import SaturationTable, exact_options
from edgeq.model.session import open_in_memory
from edgeq.session import SessionSettings, open_session

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, eq=False)
class ModelRun:
    """Outputs of the model, and of every layer on a saturating path by its name."""

    outputs: Arrays
    layers: Mapping[str, Computed]


@dataclass(frozen=True, eq=False)
class _Segment:
    """What ONNX Runtime runs between two saturating layers: names of the tensors that it reads and gives."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class Simulation:
    """One model, opened for any number of inputs.

    Args:
        model: quantized, in any form that ONNX Runtime takes.
        settings: what it is run with.
        saturating: False computes the same layers exactly: what the model gives where nothing saturates.
        watched: without `saturating`, count what would have been clipped.
        table: whose kernels saturate; None: ONNX Runtime's own. What is between them is computed as it does.

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
        self.graph = optimised_graph(model, settings)
        found = find_layers(self.graph, settings.config, table)
        self.unmodelled = tuple(layer for layer in found if not layer.path.modelled)
        self.layers = tuple(layer for layer in found if layer.path.modelled)
        self._saturating, self._watched = saturating, watched
        self._steps = _steps(self.graph, self.layers)
        self._sessions: dict[int, Any] = {}

    def run(self, inputs: Arrays) -> ModelRun:
        """The model's outputs for one sample, and those of its saturating layers."""
        values: dict[str, NDArray[Any]] = dict(inputs)
        runs = {}
        for place, step in enumerate(self._steps):
            if isinstance(step, Layer):
                given = [self._value(v.name or "", values) if v is not None else None for v in step.node.inputs]
                computed = step.compute(given, saturating=self._saturating, watched=self._watched)
                values[name_of(step.node.outputs[0])] = computed.output
                runs[step.name] = computed
            else:
                feed = {name: values[name] for name in step.inputs}
                session = self._session(place, step, feed)
                values.update(zip(step.outputs, session.run(list(step.outputs), feed), strict=True))
        return ModelRun(MappingProxyType({name: self._value(name, values) for name in self.graph.outputs}), runs)

    def get_outputs(self) -> Sequence[ir.Value]:
        """The model's outputs."""
        return list(self.graph.graph.outputs)

    def _value(self, name: str, values: Arrays) -> NDArray[Any]:
        return self.graph.constant(name) if self.graph.is_constant(name) else values[name]

    def _session(self, place: int, step: _Segment, feed: Arrays) -> Any:
        if place not in self._sessions:
            part = ir.convenience.extract(self.graph.graph, step.inputs, step.outputs)
            for value in part.inputs:
                array = feed[name_of(value)]
                value.type, value.shape = ir.TensorType(ir.DataType.from_numpy(array.dtype)), None
            model = ir.Model(part, ir_version=self.graph.model.ir_version)
            settings = SessionSettings(optimization="none", intra_op_threads=1)
            self._sessions[place] = open_in_memory(model, settings)
        return self._sessions[place]


class SimulatedSession:
    """A `Simulation` in the form of a session, for everything that measures sessions."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def get_outputs(self) -> Sequence[Any]:
        """As onnxruntime's."""
        return self._simulation.get_outputs()

    def run(self, output_names: Sequence[str] | None, input_feed: Arrays) -> Sequence[Any]:
        """As onnxruntime's."""
        outputs = self._simulation.run(input_feed).outputs
        return [outputs[name] for name in output_names or outputs]


def graph_settings(settings: SessionSettings) -> SessionSettings:
    """Those with which ONNX Runtime makes the graph of a model that a plug-in runs with `settings`: the graph of a
    plug-in cannot be read, and what makes ONNX Runtime's kernels exact does nothing to those of a plug-in."""
    config = {key: value for key, value in settings.config.items() if key not in exact_options()}
    return replace(settings, engine=None, precision=FLOAT, providers=SessionSettings().providers, config=config)


def optimised_graph(model: Path, settings: SessionSettings) -> GraphIndex:
    """The graph that ONNX Runtime makes of `model` before it runs it.

    Raises:
        RuntimeUnavailableError: onnxruntime refuses it.
    """
    with tempfile.TemporaryDirectory(prefix="edgeq-optimised-") as folder:
        path = Path(folder) / "model.onnx"
        open_session(model, replace(settings, save_optimized_to=path))
        # External weights stay where they were; onnxruntime writes the same references.
        weights = Path(settings.config.get(EXTERNAL_FOLDER, model.parent))
        return GraphIndex(read_own(path, weights))


def _steps(graph: GraphIndex, layers: Sequence[Layer]) -> tuple[Layer | _Segment, ...]:
    """The graph's nodes in order: each of `layers` a step, those between them as few segments."""
    own = {layer.node: layer for layer in layers}
    runs: list[Layer | list[ir.Node]] = []
    for node in graph.graph:
        layer = own.get(node)
        if layer is not None:
            runs.append(layer)
        elif runs and isinstance(runs[-1], list):
            runs[-1].append(node)
        else:
            runs.append([node])
    steps: list[Layer | _Segment] = []
    needed = set(graph.graph.outputs)
    for run in reversed(runs):
        if isinstance(run, Layer):
            steps.append(run)
            needed.update(v for v in run.node.inputs if v is not None)
            continue
        made = {output for node in run for output in node.outputs}
        read = {value for node in run for value in reads(node)} - made
        known = {v for v in read if v.producer() is not None or v.is_graph_input()}
        steps.append(_Segment(_names(known), _names(made & needed)))
        needed |= known
    return tuple(reversed(steps))


def _names(values: Iterable[ir.Value]) -> tuple[str, ...]:
    return tuple(sorted(value.name for value in values if value.name))
