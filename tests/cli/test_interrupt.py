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
from edgeq.prove import builds, prepare
from edgeq.util.process import INTERRUPTED, TERMINAL_GONE, TERMINATED
from tests.cli import process
from tests.cli.workspace import Workspace, contents

GOOD = ("net.onnx", "--data", "x.npz", "--no-timing")
STEPS = [
    (prepare, "prepare_model"),
    (prepare, "collect"),
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


LOST = {
    "__del__": """
class Slow:
    def __del__(self):
        end = time.monotonic() + 0.05
        while time.monotonic() < end:
            pass
print("ready", flush=True)
while True:
    Slow()
""",
    "nested": """
class Slow:
    def __init__(self, inner):
        self.inner = inner
    def __del__(self):
        self.inner = None
        end = time.monotonic() + 0.05
        while time.monotonic() < end:
            pass
print("ready", flush=True)
while True:
    Slow(Slow(Slow(None)))
""",
    "callback": """
import ctypes
@ctypes.CFUNCTYPE(None)
def called():
    end = time.monotonic() + 0.05
    while time.monotonic() < end:
        pass
print("ready", flush=True)
while True:
    called()
""",
    "step": """
def work():
    try:
        end = time.monotonic() + 0.05
        while time.monotonic() < end:
            pass
    except BaseException:
        pass
print("ready", flush=True)
progress = Printer(False, True, False).progress()
while True:
    work()
    with progress.stage("work"):
        pass
""",
    "again": """
print("ready", flush=True)
while True:
    try:
        time.sleep(0.01)
    except BaseException:
        lost += 1
        if lost == 2:
            raise
""",
}
"""Programs that lose the exception of a signal. The last one loses only the first of two."""


@pytest.mark.skipif(os.name != "posix", reason="signals are sent as POSIX has them")
@pytest.mark.parametrize("lost", LOST)
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, INTERRUPTED), (signal.SIGTERM, TERMINATED), (signal.SIGHUP, TERMINAL_GONE)],
    ids=["SIGINT", "SIGTERM", "SIGHUP"],
)
def test_a_signal_whose_exception_is_lost_ends_the_program(lost: str, number: signal.Signals, code: int) -> None:
    head = (
        "import sys, time\nfrom edgeq.cli._common import Printer\n"
        "from edgeq.util.process import ends_in_one_line, endings\nlost = 0\n"
        "import signal\nsignal.signal(signal.SIGINT, signal.SIG_DFL)\nendings.unwind()\n"
        "with ends_in_one_line():\n    try:\n"
    )
    body = "".join(f"        {line}\n" for line in LOST[lost].splitlines())
    running = subprocess.Popen(
        [sys.executable, "-P", "-c", f"{head}{body}    finally:\n        print('cleaned')\n"],
        env=process.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=process.enable_signals,
    )
    assert running.stdout is not None
    assert running.stdout.readline() == "ready\n"
    time.sleep(0.12)
    running.send_signal(number)
    if lost == "again":
        time.sleep(0.7)
        running.send_signal(number)
    try:
        out, err = running.communicate(timeout=20)
    finally:
        running.kill()
    assert (running.returncode, out) == (code, "cleaned\n"), err
    assert "Traceback" not in err
    assert "ignored" not in err


TWICE = """
import os, signal, time
from edgeq.util.process import ends_in_one_line, endings
signal.signal(signal.SIGINT, signal.SIG_DFL)
endings.unwind()
with ends_in_one_line():
    try:
        os.kill(os.getpid(), signal.FIRST)
        time.sleep(10)
    finally:
        os.kill(os.getpid(), signal.SECOND)
        time.sleep(0.1)
        print("cleaned", flush=True)
"""


@pytest.mark.skipif(os.name != "posix", reason="signals are sent as POSIX has them")
@pytest.mark.parametrize(
    ("first", "second", "code"),
    [("SIGINT", "SIGINT", INTERRUPTED), ("SIGTERM", "SIGTERM", TERMINATED), ("SIGHUP", "SIGTERM", TERMINAL_GONE)],
)
def test_a_second_signal_at_once_does_not_stop_the_cleanup(first: str, second: str, code: int) -> None:
    """A terminal and the parent send the same signal, and a system that shuts down sends two."""
    ended = subprocess.run(
        [sys.executable, "-P", "-c", TWICE.replace("FIRST", first).replace("SECOND", second)],
        env=process.environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=process.enable_signals,
    )
    assert (ended.returncode, ended.stdout) == (code, "cleaned\n"), ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.skipif(os.name != "posix", reason="signals are sent as POSIX has them")
def test_a_program_that_hangs_while_it_ends_can_be_terminated() -> None:
    code = (
        "import atexit, signal, time\nfrom edgeq.util.process import ends_in_one_line, endings\nendings.unwind()\n"
        "def hang():\n    print('ending', flush=True)\n    while True:\n        time.sleep(0.1)\n"
        "atexit.register(hang)\nwith ends_in_one_line():\n    raise SystemExit(3)\n"
    )
    running = subprocess.Popen(
        [sys.executable, "-P", "-c", code], env=process.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert running.stdout is not None
    assert running.stdout.readline() == b"ending\n"
    running.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert running.poll() is None, "one signal does not interrupt the end"
    running.send_signal(signal.SIGTERM)
    _, err = running.communicate(timeout=20)
    assert (running.returncode, err) == (-signal.SIGTERM, b"")


WORK = """
import os, pathlib, signal, sys, tempfile
from edgeq.util.process import ends_in_one_line, endings
signal.signal(signal.SIGINT, signal.SIG_DFL)
endings.unwind()
lines = 0
def count(frame, event, argument):
    global lines
    if frame.f_globals.get("__name__") == "tempfile" and event == "line":
        lines += 1
        if lines == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGTERM)
    return count
sys.settrace(count)
with ends_in_one_line():
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "file").write_text("")
    print("complete", flush=True)
"""


@pytest.mark.skipif(os.name != "posix", reason="signals are sent as POSIX has them")
def test_a_signal_in_any_line_of_tempfile_leaves_no_folder(tmp_path: Path) -> None:
    codes = set()
    for line in range(1, 200, 3):
        ended = subprocess.run(
            [sys.executable, "-P", "-c", WORK, str(line)],
            env=process.environment(TMPDIR=str(tmp_path)),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert "Traceback" not in ended.stderr
        assert list(tmp_path.iterdir()) == [], line
        codes.add(ended.returncode)
        if ended.stdout:
            break
    assert codes == {TERMINATED, 0}


EARLY = """
import builtins, signal, sys
seen, real, loaded = [], builtins.__import__, set(sys.modules)
def watched(name, *rest, **options):
    seen.append((name, signal.getsignal(signal.SIGINT) is signal.SIG_DFL))
    return real(name, *rest, **options)
builtins.__import__ = watched
MODULE
print(*[name for name, handled in seen if not handled and name not in loaded])
"""


@pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")
def test_ctrl_c_is_handled_before_anything_is_imported() -> None:
    """Before the handler is set, edgeq imports only modules that Python contains."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", EARLY.replace("MODULE", "from edgeq.__main__ import main")],
        env=process.environment(),
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=process.enable_signals,
    )
    assert set(done.stdout.split()) <= {"edgeq.__main__", "__future__"}


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
