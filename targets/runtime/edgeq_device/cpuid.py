"""What the x86-64 CPUID instruction itself answers.

ONNX Runtime chooses its kernels by CPUID, so it counts where the operating system lists nothing (Windows lists
neither VNNI nor AMX; a container may hide /proc/cpuinfo's flags; Linux does not list AVX-VNNI-INT8) and where
/proc/cpuinfo describes another CPU (under a user-mode emulator it shows the host's).

Bit positions: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2A, CPUID.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
import sys
from typing import Dict, FrozenSet, Mapping, NamedTuple, Optional, Tuple

Registers = Tuple[int, int, int, int]
"""EAX, EBX, ECX, EDX as one leaf answers them."""


class Answers(NamedTuple):
    """CPUID by (leaf, subleaf), and XCR0: the register states that the operating system saves."""

    leaves: Mapping[Tuple[int, int], Registers]
    xcr0: int


_EAX, _EBX, _ECX, _EDX = range(4)
_SSE_STATE, _AVX_STATE, _AVX512_STATE, _AMX_STATE = 0x0, 0x6, 0xE6, 0x60000
_BITS = {
    "sse": (1, 0, _EDX, 25, _SSE_STATE),
    "sse2": (1, 0, _EDX, 26, _SSE_STATE),
    "sse3": (1, 0, _ECX, 0, _SSE_STATE),
    "ssse3": (1, 0, _ECX, 9, _SSE_STATE),
    "sse4_1": (1, 0, _ECX, 19, _SSE_STATE),
    "sse4_2": (1, 0, _ECX, 20, _SSE_STATE),
    "avx": (1, 0, _ECX, 28, _AVX_STATE),
    "fma": (1, 0, _ECX, 12, _AVX_STATE),
    "f16c": (1, 0, _ECX, 29, _AVX_STATE),
    "avx2": (7, 0, _EBX, 5, _AVX_STATE),
    "avx_vnni": (7, 1, _EAX, 4, _AVX_STATE),
    "avx_vnni_int8": (7, 1, _EDX, 4, _AVX_STATE),
    "avx_vnni_int16": (7, 1, _EDX, 10, _AVX_STATE),
    "avx512f": (7, 0, _EBX, 16, _AVX512_STATE),
    "avx512dq": (7, 0, _EBX, 17, _AVX512_STATE),
    "avx512cd": (7, 0, _EBX, 28, _AVX512_STATE),
    "avx512bw": (7, 0, _EBX, 30, _AVX512_STATE),
    "avx512vl": (7, 0, _EBX, 31, _AVX512_STATE),
    "avx512vbmi": (7, 0, _ECX, 1, _AVX512_STATE),
    "avx512_vbmi2": (7, 0, _ECX, 6, _AVX512_STATE),
    "avx512_vnni": (7, 0, _ECX, 11, _AVX512_STATE),
    "avx512_fp16": (7, 0, _EDX, 23, _AVX512_STATE),
    "avx512_bf16": (7, 1, _EAX, 5, _AVX512_STATE),
    "amx_tile": (7, 0, _EDX, 24, _AMX_STATE),
    "amx_int8": (7, 0, _EDX, 25, _AMX_STATE),
    "amx_bf16": (7, 0, _EDX, 22, _AMX_STATE),
}
FEATURES = frozenset(_BITS)
"""Every feature that `features` can find."""


def bit_of(feature: str) -> Tuple[int, int, int, int]:
    """Where CPUID reports `feature`: leaf, subleaf, register (0 is EAX) and bit."""
    leaf, subleaf, register, bit, _ = _BITS[feature]
    return leaf, subleaf, register, bit


# Arguments of the first function: where to write 16 bytes, leaf, subleaf; of the second: where to write 8 bytes.
_SYSTEM_V = (
    bytes.fromhex("53 89f0 89d1 0fa2 8907 895f04 894f08 89570c 5b c3"),
    bytes.fromhex("31c9 0f01d0 8907 895704 c3"),
)
_MICROSOFT = (
    bytes.fromhex("53 4989c9 89d0 4489c1 0fa2 418901 41895904 41894908 4189510c 5b c3"),
    bytes.fromhex("4989c9 31c9 0f01d0 418901 41895104 c3"),
)


def features(answers: Answers) -> FrozenSet[str]:
    """The features that the CPU has and whose registers the operating system saves."""
    nothing = (0, 0, 0, 0)
    return frozenset(
        name
        for name, (leaf, subleaf, register, bit, state) in _BITS.items()
        if answers.leaves.get((leaf, subleaf), nothing)[register] >> bit & 1 and answers.xcr0 & state == state
    )


def query() -> Optional[Answers]:
    """Run CPUID and XGETBV on an x86-64 CPU; None where the system forbids a program to make code."""
    try:
        return _run_windows() if sys.platform == "win32" else _run_posix()
    except (OSError, ValueError):
        return None


def _run_posix() -> Answers:
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(_SYSTEM_V[0].ljust(64, b"\x90") + _SYSTEM_V[1])
    held = ctypes.c_char.from_buffer(page)
    try:
        return _collect(ctypes.addressof(held))
    finally:
        del held
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
    """Query the leaves of `_BITS` and that of the maker, by the two functions at `address` and 64 bytes after it."""
    out = ctypes.create_string_buffer(16)
    cpuid = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32)(address)
    xgetbv = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address + 64)

    def leaf(number: int, subleaf: int) -> Registers:
        """Registers eax, ebx, ecx and edx of one CPUID leaf."""
        cpuid(ctypes.addressof(out), number, subleaf)
        eax, ebx, ecx, edx = struct.unpack("<4I", out.raw)
        return eax, ebx, ecx, edx

    leaves: Dict[Tuple[int, int], Registers] = {(0, 0): leaf(0, 0), (1, 0): leaf(1, 0)}
    highest = leaves[0, 0][_EAX]
    if highest >= 7:
        leaves[7, 0] = leaf(7, 0)
        if leaves[7, 0][_EAX] >= 1:
            leaves[7, 1] = leaf(7, 1)
    saves_state = leaves[1, 0][_ECX] >> 27 & 1
    if not saves_state:
        return Answers(leaves, 0)
    xgetbv(ctypes.addressof(out))
    low, high = struct.unpack("<2I", out.raw[:8])
    return Answers(leaves, high << 32 | low)
