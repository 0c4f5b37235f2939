"""A lesser CPU at native speed: a private copy of onnxruntime in which a trap takes the place of the CPUID instruction.

No option of onnxruntime lowers its instruction set; it follows CPUID. In the copy every CPUID instruction
is replaced by one that traps, and a small library (cpuid_mask.c) gives the result with feature bits taken out.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from edgeq_device.children import import_path
from edgeq_device.cpuid import FEATURES, bit_of
from edgeq_device.moves import move_new

from edgeq.emulate.commands import find, run, which
from edgeq.emulate.emulator import check_writable, home
from edgeq.errors import RuntimeUnavailableError
from edgeq.ownership import sha256
from edgeq.progress import SILENT, Progress
from edgeq.workers.guest import Command, guest_environment

FOLDER = "masked"
_CPUID, _TRAP = b"\x0f\xa2", b"\x0f\xff"
_INSTRUCTION = re.compile(rb"^\s*([0-9a-f]+):\s+cpuid\b")
_SECTION = re.compile(r"^\s*\d+\s+\S+\s+([0-9a-f]+)\s+([0-9a-f]+)\s+[0-9a-f]+\s+([0-9a-f]+)", re.M)
_TOOLS = "Install a C compiler with its binutils (Debian, Ubuntu: apt install gcc)"
_SHIM = Path(__file__).with_name("cpuid_mask.c")


def why_not() -> str:
    """Why CPUID cannot be masked here; "" where it can."""
    if not sys.platform.startswith("linux"):
        return "masking CPUID needs Linux"
    missing = [tool for tool in ("cc", "objdump") if which(tool) is None]
    if missing:
        return f"masking CPUID needs {' and '.join(missing)}. {_TOOLS}"
    if importlib.util.find_spec("onnxruntime") is None:
        return "onnxruntime is not installed"
    return ""


def masked_command(features: Iterable[str], *, progress: Progress = SILENT) -> Command:
    """How to start this Python with onnxruntime on a CPU without `features`; makes what that needs on first use.

    Raises:
        RuntimeUnavailableError: it cannot be done here.
    """
    problem = why_not()
    if problem:
        raise RuntimeUnavailableError(problem)
    folder = _masked_runtime(progress)
    clear = []
    for feature in sorted(FEATURES.intersection(features)):
        leaf, subleaf, register, bit = bit_of(feature)
        clear.append(f"{leaf}:{subleaf}:{register}:{1 << bit:#x}")
    folders = (folder, *map(Path, import_path()))
    masks = ("--mask", str(folder / "cpuid_mask.so"), *clear)
    return Command((sys.executable,), masks, guest_environment(os.environ), folders)


def _masked_runtime(progress: Progress) -> Path:
    """The folder with the copy and the library, under a name that stands for what they were made from."""
    spec = importlib.util.find_spec("onnxruntime")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).parent
    binding = next((source / "capi").glob("onnxruntime_pybind11_state*.so"), None)
    if binding is None:
        raise RuntimeUnavailableError(f"{source} holds no onnxruntime_pybind11_state", "Install onnxruntime again")
    parts = f"{sha256(binding)[:16]}-{sha256(_SHIM)[:8]}"
    folder = home() / FOLDER / parts
    if folder.is_dir():
        return folder
    check_writable()
    (home() / FOLDER).mkdir(exist_ok=True)
    with (
        progress.stage("Preparing onnxruntime for CPUID masking"),
        tempfile.TemporaryDirectory(dir=home() / FOLDER, prefix="new-") as work,
    ):
        draft = Path(work) / "done"
        _copy(source, draft / "onnxruntime")
        for library in _loaded(binding):
            place = draft / "onnxruntime" / "capi" / library.name
            place.unlink()
            place.write_bytes(patched(library))
        run([find("cc", _TOOLS), "-O2", "-fPIC", "-shared", str(_SHIM), "-o", str(draft / "cpuid_mask.so")], _TOOLS)
        with suppress(FileExistsError):  # another process was faster
            move_new(draft, folder)
    return folder


def _copy(source: Path, place: Path) -> None:
    """The package with links in place of files; what is not Python is linked too, except where it is replaced."""
    for file in sorted(source.rglob("*")):
        name = file.relative_to(source)
        if file.is_file() and "__pycache__" not in name.parts:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).symlink_to(file)


def _loaded(binding: Path) -> list[Path]:
    """The Python binding and those libraries beside it that it is linked with."""
    output = run([find("objdump", _TOOLS), "-p", str(binding)], _TOOLS)
    needed = {line.split()[1] for line in output.splitlines() if line.strip().startswith("NEEDED")}
    return [binding, *(file for file in sorted(binding.parent.glob("*.so*")) if file.name in needed)]


def patched(library: Path) -> bytes:
    """The bytes of a shared library, each CPUID instruction in its code replaced by the trap.

    Raises:
        RuntimeUnavailableError: the disassembler and the file do not agree.
    """
    content = bytearray(library.read_bytes())
    sections = [
        (int(address, 16), int(size, 16), int(offset, 16))
        for size, address, offset in _SECTION.findall(run([find("objdump", _TOOLS), "-h", str(library)], _TOOLS))
    ]
    for address in _cpuid_addresses(library):
        at = next((a + offset for start, size, offset in sections if 0 <= (a := address - start) < size), None)
        if at is None or content[at : at + 2] != _CPUID:
            raise RuntimeUnavailableError(f"{library} is not laid out as objdump lists it", _TOOLS)
        content[at : at + 2] = _TRAP
    return bytes(content)


def _cpuid_addresses(library: Path) -> Iterator[int]:
    """Where the CPUID instructions lie. The bytes alone would not do: they occur inside others."""
    command = [find("objdump", _TOOLS), "-d", "--no-show-raw-insn", str(library)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if b"cpuid" in line and (found := _INSTRUCTION.match(line)):
                yield int(found.group(1), 16)
        if process.wait() != 0:
            raise RuntimeUnavailableError(f"objdump cannot read {library}", _TOOLS)
