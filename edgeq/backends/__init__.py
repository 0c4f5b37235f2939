"""Backends by the name that profiles and targets give them."""

from __future__ import annotations

from collections.abc import Mapping

from edgeq.backends.base import Alternative, Artifact, Backend, TargetedBackend
from edgeq.calibrate.ranges import Range
from edgeq.hardware.target import Target
from edgeq.registry import BACKENDS, Registry

__all__ = ["REGISTRY", "Alternative", "Artifact", "Backend", "backend_for", "backend_named"]

REGISTRY: Registry[Backend] = Registry(
    BACKENDS,
    lambda found: isinstance(found, Backend),
    "edgeq.backends.Backend",
    make=lambda found: found() if isinstance(found, type) else found,
)


def backend_named(name: str) -> Backend:
    """The backend that `name` stands for in profiles and targets: edgeq's own, or one of a plug-in.

    Raises:
        HardwareError: no backend has that name.
        UsageError: the plug-in that registers it is broken.
    """
    return REGISTRY.load(name)


def backend_for(
    target: Target, observed: Mapping[str, Range] | None = None, cut: Mapping[str, float] | None = None
) -> Backend:
    """The backend of `target`, configured for it where its artifacts depend on more than the scheme.

    Args:
        observed: extrema that calibration saw, by tensor, unclipped.
        cut: share of each tensor's power that its range cuts off (`edgeq.calibrate.clipping`).
    """
    backend = backend_named(target.backend)
    return backend.configured(target, observed or {}, cut or {}) if isinstance(backend, TargetedBackend) else backend
