"""onnxruntime's enumerations by member, or by the name of one: scripts of several eras and packages mix them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeq.errors import UsageError

METHODS: Mapping[str, str] = {"MinMax": "minmax", "Entropy": "entropy", "Percentile": "percentile"}
"""CalibrationMethod that gives ranges of integers → edgeq's method."""


def member(enumeration: str, value: Any) -> Any:
    """The member of `onnxruntime.quantization.<enumeration>` that `value`, a member or its name, stands for.

    Raises:
        UsageError: there is none.
    """
    import onnxruntime.quantization

    known = getattr(onnxruntime.quantization, enumeration)
    name = name_of_member(value)
    if name not in known.__members__:
        raise UsageError(f"{enumeration} has no {name!r}", f"It can be {', '.join(known.__members__)}")
    return known[name]


def name_of_member(value: Any) -> str:
    """The name of an enumeration's member, given as the member or as that name."""
    return str(getattr(value, "name", value))


def quant_type(value: Any) -> Any:
    """A QuantType of integers, by member or name.

    Raises:
        UsageError: unknown, or a float type.
    """
    found = member("QuantType", value)
    if "FLOAT" in found.name:
        raise UsageError(f"{found.name} has no kernels on the CPU", "Choose an integer QuantType")
    return found
