"""Accept onnxruntime's enumerations by member or by name, because scripts of several eras and packages mix them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeq.errors import UsageError

METHODS: Mapping[str, str] = {"MinMax": "minmax", "Entropy": "entropy", "Percentile": "percentile"}
"""CalibrationMethod that gives ranges for integers → edgeq's method."""


def member(enumeration: str, value: Any) -> Any:
    """Return a member of `onnxruntime.quantization.<enumeration>`. `value` is the member or its name.

    Raises:
        UsageError: the enumeration does not have this member.
    """
    # Imported here, so that a command's help and its wrong options need no onnxruntime.
    import onnxruntime.quantization

    members = getattr(onnxruntime.quantization, enumeration)
    name = name_of_member(value)
    if name not in members.__members__:
        raise UsageError(f"{enumeration} has no {name!r}", f"It can be {', '.join(members.__members__)}")
    return members[name]


def name_of_member(value: Any) -> str:
    """Return the name of an enumeration's member. `value` is the member or its name."""
    return str(getattr(value, "name", value))


def quant_type(value: Any) -> Any:
    """Return an integer QuantType. `value` is the member or its name.

    Raises:
        UsageError: the type is unknown or is a float type.
    """
    type_member = member("QuantType", value)
    # onnxruntime lists float8 among its types too.
    if "FLOAT" in type_member.name:
        raise UsageError(f"{type_member.name} has no kernels on the CPU", "Choose an integer QuantType")
    return type_member
