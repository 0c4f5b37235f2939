"""Backends by the name that profiles and targets give them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from edgeq.backends.base import Artifact, Backend
from edgeq.backends.cpu import CpuBackend
from edgeq.backends.systolic.backend import SystolicBackend
from edgeq.errors import HardwareError

__all__ = ["Artifact", "Backend", "backend_named"]

_BACKENDS: Mapping[str, Callable[[Mapping[str, Any]], Backend]] = {
    CpuBackend.name: lambda _: CpuBackend(),
    SystolicBackend.name: SystolicBackend,
}


def backend_named(name: str, systolic: Mapping[str, Any] = MappingProxyType({})) -> Backend:
    """The backend that `name` stands for in profiles and targets.

    Args:
        systolic: the target's [systolic] table, for the backend that builds for arrays.

    Raises:
        HardwareError: this version of edgeq cannot build for it.
    """
    if name not in _BACKENDS:
        raise HardwareError(
            f"this version of edgeq cannot build for the {name!r} backend",
            f"Choose a target whose backend is {' or '.join(_BACKENDS)}: `edgeq targets` lists them",
        )
    return _BACKENDS[name](systolic)
