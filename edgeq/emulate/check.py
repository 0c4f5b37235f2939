"""A built model on its target's kernels: whether it loads and passes its self-test, and its outputs on data.

How a plug-in's kernels for a target are run on this machine: as they are, or capped to the target's instructions.

A CPU engine chooses its kernels by the instructions that it finds. Some can be kept from newer ones by a variable of
their process, and then run what they run on a lesser CPU, at native speed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeq_device.arrays import one_array, read_arrays
from edgeq_device.engines import EngineSpec, find_library, problem_of
from edgeq_device.errors import DeviceError
from edgeq_device.select import CPU
from edgeq_device.selftest import OutputCheck, check_outputs
from edgeq_device.variants import SliceTolerance

from edgeq.emulate.emulator import KernelProof, check_kernels, probe_engine
from edgeq.emulate.routes import EMULATED, NATIVE, NOT_RUN, ExecutionRoute, Running, Simulator, route_to
from edgeq.errors import BoardError, CheckFailedError, EdgeqError, RuntimeUnavailableError
from edgeq.hardware.machine import Machine
from edgeq.hardware.target import Target, runs_natively
from edgeq.measure.accuracy import Accuracy, evaluate_sessions
from edgeq.measure.agreement import Agreement
from edgeq.measure.coverage import HERE
from edgeq.measure.latency import Session
from edgeq.measure.loaded_model import variant_settings
from edgeq.measure.task import Task
from edgeq.run.engines import Engine, described
from edgeq.run.session import SessionSettings, onnxruntime, open_session
from edgeq.run.workers import Engines, start_engine
from edgeq.util.display import SILENT, Advance, Progress
from edgeq.util.records import NOT_WRITTEN, computed, written
from edgeq.util.resources import device_errors


def route_for(
    target: Target,
    machine: Machine,
    spec: EngineSpec | None = None,
    *,
    simulators: Mapping[str, Simulator] | None = None,
    progress: Progress = SILENT,
) -> ExecutionRoute:
    """The best way to run the kernels that `spec` has for `target` on `machine`, which is this one; without a plug-in,
    see `edgeq.emulate.routes.route_to`."""
    engine = described(spec)
    if engine is None:
        return route_to(target, machine, simulators=simulators, progress=progress)
    if engine.name == target.emulate.get("simulator"):
        try:
            find_library(engine, str(onnxruntime().__version__))
        except DeviceError as error:
            return ExecutionRoute(NOT_RUN, "", str(error))
        return route_to(target, machine, simulators=simulators, progress=progress)
    problem = problem_of(engine, str(onnxruntime().__version__))
    if not problem and target.architecture != machine.architecture:
        problem = f"{engine.name} runs its kernels for {target.architecture} nowhere but there"
    if problem:
        return ExecutionRoute(NOT_RUN, "", problem)
    if runs_natively(target, machine):
        return _route(NATIVE, f"{engine.name}, {HERE}", engine, target, {})
    environment = engine.cap.environment(target.features)
    level = next((x for x in engine.cap.levels if x.value == environment.get(engine.cap.variable)), None)
    if level is None:
        return ExecutionRoute(NOT_RUN, "", f"{engine.name} cannot be kept to the instructions of {target.name}")
    lacks = sorted(set(level.features) - machine.features)
    if lacks:
        return ExecutionRoute(NOT_RUN, "", f"this CPU has no {', '.join(lacks)} to run {engine.name}'s kernels with")
    how = f"{engine.name} with {engine.cap.variable}={level.value}"
    return _route(EMULATED, how, engine, target, environment)


def _route(where: str, how: str, engine: Engine, target: Target, environment: Mapping[str, str]) -> ExecutionRoute:
    start = partial(_running, how, engine, target, environment)
    return ExecutionRoute(where, how, native_speed=True, start=start)


@contextmanager
def _running(how: str, engine: Engine, target: Target, environment: Mapping[str, str]) -> Iterator[Running]:
    with start_engine(engine, environment=environment) as guest:
        proof = KernelProof(probe_engine(guest.open, engine, how), tuple(sorted(target.features)))
        saturates = engine.saturates("U8S8", target.architecture, target.features)
        check_kernels(proof, None, saturates=saturates, title=how)
        yield Running(guest.open, proof)


if TYPE_CHECKING:
    from edgeq_device.variants import Variant
    from numpy.typing import NDArray

    from edgeq.data.samples import Samples

    Vectors = tuple[Mapping[str, NDArray[Any]], Mapping[str, NDArray[Any]]]

COMPILED = "compiled_by"
"""Of a variant that an engine has compiled: what it was compiled with."""
PASSED, FAILED = "passed", "failed"
HOST, TARGET, FLOAT = "host", "target", "float32"

# Decibels against float32 that the target's kernels may cost more than this machine's: roundings differ without costing
# any, kernels that saturate cost several.
_LOSS_DB = 3.0


@dataclass(frozen=True)
class EmulatedCheck:
    """What was found of one model on one target's kernels.

    Attributes:
        target, variant: names; the variant is "" for a model that is in no bundle yet.
        where: "natively", "emulated", "modelled" or "not run".
        how: the means, such as "qemu-aarch64 -cpu cortex-a72".
        status: "passed", "failed" or "not run"; `reason`: why it is not the first.
        kernels: proof that these are the target's kernels.
        selftest: per output, the largest difference from what is expected, and what is allowed (infinite where nothing
            is: then only shape, dtype and finiteness count).
        answers: the target's outputs for the self-test's inputs.
        samples: how many samples agreement and accuracy were measured on.
        reference: what the target's outputs are compared with: "host", the same model on this machine, or "float32".
        agreement: of the target's outputs; `host_agreement` of this machine's, where the reference is float32.
        accuracy: by labels, of "host" and "target" on those samples; empty without a task.
    """

    target: str
    variant: str
    where: str
    how: str
    status: str
    reason: str = ""
    kernels: KernelProof | None = None
    selftest: tuple[OutputCheck, ...] = field(
        default=(), metadata=written(form=lambda checks: {check.name: check for check in checks})
    )
    answers: tuple[Mapping[str, NDArray[Any]], ...] = field(default=(), metadata=NOT_WRITTEN)
    samples: int = 0
    reference: str = HOST
    agreement: Agreement | None = None
    host_agreement: Agreement | None = None
    accuracy: Mapping[str, Accuracy] = field(default_factory=dict)

    @property
    def drop(self) -> float | None:
        """Accuracy lost on the target against this machine, as a fraction; None without a task."""
        return self.accuracy[TARGET].loss_against(self.accuracy[HOST]) if self.accuracy else None

    @computed
    def accuracy_drop(self) -> float | None:
        """`drop`, as records call it."""
        return self.drop

    def check(self, max_drop: float | None = None) -> None:
        """Raise CheckFailedError where it failed, or lost more accuracy than `max_drop`."""
        name = f"variant {self.variant}" if self.variant else "the model"
        if self.status == FAILED:
            raise CheckFailedError(
                f"{name} fails on {self.target} ({self.how}): {self.reason}", "Do not deploy it there; package it again"
            )
        if max_drop is not None and self.drop is not None and self.drop > max_drop:
            raise CheckFailedError(
                f"{name} loses {self.drop:.4f} of accuracy on {self.target}'s kernels, more than {max_drop:g}",
                "Package it for that target again, or see `edgeq debug`",
            )


@dataclass(frozen=True)
class Trial:
    """What is to be checked.

    Attributes:
        model: the ONNX file, and `settings` that it is opened with.
        vectors: self-test inputs and expected outputs; `tolerance` is absolute, per output, and `slices` that of parts
            of an output; None allows any value.
        float_model: the model that it was made from, if that is there, to compare both machines' outputs with.
        samples: data for agreement and, with a `task`, accuracy; at most `count` of them.
        name: of the variant.
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
        model, settings = Path(), SessionSettings()
    else:
        model, settings = variant.model, variant_settings(variant)
    if COMPILED in variant.info:
        samples = None  # nothing else runs it, to compare with
    trial = Trial(
        model,
        settings,
        vectors,
        variant.tolerance,
        samples=samples,
        count=count,
        task=task,
        name=variant.name,
        slices=variant.slices,
    )
    return check_trial(trial, target, machine, simulators=simulators, route=route, progress=progress)


