"""`edgeq emulate setup` and `status`: what there is, what can be made, what is missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeq.emulate.emulator import Emulator, check_writable, emulator_named, home, load_emulators
from edgeq.emulate.machine import Qemu, emulated_command, fetch_qemu, find_qemu
from edgeq.emulate.routes import NOT_RUN, ExecutionRoute, Simulator, route_to
from edgeq.emulate.sysroot import Sysroot, build_sysroot, load_sysroot, use_sysroot
from edgeq.errors import RuntimeUnavailableError, UsageError
from edgeq.hardware.detect import detect_machine
from edgeq.hardware.target import load_targets
from edgeq.run.session import onnxruntime as installed_runtime
from edgeq.run.session import start_guest
from edgeq.util.display import SILENT, Progress

# Every qemu has it, and every program for the architecture runs on it.
_ANY_CPU = "max"


@dataclass(frozen=True)
class Prepared:
    """An emulated machine that is ready: `runtime` is what runs in it."""

    name: str
    qemu: Qemu
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
        """For the terminal: where it is, and what it consists of."""
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
) -> Prepared:
    """Make the emulated machine `name` ready and start a program in it. What is there already is kept.

    Args:
        sysroot: a root file system to use in place of making one.
        onnxruntime: the version to put in; None takes the one that is installed here.
        sources: an apt sources file in place of the system's.
        force: make it again.

    Raises:
        UsageError: no such machine, or `sysroot` does not fit it.
        RuntimeUnavailableError: something is missing, with what to install.
        OutputError: the cache cannot be written.
    """
    emulator = emulator_named(name)
    if sysroot is not None and (onnxruntime or sources):
        raise UsageError("--sysroot is taken as it is", "Leave --onnxruntime and --sources out")
    check_writable()
    qemu = _ready_qemu(emulator, sources, progress)
    there = None if force else load_sysroot(emulator)
    if sysroot is not None:
        there = use_sysroot(emulator, sysroot)
    elif there is None:
        version = onnxruntime or str(installed_runtime().__version__)
        there = build_sysroot(emulator, version, sources=sources, progress=progress)
    with progress.stage("Starting it"), start_guest(emulated_command(emulator, _ANY_CPU), emulator.program) as guest:
        runtime = guest.features()
    return Prepared(name, qemu, there, runtime)


def _ready_qemu(emulator: Emulator, sources: Path | None, progress: Progress) -> Qemu:
    """The system's qemu if it is new enough, else one from packages, else the system's old one."""
    found = find_qemu(emulator)
    if found is not None and found.is_honest(emulator):
        return found
    try:
        fetch_qemu(sources=sources, progress=progress)
    except RuntimeUnavailableError as error:
        if found is None:
            raise
        progress.note(f"keeping {emulator.program} {found.version}: a newer one cannot be fetched ({error.problem})")
    better = find_qemu(emulator)
    if better is None:
        raise RuntimeUnavailableError(
            f"{emulator.program} is not installed, and no package has one that runs here",
            "Install qemu-user (Debian, Ubuntu: apt install qemu-user; Fedora: dnf install qemu-user)",
        )
    return better


@dataclass(frozen=True)
class Status:
    """What there is: per emulated architecture its qemu and root file system, per target the way to its kernels."""

    place: Path
    machines: Mapping[str, tuple[Qemu | None, Sysroot | None]]
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
        """For the terminal: the machines, then each target; of reasons only the first unless `verbose`."""
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


def status(simulators: Mapping[str, Simulator] | None = None) -> Status:
    """How the kernels of each target can be run here. Starts nothing."""
    machine = detect_machine()
    machines = {
        name: (find_qemu(emulator), load_sysroot(emulator) if emulator.sysroot is not None else None)
        for name, emulator in load_emulators().items()
    }
    targets = load_targets(machine)
    return Status(home(), machines, {name: route_to(t, machine, simulators=simulators) for name, t in targets.items()})
