"""What a record's fields declare: bounded numbers, what is left out or rounded, properties that are written too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

Finite = Annotated[float, msgspec.Meta(ge=-1e200, le=1e200)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e200)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e200)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]

if TYPE_CHECKING:
    NullIsInfinite = float
    computed = property
else:

    class NullIsInfinite(float):
        """A float that may be infinite: it is written as null, which is read back as infinity."""

    class computed(property):  # noqa: N801
        """A property that `plain` writes after the fields."""


Metadata = Mapping[str, Any]

NOT_WRITTEN: Metadata = MappingProxyType({"record": "left out"})
"""Metadata of a field that is not part of the record."""


def written(
    *, name: str | None = None, digits: int | None = None, form: Callable[[Any], Any] | None = None
) -> Metadata:
    """Metadata of a field that is written otherwise than it is held. None is null in any case.

    Args:
        name: key in the record, of a type that is never parsed.
        digits: decimals that it is rounded to.
        form: gives what is written of a value.
    """
    return {"name": name, "form": form if digits is None else lambda value: round(value, digits)}
