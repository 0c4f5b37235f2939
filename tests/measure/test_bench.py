"""Test `edgeq.bench` and `edgeq bench`, which only calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from click.testing import CliRunner, Result
from edgeq_device.measure.bench_settings import BenchSettings
from edgeq_device.measure.latency import WarmUp

import edgeq
from edgeq.bundle.spec import BundleSpec, SelfTestCase, SelfTestSpec, VariantSpec
from edgeq.bundle.write import write_bundle
from edgeq.cli import group
from edgeq.errors import UsageError
from edgeq.measure.bench import BenchData, bench

from .fakes import matmul_file

pytestmark = pytest.mark.usefixtures("made_up_memory")

QUICK = BenchSettings(min_duration_s=0.02, min_queries=10, warm_up=WarmUp(min_s=0, max_s=0.02))
FAST = ("--duration", "0.02", "--queries", "10", "--threads", "1")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return matmul_file(tmp_path / "int8.onnx", 8)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return matmul_file(tmp_path / "float.onnx", 256)


@pytest.fixture(params=["bundle", "bundle.edgeq"])
def bundle(tmp_path: Path, model: Path, other: Path, request: pytest.FixtureRequest) -> Path:
    x = {"x": np.ones((1, 64), np.float32)}
    y = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"]).run(None, x)[0]
    variant = VariantSpec("small", model, selftest=SelfTestSpec((SelfTestCase(x, {"y": y}),), {"y": 1e-3}))
    write_bundle(BundleSpec("b", (variant,), float_model=other), tmp_path / request.param)
    return tmp_path / str(request.param)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(group, ["bench", *map(str, arguments)])


def test_it_is_the_public_api() -> None:
    assert edgeq.bench.__wrapped__ is bench  # type: ignore[attr-defined]


def test_a_model_alone(model: Path) -> None:
    measurement = bench(model, settings=QUICK)
    assert list(measurement.models) == ["int8.onnx"]
    assert measurement.scenarios["single-stream"]["ratios"] == {}


def test_a_model_against_another_is_compared_with_it(model: Path, other: Path) -> None:
    measurement = bench(model, against=other, settings=QUICK)
    assert measurement.report["baseline"] == "float.onnx"
    assert list(measurement.scenarios["single-stream"]["ratios"]) == ["int8.onnx"]


def test_models_of_the_same_name_are_distinguished(model: Path, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    counterpart = matmul_file(tmp_path / "old" / "int8.onnx", 8)
    assert set(bench(model, against=counterpart, settings=QUICK).models) == {str(model), str(counterpart)}
    with pytest.raises(UsageError, match="compared with itself"):
        bench(model, against=model, settings=QUICK)


def test_why_a_better_variant_of_a_bundle_does_not_run_is_a_note(model: Path, tmp_path: Path) -> None:
    better = VariantSpec("better", model, info={"rank": 9, "required_features": ["no_such_feature"]})
    write_bundle(BundleSpec("b", (better, VariantSpec("plain", model))), tmp_path / "two")
    measurement = bench(tmp_path / "two", settings=QUICK)
    assert list(measurement.models) == ["plain"]
    assert measurement.notes[0] == "not better: this device has no no_such_feature"


def test_a_bundle_is_measured_with_its_float32_on_its_self_test(bundle: Path) -> None:
    measurement = bench(bundle, settings=QUICK)
    assert list(measurement.models) == ["float32", "small"]
    assert measurement.report["baseline"] == "float32"
    assert not any("made up" in note for note in measurement.notes)


def test_samples_from_files(bundle: Path, model: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "samples.npz", x=np.ones((6, 64), np.float32))
    for bench_model in (bundle, model):
        measurement = bench(bench_model, data=BenchData(str(tmp_path / "samples.npz"), count=4), settings=QUICK)
        assert not any("made up" in note for note in measurement.notes)


def test_json_on_stdout_and_nothing_else(model: Path) -> None:
    process = run(model, "--json", "--scenario", "all", *FAST)
    assert process.exit_code == 0, process.output
    report: dict[str, Any] = json.loads(process.stdout)
    assert report["schema"] == "edgeq.bench/2"
    assert list(report["scenarios"]) == ["single-stream", "multi-stream", "server", "offline"]


def test_a_table_for_people(bundle: Path) -> None:
    process = run(bundle, "-v", *FAST)
    assert process.exit_code == 0, process.output
    assert "p99.9 ms" in process.stdout
    assert "float32" in process.stdout


def test_shapes_are_passed_on(model: Path) -> None:
    process = run(model, "--shape", "x=5,64", "--json", *FAST)
    assert process.exit_code == 0, process.output


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["missing.onnx"], 3, "missing.onnx does not exist"),
        (["{broken}"], 3, "broken.onnx"),
        (["{empty}"], 7, "not a bundle"),
        (["{model}", "--against", "missing.onnx"], 3, "missing.onnx does not exist"),
        (["{model}", "--variant", "x"], 2, "has no variants"),
        (["{model}", "--pin", "99999"], 2, "core 99999 is not available"),
        (["{model}", "--pin", "first"], 2, "does not name cores"),
        (["{model}", "--shape", "x=5,65"], 2, "'x' has the shape"),
        (["{model}", "--shape", "x"], 2, "is not a shape"),
        (["{model}", "--duration", "nan"], 2, "duration of nan"),
        (["{model}", "--queries", "0"], 2, "queries cannot be 0"),
        (["{model}", "--official", "--duration", "1"], 2, "--official and --duration"),
        (["{model}", "--data", "missing.npz"], 4, "missing.npz"),
        (["{model}", "--data", "{wrong}"], 4, "wrong.npz"),
    ],
)
def test_bad_input_is_one_line_and_its_exit_code(
    model: Path, tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    (tmp_path / "broken.onnx").write_bytes(model.read_bytes()[:100])
    (tmp_path / "empty").mkdir()
    np.savez(tmp_path / "wrong.npz", x=np.ones((6, 63), np.float32))
    places = {n: str(tmp_path / f) for n, f in (("broken", "broken.onnx"), ("empty", "empty"), ("wrong", "wrong.npz"))}
    process = run(
        *(a.format(model=model, **places) for a in arguments), *([] if "--duration" in arguments else FAST[:2])
    )
    assert process.exit_code == code, process.output
    assert message in process.stderr
    assert "Traceback" not in process.output
    assert process.stderr.strip().count("\n") == 0
    assert process.stdout == ""


def test_against_with_a_bundle_is_refused(bundle: Path, model: Path) -> None:
    process = run(bundle, "--against", model)
    assert process.exit_code == 2
    assert "a bundle has its own float32 model" in process.stderr


def test_interrupted(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("edgeq_device.bundle.bench_models.run_bench", interrupt)
    process = run(model, *FAST)
    assert process.exit_code == 130
    assert "Traceback" not in process.output
