"""Check a built model on its target's kernels: whether it loads, passes its self-test, and gives good outputs on data.

For a plug-in, this machine runs the plug-in's own kernels, unchanged or limited to the target's instructions. A CPU
engine chooses its kernels by the instructions that it finds. In some engines, an environment variable hides newer
instructions, so that the engine runs the kernels of a lesser CPU at native speed.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from edgeq_device.bundle.package import MAIN, Bundle
from edgeq_device.bundle.select import judge, select
from edgeq_device.bundle.selftest import OutputCheck, check_outputs
from edgeq_device.engines.catalog import CPU, EngineSpec, describe_problem, find_library, find_plugin
from edgeq_device.engines.device import Device, read_device
from edgeq_device.engines.variant import SliceTolerance, Variant
from edgeq_device.errors import DeviceError
from edgeq_device.measure.basis import EVERYTHING, Basis
from edgeq_device.prepare.arrays import read_arrays, to_array
from numpy.typing import NDArray

from edgeq.bundle.verify import open_checked
from edgeq.data.samples import Samples, open_samples
from edgeq.emulate.probe import probe_engine
from edgeq.emulate.proof import KernelProof, check_kernels
from edgeq.emulate.routes import (
    EMULATED,
    NATIVE,
    NOT_RUN,
    ExecutionRoute,
    Running,
    Simulator,
    choose_emulated,
    choose_route,
    is_emulated_with,
)
from edgeq.errors import (
    BoardError,
    BundleError,
    CheckFailedError,
    EdgeqError,
    HardwareError,
    RuntimeUnavailableError,
    UsageError,
    one_line,
)
from edgeq.hardware.detect import Machine, detect_machine
from edgeq.hardware.profile import ANY, load_profiles, match_profile
from edgeq.hardware.target import AUTO, Target, find_application_engine, find_target, resolve, runs_natively
from edgeq.measure.accuracy import Accuracy
from edgeq.measure.agreement import Agreement
from edgeq.measure.coverage import HERE
from edgeq.measure.inference import Session, run_samples
from edgeq.measure.loaded_model import variant_preprocessing, variant_settings
from edgeq.measure.paired import MOST_LOSS_DB, PairedEvaluation, PairedLoss
from edgeq.measure.resample import SURE
from edgeq.measure.settle import settle
from edgeq.measure.task import Task, TaskOptions, make_task
from edgeq.model.load import unchecked_signature
from edgeq.run.engines import Engine, find_description, find_only_engine, load_engines
from edgeq.run.session import Engines, SessionSettings, onnxruntime, open_session, start_engine
from edgeq.util.device_errors import device_errors
from edgeq.util.display import SILENT, Advance, Progress
from edgeq.util.numbers import difference, metric, metric_name
from edgeq.util.records import NOT_WRITTEN, computed, write_as


def find_route(
    target: Target,
    machine: Machine,
    spec: EngineSpec | None = None,
    *,
    simulators: Mapping[str, Simulator] | None = None,
    progress: Progress = SILENT,
) -> ExecutionRoute:
    """Return the best way to run, on `machine`, the kernels that the plug-in `spec` has for `target`.

    Without a plug-in, the result is that of `edgeq.emulate.routes.choose_route`.

    Args:
        machine: this machine.
    """
    engine = find_description(spec)
    if engine is None:
        return choose_route(target, machine, simulators=simulators, progress=progress)
    # The engine is itself the simulator of this target, so the plain route finds it by name.
    if target.emulate.get("simulator") in (engine.name, engine.int8.backend):
        try:
            find_library(engine, str(onnxruntime().__version__))
        except DeviceError as error:
            return ExecutionRoute(NOT_RUN, "", str(error))
        return choose_route(target, machine, simulators=simulators, progress=progress)
    problem = describe_problem(engine, str(onnxruntime().__version__))
    if not problem and target.architecture not in (ANY, machine.architecture):
        problem = f"{engine.name} runs its kernels for {target.architecture} only on {target.architecture}"
    if problem:
        # The emulated machine has a package of the engine, so nothing of the engine is needed here.
        emulated = is_emulated_with(target, engine)
        return choose_emulated(target, engine) if emulated else ExecutionRoute(NOT_RUN, "", problem)
    if runs_natively(target, machine):
        return _build_route(NATIVE, f"{engine.name}, {HERE}", engine, target, {})
    # The variable hides newer instructions, so the engine runs the kernels of the target at native speed.
    environment = engine.cap.environment(target.features)
    level = next((x for x in engine.cap.levels if x.value == environment.get(engine.cap.variable)), None)
    if level is None:
        return ExecutionRoute(NOT_RUN, "", f"{engine.name} cannot be limited to the instructions of {target.name}")
    lacks = sorted(set(level.features) - machine.features)
    if lacks:
        return ExecutionRoute(NOT_RUN, "", f"this CPU lacks {', '.join(lacks)}, which {engine.name}'s kernels need")
    means = f"{engine.name} with {engine.cap.variable}={level.value}"
    return _build_route(EMULATED, means, engine, target, environment)


def _build_route(
    kind: str, means: str, engine: Engine, target: Target, environment: Mapping[str, str]
) -> ExecutionRoute:
    start = partial(_start_engine_kernels, means, engine, target, environment)
    return ExecutionRoute(kind, means, native_speed=True, start=start)


@contextmanager
def _start_engine_kernels(
    means: str, engine: Engine, target: Target, environment: Mapping[str, str]
) -> Iterator[Running]:
    with start_engine(engine, environment=environment) as guest:
        # The variable could be unknown to the installed version, so the kernels themselves must prove that it worked.
        proof = KernelProof(probe_engine(guest.open, engine, means), tuple(sorted(target.features)))
        saturates = engine.has_saturating_kernels("U8S8", target.architecture, target.features)
        check_kernels(proof, None, saturates=saturates, title=means)
        yield Running(guest.open, proof)


Vectors = tuple[Mapping[str, NDArray[Any]], Mapping[str, NDArray[Any]]]

COMPILED = "compiled_by"
"""The key of a variant's info that names the compiler, if an engine has compiled the variant."""
PASSED, FAILED = "passed", "failed"
HOST, TARGET, FLOAT = "host", "target", "float32"

