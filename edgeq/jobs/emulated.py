"""A freshly built variant on its target's own kernels, before it goes into a bundle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgeq.backends.systolic.save import load_program
from edgeq.backends.systolic.simulate import Simulator as ArraySimulator
from edgeq.bundle.plan import FILES
from edgeq.emulate.check import EmulatedCheck, Trial, VerifyRequest, check_trial, route_for
from edgeq.emulate.routes import EMULATED, MODELLED, NATIVE, NOT_RUN, ExecutionRoute, Open, Simulator
from edgeq.errors import RuntimeUnavailableError, UsageError
from edgeq.hardware.detect import Machine
from edgeq.hardware.target import Target
from edgeq.jobs.builds import too_slow
from edgeq.jobs.emit_c import SUFFIX
from edgeq.jobs.job import Built, Job, share
from edgeq.jobs.variants import selftest_cases
from edgeq.measure.coverage import Check, CheckKind, Coverage
from edgeq.measure.latency import Session
from edgeq.measure.task import Task, split_task_options
from edgeq.model.macs import node_macs
from edgeq.run.engines import engine_for
from edgeq.run.session import Engines, SessionSettings
from edgeq.util.display import SILENT, Progress


@dataclass(frozen=True)
class Output:
    """Name, type and shape of one output, as an onnxruntime session gives them."""

    name: str


class ProgramSession:
    """An integer program in the array's arithmetic, bit by bit."""

    def __init__(self, program: Path) -> None:
        self._simulator = ArraySimulator(load_program(program))

    def get_outputs(self) -> Sequence[Output]:
        """The outputs of the program, in order, as `InferenceSession.get_outputs` gives those of a model."""
        return [Output(name) for name in self._simulator.program.outputs]

    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any]) -> Sequence[Any]:
        """Simulate one sample; `output_names` as `InferenceSession.run` takes them, None for all outputs."""
        program, found = self._simulator.program, self._simulator.run(input_feed).tensors
        # An output without axes: the simulator gives one value for each sample.
        return [
            found[name] if program.tensors[name].shape else found[name].reshape(())
            for name in output_names or program.outputs
        ]


def open_program(model: Path, settings: SessionSettings) -> Session:
    """The program that travels with `model`: beside it, or among its variant's files in a bundle.

    Raises:
        RuntimeUnavailableError: there is none.
    """
    del settings
    packed = model.parents[3] / FILES / model.parent.name if len(model.parents) > 3 else model.parent
    found = [file for folder in (model.parent, packed) for file in sorted(folder.glob(f"*{SUFFIX}"))]
    if not found:
        raise RuntimeUnavailableError(f"{model} has no {SUFFIX} beside it", "Package the model again for this target")
    return ProgramSession(found[0])


@contextmanager
def _array(target: Target) -> Iterator[Open]:
    del target
    yield open_program


@contextmanager
def _engine(target: Target) -> Iterator[Open]:
    """The engine that the target's backend builds for, where it simulates the hardware."""
    engine = engine_for(target.backend, target.device.get("engine_options", {}))
    with Engines() as engines:
        yield lambda model, settings: engines.open(model, replace(settings, engine=engine))


SIMULATORS: Mapping[str, Simulator] = {"systolic": _array, "qnn": _engine}
"""By the name that a profile gives in [emulate] simulator."""


_KINDS: Mapping[str, CheckKind] = {NATIVE: "native", EMULATED: "emulated", MODELLED: "modelled", NOT_RUN: "none"}
# An emulated CPU does about a hundredth of what a real one does: so many multiply-accumulates take a minute or two.
_MACS = 4_000_000_000
_MOST, _MOST_AT_NATIVE_SPEED = 16, 100


def check_built(
    job: Job,
    built: Built,
    coverage: Coverage,
    machine: Machine,
    *,
    task: Task | None = None,
    selftest: int = 2,
    progress: Progress = SILENT,
) -> EmulatedCheck:
    """Load `built` on its target's kernels, take the self-test's answers there, and compare both machines with float32.

    No bound is put on how far the two machines' answers lie apart: a network that follows float32 loosely spreads
    roundings as wide. What counts is that the target's follow float32 as well as this machine's.

    Args:
        coverage: of `built`.
        selftest: how many samples make the self-test.

    Raises:
        CheckFailedError: it fails there.
    """
    route = route_for(built.target, machine, built.artifact.settings().engine, simulators=SIMULATORS, progress=progress)
    count = _count(job, coverage, route)
    reason = too_slow(route, coverage, selftest + count, built.target, progress)
    if reason:
        return EmulatedCheck(built.target.name, "", NOT_RUN, route.how, NOT_RUN, reason)
    cases = selftest_cases(built.artifact, job.validation, selftest)
    trial = Trial(
        model=built.artifact.model,
        settings=built.artifact.settings(),
        vectors=[(case.inputs, case.outputs) for case in cases],
        float_model=job.prepared.path,
        samples=job.validation,
        count=count,
        task=task,
    )
    found = check_trial(trial, built.target, machine, route=route, progress=progress)
    found.check()
    return found


def checks_of(found: EmulatedCheck) -> tuple[Check, ...]:
    """The result of a check on the target's kernels, for the list of checks."""
    kind = _KINDS[found.where]
    if kind == "none":
        return (Check("kernels", kind, found.how, found.reason),)
    checks = [Check("load", kind, found.how, "", True), Check("self-test", kind, found.how, "", True)]
    if found.agreement is not None:
        detail = f"SQNR {found.agreement.sqnr_db:.1f} dB on {found.samples} samples"
        checks.append(Check("accuracy", kind, found.how, detail, True))
    return tuple(checks)


def _count(job: Job, coverage: Coverage, route: ExecutionRoute) -> int:
    """How many samples are compared: as many as an emulated CPU manages in a minute or two."""
    if route.native_speed:
        return _MOST_AT_NATIVE_SPEED
    macs = coverage.int8_macs + coverage.float_macs or sum(node_macs(job.prepared.model).values())
    return max(1, min(_MOST, _MACS // max(macs, 1)))


def verify_request(bundle: Path, variant: str | None, options: Mapping[str, Any]) -> VerifyRequest:
    """The request of `edgeq verify --on`, from its flat options."""
    named, _ = split_task_options(options)
    same = {name: options[name] for name in ("on", "data", "count", "preprocess", "labels", "task", "expect")}
    drop = share("--max-drop", options["max_drop"])
    if drop is not None and options["task"] is None:
        raise UsageError("--max-drop needs something that measures accuracy", "Give --task and labelled --data")
    return VerifyRequest(bundle, variant=variant, options=named, max_drop=drop, **same)


def refuse_without_target(options: Mapping[str, Any]) -> None:
    """Refuse options for comparing a target with this machine where no target is named.

    Raises:
        UsageError: one is given.
    """
    given = next((name for name, value in options.items() if value not in (None, ())), None)
    if given is not None:
        option = f"--{given.replace('_', '-')}"
        raise UsageError(f"{option} is for checks on another target's kernels", "Name the target with --on")
