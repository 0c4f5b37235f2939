"""Run `edgeq` in a process of its own, as a user starts it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

FAST_CLOCK = REPOSITORY / "tests" / "docs" / "fast_clock"
"""In PYTHONPATH: what warms up or measures takes a fiftieth of the time."""

COMMAND = [sys.executable, "-P", "-m", "edgeq"]


def environment(**changes: str) -> dict[str, str]:
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "targets" / "runtime")])
    return {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **changes}


def start(
    *arguments: str | Path, cwd: Path, prefix: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*prefix, *COMMAND, *map(str, arguments)],
        cwd=cwd,
        env=environment(**(env or {})),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=enable_signals if os.name == "posix" else None,
    )


def enable_signals() -> None:
    """Restore the default handlers of SIGINT and SIGHUP.

    A shell that runs the tests in the background makes their processes ignore Ctrl-C. With nohup they ignore the end of
    the terminal.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def run(
    *arguments: str | Path, cwd: Path, prefix: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    process = start(*arguments, cwd=cwd, prefix=prefix, env=env)
    out, err = process.communicate(timeout=300)
    assert "⟨" not in out + err, "a mark of edgeq.arguments is printed instead of an option"
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def without_root_powers() -> list[str] | None:
    """Return a command prefix that makes file permissions apply to root too.

    The prefix is empty if the user is not root. The result is None if the system cannot do this.
    """
    if os.geteuid() != 0:
        return []
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        return None
    powers = "-dac_override,-dac_read_search"
    prefix = [setpriv, f"--bounding-set={powers}", f"--inh-caps={powers}"]
    works = subprocess.run([*prefix, sys.executable, "-c", ""], capture_output=True, check=False).returncode == 0
    return prefix if works else None
