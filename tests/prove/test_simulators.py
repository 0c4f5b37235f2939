"""Test `edgeq.prove.target_checks` on a bundle for the systolic array, in the array's arithmetic."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgeq.backends.base import SIMULATORS
from edgeq.backends.systolic.session import open_program
from edgeq.data.open_source import Data
from edgeq.demo import CALIBRATION, MODEL, VALIDATION
from edgeq.errors import RuntimeUnavailableError
from edgeq.hardware.detect import detect_machine
from edgeq.jobs.package import package
from edgeq.prove.verify_options import read_verify_request
from edgeq.run.session import SessionSettings, open_session

OPTIONS = dict.fromkeys(
    (
        "annotations",
        "decoder",
        "class_offset",
        "confidence",
        "iou",
        "task_output",
        "preprocess",
        "labels",
        "task",
        "max_drop",
        "expect",
    )
)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("array") / "bundle"
    result = package(
        MODEL, Data(str(CALIBRATION), count=16), folder, targets=("gemmini",), timed=False,
        val=Data(str(VALIDATION), count=8),
    )  # fmt: skip
    checks = {check.name: check.kind for check in result.variants["gemmini"].checks}
    assert checks["self-test"] == checks["accuracy"] == checks["load"] == "modelled"
    assert (folder / "files" / "gemmini" / "c" / "main.c").is_file()
    return folder


def test_the_simulator_answers_as_the_twin_does(packed: Path) -> None:
    model = packed / "models" / "model" / "gemmini" / "model.onnx"
    session = open_program(model, SessionSettings())
    twin = open_session(model)
    feed = {i.name: np.random.default_rng(0).random((2, *i.shape[1:])).astype(np.float32) for i in twin.get_inputs()}
    names = [output.name for output in session.get_outputs()]
    for mine, stock in zip(session.run(None, feed), twin.run(names, feed), strict=True):
        np.testing.assert_array_equal(mine, stock)


def test_verify_on_the_array(packed: Path) -> None:
    from edgeq.emulate.check import verify_on

    asked = {**OPTIONS, "on": ("gemmini",), "data": str(VALIDATION), "count": 4}
    (found,) = verify_on(read_verify_request(packed, None, asked), simulators=SIMULATORS).checks
    assert (found.status, found.where) == ("passed", "modelled"), found.reason
    assert found.samples == 4


def test_without_a_program_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(RuntimeUnavailableError, match=r"has no \.program\.npz next to it"):
        open_program(tmp_path / "model.onnx", SessionSettings())


def test_this_machine_is_no_array() -> None:
    assert "gemmini" not in detect_machine().features