# Loss of accuracy, as a fraction, that fails a model if it is certain. If the interval of the loss reaches further than
# `_FEW_LABELS`, the labels are too few to decide.
_MOST_DROP, _FEW_LABELS = 0.01, 0.05


@dataclass(frozen=True)
class EmulatedCheck:
    """Report the check of one model on one target's kernels.

    Attributes:
        target, variant: names; the variant is "" for a model that is not in a bundle yet.
        where: "natively", "emulated", "modelled" or "not run".
        how: the means, such as "qemu-aarch64 -cpu cortex-a72".
        status: "passed", "failed" or "not run".
        reason: why the status is not "passed", or why the answers on data were not compared.
        kernels: proof that the kernels are the target's.
        selftest: for each output, the largest difference from the expected values, and its limit. With an infinite
            limit, only shape, dtype and finiteness are checked.
        answers: the target's outputs for the self-test's inputs.
        samples: number of samples for agreement and accuracy.
        reference: the outputs to which the target's outputs are compared: "host" (the same model on this machine) or
            "float32".
        agreement: agreement of the target's outputs with the reference.
        host_agreement: agreement of this machine's outputs, if the reference is float32.
        accuracy: accuracy of "host" and "target" by labels, on the same samples; empty without a task.
        noise_db: SQNR against float32 that the bundle states for the variant; None if it does not count here.
        equal: number of samples for which every value of the outputs is the same on the target and on this machine.
        difference: largest difference of a value on the target from the value on this machine.
    """

    target: str
    variant: str
    where: str
    how: str
    status: str
    reason: str = ""
    kernels: KernelProof | None = None
    selftest: tuple[OutputCheck, ...] = field(
        default=(), metadata=write_as(form=lambda checks: {check.name: check for check in checks})
    )
    answers: tuple[Mapping[str, NDArray[Any]], ...] = field(default=(), metadata=NOT_WRITTEN)
    samples: int = 0
    reference: str = HOST
    agreement: Agreement | None = None
    host_agreement: Agreement | None = None
    accuracy: Mapping[str, Accuracy] = field(default_factory=dict)
    noise_db: float | None = None
    equal: int = 0
    difference: float = 0.0

    @property
    def drop(self) -> float | None:
        """Return how much lower the accuracy is on the target than here, as a fraction; None without a task."""
        return self.accuracy[TARGET].loss_against(self.accuracy[HOST]) if self.accuracy else None

    @computed
    def accuracy_drop(self) -> float | None:
        """Return `drop` under its name in written records."""
        return self.drop

    def check(self, max_drop: float | None = None) -> None:
        """Raise CheckFailedError if the check failed, or if `drop` is larger than `max_drop`."""
        name = f"variant {self.variant}" if self.variant else "the model"
        if self.status == FAILED:
            fix = "Do not deploy it there" if self.variant else "⟨emulate=False⟩ writes it without this check"
            raise CheckFailedError(f"{name} fails on {self.target} ({self.how}): {self.reason}", fix)
        if max_drop is not None and self.drop is not None and self.drop > max_drop:
            primary = next(iter(self.accuracy.values())).primary
            lost, allowed = (difference(primary, value).lstrip("+") for value in (self.drop, max_drop))
            raise CheckFailedError(
                f"{name} loses {lost} of {metric_name(primary)} on {self.target}'s kernels, more than {allowed}",
                "Raise ⟨max_drop⟩, or see `edgeq debug`",
            )


