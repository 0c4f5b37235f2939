"""Test a model against a baseline: outcomes, exit codes, the new baseline, and the files for CI."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from edgeq_device.bundle.bench_models import BenchModel
from edgeq_device.measure.bench_settings import BenchSettings
from edgeq_device.measure.claim import Claim
from onnx import numpy_helper

from edgeq import demo
from edgeq.cli import group
from edgeq.errors import InconclusiveError, OutputError, UsageError, WorseError
from edgeq.measure.latency import Measurement
from edgeq.reporting.compare import MISSED, UNSETTLED, LimitCheck
from edgeq.reporting.gate import Gated, GateLimits, junit, markdown, read_limits
from edgeq.run.session import open_session
from tests.bundle.samples import INPUT, answer, linear
from tests.graphs import proto

QUICK = ("--duration", "0.02", "--threads", "1")


def made(place: Path, *, bias: float = 0.0, width: int = 8) -> Path:
    weights = f"float[4,{width}] w, float[{width}] b"
    model = proto(f"m (float[1,4] x, {weights}) => (float[1,{width}] y) {{ y = Gemm(x, w, b) }}")
    del model.graph.input[1:]
    arrays = {"w": np.ones((4, width), np.float32), "b": np.full(width, bias, np.float32)}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    onnx.save(model, place)
    return place


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    """Write a baseline and a model with the same size and speed but different bytes."""
    return made(tmp_path / "baseline.onnx"), made(tmp_path / "model.onnx", bias=1.0)


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch) -> list[Claim]:
    """Return the list of claims that replace the next measurements. The last claim is used for all further ones."""
    claims = [Claim(1.0, 0.99, 1.01, 0.96, 12)]

    def measure(models: Sequence[BenchModel], settings: BenchSettings, **options: Any) -> Measurement:
        latency = {"latency": {f"{name}_ms": 1.0 for name in ("p50", "p90", "p99")}}
        claimed = (claims.pop(0) if len(claims) > 1 else claims[0]).to_dict()
        names = [model.name for model in models]
        report: dict[str, Any] = {
            "machine": {},
            "versions": {},
            "settings": settings.to_dict(),
            "models": {name: {"memory": {"session_peak_bytes": 1000}} for name in names},
            "scenarios": {"single-stream": {"models": dict.fromkeys(names, latency), "ratios": {"B": claimed}}},
        }
        return Measurement(**report, notes=(), report=report)

    monkeypatch.setattr("edgeq.reporting.compare.measure_models", measure)
    return claims


def gate(model: Path, baseline: Path, *options: str | Path) -> Result:
    return CliRunner().invoke(group, [*map(str, ("gate", model, "--baseline", baseline, *QUICK, *options))])


def limits(folder: Path, text: str) -> Path:
    (folder / "gate.toml").write_text(text)
    return folder / "gate.toml"


def test_a_model_that_is_as_good_passes(models: tuple[Path, Path], speed: list[Claim], tmp_path: Path) -> None:
    done = gate(*reversed(models), "--limits", limits(tmp_path, ""), "--json")
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert record["outcome"] == "passed"
    assert {check["what"]: check["outcome"] for check in record["checks"]} == dict.fromkeys(
        ("latency", "size", "memory"), "held"
    )
    assert {check["what"]: check["limit"] for check in record["checks"]} == {
        "latency": pytest.approx(1 / 1.05),
        "size": 0.05,
        "memory": 0.1,
    }
    assert "\u202f" not in "".join(check["text"] for check in record["checks"])


def test_the_same_model_passes_without_being_timed(models: tuple[Path, Path]) -> None:
    done = gate(models[0], models[0], "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["comparison"]["bench"] is None


def test_a_slower_model_fails_with_a_code_of_its_own(models: tuple[Path, Path], speed: list[Claim]) -> None:
    speed[:] = [Claim(0.9, 0.89, 0.91, 0.96, 12, 1.0, 1.1)]
    done = gate(*reversed(models))
    assert done.exit_code == WorseError.exit_code
    assert "the model is SLOWER than the baseline: 0.90 times its speed" in done.stderr


def test_measures_unsettled_speeds_again(models: tuple[Path, Path], speed: list[Claim], tmp_path: Path) -> None:
    unsure = Claim(0.95, 0.8, 1.1, 0.96, 12)
    speed[:] = [unsure, Claim(1.0, 0.99, 1.01, 0.96, 12)]
    done = gate(*reversed(models), "--limits", limits(tmp_path, ""), "--json")
    assert done.exit_code == 0, done.output
    # measured for twice as long
    assert json.loads(done.stdout)["comparison"]["bench"]["settings"]["min_duration_s"] == 0.04


def test_a_busy_machine_is_an_outcome_of_its_own(models: tuple[Path, Path], speed: list[Claim], tmp_path: Path) -> None:
    speed[:] = [Claim(reason="the machine was busy")]
    done = gate(*reversed(models), "--limits", limits(tmp_path, ""), "--junit", tmp_path / "gate.xml")
    assert done.exit_code == InconclusiveError.exit_code
    suite = ElementTree.parse(tmp_path / "gate.xml").getroot()
    assert (suite.get("failures"), suite.get("skipped")) == ("0", "1")
    assert "the machine was busy" in done.stderr
    done = gate(*reversed(models), "--limits", limits(tmp_path, 'inconclusive = "pass"'), "--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout)["outcome"] == "inconclusive"


def test_a_larger_model_fails(models: tuple[Path, Path], speed: list[Claim], tmp_path: Path) -> None:
    larger = made(tmp_path / "larger.onnx", width=512)
    done = gate(larger, models[0], "--limits", limits(tmp_path, ""))
    assert done.exit_code == WorseError.exit_code
    assert "the model's size is" in done.stderr


def test_lost_accuracy_fails(speed: list[Claim], tmp_path: Path) -> None:
    model = onnx.load(demo.MODEL)
    for tensor in model.graph.initializer:
        if 10 in tensor.dims:
            tensor.CopyFrom(numpy_helper.from_array(np.zeros_like(numpy_helper.to_array(tensor)), tensor.name))
    onnx.save(model, tmp_path / "broken.onnx")
    task = ("--data", demo.VALIDATION, "--task", "classification", "--count", "30")
    done = gate(tmp_path / "broken.onnx", demo.MODEL, *map(str, task))
    assert done.exit_code == WorseError.exit_code
    assert "the model loses" in done.stderr


def test_the_baseline_is_written_on_request(models: tuple[Path, Path], speed: list[Claim], tmp_path: Path) -> None:
    kept = tmp_path / "kept" / "baseline.onnx"
    missing = gate(models[0], kept)
    assert missing.exit_code == UsageError.exit_code
    assert "--update" in missing.stderr
    assert gate(models[0], kept, "--update").exit_code == 0
    assert kept.read_bytes() == models[0].read_bytes()
    speed[:] = [Claim(0.5, 0.49, 0.51, 0.96, 12)]
    accepted = gate(models[1], kept, "--update")  # accepted, although it is slower
    assert accepted.exit_code == 0
    assert kept.read_bytes() == models[1].read_bytes()
    assert gate(kept, kept, "--update").exit_code == OutputError.exit_code  # --update never replaces an input


def test_external_data_below_the_model_come_along(tmp_path: Path) -> None:
    (tmp_path / "new" / "data").mkdir(parents=True)
    given = linear(tmp_path / "new" / "m.onnx", 0.0, external="data/weights.bin")
    kept = tmp_path / "baseline.onnx"
    assert gate(given, kept, "--update").exit_code == 0
    inputs = {"x": INPUT}
    for model in (given, kept):
        np.testing.assert_allclose(open_session(model).run(None, inputs)[0], answer(0.0), atol=1e-4)


def test_a_bundle_is_a_baseline_too(bundle: Path, tmp_path: Path) -> None:
    kept = tmp_path / "baseline"
    assert gate(bundle, kept, "--update").exit_code == 0
    done = gate(bundle, kept)
    assert done.exit_code == 0, done.output
    (kept / "notes.txt").write_text("mine")
    assert gate(bundle, kept, "--update").exit_code == OutputError.exit_code
    assert (kept / "notes.txt").exists()


def test_writes_markdown_and_junit_for_ci(models: tuple[Path, Path], speed: list[Claim], tmp_path: Path) -> None:
    speed[:] = [Claim(0.9, 0.89, 0.91, 0.96, 12, 1.0, 1.1)]
    done = gate(*reversed(models), "--markdown", "--junit", tmp_path / "gate.xml")
    assert done.exit_code == WorseError.exit_code
    assert done.stdout.startswith("### edgeq gate: failed")
    assert "| latency | at least 0.95× the speed | ❌ failed |" in done.stdout
    suite = ElementTree.parse(tmp_path / "gate.xml").getroot()
    assert (suite.get("tests"), suite.get("skipped")) == ("3", "0")
    failures = {case.get("name"): case.find("failure") for case in suite}
    assert failures["latency"] is not None
    assert failures["size"] is None
    again = gate(*reversed(models), "--junit", tmp_path / "gate.xml")
    assert again.exit_code == OutputError.exit_code  # fails before it measures anything


@pytest.mark.parametrize("place", ["model", "baseline", "limits", "data", "inside"])
def test_junit_replaces_no_input(place: str, models: tuple[Path, Path], bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "gate.toml").write_text("max_slowdown = 9\n")
    np.save(tmp_path / "samples.npy", np.zeros((1, 4), np.float32))
    baseline = shutil.copytree(bundle, tmp_path / "baseline") if place == "inside" else models[0]
    taken = {
        "model": models[1],
        "baseline": models[0],
        "limits": tmp_path / "gate.toml",
        "data": tmp_path / "samples.npy",
        "inside": tmp_path / "baseline" / "manifest.json",
    }[place]
    before = taken.read_bytes()
    given = ("--limits", tmp_path / "gate.toml", "--data", tmp_path / "samples.npy")
    done = gate(models[1], baseline, *given, "--junit", taken, "--force")
    assert done.exit_code == OutputError.exit_code, done.output
    assert taken.read_bytes() == before


def test_inconclusive_checks_are_skipped() -> None:
    checks = (LimitCheck("latency", 1.0, "x", UNSETTLED, "not | shown"),)
    for inconclusive in ("pass", "fail"):
        given = GateLimits(inconclusive=inconclusive)  # type: ignore[arg-type]
        found = Gated(Path("m"), Path("b"), given, None, checks, on="ssh://pi")
        suite = ElementTree.fromstring(junit(found))
        assert suite.get("name") == "edgeq gate on ssh://pi"
        assert (suite.get("failures"), suite.get("skipped")) == ("0", "1")
    assert "is the new baseline" in markdown(found)


def test_junit_escapes_characters_that_xml_does_not_have() -> None:
    hostile = "\x00\x1b[2J\x0b\ufffe\ud800\u202ea\nb"
    for outcome in (MISSED, UNSETTLED):
        checks = (LimitCheck(hostile, 1.0, hostile, outcome, hostile),)
        found = Gated(Path(hostile), Path("b"), GateLimits(), None, checks, on=hostile)
        (case,) = ElementTree.fromstring(junit(found))
        assert case.get("name") == r"\x00\x1b[2J\x0b\ufffe\ud800\u202ea\nb"
        assert case[0].get("message") == case.get("name")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("max_slow = 1", "max_slow"),
        ("max_slowdown = -0.1", "max_slowdown is -0.1"),
        ('max_slowdown = "5%"', "max_slowdown"),
        ('inconclusive = "maybe"', "inconclusive"),
        ("max_slowdown = nan", "max_slowdown"),
        ("= 1", "not TOML"),
    ],
)
def test_limits_that_make_no_sense(tmp_path: Path, text: str, part: str) -> None:
    (tmp_path / "gate.toml").write_text(text)
    with pytest.raises(UsageError, match=part):
        read_limits(tmp_path / "gate.toml")


def test_a_limit_on_accuracy_needs_a_task() -> None:
    assert GateLimits().limits(task=False).max_drop is None
    assert GateLimits().limits(task=True).max_drop == 0.01
    with pytest.raises(UsageError, match="needs a task"):
        GateLimits(max_drop=0.1).limits(task=False)


def test_a_model_that_fails_while_it_runs_is_one_line(tmp_path: Path) -> None:
    """A model that fails while it runs is reported in one line: its shapes fit, but its number of values does not."""
    body = "g (float[1, 8] x) => (float[N, M] y) <int64[2] s = {3, 5}> { y = Reshape(x, s) }"
    onnx.save(proto(body), tmp_path / "bad.onnx")
    onnx.save(proto(body.replace("{3, 5}", "{2, 4}")), tmp_path / "good.onnx")
    words = ["gate", str(tmp_path / "bad.onnx"), "--baseline", str(tmp_path / "good.onnx"), "--duration", "0"]
    found = CliRunner().invoke(group, words)
    assert found.exit_code == 4, found.output
    assert "refuses sample 0" in found.stderr
    assert found.stderr.count("\n") == 1


def test_the_workflow_of_the_page_runs_as_written(
    speed: list[Claim], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page's steps that run edgeq work in order, in a repository with the files that they name."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "gate.md").read_text("utf-8")
    steps = re.findall(r"^ +- run: (edgeq .*?)(?: >> .*)?$", page, re.MULTILINE)
    assert [step.split()[1] for step in steps] == ["package", "gate"]
    monkeypatch.chdir(tmp_path)
    shutil.copyfile(demo.MODEL, "model.onnx")
    for folder, data in (("calib", demo.CALIBRATION), ("val", demo.VALIDATION)):
        Path(folder).mkdir()
        with np.load(data) as arrays:
            np.savez(Path(folder, "samples.npz"), image=arrays["image"][:16], label=arrays["label"][:16])
    Path("gate.toml").write_text('inconclusive = "pass"')
    for step in steps:
        done = CliRunner().invoke(group, shlex.split(step)[1:])
        assert done.exit_code == 0, done.output
        if "package" in step:
            shutil.copyfile("new.edgeq", "baseline.edgeq")
    assert done.stdout.startswith("### edgeq gate: passed")
    assert ElementTree.parse("gate.xml").getroot().get("failures") == "0"
