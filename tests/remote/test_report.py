"""Test `edgeq device report`: its figures, and that nothing personal is in it."""

from __future__ import annotations

import getpass
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

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
