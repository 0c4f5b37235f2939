"""Rank the layers of a static scheme in the order in which to keep them in float: by the noise that each unit of the
graph causes (`layer_noise`), relative to its cost in float (`unit_costs`). `edgeq.tuning.float_layers` chooses layers
from the ranking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import onnx_ir as ir

from edgeq.prove.job import Job
from edgeq.scheme import Scheme
from edgeq.tuning.float_layers import LayerCosts, LayerRanking, QuietLayer, RankedLayer
from edgeq.tuning.recover.layer_noise import rank_layers
from edgeq.tuning.recover.methods.split_gates import VALUE
from edgeq.tuning.recover.run import Recoverer
from edgeq.tuning.recover.unit_costs import mac_costs, measure_costs
from edgeq.tuning.recover.units import Unit, find_units
from edgeq.util.display import SILENT, Progress

# Share of the total noise of all layers, and noise relative to the outputs' signal. A layer in int8 causes more than
# one of them: if a single layer ruins the outputs, the noise of the others is a small share of it.
_SILENT_SHARE, _SILENT_NOISE = 1e-4, 1e-6
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

    Raises:
        EdgeqError: the build, the ranking or the profile fails.
    """
    assert job.calibration is not None
    state = recoverer.state(scheme, names, recoverer.place() / "ranked.onnx", progress=progress)
    assert state.artifact is not None
    ranked = rank_layers(state.prepared, state.artifact, job.calibration, basis=job.basis, progress=progress)
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


def merge_units(layers: Sequence[RankedLayer], units: Sequence[Unit]) -> tuple[RankedLayer, ...]:
    """Map the units of a rewritten model to the units of the original model, and add up their noise.

    Returns:
        The original units that cause noise, the noisiest first.
    """
    unit_of = {node: unit.name for unit in units for node in unit.nodes}
    noise = {unit.name: 0.0 for unit in units}
    for layer in layers:
        # A split gate's second form belongs to the unit of the layer that it was copied from.
        named = (n for n in (layer.name, layer.name.removesuffix(VALUE), *layer.nodes) if n in unit_of)
        if (name := next(named, None)) is not None:
            noise[unit_of[name]] += layer.noise
    ranked = [RankedLayer(unit.name, unit.nodes, noise[unit.name]) for unit in units if noise[unit.name] > 0]
    return tuple(sorted(ranked, key=lambda layer: -layer.noise))


def drop_silent(layers: Sequence[RankedLayer]) -> tuple[RankedLayer, ...]:
    """Leave out layers with negligible noise. For example, a layer that computes in 16 bits causes very little noise.
    If it has no multiply-accumulates, its cost in float is zero, so it would come first in a ranking.
    """
    threshold = min(_SILENT_NOISE, _SILENT_SHARE * sum(layer.noise for layer in layers))
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
        # Greedy, because the cost of a layer changes with each neighbour that goes to float.
        best = max(remaining, key=lambda layer: layer.noise / max(costs.extra_cost(layer.name, float_names), _MIN_US))
        order.append(best)
        float_names.add(best.name)
        remaining.remove(best)
    return tuple(order)
