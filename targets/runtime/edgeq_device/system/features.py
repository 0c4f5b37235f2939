"""Read the CPU features of this machine from the operating system and the CPU, and give them uniform names.

Names are those of Linux's /proc/cpuinfo (`avx512_vnni`, `amx_int8`, `asimddp`, `i8mm`), except that x86's `pni` is
`sse3`. `gather` reads the evidence, and `interpret` decides which features count. Recordings of other machines also go
through `interpret`.

ONNX Runtime chooses its x86-64 kernels by the CPUID instruction. So if the operating system does not list a feature,
CPUID decides: Windows lists neither VNNI nor AMX, a container may hide the flags in /proc/cpuinfo, and Linux does not
list AVX-VNNI-INT8. CPUID also decides when /proc/cpuinfo describes another CPU: under a user-mode emulator, that file
shows the host's CPU.

The file features.json next to this one contains the bits and names, with their sources.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, FrozenSet, Iterable, List, Mapping, NamedTuple, Optional, Set, Tuple

from edgeq_device.system.programs import build_child_environment
from edgeq_device.system.tables import read_table

ROOT = Path("/")

Registers = Tuple[int, int, int, int]
"""EAX, EBX, ECX and EDX of one leaf."""


class Answers(NamedTuple):
    """Hold the registers of CPUID, keyed by (leaf, subleaf), and XCR0. XCR0 lists the register states that the
    operating system saves.
    """

    leaves: Mapping[Tuple[int, int], Registers]
    xcr0: int


_EAX, _ECX = 0, 2
_TABLE = read_table("system/features.json")
_BITS: Mapping[str, Tuple[int, int, int, int, str]] = _TABLE["cpuid"]["bits"]
FEATURES = frozenset(_BITS)
"""Every feature that `cpuid_features` can find."""


def find_bit(feature: str) -> Tuple[int, int, int, int]:
    """Return where CPUID reports `feature`: the leaf, the subleaf, the register (0 is EAX) and the bit."""
    leaf, subleaf, register, bit, _ = _BITS[feature]
    return leaf, subleaf, register, bit


# The first function takes three arguments: an address for 16 bytes, the leaf, and the subleaf. The second takes one: an
# address for 8 bytes.
_SYSTEM_V = (
    bytes.fromhex("53 89f0 89d1 0fa2 8907 895f04 894f08 89570c 5b c3"),
    bytes.fromhex("31c9 0f01d0 8907 895704 c3"),
)
_MICROSOFT = (
    bytes.fromhex("53 4989c9 89d0 4489c1 0fa2 418901 41895904 41894908 4189510c 5b c3"),
    bytes.fromhex("4989c9 31c9 0f01d0 418901 41895104 c3"),
)


def cpuid_features(answers: Answers) -> FrozenSet[str]:
    """Return the features that the CPU has and whose registers the operating system saves."""
    nothing = (0, 0, 0, 0)
    saved = {name for name, state in _TABLE["cpuid"]["xcr0"].items() if answers.xcr0 & state == state}
    return frozenset(
        name
        for name, (leaf, subleaf, register, bit, state) in _BITS.items()
        if answers.leaves.get((leaf, subleaf), nothing)[register] >> bit & 1 and state in saved
    )


def query_cpuid() -> Optional[Answers]:
    """Run CPUID and XGETBV on an x86-64 CPU. Return None if the system does not let a program create machine code."""
    try:
        return _run_windows() if sys.platform == "win32" else _run_posix()
    except (OSError, ValueError):
        return None


def _run_posix() -> Answers:
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    # NOPs fill the page up to the second function.
    page.write(_SYSTEM_V[0].ljust(64, b"\x90") + _SYSTEM_V[1])
    first_byte = ctypes.c_char.from_buffer(page)
    try:
        return _collect(ctypes.addressof(first_byte))
    finally:
        del first_byte
        page.close()


def _run_windows() -> Answers:
    commit, execute_read_write, release = 0x3000, 0x40, 0x8000
    kernel = ctypes.WinDLL("kernel32", use_last_error=True)  # type: ignore[attr-defined,unused-ignore]
    kernel.VirtualAlloc.restype = ctypes.c_void_p
    kernel.VirtualAlloc.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32, ctypes.c_uint32)
    kernel.VirtualFree.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32)
    address = kernel.VirtualAlloc(None, 4096, commit, execute_read_write)
    if not address:
        raise OSError("VirtualAlloc refused an executable page")
    try:
        code = _MICROSOFT[0].ljust(64, b"\x90") + _MICROSOFT[1]
        ctypes.memmove(address, code, len(code))
        return _collect(address)
    finally:
        kernel.VirtualFree(address, 0, release)


def _collect(address: int) -> Answers:
    """Query the leaves in `_BITS` and the leaf with the vendor. The CPUID function is at `address`, and the XGETBV
    function is 64 bytes after it.
    """
    out = ctypes.create_string_buffer(16)
    cpuid = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32)(address)
    xgetbv = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address + 64)

    def leaf(number: int, subleaf: int) -> Registers:
        """Return the registers eax, ebx, ecx and edx of one CPUID leaf."""
        cpuid(ctypes.addressof(out), number, subleaf)
        eax, ebx, ecx, edx = struct.unpack("<4I", out.raw)
        return eax, ebx, ecx, edx

    leaves: Dict[Tuple[int, int], Registers] = {(0, 0): leaf(0, 0), (1, 0): leaf(1, 0)}
    highest = leaves[0, 0][_EAX]
    # A CPU may answer for a leaf that it lacks with the values of another one.
    if highest >= 7:
        leaves[7, 0] = leaf(7, 0)
        if leaves[7, 0][_EAX] >= 1:
            leaves[7, 1] = leaf(7, 1)
    # The bit OSXSAVE; without it, XGETBV is an invalid instruction.
    saves_state = leaves[1, 0][_ECX] >> 27 & 1
    if not saves_state:
        return Answers(leaves, 0)
    xgetbv(ctypes.addressof(out))
    low, high = struct.unpack("<2I", out.raw[:8])
    return Answers(leaves, high << 32 | low)


_ARCHITECTURES = {"amd64": "x86_64", "x64": "x86_64", "aarch64": "arm64", "armv8": "arm64"}

_CPUINFO_KEYS = {"x86_64": "flags", "arm64": "Features", "riscv64": "isa"}

# CPUID bits that have no name in Linux's /proc/cpuinfo, so their absence there means nothing.
_UNLISTED = frozenset(_TABLE["unlisted_by_linux"])
_WINDOWS: Mapping[str, List[str]] = _TABLE["windows"]["numbers"]
_SYSCTL = ("/usr/sbin/sysctl", "hw", "machdep.cpu")


@dataclass(frozen=True)
class Evidence:
    """Hold what a machine reports about itself, before interpretation.

    Attributes:
        system: value of `platform.system()`: "Linux", "Darwin", "Windows".
        machine: value of `platform.machine()`.
        cpuinfo: text of /proc/cpuinfo.
        auxv: bytes of /proc/self/auxv.
        sysctl: output of `sysctl hw machdep.cpu`.
        windows: numbers for which IsProcessorFeaturePresent is true.
        cpuid: answers of the CPUID instruction; None if it was not run.
    """

    system: str
    machine: str
    cpuinfo: str = ""
    auxv: bytes = b""
    sysctl: str = ""
    windows: Tuple[int, ...] = ()
    cpuid: Optional[Answers] = None


@dataclass(frozen=True)
class Reading:
    """Hold the interpretation of the evidence.

    Attributes:
        architecture: "x86_64", "arm64", "riscv64", or the system's own name of another architecture in lower case.
        features: features by their uniform names.
        source: source that lists the features: "/proc/cpuinfo", "HWCAP", "sysctl", "Windows" or "CPUID"; "" if no
            source does.
        doubted: features about which the sources disagree. They are not in `features`.
        notes: disagreements between the sources, as sentences.
    """

    architecture: str
    features: FrozenSet[str]
    source: str
    doubted: FrozenSet[str] = frozenset()
    notes: Tuple[str, ...] = ()


def read_features() -> Tuple[str, FrozenSet[str]]:
    """Return this machine's architecture and normalised CPU features."""
    reading = interpret(gather())
    return reading.architecture, reading.features