def check_trial(
    trial: Trial,
    target: Target,
    machine: Machine,
    *,
    simulators: Mapping[str, Simulator] | None = None,
    route: ExecutionRoute | None = None,
    progress: Progress = SILENT,
) -> EmulatedCheck:
    """Run a model on the kernels of `target`: load it, hold its self-test, and compare it with this machine on data.

    What cannot be run, or cannot be proven to be the target's kernels, is "not run" with the reason; what the runtime
    there refuses, or computes wrongly, is "failed". None of that raises.

    Args:
        machine: this one.
        simulators: see `edgeq.emulate.routes.route_to`. A plug-in's kernels are run in the plug-in.
        route: to the kernels, where it is known: a board of that kind.

    Raises:
        DataError: something is wrong with the samples.
        BoardError: the link to a board was cut.
    """
    if route is None:
        route = route_for(target, machine, trial.settings.engine, simulators=simulators, progress=progress)
    if route.start is None:
        return EmulatedCheck(target.name, trial.name, NOT_RUN, route.how, NOT_RUN, route.reason)
    with ExitStack() as stack:
        try:
            with progress.stage(f"Starting {route.how}"):
                running = stack.enter_context(route.start())
        except BoardError:  # it says nothing of the model
            raise
        except EdgeqError as error:
            return EmulatedCheck(target.name, trial.name, NOT_RUN, route.how, NOT_RUN, str(error))
        return _run(trial, target, route, running, progress)