@dataclass(frozen=True)
class CheckedModel:
    """Describe a model to check.

    Attributes:
        model: the ONNX file.
        settings: the settings that it is opened with.
        vectors: inputs and expected outputs of the self-test.
        tolerance: absolute tolerance by output; None allows any value.
        slices: tolerances of parts of an output.
        basis: what the figures of the outputs are taken over.
        float_model: the float model that the model was made from, if it is available. The outputs on the target and on
            this machine are compared to those of the float model.
        host: the model that runs on this machine for the comparison, and its settings. It computes what the target's
            kernels compute. None runs the model itself here.
        samples: data for agreement and, with a `task`, accuracy; at most `count` of them are used.
        name: the variant's name.
    """

    model: Path
    settings: SessionSettings
    vectors: Sequence[Vectors] = ()
    tolerance: Mapping[str, float] | None = None
    float_model: Path | None = None
    samples: Samples | None = None
    count: int | None = None
    task: Task | None = None
    name: str = ""
    slices: Mapping[str, Sequence[SliceTolerance]] = field(default_factory=dict)
    basis: Basis = EVERYTHING
    noise_db: float | None = None
    host: tuple[Path, SessionSettings] | None = None


def check_variant(
    variant: Variant,
    target: Target,
    machine: Machine,
    *,
    samples: Samples | None = None,
    count: int | None = None,
    task: Task | None = None,
    simulators: Mapping[str, Simulator] | None = None,
    route: ExecutionRoute | None = None,
    progress: Progress = SILENT,
) -> EmulatedCheck:
    """Check a variant of an opened bundle on the kernels of `target`. See `check_trial`."""
    with device_errors():
        vectors = [(read_arrays(case.inputs), read_arrays(case.outputs)) for case in variant.cases]
    if variant.model is None:
        # onnxruntime does not run this variant, so there is no file and no setting to open.
        model, settings = Path(), SessionSettings()
    else:
        model, settings = variant.model, variant_settings(variant)
    if COMPILED in variant.info:
        samples = None  # no other runtime can run the variant for comparison
    trial = CheckedModel(
        model,
        settings,
        vectors,
        variant.tolerance,
        samples=samples,
        count=count,
        task=task,
        name=variant.name,
        slices=variant.slices,
        basis=variant.basis,
        noise_db=_read_noise(variant, machine),
    )
    return check_trial(trial, target, machine, simulators=simulators, route=route, progress=progress)


