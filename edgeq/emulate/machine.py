"""Start Python on an emulated CPU: find or fetch qemu, and prepare its command line and files."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from edgeq_device.engines.catalog import parse_version
from edgeq_device.engines.guest import list_import_path
from edgeq_device.system.programs import build_child_environment, find_program

from edgeq.emulate.cache import check_place, check_writable, home
from edgeq.emulate.emulator import Emulator, load_emulators
from edgeq.emulate.sysroot import Apt, Package, Sysroot, load_sysroot, run, unpack_programs
from edgeq.errors import HardwareError, RuntimeUnavailableError
from edgeq.hardware.detect import load_arm_parts
from edgeq.run.session import PythonCommand, build_guest_environment, start_guest
from edgeq.util.display import SILENT, Progress
from edgeq.util.marker import read_object
from edgeq.util.ownership import Judge, Ownership
from edgeq.util.record_files import read_json
from edgeq.util.records import plain

FOLDER = "qemu"
_INSTALL = "Install it (Debian, Ubuntu: apt install qemu-user; Fedora: dnf install qemu-user)"


@dataclass(frozen=True)
class QemuProgram:
    """Describe a qemu-user program that runs on this machine.

    Attributes:
        source: "the system", or the package that contained the program.
    """

    program: Path
    version: str
    source: str

    @property
    def key(self) -> tuple[int, ...]:
        """Return the version as numbers, for comparison."""
        return parse_version(self.version)

    def is_honest(self, emulator: Emulator) -> bool:
        """Return whether this qemu shows the guest a /proc/cpuinfo of the emulated CPU, not the host's."""
        return self.key >= parse_version(emulator.qemu.honest_cpuinfo)


@dataclass(frozen=True)
class _Lock:
    package: str
    sha256: str = ""


def find_qemu(emulator: Emulator) -> QemuProgram | None:
    """Return the newest qemu for `emulator` that runs on this machine; None if there is none.

    Raises:
        RuntimeUnavailableError: the folder of edgeq's own programs is damaged.
    """
    lock = check_place(home() / FOLDER, "edgeq emulate setup") / "lock.json"
    fix = f"Remove {lock.parent} and run: edgeq emulate setup"
    source = read_json(lock, _Lock, RuntimeUnavailableError, fix).package if lock.is_file() else ""
    private_program = home() / FOLDER / emulator.program
    # edgeq's own program is a candidate like the others, because the system's may be newer.
    candidates = [(private_program, source)] if private_program.is_file() else []
    for name in (emulator.program, f"{emulator.program}-static"):
        system_program = find_program(name)
        if system_program is not None:
            candidates.append((Path(system_program), "the system"))
    programs = [
        QemuProgram(path, version, origin)
        for path, origin in candidates
        if (version := _read_version(path)) is not None
    ]
    # A newer qemu knows more CPUs and shows them more truthfully.
    return max(programs, key=lambda qemu: qemu.key, default=None)


def require_qemu(emulator: Emulator) -> QemuProgram:
    """Return the newest qemu for `emulator` that runs on this machine.

    Raises:
        RuntimeUnavailableError: no qemu was found.
    """
    qemu = find_qemu(emulator)
    if qemu is None:
        fix = f"{_INSTALL}, or let edgeq unpack one: edgeq emulate setup"
        raise RuntimeUnavailableError(f"{emulator.program} is not installed", fix)
    return qemu


def fetch_qemu(*, sources: Path | None = None, progress: Progress = SILENT) -> QemuProgram | None:
    """Unpack the distribution's newest qemu-user into the cache. Backports are also searched.

    Only static programs work without installation. For others, use the system's package manager.

    Returns:
        The qemu; None if no package contains a program that runs on this machine.
    """
    folder = home() / FOLDER
    emulators = load_emulators().values()
    names = {n for emulator in emulators for n in (emulator.program, f"{emulator.program}-static")}
    packages = tuple(dict.fromkeys(name for emulator in emulators for name in emulator.qemu.packages))
    check_writable()
    with tempfile.TemporaryDirectory(dir=home(), prefix="qemu-") as work, progress.stage("Fetching qemu-user"):
        apt = _choose_apt(Path(work), sources)
        offers = [offer for versions in apt.offers(packages).values() for offer in versions]
        for package in sorted(offers, key=_rank_package, reverse=True):
            # The programs are tried in a temporary folder, so that a package that does not run here leaves nothing
            # behind.
            stage = Path(work) / "programs"
            shutil.rmtree(stage, ignore_errors=True)
            stage.mkdir()
            programs = unpack_programs(apt.download([package], Path(work))[0], stage, names)
            # A dynamically linked program fails here, because its libraries are not installed.
            if programs and all(_read_version(path) for path in programs):
                for path in programs:
                    path.rename(stage / path.name.removesuffix("-static"))
                lock = json.dumps(plain(_Lock(package.label, package.sha256)))
                (stage / "lock.json").write_text(lock + "\n", encoding="utf-8")
                PROGRAMS.check(folder)
                if folder.exists():
                    shutil.rmtree(folder)
                stage.rename(folder)
                # The cache still says that these paths have no program.
                _read_version.cache_clear()
                return find_qemu(next(iter(emulators)))
    return None


