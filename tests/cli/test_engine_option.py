"""Test `--engine` of bench, eval and quantize with a fake plug-in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from edgeq_device.measure.bench_settings import BenchSettings
from edgeq_device.measure.latency import WarmUp

from edgeq import demo
from edgeq.cli.build import quantize_command
from edgeq.cli.info import detect_command
from edgeq.cli.measure import bench_command, eval_command
from edgeq.measure.bench import bench as bench_function
from edgeq.run.engines import choose_engine
from tests import fake_engine

MODEL, DATA = str(demo.MODEL), str(demo.CALIBRATION)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake_engine.install(tmp_path, monkeypatch)
    known = {**fake_engine.load_engines(), "fake": engine}
    monkeypatch.setattr("edgeq.run.engines.load_engines", lambda *folders: known)


def run(command: Any, *arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(command, [*arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.usefixtures("fake")
def test_bench_compares_engines() -> None:
    engines = [choose_engine(name) for name in ("onnxruntime", "fake:bf16")]
    brief = BenchSettings(min_duration_s=0, min_queries=20, warm_up=WarmUp(max_s=0))
    found = bench_function(MODEL, engines=engines, settings=brief).report
    own, other = found["models"]
    assert (own, other) == ("model.onnx, onnxruntime", "model.onnx, fake:bf16")
    assert found["models"][other]["providers"][0] == "FakeExecutionProvider"
    assert found["baseline"] == own
    assert found["models"][other]["memory"]["process_peak_bytes"] > 0


@pytest.mark.usefixtures("fake")
def test_eval_runs_the_model_in_it_and_the_reference_not() -> None:
    found = run(eval_command, MODEL, "--data", DATA, "--count", "4", "--reference", MODEL, "--engine", "fake")
    assert (found["settings"]["engine"], found["settings"]["precision"]) == ("fake", "f32")
    assert found["reference"]["agreement"]["outputs"][0]["equal"]


@pytest.mark.usefixtures("fake")
def test_quantize_proves_in_it(tmp_path: Path) -> None:
    out = str(tmp_path / "int8.onnx")
    found = run(
        quantize_command, MODEL, "--data", DATA, "--count", "8", "--engine", "fake:bf16", "--no-timing", "-o", out
    )
    assert found["engine"] == "fake:bf16"
    assert "proven in fake:bf16" in found["notes"]


@pytest.mark.usefixtures("fake")
def test_detect_lists_it() -> None:
    listed = {engine["name"]: engine for engine in run(detect_command)["engines"]}
    assert listed["fake"]["version"] == "1.2.3"
    assert next(iter(listed)) == "onnxruntime"


OPTIONS = {"bench": (bench_command, ()), "eval": (eval_command, ("--data", DATA, "--reference", MODEL))}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(
    ("engine", "line"),
    [
        ("onnxruntime", "is a bundle, whose variants bring their engine. Leave --engine out"),
        ("onnxruntim", "unknown engine 'onnxruntim'. Did you mean onnxruntime?"),
    ],
)
def test_refuses_unusable_engines_in_one_line(name: str, engine: str, line: str, tmp_path: Path) -> None:
    command, arguments = OPTIONS[name]
    done = CliRunner().invoke(command, [str(tmp_path), *arguments, "--engine", engine])
    assert done.exit_code == 2
    assert line in done.stderr