def _read_noise(variant: Variant, machine: Machine) -> float | None:
    """Return the SQNR against float32 that a bundle states for a variant. Return None if there is none, or if this
    machine's kernels may saturate, so that they compute the variant otherwise than its proof did.
    """
    stated = variant.info.get("accuracy")
    stated = stated.get("sqnr_db") if isinstance(stated, Mapping) else None
    # On saturating kernels, the difference between the machines is more than the noise of quantization.
    saturates = match_profile(machine, load_profiles()).profile.hazards.get("saturates_int16")
    return float(stated) if isinstance(stated, int | float) and not saturates else None


def check_trial(
    trial: CheckedModel,
    target: Target,
    machine: Machine,
    *,
    simulators: Mapping[str, Simulator] | None = None,
    route: ExecutionRoute | None = None,
    progress: Progress = SILENT,
) -> EmulatedCheck:
    """Run a model on the kernels of `target`: load it, run its self-test, and compare its outputs on data with its
    outputs on this machine.

    The status is "not run", with the reason, if the kernels cannot run or cannot be proven to be the target's. The
    status is "failed" if the target's runtime refuses the model or computes it wrongly. In both cases no error is
    raised.

    Args:
        machine: this machine.
        simulators: see `edgeq.emulate.routes.choose_route`. They are not used for a plug-in, whose kernels run in the
            plug-in itself.
        route: the route to the kernels, such as a board with the target's hardware; None finds the route.

    Raises:
        DataError: something is wrong with the samples.
        BoardError: the connection to a board was lost.
    """
    if route is None:
        route = find_route(target, machine, trial.settings.engine, simulators=simulators, progress=progress)
    # "not run" is a result, so that one impossible target does not hide the results of the others.
    if route.start is None:
        return EmulatedCheck(target.name, trial.name, NOT_RUN, route.how, NOT_RUN, route.reason)
    with ExitStack() as stack:
        try:
            with progress.stage(f"Starting {route.how}"):
                running = stack.enter_context(route.start())
        except BoardError:  # the link failed, not the model
            raise
        except EdgeqError as error:
            return EmulatedCheck(target.name, trial.name, NOT_RUN, route.how, NOT_RUN, error.text)
        return _run(trial, target, route, running, progress)


