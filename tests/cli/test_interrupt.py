"""Test Ctrl-C and termination: one line, the exit code that shells use, no half-written file, no loss."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgeq import demo
from edgeq.backends.cpu import CpuBackend
from edgeq.bundle import write as bundle_write
from edgeq.jobs import bundles as variant_bundle
from edgeq.prove import builds, job
from edgeq.prove import job as request
from edgeq.util.process import INTERRUPTED, TERMINAL_GONE, TERMINATED
from tests.cli import process
from tests.cli.workspace import Workspace, contents

GOOD = ("net.onnx", "--data", "x.npz", "--no-timing")
STEPS = [
    (request, "prepare_model"),
    (job, "collect"),
    (CpuBackend, "build"),
    (builds, "prove"),
]


def interrupt(after: Callable[..., Any]) -> Callable[..., Any]:
    def interrupted(*arguments: Any, **options: Any) -> Any:
        after(*arguments, **options)
        raise KeyboardInterrupt

    return interrupted


@pytest.mark.parametrize(("owner", "name"), STEPS, ids=[name for _, name in STEPS])
def test_ctrl_c_after_any_step_of_quantize(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, tmp_path: Path
) -> None:
    (workspace.path / "kept.onnx").write_text("mine")
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(work))
    monkeypatch.setattr(owner, name, interrupt(getattr(owner, name)))
    workspace.refused(INTERRUPTED, "quantize", *GOOD, "-o", "kept.onnx", "--force", says="interrupted")
    workspace.refused(
        INTERRUPTED, "quantize", *GOOD, "-o", "new/int8.onnx", says="nothing half-written was left behind"
    )
    assert contents(work) == {}


@pytest.mark.parametrize("output", ["kept", "kept.edgeq"])
def test_ctrl_c_while_the_bundle_is_written(workspace: Workspace, monkeypatch: pytest.MonkeyPatch, output: str) -> None:
    assert workspace.run("package", *GOOD, "-o", output).code == 0
    step = "write_archive" if output.endswith(".edgeq") else "_write_directory"
    monkeypatch.setattr(bundle_write, step, interrupt(getattr(bundle_write, step)))
    workspace.refused(INTERRUPTED, "package", *GOOD, "-o", output, "--force", says="interrupted")


def test_ctrl_c_in_the_demo_before_the_bundle(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variant_bundle, "write_bundle", interrupt(lambda *a, **k: None))
    workspace.refused(INTERRUPTED, "demo", "-o", "demo", says="interrupted")


@pytest.mark.skipif(os.name != "posix", reason="signals are sent as POSIX has them")
@pytest.mark.parametrize(
    ("name", "codes"),
    # If SIGINT arrives in C code that Python called, the process cleans up and then ends by that signal. A shell
    # reports 130 for both.
    [
        ("SIGINT", {INTERRUPTED, -signal.SIGINT}),
        ("SIGTERM", {TERMINATED}),
        ("SIGHUP", {TERMINAL_GONE}),
    ],
    ids=["SIGINT", "SIGTERM", "SIGHUP"],
)
def test_a_signal_in_the_middle(tmp_path: Path, name: str, codes: set[int]) -> None:
    place, work = tmp_path / "place", tmp_path / "work"
    place.mkdir()
    work.mkdir()
    data = ("--data", demo.CALIBRATION)
    running = process.start("quantize", demo.MODEL, *data, "-o", "int8.onnx", cwd=place, env={"TMPDIR": str(work)})
    deadline = time.monotonic() + 120
    while not list(place.glob(".int8.onnx.*.partial")):
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    running.send_signal(getattr(signal, name))
    out, err = running.communicate(timeout=120)
    assert running.returncode in codes, err
    assert out == ""
    assert "Traceback" not in err
    assert contents(place) == {}
    assert [p.name for p in work.iterdir() if p.name.startswith("edgeq")] == []


TURNED = """
import os, signal
from edgeq.errors import RuntimeUnavailableError
from edgeq.util.process import ends_in_one_line, endings
signal.signal(signal.SIGINT, signal.SIG_DFL)
endings.unwind()
with ends_in_one_line():
    try:
        os.kill(os.getpid(), signal.NAME)
        while True:
            pass
    except BaseException as error:
        raise RuntimeUnavailableError("onnxruntime cannot be imported") from error
"""


@pytest.mark.skipif(os.name != "posix", reason="signals are sent as POSIX has them")
@pytest.mark.parametrize(
    ("name", "code", "line"),
    [
        ("SIGINT", INTERRUPTED, "edgeq: interrupted; nothing half-written was left behind\n"),
        ("SIGTERM", TERMINATED, ""),
        ("SIGHUP", TERMINAL_GONE, ""),
    ],
)
def test_a_signal_that_a_library_makes_an_error_of_ends_the_program_all_the_same(
    name: str, code: int, line: str
) -> None:
    words, env = [sys.executable, "-P", "-c", TURNED.replace("NAME", name)], process.environment()
    ended = subprocess.run(
        words, env=env, capture_output=True, text=True, timeout=60, check=False, preexec_fn=process.enable_signals
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "", line)


HANDLERS = """
import signal
import edgeq.__main__
from edgeq.util.process import endings
print(signal.getsignal(signal.SIGINT) is signal.SIG_DFL)
endings.unwind()
print(signal.getsignal(signal.SIGINT) == endings.interrupt)
signal.signal(signal.SIGINT, signal.SIG_IGN)
endings.unwind()
print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)
"""


@pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")
def test_while_modules_load_ctrl_c_just_ends() -> None:
    """Ctrl-C during imports ends the process without a traceback. A signal that the caller ignores stays ignored."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", HANDLERS],
        env=process.environment(),
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=process.enable_signals,
    )
    assert done.stdout.split() == ["True", "True", "True"]
