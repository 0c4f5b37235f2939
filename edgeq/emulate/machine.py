"""Starting Python on an emulated CPU: the command line and the files that it needs."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from edgeq_device.children import import_path

from edgeq.emulate.emulator import Emulator, home
from edgeq.emulate.qemu import Qemu, require_qemu
from edgeq.emulate.sysroot import Sysroot, load_sysroot
from edgeq.errors import HardwareError, RuntimeUnavailableError
from edgeq.hardware.detect import arm_parts
from edgeq.workers.guest import Command, guest_environment, start_guest

# What qemu logs: the instructions of the guest, once for each block that it translates.
_LOG = "in_asm"


def emulated_command(emulator: Emulator, cpu: str, *, log: Path | None = None) -> Command:
    """How to start a guest on `cpu`.

    Args:
        log: where qemu writes the code that it translates.

    Raises:
        HardwareError: qemu does not have that CPU, or only its name.
        RuntimeUnavailableError: qemu or the root file system is missing.
    """
    emulator.check_cpu(cpu)
    qemu = require_qemu(emulator)
    check_cpuinfo(qemu, emulator, cpu)
    arguments = [str(qemu.program), "-cpu", cpu, *(("-d", _LOG, "-D", str(log)) if log is not None else ())]
    if emulator.sysroot is None:
        folders = tuple(map(Path, import_path()))
        return Command((*arguments, sys.executable), (), guest_environment(os.environ), folders)
    sysroot = require_sysroot(emulator)
    root = sysroot.root
    environment = guest_environment({"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"})
    if not qemu.is_honest(emulator):
        root = _with_cpuinfo(emulator, cpu, qemu, sysroot, arguments, environment)
    folders = (sysroot.site,) if sysroot.site is not None else ()
    return Command((*arguments, "-L", str(root), str(sysroot.python)), (), environment, folders, _compiled())


def _compiled() -> Path:
    """Packages and wheels hold sources alone: compiling them took an emulated CPU most of the time of every start."""
    return home() / "compiled"


def require_sysroot(emulator: Emulator) -> Sysroot:
    """The root file system that was set up.

    Raises:
        RuntimeUnavailableError: none was.
    """
    sysroot = load_sysroot(emulator)
    if sysroot is None:
        raise RuntimeUnavailableError(
            f"there is no {emulator.name} machine yet", f"Make one: edgeq emulate setup {emulator.name}"
        )
    return sysroot


def check_cpuinfo(qemu: Qemu, emulator: Emulator, cpu: str) -> None:
    """Start qemu with the CPU and check its warnings.

    Raises:
        HardwareError: it does not know the name, or leaves out what makes the CPU what it is.
    """
    # It chooses the CPU before it looks at the program, and refuses this one.
    done = subprocess.run(
        [str(qemu.program), "-cpu", cpu, "/dev/null"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    output = done.stderr.lower()
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


def _with_cpuinfo(
    emulator: Emulator, cpu: str, qemu: Qemu, sysroot: Sysroot, arguments: list[str], environment: dict[str, str]
) -> Path:
    """The root file system seen through links, with a /proc/cpuinfo that fits `cpu`: older qemus show the host's."""
    sign = hashlib.sha256(f"{sysroot.root}\n{qemu.version}\n{cpu}".encode()).hexdigest()[:16]
    view = home() / "views" / sign
    if view.is_dir():
        return view
    # Only onnxruntime fails on the host's file: without it the guest can report its features.
    interpreter = (*arguments, "-L", str(sysroot.root), str(sysroot.python))
    command = Command(interpreter, (), environment, compiled=_compiled())
    with start_guest(command, f"{emulator.program} -cpu {cpu}") as guest:
        features = guest.features(runtime=False)["features"]
    implementer, part = _identity(cpu)
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
    text = "".join(f"processor\t: {number}\n{body}\n" for number in range(os.cpu_count() or 1))
    view.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=view.parent, prefix="new-") as work:
        draft = Path(work) / "view"
        (draft / "proc").mkdir(parents=True)
        (draft / "proc" / "cpuinfo").write_text(text, encoding="utf-8")
        for entry in sorted(sysroot.root.iterdir()):
            if entry.name != "proc":
                (draft / entry.name).symlink_to(entry)
        if not view.is_dir():
            draft.rename(view)
    return view


def _identity(cpu: str) -> tuple[str, str]:
    """Implementer and part of the core that qemu calls `cpu`; zeros, which stand for none, where it is no real one."""
    for implementer, parts in arm_parts().items():
        for part, name in parts.items():
            if name.lower() == cpu.lower():
                return implementer, part
    return "0x00", "0x000"
