"""`edgeq verify BUNDLE --on TARGET`: what a device of that kind would load from a bundle, on its kernels."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edgeq_device.engines import plugin_of
from edgeq_device.package import MAIN, Bundle
from edgeq_device.select import Device, judge, select
from edgeq_device.sessions import read_device
from edgeq_device.variants import Variant

from edgeq.bundle.verify import opened
from edgeq.data.samples import Samples, open_samples
from edgeq.emulate.check import COMPILED, EmulatedCheck, check_variant, route_for
from edgeq.emulate.routes import NATIVE, NOT_RUN, Simulator
from edgeq.errors import BundleError, HardwareError, RuntimeUnavailableError, UsageError
from edgeq.hardware.detect import detect_machine
from edgeq.hardware.machine import Machine
from edgeq.hardware.target import AUTO, Target, named_target, resolve
from edgeq.measure.loaded_model import variant_preprocessing
from edgeq.measure.task import TaskOptions, make_task
from edgeq.model.load import own_signature
from edgeq.run.engines import load_engines
from edgeq.util.display import SILENT, Progress
from edgeq.util.records import NOT_WRITTEN

ALL = "all"


@dataclass(frozen=True)
class VerifyRequest:
    """What to verify.

    Attributes:
        bundle: directory or .edgeq file.
        on: targets, or "all" for each variant on the target that it was built for.
        variant: this one alone.
        data: samples, as `edgeq.data.samples.open_samples` takes them; None runs the self-test alone.
        count: at most so many of them.
        preprocess: None takes the bundle's.
        labels, task, options: what accuracy is measured by; without a task, agreement alone.
        max_drop: accuracy that may be lost against this machine, as a fraction.
        expect: the sha256 that the bundle's manifest must have.
    """

    bundle: Path
    on: tuple[str, ...]
    variant: str | None = None
    data: Any = None
    count: int | None = None
    preprocess: Any = None
    labels: Any = None
    task: str | None = None
    options: TaskOptions | None = None
    max_drop: float | None = None
    expect: str | None = None


@dataclass(frozen=True)
class Verified:
    """The checks, in the order of the targets."""

    bundle: Path
    checks: tuple[EmulatedCheck, ...]
    max_drop: float | None = field(metadata=NOT_WRITTEN)
    manifest_sha256: str = ""

    def check(self) -> None:
        """Raise CheckFailedError where one failed, RuntimeUnavailableError where none could be run."""
        for check in self.checks:
            check.check(self.max_drop)
        if all(check.status == NOT_RUN for check in self.checks):
            why = "; ".join(dict.fromkeys(f"{check.target}: {check.reason}" for check in self.checks))
            raise RuntimeUnavailableError(f"{self.bundle}: nothing could be checked ({why})")


def verify_on(
    request: VerifyRequest, *, simulators: Mapping[str, Simulator] | None = None, progress: Progress = SILENT
) -> Verified:
    """Check a bundle on the kernels of targets; `Verified.check` turns a bad one into an error.

    Raises:
        BundleError: the bundle is damaged, or has nothing for a target.
        UsageError, HardwareError, DataError: something is wrong with the request, a target, or the samples.
    """
    if request.data is None and (request.count is not None or request.task is not None):
        raise UsageError("there are no samples to take", "Give them with --data")
    task = make_task(request.task, request.options or TaskOptions()) if request.task is not None else None
    machine = detect_machine()
    checks = []
    with opened(request.bundle, expect=request.expect) as bundle:
        pairs = list(_pairs(bundle, request, machine))
        for variant, target in pairs:
            lacks = "; ".join(judge(variant, read_device()).reasons) if _stands_in(variant) else ""
            if lacks:
                checks.append(EmulatedCheck(target.name, variant.name, NOT_RUN, "", NOT_RUN, lacks))
                continue
            samples = samples_of(request, variant, progress) if request.data is not None else None
            checks.append(
                check_variant(
                    variant,
                    target,
                    machine,
                    samples=samples,
                    count=request.count,
                    task=task,
                    simulators=simulators,
                    progress=progress,
                )
            )
    return Verified(request.bundle, tuple(checks), request.max_drop, bundle.manifest_sha256)


def _pairs(bundle: Bundle, request: VerifyRequest, machine: Machine) -> Iterator[tuple[Variant, Target]]:
    """Which variant is run on which target."""
    variants = bundle.components.get(MAIN, ())
    known = {variant.name: variant for variant in variants}
    if request.variant is not None and request.variant not in known:
        raise BundleError(f"{bundle.source} has no variant {request.variant!r}", f"It has {', '.join(known)}")
    for name in request.on:
        if name == ALL:
            for variant in variants:
                if request.variant in (None, variant.name):
                    yield variant, _built_for(variant, machine)
        else:
            target = resolve(name, machine)
            for variant in _taken(bundle, target, request.variant):
                yield variant, target


def _stands_in(variant: Variant) -> bool:
    """Tell whether `variant` was built for no target: it runs on any device of its kind where another one does not."""
    return not {"profile", "target"} & variant.info.keys()


def _built_for(variant: Variant, machine: Machine) -> Target:
    """The target that a variant was built for; its profile where it followed the build machine, or where it was a file
    of the user's own, of which a bundle records the name alone. One that stands in for others is checked here."""
    if _stands_in(variant):
        return resolve(AUTO, machine)
    profile, target = (variant.info.get(key) for key in ("profile", "target"))
    if not isinstance(profile, str) or not isinstance(target, str):
        raise BundleError(f"variant {variant.name} does not record what it was built for", "Name a target with --on")
    unknown: HardwareError | None = None
    for name in (target, profile):
        try:
            found = named_target(name, machine)
        except HardwareError as error:
            unknown = error
        else:
            if found.profile.name == profile:
                return found
    raise HardwareError(
        f"variant {variant.name} was built for {target!r} of profile {profile!r}, of which nothing is known here",
        "Give the file that it was built from: --on FILE.toml",
    ) from unknown


