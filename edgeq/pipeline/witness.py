"""Which checks of a variant hold for its target, and on whose word."""

from __future__ import annotations

from edgeq.emulate.saturation.audit import audit
from edgeq.hardware.machine import Machine
from edgeq.hardware.target import Target, runs_natively
from edgeq.measure.checks import Check
from edgeq.model.compatibility import Compatibility
from edgeq.pipeline.job import Built
from edgeq.pipeline.proof import Proof
from edgeq.pipeline.remedies import Decision

_MADE = ("load", "coverage", "accuracy", "self-test")
_SATURATION = "saturation"


def own_checks(built: Built, proof: Proof, machine: Machine, decision: Decision | None) -> tuple[Check, ...]:
    """What edgeq can say by itself: checks made here, and the model of saturating kernels."""
    target = built.target
    found = {
        "load": "",
        "coverage": f"{proof.coverage.share:.1%} of the multiply-accumulates on integers",
        "accuracy": f"SQNR {proof.agreement.sqnr_db:.1f} dB on {proof.samples} samples",
        "self-test": "",
    }
    if runs_natively(target, machine):
        return tuple(Check(name, "native", "this machine", found[name], True) for name in _MADE)
    if built.artifact.coverage is not None:
        where = "a model of the target's arithmetic, run on this machine"
        return (
            Check("load", "none", "nothing of the target's runtime is here", ""),
            *(Check(name, "modelled", where, found[name], True) for name in _MADE[1:]),
        )
    saturation = _saturation(built, decision)
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


def _saturation(built: Built, decision: Decision | None) -> Check | None:
    if not built.target.profile.saturates(built.artifact.scheme):
        return None
    if decision is not None and decision.chosen.scheme == decision.remedies[0].scheme:
        found = decision.audit
    else:
        found = audit(built.artifact.model, built.artifact.settings())
    return Check(_SATURATION, "modelled", "the weights, and a model of the kernels", found.summary(), found.safe)


def runtime_check(target: Target, compatibility: Compatibility) -> Check:
    """Whether the runtime that the target has knows the model, by the table of what each version knows."""
    device = target.runtime.get("onnxruntime")
    if device is None:
        detail = f"needs onnxruntime {compatibility.minimum}; the target names none"
        return Check("runtime", "none", "targets/onnxruntime/versions.toml", detail)
    detail = compatibility.explain(device)
    return Check("runtime", "modelled", "targets/onnxruntime/versions.toml", detail, compatibility.runs_on(device))