def _run(
    trial: CheckedModel, target: Target, route: ExecutionRoute, running: Running, progress: Progress
) -> EmulatedCheck:
    check = EmulatedCheck(target.name, trial.name, route.where, route.how, PASSED, kernels=running.kernels)
    try:
        # On an emulated CPU, threads lose more time by waiting for each other than they save.
        threads = trial.settings.intra_op_threads if route.native_speed else 1
        with progress.stage(f"Opening the model on {route.how}"):
            session = running.open(trial.model, replace(trial.settings, intra_op_threads=threads))
        with progress.stage(f"Self-test on {route.how}", total=len(trial.vectors)) as advance:
            answers = tuple(_run_vectors(session, trial.vectors, advance))
    except BoardError:  # the link failed, not the model
        raise
    # The target's runtime refuses the model. On a device, it would do the same.
    except (RuntimeUnavailableError, ValueError) as error:
        return replace(check, status=FAILED, reason=one_line(error))
    expected = [outputs for _, outputs in trial.vectors]
    anything = dict.fromkeys((name for outputs in expected for name in outputs), math.inf)
    allowed = anything if trial.tolerance is None else trial.tolerance
    cases = ((answer, outputs, inputs) for answer, (inputs, outputs) in zip(answers, trial.vectors, strict=True))
    selftest = check_outputs(cases, allowed, trial.slices, trial.basis)
    check = replace(check, selftest=selftest, answers=answers)
    wrong = [check for check in selftest if not check.passed]
    if wrong:
        worst = wrong[0].problem or f"error {wrong[0].max_abs_error:.6g} is over {wrong[0].tolerance:.6g}"
        return replace(check, status=FAILED, reason=f"self-test: output {wrong[0].name}: {worst}")
    if trial.samples is None:
        return check
    local_model, local_settings = trial.host or (trial.model, trial.settings)
    if local_settings.engine is not None and local_settings.engine.name == target.emulate.get("simulator"):
        # The simulator would compare itself with itself, so this machine uses its own kernels.
        local_settings = replace(local_settings, engine=None, providers=(CPU,))
    local_engine = find_description(local_settings.engine)
    if local_engine is not None and is_emulated_with(target, local_engine):
        problem = describe_problem(local_engine, str(onnxruntime().__version__))
        # The emulated machine has the engine and this machine does not, which says nothing about the model.
        if problem:
            return replace(check, reason=f"its answers on data were not compared with this machine's: {problem}")
    reference = HOST if trial.float_model is None else FLOAT
    settings = dict.fromkeys((HOST, TARGET), trial.settings)
    equal, difference = 0, 0.0
    try:
        with Engines() as engines:
            sessions: dict[str, Session] = {HOST: engines.open(local_model, local_settings), TARGET: session}
            if trial.float_model is not None:
                sessions[FLOAT] = open_session(trial.float_model)
            task = trial.task
            if task is not None:
                task = settle(task, sessions[reference], trial.samples, progress=progress)
            paired = PairedEvaluation(tuple(sessions), task, reference, HOST, TARGET, trial.basis)
            for sample, outputs in run_samples(sessions, trial.samples, count=trial.count, progress=progress):
                paired.update(sample, outputs)
                distance = _measure_distance(outputs[HOST], outputs[TARGET])
                equal, difference = equal + (distance == 0), max(difference, distance)
            evaluation = paired.evaluation.result(settings)
    except BoardError:  # the link failed, not the model
        raise
    except (RuntimeUnavailableError, CheckFailedError) as error:
        return replace(check, status=FAILED, reason=error.text)
    check = replace(
        check,
        samples=evaluation.samples,
        reference=reference,
        agreement=evaluation.agreement[TARGET],
        host_agreement=evaluation.agreement.get(HOST),
        accuracy=evaluation.accuracy,
        noise_db=trial.noise_db,
        equal=equal,
        difference=difference,
    )
    return _judge(check, paired.errors.result(), paired.drop_error())


def _measure_distance(expected: Mapping[str, Any], outputs: Mapping[str, Any]) -> float:
    """Return the largest difference of two sets of outputs. It is infinite if they have other shapes, or values that
    are not numbers.
    """
    largest = 0.0
    for name, array in expected.items():
        if np.array_equal(array, outputs[name], equal_nan=array.dtype.kind == "f"):
            continue
        if array.shape != outputs[name].shape or array.dtype.kind not in "fiu":
            return math.inf
        gap = np.abs(array.astype(np.float64) - outputs[name].astype(np.float64)).max()
        largest = max(largest, float(gap) if math.isfinite(gap) else math.inf)
    return largest