def next_check(path: Path, simulators: Mapping[str, Simulator], targets: Sequence[str] = ()) -> str | None:
    """Return the `edgeq` command, with "{bundle}" for the bundle, that checks as much of it as this machine can run.

    Args:
        simulators: see `verify_on`.
        targets: those that it was built for, where they are known: a bundle records no paths.

    Returns:
        None where nothing of it can be run here.
    """
    machine, device = detect_machine(), read_device()
    with opened(path) as bundle:
        try:
            pairs = list(_pairs(bundle, VerifyRequest(path, on=(ALL,)), machine))
        except HardwareError:  # a target in a file of the user's own
            named = " ".join(f"--on {shlex.quote(target)}" for target in targets)
            return f"verify {{bundle}} {named}" if named else None
        routes = [
            route_for(target, machine, plugin_of(variant.ep), simulators=simulators)
            for variant, target in pairs
            if not _stands_in(variant) or judge(variant, device).fits
        ]
    if len(pairs) == 1 and [route.where for route in routes] == [NATIVE]:
        return "verify {bundle}"
    if any(route.start is not None for route in routes):
        return "verify {bundle} --on all"
    return "emulate setup" if any("qemu" in target.emulate for _, target in pairs) else None


def _taken(bundle: Bundle, target: Target, name: str | None) -> Iterator[Variant]:
    """The variant that the runner takes on a device of `target`, by the very rules that it goes by there; where a
    plug-in that is installed here runs it, also the one that is taken without plug-ins."""
    here, simulated = read_device(), load_engines().get(target.emulate.get("simulator", ""))
    device = Device(
        architecture=target.architecture,
        features=target.features,
        runtime=target.runtime.get("onnxruntime", here.runtime),
        providers=here.providers,
        plugins={simulated.provider: ""} if simulated is not None else here.plugins,
    )
    options = target.device.get("engine_options", {})
    others = {  # of chips whose NPU would refuse it
        variant.name: f"compiled for another chip than {target.name}"
        for variant in bundle.components.get(MAIN, ())
        if COMPILED in variant.info and any(variant.info.get(key, value) != value for key, value in options.items())
    }
    found = select(bundle, device, name=name, failed=others).variant
    yield found
    if name is None and simulated is None and plugin_of(found.ep) is not None:
        yield select(bundle, replace(device, plugins={})).variant


def samples_of(request: VerifyRequest, variant: Variant, progress: Progress) -> Samples | None:
    """The samples of a request, for a variant; None for one that onnxruntime does not run."""
    if variant.model is None:
        return None
    signature = own_signature(variant.model, request.bundle)
    preprocess = request.preprocess if request.preprocess is not None else variant_preprocessing(variant)
    return open_samples(request.data, signature, preprocess=preprocess, labels=request.labels, progress=progress)


def summary(checks: Sequence[EmulatedCheck]) -> list[str]:
    """The checks in lines for people."""
    lines = []
    for check in checks:
        name = f"{check.variant} on {check.target}" if check.variant not in ("", check.target) else check.target
        state = f"{check.status}, {check.where}" if check.status != NOT_RUN else NOT_RUN
        lines.append(f"{name}: {state} ({check.how})" if check.how else f"{name}: {state}")
        if check.reason:
            lines.append(f"  {check.reason}")
        if check.kernels is not None:
            seen = f"; seen: {', '.join(check.kernels.instructions)}" if check.kernels.instructions else ""
            lines.append(f"  kernels: u8 x s8 sums are {check.kernels.pairs}{seen}")
        for output in check.selftest:
            verdict = "ok" if output.passed else "WRONG"
            bound = f", allowed {output.tolerance:.3g}" if output.tolerance < float("inf") else ""
            lines.append(f"  self-test {output.name}: max error {output.max_error:.3g}{bound}: {verdict}")
        if check.agreement is not None:
            sqnr = "equal" if check.agreement.sqnr_db == float("inf") else f"{check.agreement.sqnr_db:.1f} dB SQNR"
            if check.host_agreement is not None:
                sqnr += f", here {check.host_agreement.sqnr_db:.1f} dB"
            against = "float32" if check.host_agreement is not None else "this machine"
            lines.append(f"  {check.samples} samples, against {against}: {sqnr}")
        for place, accuracy in check.accuracy.items():
            lines.append(f"  {accuracy.primary} on the {place}: {accuracy.value:.4f}")
    return lines