def gather() -> Evidence:
    """Return the evidence of this machine. This takes at most a few milliseconds, except on macOS, where sysctl is
    started as a process.
    """
    system, machine = platform.system(), platform.machine()
    runs_x86_64 = normalise_architecture(machine) == "x86_64" and struct.calcsize("P") == 8
    # Do not use XCR0 on macOS: there it shows AVX-512 only to threads that have used it, but sysctl is correct.
    answers = query_cpuid() if runs_x86_64 and system in ("Linux", "Windows") else None
    return Evidence(
        system,
        machine,
        cpuinfo=read_bytes(Path("/proc/cpuinfo")).decode("utf-8", "replace") if system == "Linux" else "",
        auxv=read_bytes(Path("/proc/self/auxv")) if system == "Linux" else b"",
        sysctl=subprocess.run(
            _SYSCTL, env=build_child_environment(), capture_output=True, text=True, check=False
        ).stdout
        if system == "Darwin"
        else "",
        windows=_query_windows() if system == "Windows" else (),
        cpuid=answers,
    )


def interpret(evidence: Evidence) -> Reading:
    """Decide which features count: they must be listed by the system and not denied by the CPU."""
    architecture = normalise_architecture(evidence.machine)
    listed, source = _read_listed(evidence, architecture)
    if evidence.cpuid is None:
        return Reading(architecture, listed, source)
    answered = cpuid_features(evidence.cpuid)
    if source != "/proc/cpuinfo":
        return Reading(architecture, answered | listed, "CPUID")
    denied = listed & FEATURES - answered
    hidden = answered - listed - _UNLISTED
    notes = []
    if denied:
        notes.append(f"/proc/cpuinfo lists {_join(denied)}, which CPUID denies (an emulator?): not counted")
    if hidden:
        notes.append(f"CPUID reports {_join(hidden)}, which /proc/cpuinfo does not list: not counted")
    features = listed - denied | answered & _UNLISTED
    return Reading(architecture, features, source, denied | hidden, tuple(notes))