def _judge(check: EmulatedCheck, losses: Sequence[PairedLoss], drop_error: float | None) -> EmulatedCheck:
    """Set the status to failed if the target certainly computes the model worse than this machine.

    Labels decide if there are enough of them. Otherwise, each output's errors against float32 decide, on the same
    samples. If the float model is not available, the difference between the two machines must not be larger than the
    model's own quantization noise explains.
    """
    if check.host_agreement is None:
        noise = math.inf if check.noise_db is None else check.noise_db
        distant = [loss for loss in losses if loss.level_db + loss.level_reach_db < noise - MOST_LOSS_DB]
        if check.noise_db is None or not distant:
            return check
        reason = (
            f"output {distant[0].name!r} follows this machine's to {distant[0].level_db:.1f} dB SQNR, "
            f"which is less than the {noise:.1f} dB of the model's own quantization noise"
        )
        return replace(check, status=FAILED, reason=reason)
    drop = check.drop
    if drop is not None and drop_error is not None:
        low, high = drop - SURE * drop_error, drop + SURE * drop_error
        primary = check.accuracy[TARGET].primary
        # The lower end of the interval: the loss is certain, not only measured.
        if low > _MOST_DROP:
            lost, bound = (difference(primary, value).lstrip("+") for value in (drop, low))
            reason = f"it loses {lost} of {metric_name(primary)} against this machine, at least {bound}"
            return replace(check, status=FAILED, reason=reason)
        if high <= _FEW_LABELS:
            return check
    # Too few labels to decide, so the errors of the outputs decide.
    proven = [loss for loss in losses if loss.proven]
    return replace(check, status=FAILED, reason=proven[0].sentence) if proven else check


def _run_vectors(
    session: Session, vectors: Iterable[Vectors], advance: Advance
) -> Iterator[Mapping[str, NDArray[Any]]]:
    for inputs, expected in vectors:
        names = sorted(expected)
        yield dict(zip(names, map(to_array, session.run(names, inputs)), strict=True))
        advance(1)


ALL = "all"


