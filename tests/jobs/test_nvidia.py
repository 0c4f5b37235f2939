"""Test `edgeq package` and `edgeq quantize` for NVIDIA targets without a GPU, and the bundle with one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edgeq import demo
from edgeq.data.open_source import Data
from edgeq.jobs.package import package
from edgeq.jobs.quantize import quantize

pytestmark = pytest.mark.slow

TARGETS = ("nvidia-t4", "nvidia-a100", "jetson-orin")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("nvidia") / "bundle"
    package(demo.MODEL, Data(str(demo.CALIBRATION), count=20), out, targets=TARGETS, timed=False)
    return out


def run(bundle: Path, *arguments: str) -> Any:
    command = [sys.executable, str(bundle / "edgeq_run.py"), *arguments, "--json"]
    return json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


def test_the_variants_and_what_gates_them(bundle: Path) -> None:
    report = {v["variant"]: v for v in run(bundle, "info")["variants"]}
    assert set(report) == {*TARGETS, "cuda-float16", "cpu-float32"}
    gates = {name: report[name]["info"]["min_compute_capability"] for name in TARGETS}
    assert gates == {"nvidia-t4": "7.5", "nvidia-a100": "8.0", "jetson-orin": "8.6"}
    assert all(report[name]["info"]["min_tensorrt"] == "10.0" for name in TARGETS)
    ranks = [report[name]["rank"] for name in ("nvidia-a100", "nvidia-t4", "cuda-float16", "cpu-float32")]
    assert ranks == sorted(ranks, reverse=True)


def test_a_machine_without_nvidia_software_runs_it_on_the_cpu_and_says_why(bundle: Path, tmp_path: Path) -> None:
    report = run(bundle, "info")
    if report["device"]["gpus"]:
        pytest.skip("this machine has a GPU")
    assert report["chosen"] == "cpu-float32"
    assert all(v["reasons"] for v in report["variants"] if v["variant"] != "cpu-float32")
    answer = run(bundle, "infer", str(bundle / "selftest.npz" / "inputs-0"), "-o", str(tmp_path / "out.npz"))
    assert answer["variant"] == "cpu-float32"
    assert any(reason.startswith("not nvidia-a100: onnxruntime") for reason in answer["passed_over"])
    statuses = {v["variant"]: v["status"] for v in run(bundle, "verify")["variants"]}
    assert statuses["cpu-float32"] == "passed"
    assert statuses["nvidia-t4"] == "not run"


def test_quantize_with_a_table_writes_it_beside_the_model(tmp_path: Path) -> None:
    out = tmp_path / "model.onnx"
    data = Data(str(demo.CALIBRATION), count=10)
    result = quantize(demo.MODEL, data, out, target="jetson-orin", overrides={"format": "table"}, timed=False)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"model.onnx", "model.calibration.flatbuffers", "model.calibration.tensorrt"} <= names
    assert any("it needs" in note for note in result.notes)
    coverage = result.proof.coverage
    assert (coverage.basis, coverage.int8_mac_share, coverage.float_nodes) == ("unknown", None, ())
    assert not any("float" in warning and "arithmetic" in warning for warning in result.proof.warnings())


def test_a_table_travels_with_its_variant(tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    data = Data(str(demo.CALIBRATION), count=10)
    package(demo.MODEL, data, out, targets=("jetson-orin",), overrides={"format": "table"}, timed=False)
    report = {v["variant"]: v for v in run(out, "info")["variants"]}
    info = report["jetson-orin"]["info"]
    assert info["below_tensorrt"] == "11.0"
    assert (out / info["table_file"]).read_bytes()
