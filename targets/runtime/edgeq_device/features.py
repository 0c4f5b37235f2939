"""The CPU features of this machine, from the operating system and the CPU alone, in one spelling.

Names are those that Linux prints in /proc/cpuinfo (`avx512_vnni`, `amx_int8`, `asimddp`, `i8mm`), except that x86's
`pni` is `sse3`. `gather` reads, `interpret` decides; recordings of other machines go through `interpret` alike.
"""

from __future__ import annotations

import ctypes
import platform
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, FrozenSet, Iterable, Optional, Set, Tuple

from edgeq_device import cpuid

_ARCHITECTURES = {"amd64": "x86_64", "x64": "x86_64", "aarch64": "arm64", "armv8": "arm64"}

_CPUINFO_KEYS = {"x86_64": "flags", "arm64": "Features", "riscv64": "isa"}

_SPELLINGS = {
    "pni": "sse3",
    "sse4.1": "sse4_1",
    "sse4.2": "sse4_2",
    "avx1.0": "avx",
    "rdrnd": "rdrand",
    "tscdeadline": "tsc_deadline_timer",
    "avxvnni": "avx_vnni",
    "avxvnniint8": "avx_vnni_int8",
    "avxvnniint16": "avx_vnni_int16",
    "avx512vnni": "avx512_vnni",
    "avx512bf16": "avx512_bf16",
    "avx512fp16": "avx512_fp16",
    "avx512vbmi2": "avx512_vbmi2",
    "avx512bitalg": "avx512_bitalg",
    "avx512vpopcntdq": "avx512_vpopcntdq",
    "avx512_vbmi": "avx512vbmi",
    "avx512_ifma": "avx512ifma",
    "amxtile": "amx_tile",
    "amxint8": "amx_int8",
    "amxbf16": "amx_bf16",
    "neon": "asimd",
    "dotprod": "asimddp",
}

# The names of the bits of AT_HWCAP and AT_HWCAP2 on ARM64, from bit 0 up: Linux, arch/arm64/include/uapi/asm/hwcap.h.
_ARM_HWCAP = (
    "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc dcpop sha3 sm3 "
    "sm4 asimddp sha512 sve asimdfhm dit uscat ilrcpc flagm ssbs sb paca pacg"
)
_ARM_HWCAP2 = (
    "dcpodp sve2 sveaes svepmull svebitperm svesha3 svesm4 flagm2 frint svei8mm svef32mm svef64mm svebf16 i8mm bf16 "
    "dgh rng bti mte ecv afp rpres mte3 sme smei16i64 smef64f64 smei8i32 smef16f32 smeb16f32 smef32f32 smefa64 wfxt "
    "ebf16 sveebf16 cssc rprfm sve2p1 sme2 sme2p1 smei16i32 smebi32i32 smeb16b16 smef16f16 mops hbc sveb16b16 lrcpc3 "
    "lse128"
)

_APPLE = {
    "hw.optional.neon": ("asimd",),
    "hw.optional.AdvSIMD": ("asimd",),
    "hw.optional.arm.AdvSIMD": ("asimd",),
    "hw.optional.arm.FEAT_LSE": ("atomics",),
    "hw.optional.arm.FEAT_FP16": ("fphp", "asimdhp"),
    "hw.optional.arm.FEAT_FHM": ("asimdfhm",),
    "hw.optional.arm.FEAT_RDM": ("asimdrdm",),
    "hw.optional.arm.FEAT_DotProd": ("asimddp",),
    "hw.optional.arm.FEAT_I8MM": ("i8mm",),
    "hw.optional.arm.FEAT_BF16": ("bf16",),
    "hw.optional.arm.FEAT_SME": ("sme",),
    "hw.optional.arm.FEAT_SME2": ("sme2",),
    "hw.optional.arm.SME_I8I32": ("smei8i32",),
}

