"""The ranking of a static scheme's layers for being kept in float, from tensors and the runtime's own profile.

The noise of each unit comes from one pass over few samples (`sensitivity`), its cost from a profile of the float and of
the quantized model (`costs`). `edgeq.tune.float_layers` chooses by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import onnx_ir as ir

from edgeq.model.macs import node_macs
from edgeq.pipeline.job import Job
from edgeq.progress import SILENT, Progress
from edgeq.scheme import Scheme
from edgeq.tune.float_layers import LayerCosts, MacCosts, QuietLayer, RankedLayer, Ranking
from edgeq.tune.recover.costs import measure_costs
from edgeq.tune.recover.gates import VALUE
from edgeq.tune.recover.run import Recoverer
from edgeq.tune.recover.sensitivity import SAMPLES, LayerSensitivity, rank_layers
from edgeq.tune.recover.units import Unit, find_units

_SLACK = 1.5
"""What a profile of single nodes says of a whole model is rough: half as much again is allowed."""
_LEAST_US = 1.0


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
) -> Ranking:
    """Units of the job's own float model under `scheme`, by noise for each microsecond in float.

    Args:
        recoverer: of `job`.
        names: recoveries that go with the scheme.
        profiled: whether the kernels of the profile are those that it will run in. If not, what may go to float is
            limited by its multiply-accumulates: onnxruntime's own int8 kernels may be slower than float32 where
            another engine's are twice as fast.
        timed: whether anything is timed; else layers are ordered by noise for each multiply-accumulate, as they are
            where the target's model is simulated.
        count: samples on which the noise of each unit is followed to the outputs.

    Raises:
        EdgeqError: as the stages have it.
    """
    assert job.calibration is not None
    state = recoverer.state(scheme, names, recoverer.place() / "ranked.onnx", progress=progress)
    assert state.artifact is not None
    found = rank_layers(state.prepared, state.artifact, job.calibration, count=count, progress=progress)
    units = find_units(job.prepared.model)
    quantized = [unit for unit in units if not set(unit.nodes) <= set(scheme.exclude)]
    layers, work = merged(found, quantized), mac_costs(units, job.prepared.model)
    quiet = quiet_among(quantized, layers, job.prepared.model)
    if not timed or state.artifact.simulation is not None:  # no kernel of a simulation is the target's
        return Ranking(by_worth(layers, work), work, _SLACK, quiet=quiet)
    costs = measure_costs(
        units,
        job.prepared,
        state.artifact.model,
        replace(state.artifact.settings(), intra_op_threads=1),
        dict(next(iter(job.calibration)).inputs),
    )
    return Ranking(by_worth(layers, costs), costs if profiled else work, _SLACK, quiet=quiet)


def mac_costs(units: Sequence[Unit], model: ir.Model) -> MacCosts:
    """Return the multiply-accumulates of each unit of `model`."""
    macs = node_macs(model)
    return MacCosts({unit.name: sum(macs.get(node, 0) for node in unit.nodes) for unit in units})


def merged(found: Sequence[LayerSensitivity], units: Sequence[Unit]) -> tuple[RankedLayer, ...]:
    """The noise of a rewritten model's units, added up in the units of the model that it was made from.

    Returns:
        Units that cause noise, the most first.
    """
    unit_of = {node: unit.name for unit in units for node in unit.nodes}
    noise = {unit.name: 0.0 for unit in units}
    for sensitivity in found:
        for name in (sensitivity.unit.name, sensitivity.unit.name.removesuffix(VALUE), *sensitivity.unit.nodes):
            if name in unit_of:
                noise[unit_of[name]] += sensitivity.noise
                break
    ranked = [RankedLayer(unit.name, unit.nodes, noise[unit.name]) for unit in units if noise[unit.name] > 0]
    return tuple(sorted(ranked, key=lambda layer: -layer.noise))


def quiet_among(units: Sequence[Unit], layers: Sequence[RankedLayer], model: ir.Model) -> tuple[QuietLayer, ...]:
    """Those of `units` of `model` that are not among `layers`, because they cause no noise. Neighbours are those that
    hand over what can be quantized: not indices."""
    names = {layer.name for layer in layers}
    others = {
        value.name for node in model.graph for value in node.outputs if value.dtype not in (None, ir.DataType.FLOAT)
    }
    maker = {tensor: unit.name for unit in units for tensor in unit.tensors if tensor not in others}
    neighbours: dict[str, set[str]] = {unit.name: set() for unit in units}
    for unit in units:
        for made_by in {maker[tensor] for tensor in unit.reads if tensor in maker}:
            neighbours[unit.name].add(made_by)
            neighbours[made_by].add(unit.name)
    return tuple(
        QuietLayer(unit.name, unit.nodes, frozenset(neighbours[unit.name])) for unit in units if unit.name not in names
    )


def by_worth(layers: Sequence[RankedLayer], costs: LayerCosts) -> tuple[RankedLayer, ...]:
    """Layers in the order in which to keep them in float: most noise saved for each further microsecond first.

    What a layer costs depends on its neighbours: between two layers in float it saves two conversions.
    """
    remaining = list(layers)
    order: list[RankedLayer] = []
    kept: set[str] = set()
    while remaining:
        best = max(remaining, key=lambda layer: layer.noise / max(costs.further(layer.name, kept), _LEAST_US))
        order.append(best)
        kept.add(best.name)
        remaining.remove(best)
    return tuple(order)
