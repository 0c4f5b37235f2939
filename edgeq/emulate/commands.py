"""Other programs, run with their failure as one line."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from edgeq.errors import RuntimeUnavailableError


def which(program: str) -> str | None:
    """Where a program lies on PATH; None where it is not installed.

    Relative and empty entries of PATH, and Windows' habit of looking there first, lead into the working directory: what
    lies beside a model is not run.
    """
    path = search_path()
    found = shutil.which(program, path=path) if path else None
    return found if found is not None and Path(found).is_absolute() else None


def search_path() -> str:
    """Return PATH without the entries that lead into the working directory."""
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return os.pathsep.join(folder for folder in folders if Path(folder).is_absolute())


def find(program: str, fix: str) -> str:
    """Where a program lies.

    Raises:
        RuntimeUnavailableError: it is not installed; `fix`: how to get it.
    """
    found = which(program)
    if found is None:
        raise RuntimeUnavailableError(f"{program} is not installed", fix)
    return found


def run(command: Sequence[str], fix: str, *, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """Standard output of a command that has to succeed; its messages are in English.

    Raises:
        RuntimeUnavailableError: it failed: the last line of its errors, and `fix`.
    """
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "LC_ALL": "C", **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        output = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        errors = [line for line in output if line.startswith(("E:", "ERROR", "error"))] or output[-1:]
        raise RuntimeUnavailableError(
            f"{Path(command[0]).name} failed: {errors[0] if errors else f'exit code {done.returncode}'}", fix
        )
    return done.stdout
