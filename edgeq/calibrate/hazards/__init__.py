"""Tensors that must not become 8-bit integers on any backend, found from the graph and from what calibration saw.

| kind | found by | where |
|---|---|---|
| NaN or infinity | the count of such elements | `nothing` |
| numbers that mean "nothing", as masks have them | a gap in the histogram, and a constant beyond it | `nothing` |
| angles, divisors, arguments of logarithms and roots | what rounding would do to small values | `precision` |
| joins of unlike ranges | levels that the joint range leaves the narrowest input | `joins` |

A backend leaves every node in float that makes or reads such a tensor (`edgeq.model.int8_prediction`), or, where it
quantizes operands alone, every node that reads one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import onnx_ir as ir

from edgeq.calibrate.hazards.joins import find_joins
from edgeq.calibrate.hazards.measured import Measured
from edgeq.calibrate.hazards.nothing import find_nothing
from edgeq.calibrate.hazards.precision import find_precise
from edgeq.calibrate.statistics import Statistics
from edgeq.model.prepare import PreparedModel


def find_hazards(model: ir.Model, statistics: Statistics) -> Mapping[str, str]:
    """Return the tensors of a prepared model that must not be in 8 bits, by name, each with the reason.

    The reason follows the tensor's name in a sentence. Tensors without statistics are judged by the graph alone.
    """
    measured = Measured(model, statistics)
    return {**find_joins(measured), **find_precise(measured), **find_nothing(measured)}


def calibrated(prepared: PreparedModel, statistics: Statistics) -> PreparedModel:
    """Return a prepared model with its hazards, and a note for each kind of them."""
    hazards = find_hazards(prepared.model, statistics)
    alike: dict[str, list[str]] = {}
    for name, reason in hazards.items():
        alike.setdefault(reason, []).append(name)
    notes = (f"in float: tensor {names[0]!r}{_others(names)} {reason}" for reason, names in alike.items())
    return replace(prepared, hazards=hazards, notes=(*prepared.notes, *notes))


def _others(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
