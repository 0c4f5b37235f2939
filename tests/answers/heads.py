"""Find and decode a head as edgeq does, for outputs that a test writes itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from edgeq_device.answers.family import View, load_family
from edgeq_device.answers.head import Head


def find(
    family: str,
    outputs: Mapping[str, Any],
    size: tuple[int, int] = (0, 0),
    labels: Sequence[str] = (),
    named: bool = True,
    inputs: Mapping[str, Any] | None = None,
    **hints: Any,
) -> Head | None:
    """Return the head of a family, or None if it does not fit the outputs."""
    module = load_family(family)
    view = View(outputs, size, len(labels) or None, None, hints, tuple(labels), inputs or {}, named=named)
    fit = module.fit(view)
    parameters = {**fit.parameters, **hints} if fit else {}
    return Head(family, fit.outputs, parameters, module.thresholds, tuple(labels)) if fit else None


def of(*arguments: Any, **options: Any) -> Head:
    """Return the head of a family that must fit."""
    head = find(*arguments, **options)
    assert head is not None
    return head


def floats(values: Any) -> Any:
    return np.asarray(values, np.float32)
