"""What a target's exact kernels compute, on a machine whose own kernels add two products in 16 bits."""

from __future__ import annotations

from dataclasses import replace

from edgeq.backends.base import Artifact
from edgeq.emulate.saturation.audit import audit
from edgeq.errors import RuntimeUnavailableError
from edgeq.hardware.profile import Profile
from edgeq.hardware.target import Target
from edgeq.model.saturation import exact_options
from edgeq.run.session import SessionSettings
from edgeq.scheme import Scheme

_LEFT = (
    "answers were checked on this machine's kernels, which can saturate where the target's do not: onnxruntime has no "
    "exact ones for it here"
)


def on_exact_kernels(settings: SessionSettings) -> SessionSettings:
    """`settings` with what makes onnxruntime's own kernels exact on any x86-64 CPU."""
    return replace(settings, config={**settings.config, **exact_options()})


def exact_settings(artifact: Artifact) -> SessionSettings | None:
    """Settings with which onnxruntime computes `artifact` without saturation on any x86-64 CPU; None where it cannot:
    an operator has no exact kernel, or the option makes a graph of it that onnxruntime itself refuses (two layers that
    share a weight, S8S8 in the QOperator format)."""
    exact = on_exact_kernels(artifact.settings())
    try:
        return None if audit(artifact.model, exact).layers else exact
    except RuntimeUnavailableError:
        return None


def computed_as_there(artifact: Artifact, target: Target, host: Profile | None) -> Artifact:
    """`artifact`, proven with exact kernels where those of `host`, this machine, saturate and are not the target's; a
    note says where that cannot be.

    What saturated sums answer says nothing of a target whose kernels are exact; of one whose own saturate, the audit
    does.
    """
    runs_here = artifact.device == "cpu" and artifact.simulation is None
    foreign = host is not None and host.name != target.profile.name and _saturates(host, artifact.scheme)
    needed = runs_here and foreign
    if needed and (artifact.proof_options or _LEFT in artifact.notes):
        return artifact  # it was looked at for another such target
    exact = needed and exact_settings(artifact) is not None
    notes = tuple(note for note in artifact.notes if note != _LEFT)
    return replace(
        artifact,
        proof_options=exact_options() if exact else {},
        notes=(*notes, _LEFT) if needed and not exact else notes,
    )


def _saturates(host: Profile, scheme: Scheme) -> bool:
    """Whether kernels of `host` do: those of a dynamic scheme multiply the types of a static one."""
    return host.saturates(scheme) or (scheme.mode == "dynamic" and bool(host.hazards.get("saturates_int16")))
