"""Which checks of a variant hold for its target, and how each was made."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from edgeq_device.engines import FLOAT, find_library, plugin_of
from edgeq_device.select import known_wrong
from edgeq_device.version import parse_version

from edgeq import demo
from edgeq.backends.base import Artifact
from edgeq.emulate.emulator import integer_model
from edgeq.emulate.saturation.audit import audit, graph_settings
from edgeq.errors import CheckFailedError, EdgeqError, UsageError
from edgeq.hardware.detect import Machine
from edgeq.hardware.target import Target, runs_natively
from edgeq.jobs.builds import Builds
from edgeq.jobs.job import Built
from edgeq.jobs.proof import Proof
from edgeq.jobs.saturation import Decision, kernel_table, kernels_saturate
from edgeq.jobs.variants import PackagedVariant
from edgeq.measure.comparison import decibels
from edgeq.measure.coverage import Check, Coverage
from edgeq.model.compatibility import Compatibility, compatibility
from edgeq.model.edit import bytes_of_text
from edgeq.model.load import read_model
from edgeq.run.engines import Engine, EngineChoice
from edgeq.run.session import Guest, SessionSettings, onnxruntime, open_session, start_engine
from edgeq.scheme import Scheme
from edgeq.util.resources import device_errors

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


LEAST_DB = 90.0
"""How close f32 must come to ONNX Runtime's float32: what rounding in another order leaves, and bf16 does not."""
_PRODUCTS = 256
_CPU = "CPU"
# What one step of difference in some of 256 leaves.
_LEAST_PAIRS_DB = 30.0
_PAIRS = """<ir_version: 8, opset_import: ["": 17]>
pairs (float[1, 16, 8, 8] x) => (float[1, 16, 8, 8] y)
<float fine = {0.03}, uint8 middle = {128}, float small = {0.01}, int8 none = {0}, float coarse = {0.25}> {
    q = QuantizeLinear(x, fine, middle)
    d = DequantizeLinear(q, fine, middle)
    f = DequantizeLinear(w, small, none)
    c = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(d, f)
    r = QuantizeLinear(c, coarse, middle)
    y = DequantizeLinear(r, coarse, middle)
}"""
# Products of two weights of 7 bits and two activations of 8 bits fit into 16 bits.
_SMALL, _LARGE = 63, 127


def check_engine(engine: Engine, precisions: tuple[str, ...]) -> tuple[bool, str]:
    """Whether the answers of an installed plug-in are right, and what was found, in one line.

    Args:
        precisions: those to try besides f32.
    """
    if _CPU not in engine.devices:
        return _check_elsewhere(engine, precisions)
    try:
        with start_engine(engine) as guest, tempfile.TemporaryDirectory(prefix="edgeq-doctor-") as folder:
            exact = {largest: _wrong_by(guest, engine, Path(folder), largest) for largest in (_SMALL, _LARGE)}
            db = {name: _agreement(guest, engine, name) for name in dict.fromkeys((FLOAT, *precisions))}
    except EdgeqError as error:
        return False, str(error)
    faults = []
    if exact[_SMALL]:
        faults.append(f"int8 answers are wrong by up to {exact[_SMALL]:.2g} of the largest")
    if db[FLOAT] < LEAST_DB:
        faults.append(_not_float32(db[FLOAT]))
    if faults:
        return False, "; ".join(faults)
    limit = f"8-bit weights saturate, by up to {exact[_LARGE]:.2g} of the largest answer" if exact[_LARGE] else "exact"
    figures = ", ".join(f"{name} {value:.1f} dB" for name, value in db.items())
    return True, f"int8 {limit}; to onnxruntime's float32: {figures}"


def _check_elsewhere(engine: Engine, precisions: tuple[str, ...]) -> tuple[bool, str]:
    """The same for other hardware, which need not round as CPUs do: a convolution between Q/DQ pairs, held against ONNX
    Runtime's kernels, and the float demo model, unless the engine runs only what a backend has built for it."""
    random = np.random.default_rng(0)
    x = random.normal(size=(1, 16, 8, 8)).astype(np.float32)
    model = bytes_of_text(_PAIRS, {"w": random.integers(-127, 128, (16, 16, 3, 3)).astype(np.int8)})
    try:
        with start_engine(engine) as guest, tempfile.TemporaryDirectory(prefix="edgeq-doctor-") as folder:
            file = Path(folder) / "pairs.onnx"
            file.write_bytes(model)
            found = guest.open(file, SessionSettings(engine=engine)).run(None, {"x": x})[0]
            right = open_session(file).run(None, {"x": x})[0].astype(np.float64)
            floats = () if engine.int8.backend else dict.fromkeys((FLOAT, *precisions))
            db = {name: _agreement(guest, engine, name) for name in floats}
    except EdgeqError as error:
        return False, str(error)
    if db and db[FLOAT] < LEAST_DB:
        return False, _not_float32(db[FLOAT])
    pairs = decibels(float((right**2).sum()), float(((found - right) ** 2).sum()))
    kind = "its simulator" if engine.simulated else "it"
    figures = "".join(f", {name} {value:.1f} dB" for name, value in db.items())
    what = f"a Q/DQ convolution in {kind}: {pairs:.1f} dB to onnxruntime's CPU kernels{figures}"
    return pairs >= _LEAST_PAIRS_DB, what


