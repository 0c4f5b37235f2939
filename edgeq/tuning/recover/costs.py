"""Rank the layers of a static scheme in the order in which to keep them in float. The ranking is based on the noise and
the cost of each unit of the graph. `edgeq.tuning.float_layers` uses it to choose layers.

The noise comes from one pass over a few samples (`rank_layers`), by the method of `edgeq.measure.layers`. Every layer
of the quantized model gets the float model's tensors as inputs, so that only its own error remains. Then the float
model runs once for each unit, with that unit's errors added where they arise. The change of the outputs is the unit's
noise. Powers of independent errors add up, so a unit's noise is also the gain of keeping it in float. The alternative,
to leave each layer out of quantization in turn, would need a build and a session for each.

The cost comes from the runtime's own profile of the float model and of the quantized model (`measure_costs`). A unit in
float costs the time of its nodes in float minus their time in integers. The time of a conversion is added wherever a
tensor goes from a unit in float to a unit in integers, or back. The conversion time per element comes from the
conversions in the profile.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.backends.base import Artifact
from edgeq.data.samples import Samples
from edgeq.measure.agreement import Outputs
from edgeq.measure.coverage import KernelRun, timed_profile
from edgeq.measure.layers import MEMORY, LayerPair
from edgeq.model.graph import GraphIndex, name_of
from edgeq.model.load import read_own
from edgeq.model.prepare import PreparedModel
from edgeq.model.products import node_macs
from edgeq.prove.job import Job
from edgeq.run.session import SessionSettings
from edgeq.scheme import Scheme
from edgeq.tuning.float_layers import LayerCosts, LayerRanking, MacCosts, QuietLayer, RankedLayer
from edgeq.tuning.recover.layers import find_layers
from edgeq.tuning.recover.methods.split_gates import VALUE
from edgeq.tuning.recover.nonlinear import Followers
from edgeq.tuning.recover.run import Recoverer
from edgeq.util.display import SILENT, Progress


@dataclass(frozen=True)
class Unit:
    """Describe nodes of the float model that go to float together.

    Attributes:
        name: name of the layer in the unit or, if there is none, of the first node.
        nodes: names of the nodes.
        tensors: tensors that the nodes compute, in order.
        reads: tensors from other nodes, and graph inputs, that the nodes read; constants are left out.
    """

    name: str
    nodes: tuple[str, ...]
    tensors: tuple[str, ...]
    reads: tuple[str, ...]


def find_units(model: ir.Model) -> tuple[Unit, ...]:
    """Return all nodes of the main graph, grouped into units, in the order of their first nodes."""
    followers = Followers(model)
    unit_of: dict[str | None, str] = {}
    for layer in find_layers(model):
        unit_of[layer.name] = layer.name
        for node in followers.find(layer.output).nodes:
            unit_of.setdefault(node.name, layer.name)
    members: dict[str, list[ir.Node]] = {}
    for node in model.graph:
        members.setdefault(unit_of.get(node.name, node.name or ""), []).append(node)
    return tuple(_build_unit(name, nodes) for name, nodes in members.items())


def _build_unit(name: str, nodes: list[ir.Node]) -> Unit:
    tensors = [name_of(value) for node in nodes for value in node.outputs if value.name]
    inputs = dict.fromkeys(value for node in nodes for value in node.inputs if value is not None)
    reads = [name_of(value) for value in inputs if not value.is_initializer() and name_of(value) not in tensors]
    return Unit(name, tuple(node.name or "" for node in nodes), tuple(tensors), tuple(reads))


_RUNS = 5
_CONVERSIONS = ("QuantizeLinear", "DequantizeLinear")
# Microseconds per element if the profile contains no conversion.
_CONVERSION_US = 1e-4


@dataclass(frozen=True)
class Costs:
    """Hold costs in microseconds.

    Attributes:
        float_us, int8_us: time in float and in integers, by unit.
        conversion_us: time to convert each tensor that goes from one unit to another.
        makers: the unit that computes each of these tensors.
        readers: the units that read each of these tensors.
    """

    float_us: Mapping[str, float]
    int8_us: Mapping[str, float]
    conversion_us: Mapping[str, float]
    makers: Mapping[str, str]
    readers: Mapping[str, tuple[str, ...]]

    @property
    def span(self) -> float:
        """Return the microseconds of all units in float minus those of all units in integers, without conversions."""
        return sum(self.float_us.values()) - sum(self.int8_us.values())

    def further(self, name: str, float_names: Set[str]) -> float:
        """Return the microseconds that one more unit in float costs if the units in `float_names` are already in float.
        The result is negative if the unit saves more by fewer conversions than it costs.
        """
        touched = self._touched.get(name, ())
        return (
            self._difference(name)
            + self._converted(touched, float_names | {name})
            - self._converted(touched, float_names - {name})
        )

    def _difference(self, name: str) -> float:
        return self.float_us.get(name, 0.0) - self.int8_us.get(name, 0.0)

    def _converted(self, tensors: Iterable[str], float_names: Set[str]) -> float:
        return sum(
            self.conversion_us[tensor]
            for tensor in tensors
            if len({unit in float_names for unit in (self.makers[tensor], *self.readers[tensor])}) > 1
        )

    @cached_property
    def _touched(self) -> Mapping[str, Sequence[str]]:
        """Map each unit to the tensors that it exchanges with other units."""
        tensors_by_unit: dict[str, list[str]] = {}
        for tensor in self.conversion_us:
            for unit in {self.makers[tensor], *self.readers[tensor]}:
                tensors_by_unit.setdefault(unit, []).append(tensor)
        return tensors_by_unit


def measure_costs(
    units: Sequence[Unit],
    prepared: PreparedModel,
    int8_model: Path,
    settings: SessionSettings,
    feed: Mapping[str, Any],
) -> Costs:
    """Measure costs: run the float model and the quantized model under the runtime's profiler.

    Args:
        units: units of the float model, which is `prepared`.
        settings: settings of the quantized model; the float model gets the same threads.
        feed: inputs of one sample.
    """
    names: dict[str, str] = {}
    makers: dict[str, str] = {}
    readers: dict[str, list[str]] = {}
    for unit in units:
        names.update(dict.fromkeys((*unit.nodes, *unit.tensors), unit.name))
        makers.update(dict.fromkeys(unit.tensors, unit.name))
        for tensor in unit.reads:
            readers.setdefault(tensor, []).append(unit.name)
    threads = settings.intra_op_threads
    floats = timed_profile(prepared.path, SessionSettings(intra_op_threads=threads), feed, runs=_RUNS).kernels
    integers = timed_profile(int8_model, settings, feed, runs=_RUNS).kernels
    us_per_element = _measure_conversion(integers)
    sizes = _count_elements(prepared.model)
    handed = [tensor for tensor in makers if tensor in readers]
    return Costs(
        _sum_by_unit(floats, names),
        _sum_by_unit(integers, names),
        {tensor: us_per_element * sizes.get(tensor, 0) for tensor in handed},
        {tensor: makers[tensor] for tensor in handed},
        {tensor: tuple(readers[tensor]) for tensor in handed},
    )


def find_unit(kernel: str, names: Mapping[str, str]) -> str | None:
    """Return the unit that a kernel belongs to; None if the unit is unknown. The kernel's name begins with the name of
    the node or tensor that it was fused from.
    """
    end = len(kernel)
    while end > 0:
        unit = names.get(kernel[:end])
        if unit is not None and not kernel[end : end + 1].isalnum():
            return unit
        end -= 1
    return None


def _sum_by_unit(kernels: Sequence[KernelRun], names: Mapping[str, str]) -> dict[str, float]:
    total: dict[str, float] = {}
    for kernel in kernels:
        unit = find_unit(kernel.name, names) if kernel.op_type not in _CONVERSIONS else None
        if unit is not None:
            total[unit] = total.get(unit, 0.0) + kernel.us
    return total


def _measure_conversion(kernels: Sequence[KernelRun]) -> float:
    conversions = [kernel for kernel in kernels if kernel.op_type in _CONVERSIONS and kernel.outputs]
    elements = sum(math.prod(kernel.outputs[0][1]) for kernel in conversions)
    return sum(kernel.us for kernel in conversions) / elements if elements else _CONVERSION_US


def _count_elements(model: ir.Model) -> dict[str, int]:
    """Return the number of elements of each tensor of the main graph that has a shape. Unknown sizes count as 1."""
    values = [output for node in model.graph for output in node.outputs]
    return {
        value.name: math.prod(max(1, size) if isinstance(size, int) else 1 for size in value.shape)
        for value in values
        if value.name and value.shape is not None
    }


SAMPLES = 4
# Outputs with at least this many rows are compared by column, because a column may be a coordinate or a score.
_ROWS = 64
# If an element is not finite although the float model's element is, it counts as this many times the signal. No
# rounding error is as large.
_NOT_FINITE = 100.0


# Share of the total noise of all layers. Every layer in int8 causes more noise than this.
_SILENT_SHARE = 1e-4


def rank_layers(
    prepared: PreparedModel,
    artifact: Artifact,
    samples: Samples,
    *,
    count: int = SAMPLES,
    memory: int = MEMORY,
    progress: Progress = SILENT,
) -> tuple[RankedLayer, ...]:
    """Rank units of the float model by the noise that they cause in the quantized model, the noisiest first.

    Args:
        prepared: the float model that `artifact` was made from; the artifact may have any format.
        count: number of samples to use, evenly spread.
        memory: bytes that fetched tensors may take at once.

    Raises:
        DataError: a model refuses a sample.
    """
    settings = artifact.proof_settings()
    source, quantized = GraphIndex(prepared.model), GraphIndex(read_own(artifact.proof_model))
    pair = LayerPair(source, quantized, settings=settings, memory=memory, progress=progress)
    matched = {match.name for match in pair.matches}
    units = find_units(prepared.model)
    groups = {unit.name: [tensor for tensor in unit.tensors if tensor in matched] for unit in units}
    matched_groups = {name: tensors for name, tensors in groups.items() if tensors}
    effects = pair.group_effects(matched_groups, samples, ColumnNoise, count=count)
    noise = {name: sum(part.noise for part in parts) for name, parts in effects.items()}
    ranked = [RankedLayer(u.name, u.nodes, noise.get(u.name, 0.0)) for u in units if groups[u.name]]
    return tuple(sorted(ranked, key=lambda r: -r.noise))


@dataclass
class ColumnNoise:
    """Measure the noise power of outputs relative to their signal power. In a table, each column is measured
    separately, so that boxes and scores have the same weight.
    """

    _noise: dict[str, list[NDArray[np.float64]]] = field(default_factory=dict)
    _signal: dict[str, list[NDArray[np.float64]]] = field(default_factory=dict)
    _limit: float = 1.0

    def update(self, reference: Outputs, candidate: Outputs) -> None:
        """Add one sample's outputs. Elements that are not finite in the reference are left out."""
        for name, reference_array in reference.items():
            if reference_array.dtype.kind not in "biuf":
                continue
            signal, changed = np.asarray(reference_array, np.float64), np.asarray(candidate[name], np.float64)
            # If the size of an output depends on values and has changed, the output counts as entirely wrong.
            with np.errstate(invalid="ignore"):
                noise = changed - signal if changed.shape == signal.shape else signal
            finite = np.isfinite(signal)
            if not np.isfinite(noise[finite]).all():
                self._limit = np.inf
            noise = np.where(np.isfinite(noise), noise, _NOT_FINITE * signal)
            self._noise.setdefault(name, []).append(column_powers(np.where(finite, noise, 0.0)))
            self._signal.setdefault(name, []).append(column_powers(np.where(finite, signal, 0.0)))

    @property
    def noise(self) -> float:
        """Return noise power over signal power, averaged over the columns of each output and then over the outputs. It
        is at most 1 if all values are finite.
        """
        shares = []
        for name in self._signal:
            noise, signal = (_add_up(parts[name]) for parts in (self._noise, self._signal))
            if np.any(signal > 0):
                # If noise exceeds the signal, count it as equal to the signal. Otherwise it would hide the noise of the
                # other columns.
                shares.append(float(np.mean(np.minimum(noise[signal > 0] / signal[signal > 0], self._limit))))
        return float(np.mean(shares)) if shares else 0.0