def _read_listed(evidence: Evidence, architecture: str) -> Tuple[FrozenSet[str], str]:
    """Return the features that the operating system lists, and their source. The source is "" if nothing is listed."""
    hwcap = parse_hwcap(*read_hwcap(evidence.auxv)) if architecture == "arm64" else frozenset()
    for source, features in (
        ("/proc/cpuinfo", parse_cpuinfo(evidence.cpuinfo, architecture)),
        ("HWCAP", hwcap),
        ("sysctl", parse_sysctl(evidence.sysctl)),
        ("Windows", frozenset(name for number in evidence.windows for name in _WINDOWS.get(str(number), ()))),
    ):
        if features:
            return features | hwcap, source
    return frozenset(), ""


def normalise_architecture(machine: str) -> str:
    """Return the uniform name of an architecture that `platform.machine()` reports on any system."""
    spelling = machine.strip().lower()
    return _ARCHITECTURES.get(spelling, spelling)


def normalise(spellings: Iterable[str]) -> FrozenSet[str]:
    """Translate feature names from any source to the uniform names."""
    lower = (spelling.strip().lower() for spelling in spellings)
    return frozenset(_TABLE["spellings"].get(spelling, spelling) for spelling in lower if spelling)


def parse_cpuinfo(text: str, architecture: str) -> FrozenSet[str]:
    """Return the features that every processor in a /proc/cpuinfo text has, because a thread may run on any of them.

    Only the lines of `architecture` are read, because a user-mode emulator shows the host's file.
    """
    features_key = _CPUINFO_KEYS.get(architecture)
    features = None
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == features_key:
            names = normalise(value.split())
            if features_key == "isa":  # "rv64imafdcv_zicbom" → {"i", "m", …, "v", "zicbom"}
                base, *extensions = value.strip().lower().split("_")
                names = frozenset((*base[4:], *extensions))
            features = names if features is None else features & names
    return features or frozenset()


def read_hwcap(auxv: bytes) -> Tuple[int, int]:
    """Return AT_HWCAP and AT_HWCAP2 from the bytes of /proc/self/auxv (64-bit, little endian)."""
    entries: Dict[int, int] = dict(struct.iter_unpack("<QQ", auxv[: len(auxv) // 16 * 16]))
    # AT_HWCAP is entry 16 of the auxiliary vector, AT_HWCAP2 is entry 26.
    return entries.get(16, 0), entries.get(26, 0)


def parse_hwcap(hwcap: int, hwcap2: int = 0) -> FrozenSet[str]:
    """Return the features in ARM64's AT_HWCAP and AT_HWCAP2. The /proc/cpuinfo of old kernels and of 32-bit shells
    lacks some of them.
    """
    names = [name for bit, name in enumerate(_TABLE["hwcap"]["bits"].split()) if hwcap >> bit & 1]
    names += [name for bit, name in enumerate(_TABLE["hwcap"]["bits2"].split()) if hwcap2 >> bit & 1]
    return frozenset(names)


def parse_sysctl(text: str) -> FrozenSet[str]:
    """Return the features in macOS's `sysctl hw machdep.cpu`, ARM64 or x86-64."""
    features: Set[str] = set()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key in ("machdep.cpu.features", "machdep.cpu.leaf7_features"):
            features |= normalise(value.split())
        elif value.strip() == "1":
            features.update(_TABLE["apple"]["keys"].get(key, ()))
    return frozenset(features)


def parse_identity(text: str) -> Dict[str, str]:
    """Return the first processor's fields of /proc/cpuinfo by their original keys ("model name", "CPU part", …)."""
    fields: Dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), value.strip())
    return fields


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a file, or b"" if it does not exist or cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _query_windows() -> Tuple[int, ...]:
    if sys.platform != "win32":
        return ()
    present = ctypes.WinDLL("kernel32").IsProcessorFeaturePresent  # type: ignore[attr-defined,unused-ignore]
    return tuple(number for number in sorted(map(int, _WINDOWS)) if present(number))


def _join(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def read_text(path: Path, limit: int = 1 << 20) -> Optional[str]:
    """Return the text of a small system file, or None if it does not exist or cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(limit).decode("utf-8", "replace")
    except OSError:
        # The file is absent, or reading it fails. (Thermal zones that are switched off return EINVAL.)
        return None


def read_allowed_cores() -> Tuple[int, ...]:
    """Return the logical cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))
