"""Backends by the name that profiles and targets give them."""

from __future__ import annotations

from collections.abc import Mapping

from edgeq.backends.base import Alternative, Artifact, Backend, TargetedBackend
from edgeq.backends.cpu import CpuBackend
from edgeq.backends.systolic.backend import SystolicBackend
from edgeq.backends.tensorrt import TensorrtBackend
from edgeq.calibrate.ranges import Range
from edgeq.errors import HardwareError
from edgeq.hardware.target import Target

__all__ = ["Alternative", "Artifact", "Backend", "backend_for", "backend_named"]

_BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (CpuBackend(), SystolicBackend(), TensorrtBackend())
}


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


def backend_for(
    target: Target, observed: Mapping[str, Range] | None = None, cut: Mapping[str, float] | None = None
) -> Backend:
    """The backend of `target`, told of it where it wants to know.

    Args:
        observed: what calibration saw, by tensor, unclipped.
        cut: share of each tensor's power that its range cuts off (`edgeq.calibrate.clipping`).
    """
    backend = backend_named(target.backend)
    return backend.configured(target, observed or {}, cut or {}) if isinstance(backend, TargetedBackend) else backend