def _run(trial: Trial, target: Target, route: ExecutionRoute, running: Running, progress: Progress) -> EmulatedCheck:
    found = EmulatedCheck(target.name, trial.name, route.where, route.how, PASSED, kernels=running.kernels)
    try:
        # Threads that wait for each other cost an emulated CPU more than they bring.
        threads = trial.settings.intra_op_threads if route.native_speed else 1
        with progress.stage(f"Opening the model on {route.how}"):
            session = running.open(trial.model, replace(trial.settings, intra_op_threads=threads))
        with progress.stage(f"Self-test on {route.how}", total=len(trial.vectors)) as advance:
            answers = tuple(_answers(session, trial.vectors, advance))
    except BoardError:  # it says nothing of the model
        raise
    except (RuntimeUnavailableError, ValueError) as error:
        return replace(found, status=FAILED, reason=str(error))
    expected = [outputs for _, outputs in trial.vectors]
    anything = dict.fromkeys((name for outputs in expected for name in outputs), math.inf)
    allowed = anything if trial.tolerance is None else trial.tolerance
    selftest = check_outputs(zip(answers, expected, strict=True), allowed, trial.slices)
    found = replace(found, selftest=selftest, answers=answers)
    wrong = [check for check in selftest if not check.passed]
    if wrong:
        worst = wrong[0].problem or f"error {wrong[0].max_error:.6g} is over {wrong[0].tolerance:.6g}"
        return replace(found, status=FAILED, reason=f"self-test: output {wrong[0].name}: {worst}")
    if trial.samples is None:
        return found
    here = trial.settings
    if here.engine is not None and here.engine.name == target.emulate.get("simulator"):
        here = replace(here, engine=None, providers=(CPU,))
    reference = HOST if trial.float_model is None else FLOAT
    settings = dict.fromkeys((HOST, TARGET), trial.settings)
    try:
        with Engines() as engines:
            sessions: dict[str, Session] = {HOST: engines.open(trial.model, here), TARGET: session}
            if trial.float_model is not None:
                sessions[FLOAT] = open_session(trial.float_model)
            evaluation = evaluate_sessions(
                sessions,
                trial.samples,
                task=trial.task,
                reference=reference,
                settings=settings,
                count=trial.count,
                progress=progress,
            )
    except BoardError:  # it says nothing of the model
        raise
    except (RuntimeUnavailableError, CheckFailedError) as error:
        return replace(found, status=FAILED, reason=str(error))
    found = replace(
        found,
        samples=evaluation.count,
        reference=reference,
        agreement=evaluation.agreement[TARGET],
        host_agreement=evaluation.agreement.get(HOST),
        accuracy=evaluation.accuracy,
    )
    return _judge(found)


def _judge(found: EmulatedCheck) -> EmulatedCheck:
    """Failed, if the target's kernels follow float32 clearly worse than this machine's do."""
    assert found.agreement is not None
    if found.host_agreement is None:
        return found
    there, here = found.agreement.sqnr_db, found.host_agreement.sqnr_db
    if there >= here - _LOSS_DB:
        return found
    reason = f"its outputs follow float32 to {there:.1f} dB SQNR, on this machine to {here:.1f} dB"
    return replace(found, status=FAILED, reason=reason)


def _answers(session: Session, vectors: Iterable[Vectors], advance: Advance) -> Iterator[Mapping[str, NDArray[Any]]]:
    for inputs, expected in vectors:
        names = sorted(expected)
        yield dict(zip(names, map(one_array, session.run(names, inputs)), strict=True))
        advance(1)
