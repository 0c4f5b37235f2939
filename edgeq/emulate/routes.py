"""How a target's kernels can be run on this machine: itself, masked, emulated, by a model of them, or not at all."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from edgeq_device.cpuid import FEATURES

from edgeq.emulate import mask
from edgeq.emulate.emulator import Emulator, Speed, home, load_emulators
from edgeq.emulate.machine import emulated_command, require_sysroot
from edgeq.emulate.probe import KernelProof, Watch, check_kernels, load_proof, probe, probe_file, save_proof
from edgeq.emulate.qemu import require_qemu
from edgeq.errors import CheckFailedError, HardwareError, RuntimeUnavailableError
from edgeq.hardware.machine import Machine
from edgeq.hardware.target import Target, runs_natively
from edgeq.measure.inference import Session
from edgeq.progress import SILENT, Progress
from edgeq.records import fingerprint
from edgeq.session import SessionSettings, open_session
from edgeq.workers.guest import Guest, start_guest

NATIVE, EMULATED, MODELLED, NOT_RUN = "natively", "emulated", "modelled", "not run"

Open = Callable[[Path, SessionSettings], Session]
Simulator = Callable[[Target], AbstractContextManager[Open]]
"""Simulates the device of a target: opens models as sessions whose outputs are the device's."""


@dataclass(frozen=True)
class Running:
    """The target's kernels, running: how to open a model there, and what was proven of them (None where the simulator
    is the definition of them)."""

    open: Open
    kernels: KernelProof | None


@dataclass(frozen=True)
class ExecutionRoute:
    """One way to run a target's kernels.

    Attributes:
        where: NATIVE, EMULATED, MODELLED or NOT_RUN.
        how: the means, such as "qemu-aarch64 -cpu cortex-a72".
        reason: why it is not run, and what to do about it; "" where it is.
        native_speed: whether it is about as fast as this machine, not a hundred times slower.
        speed: about how fast it is, where that is known and it is not at native speed.
        start: gives the running kernels, proven to be the target's; None where there are none.
    """

    where: str
    how: str
    reason: str = ""
    native_speed: bool = False
    speed: Speed | None = None
    start: Callable[[], AbstractContextManager[Running]] | None = None

    def seconds(self, int8_macs: int, float_macs: int) -> float:
        """About how long one inference of so many multiply-accumulates takes; 0 where nothing is known of that."""
        return int8_macs / self.speed.int8 + float_macs / self.speed.float if self.speed is not None else 0.0


def route_to(
    target: Target,
    machine: Machine,
    *,
    simulators: Mapping[str, Simulator] | None = None,
    progress: Progress = SILENT,
) -> ExecutionRoute:
    """The best way to run the kernels of `target` on `machine`, which is this one.

    Args:
        simulators: those at hand, by the name that a profile's [emulate] simulator gives.
    """
    wants = target.emulate
    if runs_natively(target, machine):
        return ExecutionRoute(NATIVE, "this machine", native_speed=True, start=partial(_native, target))
    reasons = []
    name = wants.get("simulator")
    if name is not None:
        simulator = (simulators or {}).get(name)
        if simulator is not None:
            return ExecutionRoute(MODELLED, f"the {name} simulator", start=partial(_simulated, simulator, target))
        reasons.append(f"there is no simulator {name!r} here")
    if "mask" in wants and machine.architecture == target.architecture:
        problem = _why_not_masked(target, machine)
        if not problem:
            hidden = sorted(machine.features.intersection(wants["mask"]))
            if not hidden:
                return ExecutionRoute(NATIVE, "this machine", native_speed=True, start=partial(_native, target))
            how = f"this CPU with {', '.join(hidden)} masked"
            return ExecutionRoute(EMULATED, how, native_speed=True, start=partial(_masked, target, how, progress))
        reasons.append(problem)
    if "qemu" in wants:
        cpu = wants["qemu"]["cpu"]
        try:
            emulator = _emulator_for(target)
            how = f"{emulator.program} -cpu {cpu}"
            emulator.check_cpu(cpu)
            require_qemu(emulator)
            if emulator.sysroot is not None:
                require_sysroot(emulator)
            start = partial(_emulated, emulator, target, cpu, how)
            return ExecutionRoute(EMULATED, how, speed=emulator.speed, start=start)
        except (HardwareError, RuntimeUnavailableError) as error:
            reasons.append(str(error))
    if not reasons:
        reasons.append(f"nothing is known that runs the kernels of {target.name} elsewhere")
    return ExecutionRoute(NOT_RUN, "", "; ".join(reasons))


