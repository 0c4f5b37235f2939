"""Provide the real kernels of a CPU that saturates as the reference: this machine's, or those under qemu-user."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgeq.hardware.detect import detect_machine
from edgeq.hardware.profile import load_profiles, match_profile
from edgeq.scheme import Scheme
from tests.emulate.saturation import cases

_PROFILE = "x86-64-avx2"


def command() -> list[str]:
    """Return the command that runs Python on kernels that saturate; empty if this machine has neither them nor the
    emulator.
    """
    if match_profile(detect_machine(), load_profiles()).profile.saturates(Scheme()):
        return [sys.executable]
    qemu = load_profiles()[_PROFILE].emulate["qemu"]
    program = shutil.which(f"qemu-{qemu['arch']}")
    if program is None or platform.machine() != qemu["arch"]:
        return []
    return [program, "-cpu", qemu["cpu"], sys.executable]


def emulated(models: Path, out: Path, prefix: Sequence[str]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the outputs of every model of a folder (`cases.run_all`) by "MODEL:OUTPUT"."""
    subprocess.run([*prefix, cases.__file__, str(models), str(out)], check=True, capture_output=True, timeout=1800)
    with np.load(out) as found:
        return {name: found[name] for name in found.files}