def _judge(folder: Path) -> Judge | None:
    lock = read_object(folder / "lock.json")
    if lock is None or not {"package", "sha256"} <= lock.keys():
        return None
    return lambda name: name in ("lock.json", *(emulator.program for emulator in load_emulators().values()))


PROGRAMS = Ownership("folder of edgeq's programs", _judge)
"""The folder contains the unpacked programs, and the lock file that names their package."""


def _rank_package(package: Package) -> tuple[tuple[int, ...], int]:
    """Return a sort key: the upstream version, then the smaller download."""
    # The epoch and the distribution's suffix are not part of qemu's own version.
    upstream = package.version.split(":")[-1]
    return parse_version(re.sub(r"[^0-9.].*", "", upstream)), -package.size


def _choose_apt(work: Path, sources: Path | None) -> Apt:
    """Return a private apt for the backports if they offer qemu, else for the system's archives."""
    system_apt = Apt(work / "apt", "", sources)
    system_apt.update()
    codename = _read_codename()
    lines = [archive.line(f"{codename}-backports") for archive in system_apt.archives() if archive.release == codename]
    if not lines:
        return system_apt
    file = work / "backports.list"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    backports = Apt(work / "backports", "", file)
    try:
        backports.update()
    except RuntimeUnavailableError:
        return system_apt  # this distribution or its mirror has no backports
    return backports if backports.offers(["qemu-user"]) else system_apt


def _read_codename() -> str:
    file = Path("/etc/os-release")
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    match = re.search(r'^VERSION_CODENAME="?([^"\n]*)', text, re.M)
    return match.group(1) if match else ""


@cache
def _read_version(program: Path) -> str | None:
    """Return the version that `--version` prints; None if the program does not run on this machine."""
    if not os.access(program, os.X_OK):
        return None
    try:
        output = run([str(program), "--version"], "")
    except (RuntimeUnavailableError, OSError):
        return None
    match = re.search(r"version (\d+(?:\.\d+)*)", output)
    return match.group(1) if match else None


# With this option, qemu logs the guest's instructions, once for each block that it translates.
_LOG = "in_asm"


def build_command(emulator: Emulator, cpu: str, *, log: Path | None = None) -> PythonCommand:
    """Return the command that starts a guest on `cpu`.

    Args:
        log: file to which qemu logs the code that it translates; None writes no log.

    Raises:
        HardwareError: qemu does not have that CPU, or runs another CPU under its name.
        RuntimeUnavailableError: qemu or the root file system is missing.
    """
    emulator.check_cpu(cpu)
    qemu = require_qemu(emulator)
    check_cpuinfo(qemu, emulator, cpu)
    arguments = [str(qemu.program), "-cpu", cpu, *(("-d", _LOG, "-D", str(log)) if log is not None else ())]
    # The emulated CPU has this machine's architecture, so this machine's own Python and packages run on it.
    if emulator.sysroot is None:
        folders = tuple(map(Path, list_import_path()))
        return PythonCommand((*arguments, sys.executable), (), build_guest_environment(os.environ), folders)
    sysroot = require_sysroot(emulator)
    root = sysroot.root
    # The host's variables name paths and libraries of the wrong architecture.
    environment = build_guest_environment({"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"})
    # onnxruntime reads /proc/cpuinfo to choose its kernels, so it must not see the host's.
    if not qemu.is_honest(emulator):
        root = _write_cpuinfo(emulator, cpu, qemu, sysroot, arguments, environment)
    folders = (sysroot.site,) if sysroot.site is not None else ()
    return PythonCommand(
        (*arguments, "-L", str(root), str(sysroot.python)), (), environment, folders, _compiled_folder()
    )


