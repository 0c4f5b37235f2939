"""Test `edgeq gate --on`: both models run on the board, and its results are compared with the limits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from edgeq import demo
from edgeq.cli import group
from edgeq.errors import BoardError, UsageError, WorseError
from tests.remote.conftest import FakeBoard
from tests.reporting.test_gate import limits, made

# Tests never assert timings: any speed is fast enough, and an inconclusive speed passes.
ANY_SPEED = 'max_slowdown = 100.0\nmax_memory_growth = 100.0\ninconclusive = "pass"\n'


@pytest.fixture(autouse=True)
def _once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeq.reporting.gate._ATTEMPTS", 1)
    monkeypatch.setattr("edgeq.reporting.gate._SESSIONS", 2)


def gate(board: FakeBoard, model: Path, baseline: Path, *options: object) -> Result:
    words = ("gate", model, "--baseline", baseline, "--on", board.address, "--duration", "0.02", "--threads", "1")
    return CliRunner().invoke(group, [str(word) for word in (*words, *options)])


def test_a_model_on_a_board(board: FakeBoard, tmp_path: Path) -> None:
    larger, baseline = made(tmp_path / "larger.onnx", width=512), made(tmp_path / "baseline.onnx")
    done = gate(board, larger, baseline, "--limits", limits(tmp_path, ANY_SPEED), "--json")
    assert done.exit_code == WorseError.exit_code
    assert "the model's size is" in done.stderr
    found = json.loads(done.stdout)
    assert found["on"] == board.address
    assert {c["what"]: c["outcome"] for c in found["checks"] if c["what"] != "latency"} == {
        "size": "missed",
        "memory": "held",
    }
    bench = found["comparison"]["bench"]
    assert bench["board"]["name"] == board.address
    assert bench["scenarios"]["single-stream"]["models"]["B"]["latency"]["p50_ms"] > 0
    assert bench["models"]["A"]["memory"]["session_peak_bytes"] > 0
    assert found["comparison"]["a"]["coverage"] is None
    assert not any((board.cache / "tmp").iterdir())


def test_a_bundle_and_its_accuracy_on_a_board(board: FakeBoard, bundle: Path, tmp_path: Path) -> None:
    """The variant that the board chooses is judged and timed by the board's own outputs."""
    data = ("--data", demo.VALIDATION, "--task", "classification", "--count", 20)
    text = f"{ANY_SPEED}max_drop = 1.0\n"
    done = gate(board, bundle, demo.MODEL, *data, "--limits", limits(tmp_path, text), "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["comparison"]
    assert found["b"]["variant"]
    assert found["samples"] == 20
    assert found["b"]["accuracy"]["metrics"].keys() == found["a"]["accuracy"]["metrics"].keys()
    assert set(found["bench"]["models"]) == {"A", "B"}


def test_a_board_that_is_not_there(board: FakeBoard, tmp_path: Path) -> None:
    model, baseline = made(tmp_path / "model.onnx"), tmp_path / "kept.onnx"
    board.fails("ssh: connect to host pi port 22: Connection refused")
    # there is no baseline, whatever the board does
    assert gate(board, model, baseline).exit_code == UsageError.exit_code
    assert gate(board, model, baseline, "--update").exit_code == 0
    done = gate(board, model, baseline)
    assert done.exit_code == BoardError.exit_code
    assert done.stderr.count("\n") == 1