def column_powers(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sum of squares of an output. If the output has many rows, return one sum for each column, because a
    column may be a coordinate or a score.
    """
    squares = values**2
    if values.ndim > 1 and values.size // max(1, values.shape[-1]) >= _ROWS:
        return np.asarray(squares.reshape(-1, values.shape[-1]).sum(0))
    return np.asarray(squares.sum()).reshape(1)


def _add_up(parts: Sequence[NDArray[Any]]) -> NDArray[np.float64]:
    """Add up sums over samples. If their shapes differ, add up their columns first."""
    if len({part.shape for part in parts}) > 1:
        parts = [part.sum(keepdims=True) for part in parts]
    return np.asarray(np.sum(parts, axis=0), np.float64)


_SLACK = 1.5
"""Factor by which the allowed cost is raised: the profile of single nodes only roughly predicts a whole model."""
_MIN_US = 1.0


def rank_static(
    recoverer: Recoverer,
    job: Job,
    scheme: Scheme,
    names: Sequence[str],
    *,
    profiled: bool = True,
    timed: bool = True,
    count: int = SAMPLES,
    progress: Progress = SILENT,
) -> LayerRanking:
    """Rank the units of the job's own float model under `scheme` by noise per microsecond in float.

    Args:
        recoverer: the recoverer of `job`.
        names: recoveries to apply with the scheme.
        profiled: whether the model will run in the kernels that are profiled. If not, the limit on layers in float
            counts multiply-accumulates instead of profiled time: onnxruntime's own int8 kernels may be slower than
            float32 although another engine's int8 kernels are twice as fast.
        timed: whether to time anything. If not, layers are ordered by noise per multiply-accumulate, as for a simulated
            model.
        count: number of samples on which the noise of each unit is traced to the outputs.

    Raises:
        EdgeqError: the build, the ranking or the profile fails.
    """
    assert job.calibration is not None
    state = recoverer.state(scheme, names, recoverer.place() / "ranked.onnx", progress=progress)
    assert state.artifact is not None
    ranked = rank_layers(state.prepared, state.artifact, job.calibration, count=count, progress=progress)
    units = find_units(job.prepared.model)
    quantized = [unit for unit in units if not set(unit.nodes) <= set(scheme.exclude)]
    layers, work = drop_silent(merge_units(ranked, quantized)), mac_costs(units, job.prepared.model)
    quiet = find_quiet_layers(quantized, layers, job.prepared.model)
    if not timed or state.artifact.simulation is not None:  # a simulation does not run the target's kernels
        return LayerRanking(sort_by_worth(layers, work), work, quiet=quiet)
    costs = measure_costs(
        units,
        job.prepared,
        state.artifact.model,
        replace(state.artifact.settings(), intra_op_threads=1),
        dict(next(iter(job.calibration)).inputs),
    )
    return LayerRanking(sort_by_worth(layers, costs), costs if profiled else work, _SLACK, quiet=quiet)


def mac_costs(units: Sequence[Unit], model: ir.Model) -> MacCosts:
    """Return the multiply-accumulates of each unit of `model`."""
    macs = node_macs(model)
    return MacCosts({unit.name: sum(macs.get(node, 0) for node in unit.nodes) for unit in units})


def merge_units(layers: Sequence[RankedLayer], units: Sequence[Unit]) -> tuple[RankedLayer, ...]:
    """Map the units of a rewritten model to the units of the original model, and add up their noise.

    Returns:
        The original units that cause noise, the noisiest first.
    """
    unit_of = {node: unit.name for unit in units for node in unit.nodes}
    noise = {unit.name: 0.0 for unit in units}
    for layer in layers:
        named = (n for n in (layer.name, layer.name.removesuffix(VALUE), *layer.nodes) if n in unit_of)
        if (name := next(named, None)) is not None:
            noise[unit_of[name]] += layer.noise
    ranked = [RankedLayer(unit.name, unit.nodes, noise[unit.name]) for unit in units if noise[unit.name] > 0]
    return tuple(sorted(ranked, key=lambda layer: -layer.noise))


def drop_silent(layers: Sequence[RankedLayer]) -> tuple[RankedLayer, ...]:
    """Leave out layers with negligible noise. For example, a layer that computes in 16 bits causes very little noise.
    If it has no multiply-accumulates, its cost in float is zero, so it would come first in a ranking.
    """
    threshold = _SILENT_SHARE * sum(layer.noise for layer in layers)
    return tuple(layer for layer in layers if layer.noise > threshold)


def find_quiet_layers(units: Sequence[Unit], layers: Sequence[RankedLayer], model: ir.Model) -> tuple[QuietLayer, ...]:
    """Return the units of `model` that cause no noise: those that are not among `layers`. Two units are neighbours if
    they exchange a tensor that can be quantized, such as an activation but not an index.
    """
    names = {layer.name for layer in layers}
    non_float = {
        value.name for node in model.graph for value in node.outputs if value.dtype not in (None, ir.DataType.FLOAT)
    }
    maker = {tensor: unit.name for unit in units for tensor in unit.tensors if tensor not in non_float}
    neighbours: dict[str, set[str]] = {unit.name: set() for unit in units}
    for unit in units:
        for made_by in {maker[tensor] for tensor in unit.reads if tensor in maker}:
            neighbours[unit.name].add(made_by)
            neighbours[made_by].add(unit.name)
    return tuple(
        QuietLayer(unit.name, unit.nodes, frozenset(neighbours[unit.name])) for unit in units if unit.name not in names
    )


def sort_by_worth(layers: Sequence[RankedLayer], costs: LayerCosts) -> tuple[RankedLayer, ...]:
    """Return layers in the order in which to keep them in float: the most noise saved per additional microsecond first.

    The cost of a layer depends on its neighbours: a layer between two layers in float saves two conversions.
    """
    remaining = list(layers)
    order: list[RankedLayer] = []
    float_names: set[str] = set()
    while remaining:
        best = max(remaining, key=lambda layer: layer.noise / max(costs.further(layer.name, float_names), _MIN_US))
        order.append(best)
        float_names.add(best.name)
        remaining.remove(best)
    return tuple(order)
