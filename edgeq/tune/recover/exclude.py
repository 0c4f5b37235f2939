"""Which layers to keep in float: the fewest microseconds for the accuracy that is asked for.

The ranking says what noise each unit causes, the profile what it costs in float. Units are taken greedily by noise
saved for each microsecond. How many are needed is found by building: 1, 2, 4, ... of them until the loss is small
enough, then by bisection. Then those that cost most for what they bring are put back into integers, one by one, as
long as the loss stays small enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from edgeq.model.load import load_model
from edgeq.pipeline.job import Job
from edgeq.progress import SILENT, Progress
from edgeq.scheme import Scheme
from edgeq.tune.recover.costs import Costs, measure_costs
from edgeq.tune.recover.gates import VALUE
from edgeq.tune.recover.run import Recoverer
from edgeq.tune.recover.sensitivity import LayerSensitivity, rank_layers
from edgeq.tune.recover.units import Unit, find_units

REFINEMENTS = 4
_ROUGHLY = 1.5
_LEAST_US = 1.0


@dataclass(frozen=True)
class Ranked:
    """A unit of the float model that the user gave, with its noise at the outputs."""

    unit: Unit
    noise: float


@dataclass(frozen=True)
class Tried:
    """A set of units kept in float, and what was measured."""

    units: tuple[str, ...]
    loss: float


def exclude_layers(
    recoverer: Recoverer,
    job: Job,
    scheme: Scheme,
    names: Sequence[str],
    loss: Callable[[Scheme], float],
    max_drop: float,
    expired: Callable[[], bool],
    *,
    headroom: float = math.inf,
    progress: Progress = SILENT,
) -> tuple[Scheme, ...]:
    """Schemes with layers kept in float that lose at most `max_drop`, the cheapest last; empty if none was found.

    Args:
        recoverer: of `job`.
        scheme: what falls short.
        names: recoveries that go with it.
        loss: builds and measures a scheme; the same unit as `max_drop`.
        expired: whether to stop looking.
        headroom: how far the latency may go from that in integers towards that in float, 1 being all the way.

    Raises:
        EdgeqError: as the stages have it.
    """
    ranked, costs = rank_for_exclusion(recoverer, job, scheme, names, progress=progress)
    order = by_worth(ranked, costs)
    units = {found.unit.name: found.unit for found in ranked}

    def scheme_of(chosen: Sequence[str]) -> Scheme:
        nodes = [node for name in chosen for node in units[name].nodes]
        return scheme.replace(exclude=(*scheme.exclude, *nodes))

    def measured(chosen: Sequence[str]) -> Tried:
        return Tried(tuple(chosen), loss(scheme_of(chosen)))

    found = search(order[: affordable(order, costs, headroom)], costs, measured, max_drop, expired)
    return tuple(scheme_of(tried.units) for tried in found)


def rank_for_exclusion(
    recoverer: Recoverer, job: Job, scheme: Scheme, names: Sequence[str], *, progress: Progress = SILENT
) -> tuple[tuple[Ranked, ...], Costs]:
    """Units of the job's own float model by their noise under `scheme`, and what they cost in float."""
    assert job.calibration is not None
    state = recoverer.state(scheme, names, recoverer.place() / "ranked.onnx", progress=progress)
    assert state.artifact is not None
    found = rank_layers(state.prepared, state.artifact, job.calibration, progress=progress)
    model = load_model(job.prepared.path, external_data="none")
    units = find_units(model, {node.op_type for node in model.graph.node})
    ranked = merged(found, [unit for unit in units if not set(unit.nodes) <= set(scheme.exclude)])
    feed = dict(next(iter(job.calibration)).inputs)
    costs = measure_costs(
        units,
        model,
        job.prepared.path,
        state.artifact.model,
        replace(state.artifact.settings(), intra_op_threads=1),
        feed,
    )
    return ranked, costs


def merged(found: Sequence[LayerSensitivity], units: Sequence[Unit]) -> tuple[Ranked, ...]:
    """The noise of a rewritten model's units, added up in the units of the model that it was made from."""
    unit_of = {node: unit.name for unit in units for node in unit.nodes}
    noise = {unit.name: 0.0 for unit in units}
    for sensitivity in found:
        for name in (sensitivity.unit.name, sensitivity.unit.name.removesuffix(VALUE), *sensitivity.unit.nodes):
            if name in unit_of:
                noise[unit_of[name]] += sensitivity.noise
                break
    ranked = [Ranked(unit, noise[unit.name]) for unit in units if noise[unit.name] > 0]
    return tuple(sorted(ranked, key=lambda r: -r.noise))


def by_worth(ranked: Sequence[Ranked], costs: Costs) -> tuple[str, ...]:
    """Units in the order in which to keep them in float: most noise saved for each further microsecond first.

    What a unit costs depends on its neighbours: between two units in float it saves two conversions.
    """
    remaining = {found.unit.name: found.noise for found in ranked}
    order: list[str] = []
    kept: set[str] = set()
    while remaining:
        best = max(remaining, key=lambda name: remaining[name] / max(costs.further(name, kept), _LEAST_US))
        order.append(best)
        kept.add(best)
        del remaining[best]
    return tuple(order)


def affordable(order: Sequence[str], costs: Costs, headroom: float) -> int:
    """How many of `order` may go to float: never all, that would be the float model.

    What a profile of single nodes tells of a whole model is rough: half as much again is allowed.
    """
    span = sum(costs.float_us.values()) - sum(costs.int8_us.values())
    limit = _ROUGHLY * headroom * span if headroom < math.inf else math.inf
    kept: set[str] = set()
    spent, count = 0.0, 0
    for position, name in enumerate(order[:-1], 1):
        spent += costs.further(name, kept)
        kept.add(name)
        if spent <= limit:
            count = position
    return count


def search(
    order: Sequence[str],
    costs: Costs,
    measured: Callable[[Sequence[str]], Tried],
    max_drop: float,
    expired: Callable[[], bool],
    *,
    refinements: int = REFINEMENTS,
) -> tuple[Tried, ...]:
    """Sets that lose at most `max_drop`, each cheaper than the one before; empty where none was found in time."""
    most = len(order)
    failed, passed = 0, 0
    found: list[Tried] = []
    size = 1
    while most > failed and not expired():
        size = min(size, most)
        tried = measured(order[:size])
        if tried.loss <= max_drop:
            passed = size
            found.append(tried)
            break
        failed = size
        size *= 2
    while passed - failed > 1 and not expired():
        middle = (passed + failed) // 2
        tried = measured(order[:middle])
        if tried.loss <= max_drop:
            passed = middle
            found.append(tried)
        else:
            failed = middle
    if not found:
        return ()
    kept = list(found[-1].units)
    for name in _dearest(kept, costs)[:refinements]:
        if expired() or len(kept) == 1:
            break
        without = [unit for unit in kept if unit != name]
        if without == list(order[: len(without)]):
            continue  # it was tried on the way here, and fell short
        tried = measured(without)
        if tried.loss <= max_drop:
            kept = without
            found.append(tried)
    return tuple(found)


def _dearest(kept: Sequence[str], costs: Costs) -> list[str]:
    """Units by what putting them back into integers would save, the most first; those that save nothing left out."""
    saved = np.array([costs.further(name, set(kept)) for name in kept])
    return [kept[place] for place in np.argsort(-saved, kind="stable") if saved[place] > 0]