# IsProcessorFeaturePresent of the Windows SDK (winnt.h). Windows has no bit for FMA; every CPU with AVX2 that it
# runs on has it.
_WINDOWS = {
    6: ("sse",),
    10: ("sse2",),
    13: ("sse3",),
    36: ("ssse3",),
    37: ("sse4_1",),
    38: ("sse4_2",),
    39: ("avx",),
    40: ("avx2", "fma"),
    41: ("avx512f",),
    19: ("asimd",),
    34: ("atomics",),
    43: ("asimddp",),
    46: ("sve",),
    47: ("sve2",),
    57: ("svei8mm",),
    66: ("i8mm",),
    67: ("fphp", "asimdhp"),
    68: ("bf16",),
    70: ("sme",),
    71: ("sme2",),
}

# CPUID bits for which Linux has no /proc/cpuinfo name, so their absence there means nothing.
_UNLISTED_BY_LINUX = frozenset({"avx_vnni_int8", "avx_vnni_int16"})


@dataclass(frozen=True)
class Evidence:
    """What a machine reports about itself, not yet interpreted.

    Attributes:
        system: `platform.system()`: "Linux", "Darwin", "Windows".
        machine: `platform.machine()`.
        cpuinfo: the text of /proc/cpuinfo.
        auxv: the bytes of /proc/self/auxv.
        sysctl: the output of `sysctl hw machdep.cpu`.
        windows: the numbers for which IsProcessorFeaturePresent is true.
        cpuid: the answers of the CPUID instruction.
    """

    system: str
    machine: str
    cpuinfo: str = ""
    auxv: bytes = b""
    sysctl: str = ""
    windows: Tuple[int, ...] = ()
    cpuid: Optional[cpuid.Answers] = None


@dataclass(frozen=True)
class Reading:
    """What the evidence comes to.

    Attributes:
        architecture: "x86_64", "arm64", "riscv64", or the system's own lower-case name of another one.
        features: in the one spelling.
        source: who listed them: "/proc/cpuinfo", "HWCAP", "sysctl", "Windows", "CPUID", or "" where nothing did.
        doubted: features about which sources disagree; none of them counts.
        notes: the same as sentences.
    """

    architecture: str
    features: FrozenSet[str]
    source: str
    doubted: FrozenSet[str] = frozenset()
    notes: Tuple[str, ...] = ()


def read_features() -> Tuple[str, FrozenSet[str]]:
    """This machine's architecture and normalised CPU features."""
    reading = interpret(gather())
    return reading.architecture, reading.features


def gather() -> Evidence:
    """The evidence of this machine. It takes a few milliseconds at most, except sysctl's process on macOS."""
    system, machine = platform.system(), platform.machine()
    runs_x86_64 = normalise_architecture(machine) == "x86_64" and struct.calcsize("P") == 8
    # On macOS, XCR0 shows AVX-512 only to threads that have used it; sysctl is right there.
    answers = cpuid.query() if runs_x86_64 and system in ("Linux", "Windows") else None
    return Evidence(
        system,
        machine,
        cpuinfo=read_bytes(Path("/proc/cpuinfo")).decode("utf-8", "replace") if system == "Linux" else "",
        auxv=read_bytes(Path("/proc/self/auxv")) if system == "Linux" else b"",
        sysctl=_query_sysctl() if system == "Darwin" else "",
        windows=_query_windows() if system == "Windows" else (),
        cpuid=answers,
    )


def interpret(evidence: Evidence) -> Reading:
    """Decide which features count: those that the system lists, less those that the CPU itself denies."""
    architecture = normalise_architecture(evidence.machine)
    listed, source = _listed(evidence, architecture)
    if evidence.cpuid is None:
        return Reading(architecture, listed, source)
    answered = cpuid.features(evidence.cpuid)
    if source != "/proc/cpuinfo":
        return Reading(architecture, answered | listed, "CPUID")
    denied = listed & cpuid.FEATURES - answered
    hidden = answered - listed - _UNLISTED_BY_LINUX
    notes = []
    if denied:
        notes.append(f"/proc/cpuinfo lists {_joined(denied)}, which CPUID denies (an emulator?): not counted")
    if hidden:
        notes.append(f"CPUID answers {_joined(hidden)}, which /proc/cpuinfo does not list: not counted")
    features = listed - denied | answered & _UNLISTED_BY_LINUX
    return Reading(architecture, features, source, denied | hidden, tuple(notes))


