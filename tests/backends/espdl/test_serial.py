"""Test that a chip's output becomes a report on the file that the chip ran."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from edgeq.backends.espdl.project import PROJECT_FILE
from edgeq.backends.espdl.serial import read_serial_log
from edgeq.cli import group
from edgeq.jobs.package import package
from edgeq.util.marker import sha256
from tests.backends.build import random
from tests.backends.espdl.models import MODELS

FILE = "0" * 64


def printed(*lines: str, file: str = FILE, passed: int = 1) -> str:
    start, end = f"EDGEQ start file={file} chip=esp32-c6", f"EDGEQ end passed={passed} microseconds=9120"
    return "\n".join(["boot: ESP-IDF", start, *lines, end, ""])


GOOD = ("\x1b[0;32mI (512) dl::Model: Testing output c1.\x1b[0m", "I (513) dl::Model: Test Pass!")
BAD = (GOOD[0], "\x1b[0;31mE (516) dl::Model: Test output c1 does not match\x1b[0m")


def test_a_passed_check_names_its_tensors_and_its_time() -> None:
    log = read_serial_log(printed(*GOOD))
    assert log is not None
    assert (log.passed, log.tensors, log.microseconds, log.chip) == (True, ("c1",), 9120, "esp32-c6")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (printed(*BAD, passed=0), "tensor 'c1' has other values"),
        # A difference outweighs the program's own word.
        (printed(*BAD), "tensor 'c1' has other values"),
        (printed(passed=0), "names no tensor"),
        (printed(*GOOD).rsplit("EDGEQ end", 1)[0], "ends before"),
    ],
)
def test_a_failed_check_has_its_reason(text: str, reason: str) -> None:
    log = read_serial_log(text)
    assert log is not None
    assert not log.passed
    assert reason in log.reason


def test_the_check_after_a_restart_counts() -> None:
    log = read_serial_log(printed(*BAD, passed=0) + printed(*GOOD))
    assert log is not None
    assert log.passed


def test_other_output_has_no_check() -> None:
    assert read_serial_log("boot: ESP-IDF\nI (512) dl::Model: Test Pass!\n") is None


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    (folder / "model.onnx").write_bytes(MODELS["residual"].SerializeToString())
    np.savez(folder / "x.npz", x=random(12, 8, 8, 8))
    package(folder / "model.onnx", folder / "x.npz", folder / "dist", targets="esp32-c6", effort=None)
    return folder / "dist"


def verify(bundle: Path, text: str, *options: str) -> Result:
    log = bundle.parent / "serial.txt"
    log.write_text(text, encoding="utf-8")
    return CliRunner().invoke(group, ["verify", str(bundle), "--log", str(log), *options])


def file_hash(bundle: Path) -> str:
    return sha256(bundle / "files" / "esp32-c6" / PROJECT_FILE)


def test_a_report_states_the_bundle_the_file_and_the_output(bundle: Path) -> None:
    result = verify(bundle, printed(*GOOD, file=file_hash(bundle)), "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert report["log"]["passed"]
    assert report["manifest_sha256"] == sha256(bundle / "manifest.json")
    assert report["log_sha256"] == sha256(bundle.parent / "serial.txt")


def test_a_failed_check_on_a_chip_ends_with_the_code_of_a_failed_check(bundle: Path) -> None:
    result = verify(bundle, printed(*BAD, file=file_hash(bundle), passed=0))
    assert result.exit_code == 10
    assert "tensor 'c1' has other values on the chip" in result.output


@pytest.mark.parametrize(
    ("text", "options", "problem"),
    [
        (printed(*GOOD), (), "ran a file that is not in"),
        ("nothing", (), "has no check"),
        (printed(*GOOD), ("--variant", "other"), "has no variant 'other'"),
        (printed(*GOOD), ("--count", "3"), "--count does not apply"),
    ],
)
def test_output_that_proves_nothing_is_refused(text: str, options: tuple[str, ...], problem: str, bundle: Path) -> None:
    result = verify(bundle, text, *options)
    assert result.exit_code != 0
    assert problem in " ".join(result.output.split())
