"""How much each layer's own error matters at the outputs, from a handful of samples and two sessions.

For each sample:

1. The float model gives every tensor.
2. The quantized model, cut so that each of its layers is fed the float model's tensors, gives what each layer makes of
   them in integers: its own error e, with nothing of the layers before it.
3. The float model is run once for each unit with that unit's errors added where they arise; what the outputs change is
   the unit's noise in context.

Powers of independent errors add up, so the noise of the units on their own tells what is gained by keeping one in
float. It costs one run of the float model for each unit and sample, in one session; leaving each layer out of
quantization in turn would need a build and a session each.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edgeq.backends import Artifact
from edgeq.calibrate.observed import ObservedModel
from edgeq.data.samples import Samples
from edgeq.errors import ModelError
from edgeq.model.load import load_model
from edgeq.model.prepare import PreparedModel
from edgeq.progress import SILENT, Progress
from edgeq.session import SessionSettings, open_session
from edgeq.tune.recover.moments import spread
from edgeq.tune.recover.units import Unit, find_units

SAMPLES = 4
_GIVEN, _ERROR, _MADE = "/given", "/error", "/made"
_SUFFIX = "_QuantizeLinear_Input"
# Outputs with at least so many rows are judged column by column: a column may be a coordinate or a score.
_ROWS = 64


@dataclass(frozen=True)
class LayerSensitivity:
    """One unit's share of the output noise.

    Attributes:
        unit: what it is about; `unit.nodes` is what to exclude.
        noise: power of the change at the outputs over the outputs' power, mean over outputs and their columns.
        local: power of the error over the power of the tensor, at the unit's last tensor.
    """

    unit: Unit
    noise: float
    local: float

    @property
    def sqnr_db(self) -> float:
        """Of the outputs, if nothing else were quantized."""
        return -10 * math.log10(self.noise) if self.noise > 0 else math.inf


@dataclass(frozen=True, eq=False)
class Point:
    """A place where the quantized model rounds a tensor.

    Attributes:
        tensor: name in the float model.
        computed: name in the quantized model, before QuantizeLinear.
        scale, zero, low, high: of the integers.
    """

    tensor: str
    computed: str
    scale: float
    zero: int
    low: int
    high: int

    def rounded(self, values: NDArray[Any]) -> NDArray[np.float32]:
        steps = np.clip(np.rint(values / np.float32(self.scale)), self.low - self.zero, self.high - self.zero)
        return np.asarray(steps * np.float32(self.scale), np.float32)


def rank_layers(
    prepared: PreparedModel,
    artifact: Artifact,
    samples: Samples,
    *,
    count: int = SAMPLES,
    progress: Progress = SILENT,
) -> tuple[LayerSensitivity, ...]:
    """Units of the float model by their noise at the outputs, the worst first.

    Args:
        prepared: the float model that `artifact` was made from.
        artifact: in QDQ format.
        count: samples at most, spread over all there are.

    Raises:
        ModelError: the artifact has no QuantizeLinear nodes.
    """
    source = load_model(prepared.path, external_data="all")
    quantized = load_model(artifact.model, external_data="all")
    points = find_points(source, quantized)
    if not points:
        raise ModelError(f"{artifact.model} has no QuantizeLinear to look at", "Rank the QDQ form of the scheme")
    types = {node.op_type for node in source.graph.node}
    units = [unit for unit in find_units(source, types) if any(tensor in points for tensor in unit.tensors)]
    made = {o for node in source.graph.node for o in node.output}
    fetched = [name for name in points if name in made]
    observed = ObservedModel(source, prepared.path, fetched, keep_layout=fetched)
    cut = _session(cut_at(quantized, points.values()), artifact.settings())
    faulty = open_session(with_errors(source, points).SerializeToString())
    tally = {unit.name: _Tally() for unit in units}
    with progress.stage("ranking layers", min(count, len(samples)) * len(units)) as advance:
        for sample in spread(samples, count):
            values = dict(sample.inputs)
            values.update(zip(fetched, observed.run(sample.inputs, sample.name), strict=True))
            errors = own_errors(cut, points, values)
            silent: dict[str, Any] = {name + _ERROR: np.zeros(1, np.float32) for name in points}
            names = [output.name for output in source.graph.output]
            plain = faulty.run(names, {**dict(sample.inputs), **silent})
            for unit in units:
                mine = [tensor for tensor in unit.tensors if tensor in points]
                given = {tensor + _ERROR: errors[tensor] for tensor in mine}
                changed = faulty.run(names, {**dict(sample.inputs), **silent, **given})
                tally[unit.name].add(plain, changed, errors[mine[-1]], values[mine[-1]])
                advance(1)
    ranked = [LayerSensitivity(unit, *tally[unit.name].result()) for unit in units]
    return tuple(sorted(ranked, key=lambda found: -found.noise))


def find_points(source: onnx.ModelProto, quantized: onnx.ModelProto) -> dict[str, Point]:
    """Float tensor → where it is rounded. Only tensors that both models have, rounded once with constant scale."""
    constants = {tensor.name: tensor for tensor in quantized.graph.initializer}
    known = {i.name for i in source.graph.input} | {o for node in source.graph.node for o in node.output}
    found: dict[str, Point] = {}
    for node in quantized.graph.node:
        if node.op_type != "QuantizeLinear" or any(name not in constants for name in node.input[1:3]):
            continue
        tensor = node.input[0].removesuffix(_SUFFIX)
        if tensor not in known or tensor in found or node.input[0] in constants:
            continue
        scale, zero = (numpy_helper.to_array(constants[name]).ravel() for name in node.input[1:3])
        if scale.size == 1:
            limits = np.iinfo(zero.dtype)
            found[tensor] = Point(tensor, node.input[0], float(scale[0]), int(zero[0]), limits.min, limits.max)
    return found


def cut_at(quantized: onnx.ModelProto, points: Iterable[Point]) -> onnx.ModelProto:
    """A copy in which each rounded tensor is an input of its own, so that each layer reads what it is given."""
    cut = onnx.ModelProto()
    cut.CopyFrom(quantized)
    by_computed = {point.computed: point for point in points}
    for node in cut.graph.node:
        if node.op_type == "QuantizeLinear" and node.input[0] in by_computed:
            node.input[0] = by_computed[node.input[0]].tensor + _GIVEN
    made = {o for node in cut.graph.node for o in node.output}
    del cut.graph.output[:]
    for point in by_computed.values():
        cut.graph.input.append(helper.make_tensor_value_info(point.tensor + _GIVEN, TensorProto.FLOAT, None))
        if point.computed in made:
            cut.graph.output.append(onnx.ValueInfoProto(name=point.computed))
    return cut


def own_errors(cut: Any, points: Mapping[str, Point], values: Mapping[str, Any]) -> dict[str, NDArray[np.float32]]:
    """Tensor → what its layer alone, fed with the float model's tensors, and its rounding put wrong."""
    wanted = {i.name for i in cut.get_inputs()}
    feed = {name: value for name, value in values.items() if name in wanted}
    feed.update({name + _GIVEN: values[name] for name in points})
    names = [output.name for output in cut.get_outputs()]
    computed = dict(zip(names, cut.run(names, feed), strict=True))
    return {
        name: point.rounded(computed.get(point.computed, values[name])) - values[name] for name, point in points.items()
    }


