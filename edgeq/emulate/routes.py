"""Find how this machine can run a target's kernels: natively, masked, emulated, in a simulator, or not at all.

A masked machine acts as a lesser CPU at native speed. onnxruntime chooses kernels by CPUID and has no option to ignore
instructions. So edgeq makes a private copy of onnxruntime, and replaces every CPUID instruction in the copy by one that
traps. A small library (cpuid_mask.c) handles the trap and returns the result without the masked feature bits.

`setup` prepares an emulated machine, and `read_status` lists the machines and routes.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from edgeq_device.engines.guest import list_import_path
from edgeq_device.system.features import FEATURES, find_bit
from edgeq_device.system.places import scratch_folder
from edgeq_device.system.programs import build_child_environment, find_program
from edgeq_device.system.renaming import move_new

from edgeq.emulate.cache import check_place, check_writable, home
from edgeq.emulate.emulator import EmulatedSpeed, Emulator, find_emulator, load_emulators
from edgeq.emulate.machine import QemuProgram, build_command, fetch_qemu, find_qemu, require_qemu, require_sysroot
from edgeq.emulate.probe import probe, probe_file, probe_signed
from edgeq.emulate.proof import KernelProof, check_kernels, load_proof, save_proof
from edgeq.emulate.sysroot import Sysroot, build_sysroot, load_sysroot, require_program, run, use_sysroot
from edgeq.emulate.watch import KernelWatch
from edgeq.errors import CheckFailedError, HardwareError, RuntimeUnavailableError, UsageError
from edgeq.hardware.detect import Machine, detect_machine
from edgeq.hardware.target import Target, find_application_engine, load_targets, runs_natively
from edgeq.measure.inference import Session
from edgeq.run.engines import Engine
from edgeq.run.session import (
    EngineFiles,
    GuestProgram,
    PythonCommand,
    SessionSettings,
    build_guest_environment,
    open_session,
    start_guest,
)
from edgeq.run.session import onnxruntime as installed_runtime
from edgeq.util.display import SILENT, Progress
from edgeq.util.marker import sha256
from edgeq.util.records import fingerprint

FOLDER = "masked"
# Both instructions have two bytes, so no address in the library moves. 0f ff is undefined on every CPU, so it traps.
_CPUID, _TRAP = b"\x0f\xa2", b"\x0f\xff"
# A line of objdump's disassembly, with the address and the name of the instruction.
_INSTRUCTION = re.compile(rb"^\s*([0-9a-f]+):\s+cpuid\b")
# A line of objdump's list of sections, with the size, the address and the place in the file.
_SECTION = re.compile(r"^\s*\d+\s+\S+\s+([0-9a-f]+)\s+([0-9a-f]+)\s+[0-9a-f]+\s+([0-9a-f]+)", re.M)
_TOOLS = "Install a C compiler with its binutils (Debian, Ubuntu: apt install gcc)"
_SHIM = Path(__file__).with_name("cpuid_mask.c")


def mask_problem() -> str:
    """Return why CPUID cannot be masked here; "" if it can."""
    if not sys.platform.startswith("linux"):
        return "masking CPUID needs Linux"
    # The copy needs a compiler for the trap handler, and objdump to find the instructions.
    missing = [tool for tool in ("cc", "objdump") if find_program(tool) is None]
    if missing:
        return f"masking CPUID needs {' and '.join(missing)}. {_TOOLS}"
    if importlib.util.find_spec("onnxruntime") is None:
        return "onnxruntime is not installed"
    return ""


def build_masked_command(features: Iterable[str], *, progress: Progress = SILENT) -> PythonCommand:
    """Return the command that starts this Python, with an onnxruntime that sees a CPU without `features`.

    The first use prepares the masked copy of onnxruntime.

    Raises:
        RuntimeUnavailableError: CPUID cannot be masked here.
    """
    problem = mask_problem()
    if problem:
        raise RuntimeUnavailableError(problem)
    folder = _prepare_masked_runtime(progress)
    # The handler knows no names of features, only registers and bits.
    clear = []
    for feature in sorted(FEATURES.intersection(features)):
        leaf, subleaf, register, bit = find_bit(feature)
        clear.append(f"{leaf}:{subleaf}:{register}:{1 << bit:#x}")
    folders = (folder, *map(Path, list_import_path()))
    masks = ("--mask", str(folder / "cpuid_mask.so"), *clear)
    return PythonCommand((sys.executable,), masks, build_guest_environment(os.environ), folders)


def _prepare_masked_runtime(progress: Progress) -> Path:
    """Return the folder with the masked copy and the library. The folder's name contains hashes of both sources."""
    spec = importlib.util.find_spec("onnxruntime")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).parent
    binding = next((source / "capi").glob("onnxruntime_pybind11_state*.so"), None)
    if binding is None:
        raise RuntimeUnavailableError(f"{source} has no onnxruntime_pybind11_state", "Install onnxruntime again")
    # A new onnxruntime or handler gets a folder of its own, so a stale copy is never used.
    parts = f"{sha256(binding)[:16]}-{sha256(_SHIM)[:8]}"
    folder = check_place(home() / FOLDER / parts, "the same command again")
    # The folder appears under its name only when it is complete, so its existence is enough.
    if folder.is_dir():
        return folder
    check_writable()
    (home() / FOLDER).mkdir(mode=0o700, exist_ok=True)
    with (
        progress.stage("Preparing onnxruntime for CPUID masking"),
        tempfile.TemporaryDirectory(dir=home() / FOLDER, prefix="new-") as work,
    ):
        draft = Path(work) / "done"
        _copy(source, draft / "onnxruntime")
        for library in _list_libraries(binding):
            place = draft / "onnxruntime" / "capi" / library.name
            # The link must go first, or the write would change the installed library.
            place.unlink()
            place.write_bytes(patch_library(library))
        run(
            [require_program("cc", _TOOLS), "-O2", "-fPIC", "-shared", str(_SHIM), "-o", str(draft / "cpuid_mask.so")],
            _TOOLS,
        )
        with suppress(FileExistsError):  # another process made the folder first
            move_new(draft, folder)
    return folder


