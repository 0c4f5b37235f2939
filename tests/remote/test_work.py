"""Test every job on a board with its real command line, through a stand-in for ssh."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from edgeq_device.system.features import read_features

from edgeq import demo
from edgeq.cli import group
from edgeq.data.open_source import Data
from edgeq.jobs.package import package
from tests.plugins import needs_plugin
from tests.remote.conftest import FakeBoard


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(group, [str(a) for a in arguments])


def run_json(*arguments: object) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_detect(board: FakeBoard) -> None:
    there, here = run_json("detect", "--on", board.address), run_json("detect")
    assert there["machine"]["features"] == here["machine"]["features"]
    assert there["match"]["profile"] == here["match"]["profile"]
    same = ("architecture", "cores", "threads", "usable_threads", "caches", "memory_bytes", "runtimes", "os")
    assert {k: there["machine"][k] for k in same} == {k: here["machine"][k] for k in same}
    installed = [{e["name"]: e for e in found["engines"] if e["name"] != "wasm"} for found in (there, here)]
    assert installed[0] == installed[1], "but for what lies in the user's own cache"
    assert there["state"]["free_bytes"] > 0
    assert "GB free" in run("detect", "--on", board.address).stdout


def test_verify_and_what_the_second_time_sends(board: FakeBoard, bundle: Path) -> None:
    first = run_json("verify", bundle, "--on", board.address)["boards"][0]
    second = run_json("verify", bundle, "--on", board.address)["boards"][0]
    assert first["verification"]["passed"]
    assert first["verification"]["architecture"] == read_features()[0]
    assert {v["status"] for v in first["verification"]["variants"]} <= {"passed", "loaded"}
    assert second["board"]["bytes_sent"] < 0.01 * first["board"]["bytes_sent"]
    assert not any((board.cache / "tmp").iterdir())


def test_verify_on_samples(board: FakeBoard, bundle: Path) -> None:
    found = run_json("verify", bundle, "--on", board.address, "--data", demo.CALIBRATION, "--count", 4)
    check = found["boards"][0]["check"]
    assert (check["status"], check["samples"], check["agreement"]["outputs"][0]["max_abs_error"]) == ("passed", 4, 0.0)


def test_a_bundle_that_answers_otherwise_there_fails(board: FakeBoard, bundle: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "onnxruntime_patch.py"
    wrong.write_text(
        "import sys, runpy, onnxruntime as ort\n"
        "run = ort.InferenceSession.run\n"
        "ort.InferenceSession.run = lambda self, *a: [x + 1 for x in run(self, *a)]\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    import sys

    # Only the bundle's own runner, which runs without -I, gets the patch.
    board.python(
        f'case "$1" in -I) exec {sys.executable} "$@";; *) shift; exec {sys.executable} -B {wrong} "$@";; esac'
    )
    result = run("verify", bundle, "--on", board.address)
    assert result.exit_code == 10
    assert "fails on ssh://pi" in result.stderr


def test_bench(board: FakeBoard, bundle: Path) -> None:
    found = run_json("bench", bundle, "--on", board.address, "--duration", 0.05, "--queries", 5)
    assert "float32" in found["models"]
    assert found["board"]["name"] == board.address
    assert found["board"]["after"]["load"] is not None
    assert found["scenarios"]["single-stream"]["models"]["float32"]["latency"]["p50_ms"] > 0


def test_bench_models_on_data(board: FakeBoard) -> None:
    found = run_json(
        *("bench", demo.MODEL, "--on", board.address, "--data", demo.CALIBRATION, "--count", 2),
        *("--duration", 0.02, "--queries", 3, "--engine", "onnxruntime"),
    )
    assert list(found["models"]) == ["model.onnx, onnxruntime"]
    assert not [note for note in found["notes"] if "made up" in note]


@needs_plugin("litert")
def test_a_board_gets_the_file_of_an_engine_with_a_format_of_its_own(board: FakeBoard, tmp_path: Path) -> None:
    engine = ("--engine", "litert")
    found = run_json("bench", demo.MODEL, "--on", board.address, *engine, "--duration", 0.02, "--queries", 3)
    assert found["models"]["model.onnx, litert"]["providers"] == ["LiteRTExecutionProvider"]
    data = ("--data", demo.CALIBRATION, "--count", 6, "--reference", demo.MODEL)
    here = run_json("eval", demo.MODEL, *data, *engine)
    there = run_json("eval", demo.MODEL, *data, *engine, "--on", board.address)
    same = here.keys() - {"coverage"}
    assert {key: there[key] for key in same} == {key: here[key] for key in same}
    package(demo.MODEL, Data(demo.CALIBRATION), tmp_path / "b", engines="litert", effort=None, timed=False)
    checked = run_json("verify", tmp_path / "b", "--on", board.address)["boards"][0]["verification"]
    assert {entry["status"] for entry in checked["variants"]} == {"passed"}
    assert run_json("eval", tmp_path / "b", *data, "--on", board.address)["variant"].endswith("-litert")


def test_eval(board: FakeBoard, bundle: Path) -> None:
    data = ("--data", demo.CALIBRATION, "--count", 6, "--reference", demo.MODEL)
    there, here = run_json("eval", bundle, *data, "--on", board.address), run_json("eval", bundle, *data)
    assert there.pop("board")["name"] == board.address
    assert there == here
    assert "agreement with the reference" in run("eval", demo.MODEL, *data, "--on", board.address).stdout


def test_doctor(board: FakeBoard) -> None:
    found = run_json("doctor", "--on", board.address)
    by_name = {check["name"]: check for check in found["checks"]}
    assert {by_name[name]["status"] for name in ("SSH", "Python", "numpy", "onnxruntime", "kernels")} == {"ok"}
    board.fails("pi@pi: Permission denied (publickey).")
    result = run("doctor", "--on", board.address)
    assert result.exit_code == 10
    assert "ssh-copy-id" in result.stdout


def test_clean(board: FakeBoard, bundle: Path) -> None:
    run_json("verify", bundle, "--on", board.address)
    found = run_json("device", "clean", board.address)
    assert found["bytes"] > 100_000
    assert not board.cache.exists()
    assert [path for path in board.home.rglob("*") if path.is_file()] == []


def test_a_list_of_devices(tmp_path: Path) -> None:
    assert "no devices.toml" in run("device", "list").stdout
    (tmp_path / "devices.toml").write_text('[devices.pi]\nhost = "me@pi"\n')
    assert run("device", "list").stdout.startswith("pi: me@pi, of the kind pi\n")


def test_a_name_that_is_no_board() -> None:
    result = run("detect", "--on", "nothing")
    assert result.exit_code == 2
    assert "there is no board 'nothing'" in result.stderr


def test_samples_of_texts_are_refused_in_one_line(board: FakeBoard, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", image=np.array(["a"]))
    result = run("eval", demo.MODEL, "--data", tmp_path / "x.npz", "--reference", demo.MODEL, "--on", board.address)
    assert result.exit_code == 4