def _why_not_masked(target: Target, machine: Machine) -> str:
    """Why this CPU with features hidden would not do; "" where it would."""
    hide = frozenset(target.emulate["mask"])
    unknown = sorted(hide - FEATURES)
    if unknown:
        raise HardwareError(f"{target.files[-1]}: [emulate] mask names {unknown[0]!r}, which is no CPUID feature")
    lacks = sorted(target.profile.requires - (machine.features - hide))
    if lacks:
        return f"this CPU has no {', '.join(lacks)} to mask the rest of"
    return mask.why_not() if hide & machine.features else ""


def _emulator_for(target: Target) -> Emulator:
    program = f"qemu-{target.emulate['qemu']['arch']}"
    found = next((e for e in load_emulators().values() if e.program == program), None)
    if found is None:
        raise HardwareError(f"{target.name}: edgeq cannot run {program}", "Name an architecture that it can emulate")
    return found


def _saturates(target: Target) -> bool:
    return bool(target.profile.hazards.get("saturates_int16"))


@contextmanager
def _native(target: Target) -> Iterator[Running]:
    with probe_file() as file:
        proof = KernelProof(probe(open_session(file), "this machine"), tuple(sorted(target.features)))
    if target.profile.min_compute_capability is None:
        check_kernels(proof, None, saturates=_saturates(target), title="this machine")
    yield Running(open_session, proof)


@contextmanager
def _simulated(simulator: Simulator, target: Target) -> Iterator[Running]:
    with simulator(target) as opener:
        yield Running(opener, None)


@contextmanager
def _masked(target: Target, how: str, progress: Progress) -> Iterator[Running]:
    hide = tuple(target.emulate["mask"])
    with start_guest(mask.masked_command(hide, progress=progress), how) as guest:
        seen = guest.features(hide)
        if not seen["trapped"]:
            raise CheckFailedError(f"{how}: onnxruntime read no masked CPUID", "Report this: nothing was proven")
        proof = KernelProof(_probe_in(guest), tuple(seen["features"]))
        check_kernels(proof, None, saturates=_saturates(target), title=how)
        yield Running(guest.open, proof)


@contextmanager
def _emulated(emulator: Emulator, target: Target, cpu: str, how: str) -> Iterator[Running]:
    with start_guest(emulated_command(emulator, cpu), how) as guest:
        seen = guest.features()
        instructions = _instructions(emulator, cpu, how, seen) if emulator.kernels else None
        proof = KernelProof(_probe_in(guest), tuple(seen["features"]), instructions)
        _check_features(target, proof, emulator, how)
        check_kernels(proof, emulator, saturates=_saturates(target), title=how)
        yield Running(guest.open, proof)


def _check_features(target: Target, proof: KernelProof, emulator: Emulator, how: str) -> None:
    """Where features distinguish kernels, the emulated CPU needs those that the target's profile requires."""
    distinguishing = {kernels.feature for kernels in emulator.kernels}
    lacks = sorted(distinguishing & target.profile.requires - set(proof.features))
    if lacks:
        raise CheckFailedError(f"{how} has no {', '.join(lacks)}, which {target.profile.name} requires")


def _probe_in(guest: Guest) -> str:
    with probe_file() as file:
        session = guest.open(file, SessionSettings(intra_op_threads=1))
        pairs = probe(session, guest.title)
        session.close()
    return pairs


def _instructions(emulator: Emulator, cpu: str, how: str, seen: Mapping[str, Any]) -> tuple[str, ...]:
    """The kinds of kernels that the probe's translated code holds, on the same CPU, qemu and runtime; kept, because
    watching takes ten times as long as running."""
    basis: dict[str, Any] = {**seen, "cpu": cpu, "qemu": require_qemu(emulator).version, "program": emulator.program}
    basis["kernels"] = [(kernels.name, kernels.patterns) for kernels in emulator.kernels]
    file = home() / "proofs" / f"{fingerprint(basis)[:16]}.json"
    known = load_proof(file)
    if known is not None and known.instructions is not None:
        return known.instructions
    with tempfile.TemporaryDirectory(prefix="edgeq-watch-") as folder:
        watch = Watch(emulator.kernels, Path(folder))
        try:
            with start_guest(emulated_command(emulator, cpu, log=watch.pipe), how) as guest:
                pairs = _probe_in(guest)
        finally:
            instructions = watch.finish()
    save_proof(KernelProof(pairs, tuple(seen["features"]), instructions), file)
    return instructions
