"""The maker of this CPU, as CPUID names it: some plug-in engines take the CPUs of one maker alone."""

from __future__ import annotations

import struct
from functools import lru_cache

from edgeq_device.features import Evidence, gather, parse_identity

_IDENTITY = (0, 0)


@lru_cache(maxsize=1)
def read_vendor() -> str:
    """ "GenuineIntel", "AuthenticAMD" ...; "" where nothing says so, as on other architectures."""
    return vendor_of(gather())


def vendor_of(evidence: Evidence) -> str:
    """What CPUID answers, by which runtimes go: /proc/cpuinfo shows the host's under an emulator."""
    if evidence.cpuid is not None and _IDENTITY in evidence.cpuid.leaves:
        _, ebx, ecx, edx = evidence.cpuid.leaves[_IDENTITY]
        return struct.pack("<3I", ebx, edx, ecx).decode("ascii", "replace").strip("\0 ")
    return parse_identity(evidence.cpuinfo).get("vendor_id", "")
