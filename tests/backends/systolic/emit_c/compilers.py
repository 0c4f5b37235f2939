"""Find the compilers and emulators that the tests of C need. A test that lacks one is skipped with the reason."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

LONGEST_S = 900
RISCV = ("riscv64-linux-gnu-gcc", "qemu-riscv64")


def need(*programs: str) -> None:
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed")


def done(*command: str | Path, folder: Path | None = None) -> str:
    """Run a command that has to succeed. Return what it printed, stderr last."""
    parts = [str(part) for part in command]
    result = subprocess.run(parts, cwd=folder, capture_output=True, text=True, check=False, timeout=LONGEST_S)
    assert result.returncode == 0, f"{command}: {result.stdout}{result.stderr}"
    return result.stdout + result.stderr