def _copy(source: Path, place: Path) -> None:
    """Copy the package `source` as links to its files. Files that are not Python code are linked as well."""
    for file in sorted(source.rglob("*")):
        name = file.relative_to(source)
        if file.is_file() and "__pycache__" not in name.parts:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).symlink_to(file)


def _list_libraries(binding: Path) -> list[Path]:
    """Return the Python binding, and those libraries in its folder that the binding is linked with."""
    output = run([require_program("objdump", _TOOLS), "-p", str(binding)], _TOOLS)
    linked_names = {line.split()[1] for line in output.splitlines() if line.strip().startswith("NEEDED")}
    return [binding, *(file for file in sorted(binding.parent.glob("*.so*")) if file.name in linked_names)]


def patch_library(library: Path) -> bytes:
    """Return the bytes of a shared library, with each CPUID instruction in its code replaced by the trap.

    Raises:
        RuntimeUnavailableError: the disassembler and the file do not agree.
    """
    content = bytearray(library.read_bytes())
    sections = [
        (int(address, 16), int(size, 16), int(offset, 16))
        for size, address, offset in _SECTION.findall(
            run([require_program("objdump", _TOOLS), "-h", str(library)], _TOOLS)
        )
    ]
    for address in _find_cpuid(library):
        at = next((a + offset for start, size, offset in sections if 0 <= (a := address - start) < size), None)
        # A wrong byte in machine code would fail far from here, so a disagreement ends the patching.
        if at is None or content[at : at + 2] != _CPUID:
            raise RuntimeUnavailableError(f"{library} does not match its listing by objdump", _TOOLS)
        content[at : at + 2] = _TRAP
    return bytes(content)


