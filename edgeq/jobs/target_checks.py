"""Which checks of a variant hold for its target, and how each was made."""

from __future__ import annotations

from edgeq_device.select import known_wrong
from edgeq_device.version import parse_version

from edgeq.backends.base import Artifact
from edgeq.emulate.saturation.audit import audit, graph_settings
from edgeq.errors import CheckFailedError
from edgeq.hardware.machine import Machine
from edgeq.hardware.target import Target, runs_natively
from edgeq.jobs.job import Built
from edgeq.jobs.proof import Proof
from edgeq.jobs.saturation import Decision, kernel_table, kernels_saturate
from edgeq.measure.checks import Check
from edgeq.measure.coverage import Coverage
from edgeq.model.compatibility import Compatibility, compatibility
from edgeq.model.load import read_model

_MADE = ("load", "accuracy", "self-test")
_SATURATION = "saturation"
_TABLE = "targets/onnxruntime/versions.toml"


def artifact_checks(built: Built, proof: Proof, machine: Machine, decision: Decision | None) -> tuple[Check, ...]:
    """The checks that need no target: those made here, and the model of saturating kernels."""
    load, *others = _made_here(built, proof, machine, decision)
    return load, coverage_check(proof.coverage), *others


def coverage_check(found: Coverage) -> Check:
    """What runs in int8, as a check."""
    if found.basis in ("native", "emulated", "modelled"):
        return Check("coverage", found.basis, found.how, found.summary(), True)
    return Check("coverage", "none", found.how, found.summary())


def _made_here(built: Built, proof: Proof, machine: Machine, decision: Decision | None) -> tuple[Check, ...]:
    """The others; the first is "load"."""
    target = built.target
    found = {
        "load": "",
        "accuracy": f"SQNR {proof.agreement.sqnr_db:.1f} dB on {proof.samples} samples",
        "self-test": "",
    }
    saturation = saturation_check(built, decision)
    if runs_natively(target, machine):
        native = (Check(name, "native", "this machine", found[name], True) for name in _MADE)
        return (*native, *([saturation] if saturation else []))
    if built.artifact.coverage is not None and built.artifact.plugin is not None:
        return tuple(Check(name, "modelled", built.artifact.coverage.how, found[name], True) for name in _MADE)
    if built.artifact.coverage is not None:
        where = "a model of the target's arithmetic, run on this machine"
        return (
            Check("load", "none", "nothing of the target's runtime is here", ""),
            *(Check(name, "modelled", where, found[name], True) for name in _MADE[1:]),
        )
    if saturation is None or target.architecture != machine.architecture:
        where = "run on this machine's kernels, not on the target's"
        return (*(Check(name, "none", where, found[name]) for name in _MADE), *([saturation] if saturation else []))
    exact = saturation.passed is True
    where = "this machine's exact kernels, whose sums are the target's: nothing can saturate there"
    made = ("accuracy", "self-test") if exact else ()
    return (
        *(
            Check(name, "modelled", where, found[name], True)
            if name in made
            else Check(name, "none", "run on this machine's kernels, not on the target's", found[name])
            for name in _MADE
        ),
        saturation,
    )


def saturation_check(built: Built, decision: Decision | None) -> Check | None:
    """What the weights say of kernels that add two products in 16 bits; None where the artifact's do not, or where
    nothing is known of how those of its plug-in do.

    Args:
        decision: what was done about them.
    """
    artifact, target = built.artifact, built.target
    plugin = artifact.plugin.engine if artifact.plugin is not None else None
    known = plugin is None or bool(plugin.int8.saturation)
    if not known or not kernels_saturate(target, artifact.scheme, plugin):
        return None
    if decision is not None and decision.chosen.scheme == decision.mitigations[0].scheme:
        found = decision.audit
    else:
        settings = artifact.settings() if plugin is None else graph_settings(artifact.settings())
        found = audit(artifact.model, settings, table=kernel_table(target, plugin))
    return Check(_SATURATION, "modelled", "the weights, and a model of the kernels", found.summary(), found.safe)


def runtime_requirements(target: Target, artifact: Artifact) -> tuple[Compatibility, Check]:
    """What an artifact needs of onnxruntime, held against what the target has.

    Raises:
        CheckFailedError: the target's is too old, or computes some of it wrongly on such a CPU.
        ModelError: no release that was probed could load it.
    """
    needed = compatibility(read_model(artifact.model), target.architecture)
    device = target.runtime.get("onnxruntime")
    for row in known_wrong():
        # A target that names no release may have any; weights that are right in all of them cost nothing.
        there = row.in_release(device) if device is not None else row.weight_limit > 0
        concerned = row.provider == artifact.provider and set(row.products).intersection(needed.products)
        if there and concerned and row.on(target.architecture, target.features):
            raise CheckFailedError(f"{target.name}: {row.explain(device or 'of some releases', needed.products)}")
    if device is None:
        return needed, Check("runtime", "none", _TABLE, f"needs onnxruntime {needed.minimum}; the target names none")
    if not needed.runs_on(device):
        raise CheckFailedError(
            f"{target.name}: {needed.explain(device)}",
            "Update it there and correct [runtime] in the target's file, or choose another scheme",
        )
    return needed, Check("runtime", "modelled", _TABLE, needed.explain(device), True)


def refuse_left_out(target: Target, artifact: Artifact) -> None:
    """Refuse what the runner on the target would leave out: its release is older than any that was tried.

    Raises:
        CheckFailedError: with both releases.
    """
    device, oldest = target.runtime.get("onnxruntime"), artifact.min_onnxruntime or target.profile.min_onnxruntime
    if device is not None and parse_version(device) < parse_version(oldest):
        raise CheckFailedError(
            f"{target.name}: onnxruntime {device} is older than {oldest}, the oldest that this kind of model was seen "
            "to work with, so that the runner there would leave it out",
            "Update it there and correct [runtime] in the target's file, or set min_onnxruntime in it to try it",
        )
