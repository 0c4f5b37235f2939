"""Test `edgeq device report`: its figures, and that nothing personal is in it."""

from __future__ import annotations

import getpass
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from edgeq_device.system.features import read_features

from edgeq.cli import group
from edgeq.hardware.measured import read_report
from tests.remote.conftest import FakeBoard

SERIAL, MODEL = "10000000c0ffee42", "Raspberry Pi 5 Model B Rev 1.0"
# The system files of a board that names itself, its chip and its serial number.
_FILES = f"""
import builtins, pathlib
real = pathlib.Path.open
shown = {{"/proc/device-tree/model": b"{MODEL}\\0", "/proc/device-tree/serial-number": b"{SERIAL}\\0",
    "/proc/device-tree/compatible": b"raspberrypi,5-model-b\\0brcm,bcm2712\\0"}}
def opened(self, mode="r", *rest, **named):
    import io
    if str(self) == "/proc/cpuinfo":
        return io.BytesIO(real(self, "rb").read() + b"\\nSerial\\t\\t: {SERIAL}\\nModel\\t\\t: {MODEL}\\n")
    return io.BytesIO(shown[str(self)]) if str(self) in shown else real(self, mode, *rest, **named)
pathlib.Path.open = opened
"""


@pytest.mark.slow
def test_a_report_has_the_figures_and_nothing_personal(
    make_board: Callable[[str], FakeBoard], bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = make_board("kitchen-shelf")
    board.patched(_FILES)
    monkeypatch.chdir(tmp_path)
    words = ("device", "report", "ssh://jane.doe@kitchen-shelf", str(bundle), "-o", "report.json", "--duration", "0.02")
    ran = CliRunner().invoke(group, words)
    assert ran.exit_code == 0, ran.output
    assert ran.stdout.startswith(f"{MODEL}, {platform.system()} ")
    text = Path("report.json").read_text("utf-8")
    personal = ("jane", "doe", "kitchen", "shelf", str(board.home), str(tmp_path), SERIAL, getpass.getuser())
    assert [word for word in (*personal, platform.node(), "ssh:", "127.0.0.1", sys.prefix) if word in text] == []
    report = read_report(Path("report.json"))
    assert (report.target, report.compatible) == ("raspberry-pi-5", ("raspberrypi,5-model-b", "brcm,bcm2712"))
    assert {"edgeq", "onnxruntime", "numpy", "python"} <= report.versions.keys()
    assert [entry.name for entry in report.bundles] == ["demo", "bundle"]
    for entry in report.bundles:
        assert entry.passed
        assert entry.latency.keys() == {"float32", entry.variant}
        assert entry.speedup is not None
    again = CliRunner().invoke(group, words)
    assert again.exit_code != 0
    assert "--force" in again.stderr


def test_another_architecture_is_refused(board: FakeBoard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    other = "raspberry-pi-5" if read_features()[0] == "x86_64" else "haswell"
    ran = CliRunner().invoke(group, ("device", "report", board.address, "-t", other))
    assert ran.exit_code == 2
    assert f"but {other} is" in ran.stderr
    assert list(tmp_path.glob("*.json")) == []


@pytest.mark.slow
def test_a_failed_self_test_is_reported(board: FakeBoard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "import runpy, sys, onnxruntime\n"
        "session = onnxruntime.InferenceSession\n"
        "run = session.run\n"
        "session.run = lambda self, *a: [value + 1 for value in run(self, *a)]\n"
        "sys.argv = sys.argv[2:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    board.python(f'case "$1" in -I) exec {sys.executable} "$@";; *) exec {sys.executable} {wrong} "$@";; esac')
    ran = CliRunner().invoke(group, ("device", "report", board.address))
    assert ran.exit_code == 10
    (entry,) = read_report(Path("board-report.json")).bundles
    assert (entry.passed, entry.latency, entry.variants[0].status) == (False, {}, "failed")
    assert f"{entry.name}: the self-test does not pass" in ran.stdout