def _find_cpuid(library: Path) -> Iterator[int]:
    """Yield the addresses of the CPUID instructions.

    A search for the instruction's bytes is not enough, because these bytes also occur inside other instructions.
    """
    command = [require_program("objdump", _TOOLS), "-d", "--no-show-raw-insn", str(library)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=build_child_environment()
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if b"cpuid" in line and (match := _INSTRUCTION.match(line)):
                yield int(match.group(1), 16)
        # A listing that was cut off would leave instructions unmasked without a sign.
        if process.wait() != 0:
            raise RuntimeUnavailableError(f"objdump cannot read {library}", _TOOLS)


NATIVE, EMULATED, MODELLED, NOT_RUN = "natively", "emulated", "modelled", "not run"

Open = Callable[[Path, SessionSettings], Session]
Simulator = Callable[[Target], AbstractContextManager[Open]]
"""A function that opens models for a target as sessions. The sessions give the same outputs as the target's device."""


@dataclass(frozen=True)
class Running:
    """Hold the target's running kernels.

    Attributes:
        open: a function that opens a model on these kernels.
        kernels: proof that the kernels are the target's; None if the simulator defines the kernels.
    """

    open: Open
    kernels: KernelProof | None


@dataclass(frozen=True)
class ExecutionRoute:
    """Describe one way to run a target's kernels.

    Attributes:
        where: NATIVE, EMULATED, MODELLED or NOT_RUN.
        how: the means, such as "qemu-aarch64 -cpu cortex-a72".
        reason: why the kernels cannot run, and what to do about it; "" if they can run.
        native_speed: whether the kernels run about as fast as this machine's own kernels, not a hundred times slower.
        speed: the approximate speed, if it is known and not native.
        start: a function that starts the kernels and proves that they are the target's; None if they cannot run.
    """

    where: str
    how: str
    reason: str = ""
    native_speed: bool = False
    speed: EmulatedSpeed | None = None
    start: Callable[[], AbstractContextManager[Running]] | None = None

    def seconds(self, int8_macs: int, float_macs: int) -> float:
        """Return the approximate seconds for one inference with the given multiply-accumulates; 0 if the speed is
        unknown.
        """
        return int8_macs / self.speed.int8 + float_macs / self.speed.float if self.speed is not None else 0.0


def choose_route(
    target: Target,
    machine: Machine,
    *,
    simulators: Mapping[str, Simulator] | None = None,
    progress: Progress = SILENT,
) -> ExecutionRoute:
    """Return the best way to run the kernels of `target` on `machine`.

    Args:
        machine: this machine.
        simulators: the available simulators, by the name in a profile's [emulate] simulator.
    """
    wants = target.emulate
    # The order of the routes is the order of trust and speed: the hardware itself, a simulator, masking, emulation.
    if runs_natively(target, machine):
        return ExecutionRoute(NATIVE, "this machine", native_speed=True, start=partial(_native, target))
    reasons = []
    name = wants.get("simulator")
    if name is not None:
        simulator = (simulators or {}).get(name)
        if simulator is not None:
            # A simulator stands for hardware, so its limits belong to every statement made with it.
            never = f"; never run on {target.profile.never_run}" if target.profile.never_run else ""
            return ExecutionRoute(
                MODELLED, f"the {name} simulator{never}", start=partial(_simulated, simulator, target)
            )
        reasons.append(f"there is no simulator {name!r} here")
    if "mask" in wants and machine.architecture == target.architecture:
        problem = _target_mask_problem(target, machine)
        if not problem:
            hidden = sorted(machine.features.intersection(wants["mask"]))
            # This CPU already lacks everything that would be hidden, so its own kernels are the target's.
            if not hidden:
                return ExecutionRoute(NATIVE, "this machine", native_speed=True, start=partial(_native, target))
            means = f"this CPU with {', '.join(hidden)} masked"
            return ExecutionRoute(EMULATED, means, native_speed=True, start=partial(_masked, target, means, progress))
        reasons.append(problem)
    if "qemu" in wants:
        route = choose_emulated(target, find_application_engine(target))
        if route.start is not None:
            return route
        reasons.append(route.reason)
    if not reasons:
        reasons.append(f"edgeq knows no way to run the kernels of {target.name} on another machine")
    return ExecutionRoute(NOT_RUN, "", "; ".join(reasons))


def choose_emulated(target: Target, engine: Engine | None = None) -> ExecutionRoute:
    """Return the route to the kernels that run on the target's CPU under qemu.

    Args:
        target: a target whose [emulate] names a CPU of qemu.
        engine: the engine whose kernels run there; None means onnxruntime's own kernels.
    """
    cpu = target.emulate["qemu"]["cpu"]
    try:
        emulator = _find_emulator(target)
        means = f"{emulator.program} -cpu {cpu}"
        emulator.check_cpu(cpu)
        require_qemu(emulator)
        if emulator.sysroot is not None:
            require_sysroot(emulator, engine.packages if engine is not None else ())
        if engine is not None:
            means = f"{engine.name} under {means}"
            start = partial(_emulated_engine, emulator, target, engine, cpu, means)
        else:
            start = partial(_emulated, emulator, target, cpu, means)
        return ExecutionRoute(EMULATED, means, speed=emulator.speed, start=start)
    # A missing emulator is a reason in the record, not an error of the whole check.
    except (HardwareError, RuntimeUnavailableError) as error:
        return ExecutionRoute(NOT_RUN, "", error.text)


def is_emulated_with(target: Target, engine: Engine) -> bool:
    """Return whether the target's emulated machine contains `engine`. Its recipe then lists the engine's package."""
    if "qemu" not in target.emulate:
        return False
    recipe = _find_emulator(target).sysroot
    return recipe is not None and not set(recipe.wheels).isdisjoint(engine.packages)


def _target_mask_problem(target: Target, machine: Machine) -> str:
    """Return why this CPU cannot replace the target's CPU by hiding features; "" if it can."""
    hide = frozenset(target.emulate["mask"])
    unknown = sorted(hide - FEATURES)
    if unknown:
        raise HardwareError(f"{target.files[-1]}: [emulate] mask names {unknown[0]!r}, which is not a CPUID feature")
    # Masking only hides features. A target that needs a feature of its own cannot be imitated.
    lacks = sorted(target.profile.requires - (machine.features - hide))
    if lacks:
        return f"this CPU lacks {', '.join(lacks)}, so masking is not enough"
    return mask_problem() if hide & machine.features else ""


def _find_emulator(target: Target) -> Emulator:
    program = f"qemu-{target.emulate['qemu']['arch']}"
    emulator = next((e for e in load_emulators().values() if e.program == program), None)
    if emulator is None:
        raise HardwareError(f"{target.name}: edgeq cannot run {program}", "Name an architecture that it can emulate")
    return emulator


def _saturates(target: Target) -> bool:
    return bool(target.profile.hazards.get("saturates_int16"))


@contextmanager
def _native(target: Target) -> Iterator[Running]:
    with probe_file() as file:
        proof = KernelProof(probe(open_session(file), "this machine"), tuple(sorted(target.features)))
    # The probe runs on the CPU, so it says nothing about a GPU.
    if target.profile.min_compute_capability is None:
        check_kernels(proof, None, saturates=_saturates(target), title="this machine")
    yield Running(open_session, proof)


@contextmanager
def _simulated(simulator: Simulator, target: Target) -> Iterator[Running]:
    with simulator(target) as opener:
        yield Running(opener, None)


@contextmanager
def _masked(target: Target, means: str, progress: Progress) -> Iterator[Running]:
    hide = tuple(target.emulate["mask"])
    with start_guest(build_masked_command(hide, progress=progress), means) as guest:
        report = guest.features(hide)
        # Without a trap, nothing shows that onnxruntime saw the masked CPU.
        if not report["trapped"]:
            raise CheckFailedError(
                f"{means}: onnxruntime did not read the masked CPUID", "Report this: the kernels could not be proven"
            )
        proof = KernelProof(_probe_in(guest), tuple(report["features"]))
        check_kernels(proof, None, saturates=_saturates(target), title=means)
        yield Running(guest.open, proof)


@contextmanager
def _emulated(emulator: Emulator, target: Target, cpu: str, means: str) -> Iterator[Running]:
    with start_guest(build_command(emulator, cpu), means) as guest:
        report = guest.features()
        instructions = _watch_instructions(emulator, cpu, means, report, _probe_in) if emulator.kernels else None
        proof = KernelProof(_probe_in(guest), tuple(report["features"]), instructions)
        _check_features(target, proof, emulator, means)
        # The features are checked first, because a missing feature explains wrong kernels.
        check_kernels(proof, emulator, saturates=_saturates(target), title=means)
        yield Running(guest.open, proof)


@contextmanager
def _emulated_engine(emulator: Emulator, target: Target, engine: Engine, cpu: str, means: str) -> Iterator[Running]:
    """Start the kernels of `engine` on the emulated CPU. Models are converted on this machine."""
    with (
        scratch_folder("edgeq-converted-") as folder,
        start_guest(build_command(emulator, cpu), means) as guest,
    ):
        files = EngineFiles(Path(folder))

        def open_in(program: GuestProgram, model: Path, settings: SessionSettings) -> Session:
            return program.open(files.convert_once(model, settings.engine), settings)

        def probe_in(program: GuestProgram) -> str:
            return probe_signed(partial(open_in, program), engine, program.title)

        # The wheels of the root file system state the engine's version.
        wheels = require_sysroot(emulator).lock.wheels if emulator.sysroot is not None else ()
        report = {**guest.features(), "engine": engine.name, "wheels": [wheel.name for wheel in wheels]}
        instructions = _watch_instructions(emulator, cpu, means, report, probe_in) if emulator.kernels else None
        proof = KernelProof(probe_in(guest), tuple(report["features"]), instructions)
        _check_features(target, proof, emulator, means)
        saturates = engine.has_saturating_kernels("S8S8", target.architecture, target.features)
        check_kernels(proof, emulator, saturates=saturates, title=means)
        yield Running(partial(open_in, guest), proof)


def _check_features(target: Target, proof: KernelProof, emulator: Emulator, means: str) -> None:
    """Check that the emulated CPU has the features of the target. Only features by which kernels are chosen are
    checked.
    """
    # Other features do not change which kernels run.
    distinguishing = {kernels.feature for kernels in emulator.kernels}
    lacks = sorted(distinguishing & target.features - set(proof.features))
    if lacks:
        raise CheckFailedError(f"{means} has no {', '.join(lacks)}, which {target.name} has")


def _probe_in(guest: GuestProgram) -> str:
    with probe_file() as file:
        session = guest.open(file, SessionSettings(intra_op_threads=1))
        pairs = probe(session, guest.title)
        session.close()
    return pairs


def _watch_instructions(
    emulator: Emulator, cpu: str, means: str, report: Mapping[str, Any], probe_in: Callable[[GuestProgram], str]
) -> tuple[str, ...]:
    """Return the kinds of kernels in the probe's translated code. The probe runs on `cpu`, with the qemu and the
    runtime that run the model.

    The result is kept in a file, because watching the probe takes ten times as long as running it.

    Args:
        report: versions of everything that runs the probe.
        probe_in: a function that runs the probe in a guest and returns its result.
    """
    # Everything that can change the translated code is part of the file's name.
    basis: dict[str, Any] = {**report, "cpu": cpu, "qemu": require_qemu(emulator).version, "program": emulator.program}
    basis["kernels"] = [(kernels.name, kernels.patterns) for kernels in emulator.kernels]
    file = home() / "proofs" / f"{fingerprint(basis)[:16]}.json"
    proof = load_proof(file)
    if proof is not None and proof.instructions is not None:
        return proof.instructions
    with scratch_folder("edgeq-watch-") as folder:
        watch = KernelWatch(emulator.kernels, Path(folder))
        try:
            with start_guest(build_command(emulator, cpu, log=watch.pipe), means) as guest:
                pairs = probe_in(guest)
        finally:
            # Also after an error, because the reading thread would wait for the mark forever.
            instructions = watch.finish()
    save_proof(KernelProof(pairs, tuple(report["features"]), instructions), file)
    return instructions


# Every qemu has this CPU, and the CPU runs every program for the architecture.
_ANY_CPU = "max"


@dataclass(frozen=True)
class EmulatedMachine:
    """Describe an emulated machine that is ready.

    Attributes:
        runtime: versions of Python and the packages in it.
    """

    name: str
    qemu: QemuProgram
    sysroot: Sysroot
    runtime: Mapping[str, Any]

    def __record__(self) -> dict[str, Any]:
        return {
            "machine": self.name,
            "root": str(self.sysroot.root),
            "qemu": self.qemu,
            **{key: self.runtime[key] for key in ("python", "numpy", "onnxruntime")},
            "bytes": self.sysroot.lock.bytes,
            "packages": self.sysroot.lock.packages,
            "wheels": self.sysroot.lock.wheels,
            "notes": self.sysroot.lock.notes,
        }

    def lines(self) -> list[str]:
        """Return lines for the terminal: the machine's folder and its contents."""
        size = self.sysroot.lock.bytes
        runtime = self.runtime
        return [
            f"{self.name}: ready in {self.sysroot.root}" + (f" ({size / 1e6:.0f} MB)" if size else ""),
            f"  Python {runtime['python']}, numpy {runtime['numpy']}, onnxruntime {runtime['onnxruntime']}",
            f"  {self.qemu.program.name} {self.qemu.version} from {self.qemu.source}",
            *(f"  note: {note}" for note in self.sysroot.lock.notes),
        ]


def setup(
    name: str,
    *,
    sysroot: Path | None = None,
    onnxruntime: str | None = None,
    sources: Path | None = None,
    force: bool = False,
    progress: Progress = SILENT,
) -> EmulatedMachine:
    """Prepare the emulated machine `name`, and start a program on it. Parts that exist already are kept.

    Args:
        sysroot: an existing root file system to use.
        onnxruntime: the version to install; None installs the same version as on this machine.
        sources: an apt sources file to use instead of the system's.
        force: whether to make the root file system again.

    Raises:
        UsageError: there is no such machine, or `sysroot` does not fit it.
        RuntimeUnavailableError: something is missing. The message names what to install.
        OutputError: the cache cannot be written.
    """
    emulator = find_emulator(name)
    if sysroot is not None and (onnxruntime or sources):
        raise UsageError("⟨sysroot⟩ cannot be used with ⟨onnxruntime⟩ or ⟨sources⟩", "Leave those two out")
    check_writable()
    # qemu comes first: without it, the root file system could not be tried.
    qemu = _prepare_qemu(emulator, sources, progress)
    # A complete root file system takes minutes to make, so it is kept unless the user asks for a new one.
    prepared = None if force else load_sysroot(emulator)
    # An earlier version of edgeq may have made it, with fewer wheels.
    prepared = prepared if prepared is not None and is_complete(prepared, emulator) else None
    if sysroot is not None:
        prepared = use_sysroot(emulator, sysroot)
    elif prepared is None:
        version = onnxruntime or str(installed_runtime().__version__)
        prepared = build_sysroot(emulator, version, sources=sources, progress=progress)
    with progress.stage("Starting it"), start_guest(build_command(emulator, _ANY_CPU), emulator.program) as guest:
        runtime = guest.features()
    return EmulatedMachine(name, qemu, prepared, runtime)


def is_complete(sysroot: Sysroot, emulator: Emulator) -> bool:
    """Return whether a root file system contains all wheels of its recipe."""
    return emulator.sysroot is None or all(map(sysroot.has_wheel, emulator.sysroot.wheels))


def _prepare_qemu(emulator: Emulator, sources: Path | None, progress: Progress) -> QemuProgram:
    """Return the system's qemu if it is new enough. Otherwise return one from packages or, if that fails, the system's
    old one.
    """
    installed = find_qemu(emulator)
    if installed is not None and installed.is_honest(emulator):
        return installed
    try:
        fetch_qemu(sources=sources, progress=progress)
    except RuntimeUnavailableError as error:
        # An old qemu still runs programs, and `build_command` makes up for its /proc/cpuinfo.
        if installed is None:
            raise
        progress.note(
            f"keeping {emulator.program} {installed.version}: a newer one cannot be fetched ({error.problem})"
        )
    better = find_qemu(emulator)
    if better is None:
        raise RuntimeUnavailableError(
            f"{emulator.program} is not installed, and no package has one that runs here",
            "Install qemu-user (Debian, Ubuntu: apt install qemu-user; Fedora: dnf install qemu-user)",
        )
    return better


@dataclass(frozen=True)
class Status:
    """List each emulated architecture with its qemu and root file system, and each target with the route to its
    kernels.
    """

    place: Path
    machines: Mapping[str, tuple[QemuProgram | None, Sysroot | None]]
    routes: Mapping[str, ExecutionRoute]

    def __record__(self) -> dict[str, Any]:
        return {
            "place": self.place,
            "machines": {
                name: {"qemu": qemu, "root": sysroot.root if sysroot else None}
                for name, (qemu, sysroot) in self.machines.items()
            },
            "targets": {
                name: {"where": route.where, "how": route.how, "reason": route.reason}
                for name, route in self.routes.items()
            },
        }

    def lines(self, *, verbose: bool = False) -> list[str]:
        """Return lines for the terminal: the machines, then each target. With `verbose`, each route is listed with all
        its reasons, not only the first.
        """
        lines = [f"emulated machines in {self.place}"]
        for name, (qemu, sysroot) in self.machines.items():
            has = f"{qemu.program.name} {qemu.version} from {qemu.source}" if qemu else "no qemu"
            root = f", root file system {sysroot.root}" if sysroot else ""
            lines.append(f"  {name}: {has}{root}")
        width = max(map(len, self.routes), default=0)
        for name, route in self.routes.items():
            text = route.how if route.where != NOT_RUN else route.reason if verbose else route.reason.split("; ")[0]
            lines.append(f"{name:{width}}  {route.where}: {text}")
        return lines


def read_status(simulators: Mapping[str, Simulator] | None = None) -> Status:
    """Return how this machine can run the kernels of each target. It opens simulators, but runs nothing in them."""
    machine = detect_machine()
    machines = {
        name: (find_qemu(emulator), load_sysroot(emulator) if emulator.sysroot is not None else None)
        for name, emulator in load_emulators().items()
    }
    # The machine was detected above, so "auto" needs no second detection.
    targets = load_targets(machine)
    routes = {name: choose_route(target, machine, simulators=simulators) for name, target in targets.items()}
    return Status(home(), machines, {name: _check_simulator(route) for name, route in routes.items()})


def _check_simulator(route: ExecutionRoute) -> ExecutionRoute:
    """Return `route`, or what is missing if the packages of its simulator are not installed."""
    if route.where != MODELLED or route.start is None:
        return route
    try:
        with route.start():
            return route
    except RuntimeUnavailableError as error:
        return ExecutionRoute(NOT_RUN, "", error.text)