def _compiled_folder() -> Path:
    """Return the folder for compiled Python files.

    Packages and wheels contain only sources. Without this folder, every start on an emulated CPU would spend most of
    its time on compiling the sources.
    """
    return check_place(home() / "compiled", "edgeq emulate setup")


def require_sysroot(emulator: Emulator, packages: Sequence[str] = ()) -> Sysroot:
    """Return the root file system that was set up.

    Args:
        packages: wheels that it must contain; any one of them is enough.

    Raises:
        RuntimeUnavailableError: no root file system was set up, or it does not contain the wheel.
    """
    sysroot = load_sysroot(emulator)
    if sysroot is None:
        raise RuntimeUnavailableError(
            f"the {emulator.name} machine is not set up yet", f"Set it up: edgeq emulate setup {emulator.name}"
        )
    if packages and not any(map(sysroot.has_wheel, packages)):
        raise RuntimeUnavailableError(
            f"the {emulator.name} machine does not contain {packages[0]}",
            f"Set it up again: edgeq emulate setup {emulator.name}",
        )
    return sysroot


def check_cpuinfo(qemu: QemuProgram, emulator: Emulator, cpu: str) -> None:
    """Start qemu with the CPU and check its warnings.

    Raises:
        HardwareError: qemu does not know the CPU, or leaves out features by which kernels are chosen.
    """
    # qemu chooses the CPU before it reads the program. It then refuses to run /dev/null.
    process = subprocess.run(
        [str(qemu.program), "-cpu", cpu, "/dev/null"],
        env=build_child_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    output = process.stderr.lower()
    if "unable to find cpu model" in output:
        raise HardwareError(
            f"{emulator.program} {qemu.version} has no CPU {cpu!r}",
            f"Use a newer one: edgeq emulate setup, or name one that {emulator.program} -cpu help lists",
        )
    left_out = [
        line for line in output.splitlines() if any(f".{component}" in line for component in emulator.qemu.missing)
    ]
    if left_out:
        raise HardwareError(
            f"{emulator.program} {qemu.version} has no {cpu}: it leaves out {left_out[0].rsplit('.', 1)[-1].strip()}",
            "Name a CPU that it has in [emulate], or check on a machine of that kind",
        )


def _write_cpuinfo(
    emulator: Emulator, cpu: str, qemu: QemuProgram, sysroot: Sysroot, arguments: list[str], environment: dict[str, str]
) -> Path:
    """Return a folder of links to the root file system, with a /proc/cpuinfo that fits `cpu`.

    Without this file, older versions of qemu would show the host's.
    """
    # All that the view depends on is part of its name, so it can be kept.
    sign = hashlib.sha256(f"{sysroot.root}\n{qemu.version}\n{cpu}".encode()).hexdigest()[:16]
    view = check_place(home() / "views" / sign, "edgeq emulate setup")
    if view.is_dir():
        return view
    # With the host's /proc/cpuinfo, only onnxruntime fails. A guest without onnxruntime can still report its features.
    interpreter = (*arguments, "-L", str(sysroot.root), str(sysroot.python))
    command = PythonCommand(interpreter, (), environment, compiled=_compiled_folder())
    with start_guest(command, f"{emulator.program} -cpu {cpu}") as guest:
        features = guest.features(runtime=False)["features"]
    implementer, part = _find_core(cpu)
    fields = {
        "BogoMIPS": "100.00",
        "Features": " ".join(features),
        "CPU implementer": implementer,
        "CPU architecture": "8",
        "CPU variant": "0x0",
        "CPU part": part,
        "CPU revision": "0",
    }
    body = "".join(f"{key}\t: {value}\n" for key, value in fields.items())
    # qemu gives the guest as many processors as the host has.
    text = "".join(f"processor\t: {number}\n{body}\n" for number in range(os.cpu_count() or 1))
    view.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=view.parent, prefix="new-") as work:
        draft = Path(work) / "view"
        (draft / "proc").mkdir(parents=True)
        (draft / "proc" / "cpuinfo").write_text(text, encoding="utf-8")
        for entry in sorted(sysroot.root.iterdir()):
            if entry.name != "proc":
                (draft / entry.name).symlink_to(entry)
        # Another process may have finished the same view first.
        if not view.is_dir():
            draft.rename(view)
    return view


def _find_core(cpu: str) -> tuple[str, str]:
    """Return the implementer and part number of the core that qemu calls `cpu`; zeros if it is not a real core."""
    for implementer, parts in load_arm_parts().items():
        for part, name in parts.items():
            if name.lower() == cpu.lower():
                return implementer, part
    return "0x00", "0x000"
