"""Backends by the name that profiles and targets give them."""

from __future__ import annotations

from edgeq.backends.base import Artifact, Backend
from edgeq.backends.cpu import CpuBackend
from edgeq.errors import HardwareError

__all__ = ["Artifact", "Backend", "backend_named"]

_BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (CpuBackend(),)}


def backend_named(name: str) -> Backend:
    """The backend that `name` stands for in profiles and targets.

    Raises:
        HardwareError: this version of edgeq cannot build for it.
    """
    if name not in _BACKENDS:
        raise HardwareError(
            f"this version of edgeq cannot build for the {name!r} backend",
            f"Choose a target whose backend is {' or '.join(_BACKENDS)}: `edgeq targets` lists them",
        )
    return _BACKENDS[name]