def with_errors(source: onnx.ModelProto, points: Mapping[str, Point]) -> onnx.ModelProto:
    """A copy in which something can be added to each of the tensors, given as an input of its own."""
    model = onnx.ModelProto()
    model.CopyFrom(source)
    del model.graph.value_info[:]
    inputs = {i.name for i in model.graph.input}
    nodes = []
    for name in points:
        model.graph.input.append(helper.make_tensor_value_info(name + _ERROR, TensorProto.FLOAT, None))
        if name in inputs:
            nodes.append(helper.make_node("Add", [name, name + _ERROR], [name + _MADE], name=name + _MADE))
    for node in model.graph.node:
        for place, name in enumerate(node.input):
            if name in points and name in inputs:
                node.input[place] = name + _MADE
        nodes.append(node)
        for place, name in enumerate(node.output):
            if name in points:
                node.output[place] = name + _MADE
                nodes.append(helper.make_node("Add", [name + _MADE, name + _ERROR], [name], name=name + _ERROR))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


class _Tally:
    def __init__(self) -> None:
        self._noise: list[Any] = []
        self._signal: list[Any] = []
        self._error = 0.0
        self._power = 0.0

    def add(
        self, plain: Sequence[Any], changed: Sequence[Any], error: NDArray[np.float32], value: NDArray[Any]
    ) -> None:
        noise = [columns(np.asarray(c, np.float64) - p) for p, c in zip(plain, changed, strict=True)]
        signal = [columns(np.asarray(p, np.float64)) for p in plain]
        self._noise = [a + b for a, b in zip(self._noise, noise, strict=True)] if self._noise else noise
        self._signal = [a + b for a, b in zip(self._signal, signal, strict=True)] if self._signal else signal
        self._error += float(np.square(error, dtype=np.float64).sum())
        self._power += float(np.square(value, dtype=np.float64).sum())

    def result(self) -> tuple[float, float]:
        shares = [
            float(np.mean(noise[signal > 0] / signal[signal > 0]))
            for noise, signal in zip(self._noise, self._signal, strict=True)
            if np.any(signal > 0)
        ]
        return (float(np.mean(shares)) if shares else 0.0), (self._error / self._power if self._power else 0.0)


def columns(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Power of an output, column by column where it has many rows: a column may be a coordinate or a score."""
    squares = values**2
    if values.ndim > 1 and values.size // values.shape[-1] >= _ROWS:
        return np.asarray(squares.reshape(-1, values.shape[-1]).sum(0))
    return np.asarray(squares.sum()).reshape(1)


def _session(model: onnx.ModelProto, settings: SessionSettings) -> Any:
    """As written: the optimiser would fuse what is to be looked at."""
    return open_session(model.SerializeToString(), dataclasses.replace(settings, optimization="none"))


def predicted_noise(ranked: Sequence[LayerSensitivity], kept: Collection[str] = ()) -> float:
    """Output noise with the named units in float: errors of the others, added as powers."""
    return sum(found.noise for found in ranked if found.unit.name not in kept)