@dataclass(frozen=True)
class VerifyRequest:
    """Describe what to verify.

    Attributes:
        bundle: a directory or .edgeq file.
        on: targets, or "all" to check each variant on the target that it was built for.
        variant: the only variant to check; None means all.
        data: samples, in any form that `edgeq.data.samples.open_samples` accepts; None runs only the self-test.
        count: the largest number of samples to use.
        preprocess: preprocessing of the samples; None uses the bundle's.
        labels, task, options: the labels, the task, and its options for measuring accuracy. Without a task, only
            agreement is measured.
        max_drop: how much lower the accuracy may be on a target than on this machine, as a fraction.
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
    """Hold the checks, in the order of the targets."""

    bundle: Path
    checks: tuple[EmulatedCheck, ...]
    max_drop: float | None = field(metadata=NOT_WRITTEN)
    manifest_sha256: str = ""

    def check(self) -> None:
        """Raise CheckFailedError if a check failed, or RuntimeUnavailableError if no check could run."""
        for check in self.checks:
            check.check(self.max_drop)
        if all(check.status == NOT_RUN for check in self.checks):
            why = "; ".join(dict.fromkeys(f"{check.target}: {check.reason}" for check in self.checks))
            raise RuntimeUnavailableError(f"{self.bundle}: nothing could be checked ({why})")


def verify_on(
    request: VerifyRequest, *, simulators: Mapping[str, Simulator] | None = None, progress: Progress = SILENT
) -> Verified:
    """Check a bundle on the kernels of targets. `Verified.check` turns a failed check into an error.

    Raises:
        BundleError: the bundle is damaged, or has nothing for a target.
        UsageError, HardwareError, DataError: something is wrong with the request, a target, or the samples.
    """
    if request.data is None and (request.count is not None or request.task is not None):
        raise UsageError("there are no samples", "Give them with ⟨data⟩")
    task = make_task(request.task, request.options or TaskOptions()) if request.task is not None else None
    machine = detect_machine()
    checks = []
    with open_checked(request.bundle, expect=request.expect) as bundle:
        pairs = list(_pair_targets(bundle, request, machine))
        for variant, target in pairs:
            # A stand-in was built for no target, so it is checked only where a runner would choose it.
            lacks = "; ".join(judge(variant, read_device()).reasons) if _is_stand_in(variant) else ""
            if lacks:
                checks.append(EmulatedCheck(target.name, variant.name, NOT_RUN, "", NOT_RUN, lacks))
                continue
            samples = open_variant_samples(request, variant, progress) if request.data is not None else None
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


def _pair_targets(bundle: Bundle, request: VerifyRequest, machine: Machine) -> Iterator[tuple[Variant, Target]]:
    """Yield each variant with the target to check it on."""
    variants = bundle.components.get(MAIN, ())
    variants_by_name = {variant.name: variant for variant in variants}
    if request.variant is not None and request.variant not in variants_by_name:
        raise BundleError(
            f"{bundle.source} has no variant {request.variant!r}", f"It has {', '.join(variants_by_name)}"
        )
    for name in request.on:
        if name == ALL:
            for variant in variants:
                if request.variant in (None, variant.name):
                    yield variant, _find_target(variant, machine)
        else:
            target = resolve(name, machine)
            # A device runs what the runner selects, so another variant of the bundle need not work there.
            for variant in _select_variants(bundle, target, request.variant):
                yield variant, target


def _is_stand_in(variant: Variant) -> bool:
    """Return whether `variant` was built without a target. A device runs such a variant only if no other one fits."""
    return not {"profile", "target"} & variant.info.keys()


def _find_target(variant: Variant, machine: Machine) -> Target:
    """Return the target that a variant was built for.

    A bundle records only the name of a user's own target file. For a variant built for such a file, or for the build
    machine, return the target of the variant's profile. For a variant built without a target, return this machine's
    target.
    """
    if _is_stand_in(variant):
        return resolve(AUTO, machine)
    profile, target = (variant.info.get(key) for key in ("profile", "target"))
    if not isinstance(profile, str) or not isinstance(target, str):
        raise BundleError(f"variant {variant.name} does not record what it was built for", "Name a target with ⟨on⟩")
    unknown: HardwareError | None = None
    # The target is the closer description. The profile is left if the target was a file of the user.
    for name in (target, profile):
        try:
            candidate = find_target(name, machine)
        except HardwareError as error:
            unknown = error
        else:
            # A target of the same name may have another profile by now.
            if candidate.profile.name == profile:
                return candidate
    raise HardwareError(
        f"variant {variant.name} was built for {target!r} of profile {profile!r}, but neither is known here",
        "Give the file that it was built from: ⟨on⟩ FILE.toml",
    ) from unknown


def suggest_check(path: Path, simulators: Mapping[str, Simulator], targets: Sequence[str] = ()) -> str | None:
    """Return the `edgeq` command that checks as much of a bundle as this machine can run.

    The command contains "{bundle}" instead of the bundle's path.

    Args:
        simulators: see `verify_on`.
        targets: the targets that the bundle was built for, if known; a bundle does not record their paths.

    Returns:
        None if this machine cannot run any part of the bundle.
    """
    machine, device = detect_machine(), read_device()
    with open_checked(path) as bundle:
        try:
            pairs = list(_pair_targets(bundle, VerifyRequest(path, on=(ALL,)), machine))
        except HardwareError:  # the target's file was the user's own
            named = " ".join(f"⟨on⟩ {shlex.quote(target)}" for target in targets)
            return f"verify {{bundle}} {named}" if named else None
        routes = [
            find_route(target, machine, find_plugin(variant.ep), simulators=simulators)
            for variant, target in pairs
            if not _is_stand_in(variant) or judge(variant, device).fits
        ]
    if len(pairs) == 1 and [route.where for route in routes] == [NATIVE]:
        return "verify {bundle}"
    if any(route.start is not None for route in routes):
        return "verify {bundle} ⟨on⟩ all"
    return "emulate setup" if any("qemu" in target.emulate for _, target in pairs) else None


def _select_variants(bundle: Bundle, target: Target, name: str | None) -> Iterator[Variant]:
    """Yield the variant that the runner selects on a device of `target`, by the runner's own rules.

    If an installed plug-in runs that variant, also yield the variant that the runner selects without plug-ins.
    """
    # The device has its engine, whatever is installed here.
    engine_name = target.device.get("engine", target.emulate.get("simulator", ""))
    local_device = read_device()
    simulated = load_engines().get(engine_name) or find_application_engine(target)
    device = Device(
        architecture=target.architecture,
        features=target.features,
        runtime=target.runtime.get("onnxruntime", local_device.runtime),
        providers=local_device.providers,
        plugins={simulated.provider: ""} if simulated is not None else local_device.plugins,
    )
    options = target.device.get("engine_options", {})
    other_chips = {  # variants compiled for other chips, which the target would refuse
        variant.name: f"compiled for a chip other than {target.name}"
        for variant in bundle.components.get(MAIN, ())
        if COMPILED in variant.info and any(variant.info.get(key, value) != value for key, value in options.items())
    }
    selected = select(bundle, device, name=name, failed=other_chips).variant
    yield selected
    without = find_only_engine(target.backend) is None
    # A device may lack the plug-in, so the variant that runs without it must work too.
    if name is None and simulated is None and without and find_plugin(selected.ep) is not None:
        yield select(bundle, replace(device, plugins={})).variant


def open_variant_samples(request: VerifyRequest, variant: Variant, progress: Progress) -> Samples | None:
    """Return the requested samples, prepared for a variant; None if onnxruntime does not run the variant."""
    if variant.model is None:
        return None
    signature = unchecked_signature(variant.model, request.bundle)
    preprocess = request.preprocess if request.preprocess is not None else variant_preprocessing(variant)
    return open_samples(request.data, signature, preprocess=preprocess, labels=request.labels, progress=progress)


def summarise(checks: Sequence[EmulatedCheck]) -> list[str]:
    """Return lines of text that describe the checks to the user."""
    lines = []
    for check in checks:
        name = f"{check.variant} on {check.target}" if check.variant not in ("", check.target) else check.target
        state = f"{check.status}, {check.where}" if check.status != NOT_RUN else NOT_RUN
        lines.append(f"{name}: {state} ({check.how})" if check.how else f"{name}: {state}")
        if check.reason:
            lines.append(f"  {check.reason}")
        if check.kernels is not None:
            instructions = f"; seen: {', '.join(check.kernels.instructions)}" if check.kernels.instructions else ""
            lines.append(f"  kernels: u8 x s8 sums are {check.kernels.pairs}{instructions}")
        for output in check.selftest:
            verdict = "ok" if output.passed else "WRONG"
            bound = f", allowed {output.tolerance:.3g}" if output.tolerance < float("inf") else ""
            lines.append(f"  self-test {output.name}: max error {output.max_abs_error:.3g}{bound}: {verdict}")
        if check.agreement is not None:
            sqnr = "equal" if check.agreement.sqnr_db == float("inf") else f"{check.agreement.sqnr_db:.1f} dB SQNR"
            if check.host_agreement is not None:
                sqnr += f", here {check.host_agreement.sqnr_db:.1f} dB"
            elif check.noise_db is not None:
                sqnr += f"; its own quantization noise is at {check.noise_db:.1f} dB"
            against = "float32" if check.host_agreement is not None else "this machine"
            lines.append(f"  {check.samples} samples, against {against}: {sqnr}")
            if check.host_agreement is not None:
                same = f"  every value is equal to this machine's in {check.equal} of {check.samples} samples"
                largest = f"; the largest difference is {check.difference:.3g}"
                lines.append(same + (largest if check.equal < check.samples else ""))
        for place, accuracy in check.accuracy.items():
            lines.append(f"  {accuracy.primary} on the {place}: {metric(accuracy.primary, accuracy.value)}")
    return lines