def _not_float32(db: float) -> str:
    return f"f32 is not float32: {db:.1f} dB to ONNX Runtime's, {LEAST_DB:g} at least"


def _wrong_by(guest: Guest, engine: Engine, folder: Path, largest: int) -> float:
    """Largest error of an integer Conv and MatMul with weights up to ±`largest`, as a share of the largest answer."""
    random = np.random.default_rng(largest)
    weights = random.integers(-largest, largest + 1, (16, _PRODUCTS)).astype(np.int8)
    weights[0] = largest
    samples = random.integers(0, 256, (4, _PRODUCTS)).astype(np.float32)
    samples[0] = 255
    file = folder / f"integers-{largest}.onnx"
    file.write_bytes(integer_model(weights))
    session = guest.open(file, SessionSettings(engine=engine))
    right = samples.astype(np.int64) @ weights.T.astype(np.int64)
    found = session.run(["conv", "product"], {"x": samples[:, :, None, None]})
    worst = max(np.abs(values.reshape(right.shape) - right).max() for values in found)
    return float(worst / np.abs(right).max())


def _agreement(guest: Guest, engine: Engine, precision: str) -> float:
    """SQNR in dB of the demo model in `engine` to ONNX Runtime's float32."""
    with np.load(demo.CALIBRATION) as samples:
        feed = {"image": samples["image"][:8]}
    right = open_session(demo.MODEL).run(None, feed)[0].astype(np.float64)
    found = guest.open(demo.MODEL, SessionSettings(engine=engine, precision=precision)).run(None, feed)[0]
    return decibels(float((right**2).sum()), float(((found - right) ** 2).sum()))


def check_engines(engines: Sequence[EngineChoice], targets: Sequence[Target]) -> tuple[EngineChoice, ...]:
    """The plug-ins among `engines`, each once; onnxruntime's own kernels are in every bundle.

    Raises:
        UsageError: one that exists for none of `targets`, or that the runner on devices does not know.
        RuntimeUnavailableError: one that cannot be used here, with the command that helps.
    """
    plugins = tuple({choice.name: choice for choice in engines if choice.engine.module}.values())
    for choice in plugins:
        if plugin_of(choice.engine.provider) is None:
            raise UsageError(f"{choice.name} is not among the engines that devices know", "Leave --engine out")
        if not any(exists_for(choice.engine, target) for target in targets):
            named = ", ".join(target.name for target in targets)
            raise UsageError(f"there is no {choice.engine.name} for {named}", "Leave --engine out")
        with device_errors():
            find_library(choice.engine, str(onnxruntime().__version__))
    return plugins


def exists_for(engine: Engine, target: Target) -> bool:
    """Whether `engine` runs on the kind of processor that `target` is built for, and exists for its architecture."""
    kind = "CPU" if target.profile.min_compute_capability is None else "GPU"
    made_for = {platform.split()[1] for platform in engine.platforms}
    return kind in engine.devices and target.systolic == {} and (not made_for or target.architecture in made_for)


def in_engine(
    builds: Builds,
    variant: PackagedVariant,
    scheme: Scheme,
    choice: EngineChoice,
    machine: Machine,
    decision: Decision | None = None,
) -> PackagedVariant:
    """The model of `variant`, proven in `choice`.

    Args:
        decision: what was done about saturation in that engine.

    Raises:
        EngineError: the engine crashes, hangs or refuses the model.
    """
    built = dataclasses.replace(variant.built, artifact=variant.built.artifact.in_engine(choice))
    proof = builds.prove(built, scheme, machine, native=variant.native)
    where = f"{choice.name} on this machine" + ("" if variant.native else ", not on the target's kernels")
    found = {"load": "", "accuracy": f"SQNR {proof.agreement.sqnr_db:.1f} dB on {proof.samples} samples"}
    made = [
        Check(name, "native" if variant.native else "none", where, found.get(name, ""), variant.native or None)
        for name in ("load", "accuracy", "self-test")
    ]
    runtime = [check for check in variant.checks if check.name == "runtime"]
    saturation = saturation_check(built, decision)
    checks = (*made, coverage_check(proof.coverage), *([saturation] if saturation else []), *runtime)
    return dataclasses.replace(variant, built=built, proof=proof, checks=checks, decision=decision)