def _listed(evidence: Evidence, architecture: str) -> Tuple[FrozenSet[str], str]:
    """The features that the operating system lists, and where; an empty source when it lists none."""
    hwcap = parse_hwcap(*read_hwcap(evidence.auxv)) if architecture == "arm64" else frozenset()
    for source, found in (
        ("/proc/cpuinfo", parse_cpuinfo(evidence.cpuinfo, architecture)),
        ("HWCAP", hwcap),
        ("sysctl", parse_sysctl(evidence.sysctl)),
        ("Windows", parse_windows(evidence.windows)),
    ):
        if found:
            return found | hwcap, source
    return frozenset(), ""


def normalise_architecture(machine: str) -> str:
    """One name per architecture, from `platform.machine()` of any system."""
    spelling = machine.strip().lower()
    return _ARCHITECTURES.get(spelling, spelling)


def normalise(spellings: Iterable[str]) -> FrozenSet[str]:
    """Feature names of any source in the one spelling."""
    lower = (spelling.strip().lower() for spelling in spellings)
    return frozenset(_SPELLINGS.get(spelling, spelling) for spelling in lower if spelling)


def parse_cpuinfo(text: str, architecture: str) -> FrozenSet[str]:
    """Features that every processor of a /proc/cpuinfo text has: a thread may run on any of them.

    Only the line that belongs to `architecture` counts, because a user-mode emulator shows the host's file.
    """
    wanted = _CPUINFO_KEYS.get(architecture)
    found = None
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == wanted:
            names = _riscv_isa(value.strip()) if wanted == "isa" else normalise(value.split())
            found = names if found is None else found & names
    return found or frozenset()


def _riscv_isa(isa: str) -> FrozenSet[str]:
    """ "rv64imafdcv_zicbom" → {"i", "m", …, "v", "zicbom"}."""
    base, *extensions = isa.lower().split("_")
    return frozenset(base[4:]) | frozenset(extensions)


def read_hwcap(auxv: bytes) -> Tuple[int, int]:
    """AT_HWCAP and AT_HWCAP2 from the bytes of /proc/self/auxv (64-bit, little endian)."""
    entries: Dict[int, int] = dict(struct.iter_unpack("<QQ", auxv[: len(auxv) // 16 * 16]))
    return entries.get(16, 0), entries.get(26, 0)


def parse_hwcap(hwcap: int, hwcap2: int = 0) -> FrozenSet[str]:
    """Features in ARM64's AT_HWCAP and AT_HWCAP2. Old kernels' /proc/cpuinfo and 32-bit shells leave some out."""
    names = [name for bit, name in enumerate(_ARM_HWCAP.split()) if hwcap >> bit & 1]
    names += [name for bit, name in enumerate(_ARM_HWCAP2.split()) if hwcap2 >> bit & 1]
    return frozenset(names)


def parse_sysctl(text: str) -> FrozenSet[str]:
    """Features in macOS's `sysctl hw machdep.cpu`, ARM64 or x86-64."""
    found: Set[str] = set()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key in ("machdep.cpu.features", "machdep.cpu.leaf7_features"):
            found |= normalise(value.split())
        elif value.strip() == "1":
            found.update(_APPLE.get(key, ()))
    return frozenset(found)


def parse_windows(numbers: Iterable[int]) -> FrozenSet[str]:
    """Features for the IsProcessorFeaturePresent numbers that are set."""
    return frozenset(name for number in numbers for name in _WINDOWS.get(number, ()))


def parse_identity(text: str) -> Dict[str, str]:
    """The first processor's fields of /proc/cpuinfo, by their own keys ("model name", "CPU part", …)."""
    fields: Dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), value.strip())
    return fields


def read_bytes(path: Path) -> bytes:
    """The file, or nothing where the system does not have it or does not show it."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _query_sysctl() -> str:
    run = subprocess.run(["/usr/sbin/sysctl", "hw", "machdep.cpu"], capture_output=True, text=True, check=False)
    return run.stdout


def _query_windows() -> Tuple[int, ...]:
    if sys.platform != "win32":
        return ()
    present = ctypes.WinDLL("kernel32").IsProcessorFeaturePresent  # type: ignore[attr-defined,unused-ignore]
    return tuple(number for number in sorted(_WINDOWS) if present(number))


def _joined(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
