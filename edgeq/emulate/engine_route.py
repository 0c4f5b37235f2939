"""How a plug-in's kernels for a target are run on this machine: as they are, or capped to the target's instructions.

A CPU engine chooses its kernels by the instructions that it finds. Some can be kept from newer ones by a variable of
their process, and then run what they run on a lesser CPU, at native speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from edgeq_device.engines import EngineSpec, find_library, problem_of
from edgeq_device.errors import DeviceError

from edgeq.emulate.probe import KernelProof, check_kernels, probe_engine
from edgeq.emulate.routes import EMULATED, NATIVE, NOT_RUN, ExecutionRoute, Running, Simulator, route_to
from edgeq.engines import Engine, described
from edgeq.hardware.machine import Machine
from edgeq.hardware.target import Target, runs_natively
from edgeq.measure.coverage import HERE
from edgeq.progress import SILENT, Progress
from edgeq.session import onnxruntime
from edgeq.workers.engine import start_engine


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
