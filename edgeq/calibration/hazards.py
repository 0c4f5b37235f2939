"""Find the tensors that must not become 8-bit integers on any backend, from the graph and the calibration statistics.

| kind | found by | module |
|---|---|---|
| NaN or infinity | the number of such elements | `sentinels` |
| numbers that mean "nothing", such as those in masks | a gap in the histogram, and a constant beyond it | `sentinels` |
| angles, indices, divisors, arguments of logarithms and roots | the effect of rounding on small values | `precision` |
| tensors that the samples leave empty | values that are all zero | `unseen` |
| joins of unlike ranges | the levels that the joint range leaves for the narrowest input | `joins` |

A backend keeps a node in float if the node writes or reads such a tensor (`edgeq.model.int8_prediction`). By contrast,
a backend that quantizes only operands keeps a node in float only if the node reads such a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import onnx_ir as ir

from edgeq.calibration.joins import find_joins
from edgeq.calibration.precision import find_precise
from edgeq.calibration.sentinels import find_nothing
from edgeq.calibration.spreads import ModelSpreads, is_empty
from edgeq.calibration.statistics import Statistics
from edgeq.calibration.unseen import UNSEEN, find_unseen
from edgeq.model.graph import (
    GraphIndex,
    before_layers,
    indexed,
    operator_of,
    readers,
)
from edgeq.model.prepare import PreparedModel


def find_hazards(model: ir.Model | GraphIndex, statistics: Statistics) -> Mapping[str, str]:
    """Return name → reason, for tensors of a prepared model that must not be in 8 bits.

    The reason completes a sentence that begins with the tensor's name. Tensors without statistics are judged by the
    graph alone.
    """
    measured = ModelSpreads(indexed(model), statistics)
    unseen = {name: UNSEEN.format(source) for name, source in find_unseen(measured).items()}
    # A later reason replaces an earlier one. What no sample shows comes last, because no measured reason holds without
    # values.
    return {**find_joins(measured), **find_precise(measured), **find_nothing(measured), **unseen}


def with_hazards(prepared: PreparedModel, statistics: Statistics) -> PreparedModel:
    """Return a copy of a prepared model, with its hazards and its unseen inputs."""
    measured = ModelSpreads(prepared.graph, statistics)
    unseen = tuple(name for name in prepared.graph.inputs if is_empty(measured.spread_of(name)))
    return replace(prepared, hazards=find_hazards(prepared.graph, statistics), unseen=unseen)


def hazards_behind_layers(graph: GraphIndex, hazards: Mapping[str, str]) -> Mapping[str, str]:
    """Return the hazards that cost no layer in float: tensors that only nodes after the last layers write and read."""
    leading = before_layers(graph.model)

    def costs_layer(name: str) -> bool:
        value = graph.values[name]
        nodes = (node for node in (value.producer(), *readers(value)) if node is not None)
        return any(node in leading or operator_of(node).mac_rule for node in nodes)

    return {name: reason for name, reason in hazards.items() if not costs_layer(name)}


def hazard_notes(hazards: Mapping[str, str], prefix: str) -> tuple[str, ...]:
    """Return a note for each kind of hazard. It begins with `prefix`, which states how the tensors are computed."""
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in hazards.items():
        names_by_reason.setdefault(reason, []).append(name)
    return tuple(
        f"{prefix}: tensor {names[0]!r}{_more_note(names)} {reason}" for reason, names in names_by_reason.items()
    )


def _more_note(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
