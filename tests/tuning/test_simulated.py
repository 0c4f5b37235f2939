"""Run `edgeq tune` for targets that are simulated here, on the embedded demo model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from edgeq_device.errors import DeviceError

import edgeq
from edgeq import demo
from edgeq.cli import group
from edgeq.data.open_source import Data
from edgeq.errors import GoalNotMetError, OutputError
from edgeq.jobs.candidates import plan
from edgeq.jobs.tune import Tuned
from edgeq.measure.task import TaskOptions, make_task
from edgeq.prove.request import Request
from edgeq.tuning.goal import Goal
from edgeq.util.records import plain
from tests.tuning.fakes import Interrupting

KEYS = ["bundle", "target", "simulated", "goal", "goal_met", "chosen", "trials", "elapsed_s", "proof"]
FORM = {"method", "recoveries", "kept_in_float", "wide", "wide_share", "int8_mac_share", "loss", "simulator", "noise"}


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demo") / "validation.npz"
    with np.load(demo.VALIDATION) as archive:
        np.savez(path, **{name: archive[name][:100] for name in archive.files})
    return path


@pytest.mark.slow
@pytest.mark.parametrize("target", ["nvidia-t4", "gemmini"])
def test_a_bundle_for_elsewhere(labelled: Path, tmp_path: Path, target: str) -> None:
    out = tmp_path / "bundle"
    result = edgeq.tune(
        demo.MODEL,
        Data(str(demo.CALIBRATION), count=50),
        out,
        target=target,
        val=Data(str(labelled)),
        task=make_task("classification", TaskOptions()),
    )
    record = plain(result)
    assert list(record) == KEYS
    assert record["simulated"] is True
    assert all(set(form) == FORM for form in [record["chosen"], *record["trials"]])
    assert record["chosen"]["loss"] <= 0.01
    assert record["chosen"]["loss"] == pytest.approx(result.proof.drop)
    assert record["chosen"]["int8_mac_share"] == pytest.approx(result.proof.coverage.int8_mac_share, abs=1e-6)
    assert not out.with_name("bundle.tuning").exists()
    assert "tuned in simulation: calibration by" in (out / "report.json").read_text("utf-8")
    run = [sys.executable, str(out / "edgeq_run.py"), "info", "--json"]
    report = json.loads(subprocess.run(run, capture_output=True, check=True, text=True).stdout)
    by_name = {variant["variant"]: variant for variant in report["variants"]}
    assert target in by_name
    if target == "nvidia-t4":
        checks = {check["name"]: check["kind"] for check in by_name[target]["info"]["checks"]}
        assert checks["accuracy"] == checks["self-test"] == "modelled"
        if not by_name[target]["runs_here"]:
            assert by_name[target]["reasons"]
            assert report["chosen"] in ("cpu-float32", "cuda-float16")


def test_resumes_an_interrupted_run(tmp_path: Path) -> None:
    output = tmp_path / "bundle"

    def tuned(**changes: Any) -> Tuned:
        goal = Goal(max_drop=0.2, budget_s=20)
        return edgeq.tune(demo.MODEL, Data(demo.CALIBRATION, count=4), output, target="gemmini", goal=goal, **changes)

    with pytest.raises(KeyboardInterrupt):
        tuned(progress=Interrupting())
    with pytest.raises(OutputError, match="resume"):
        tuned()
    assert tuned(resume=True).record["chosen"]["loss"] <= 0.2
    assert output.exists()
    assert not output.with_name("bundle.tuning").exists()


@pytest.mark.parametrize("strict", [True, False])
def test_a_goal_out_of_reach_says_what_the_best_form_loses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strict: bool
) -> None:
    from edgeq.tuning import local

    unchanged = local.LocalEvaluator.assess

    def lossy(self: local.LocalEvaluator, candidates: Any, samples: int) -> Any:
        found = unchanged(self, candidates, samples)
        return {name: type(one)(samples, True, one.basis, 0.25, 0.2, 0.3, 0.25) for name, one in found.items()}

    monkeypatch.setattr(local.LocalEvaluator, "assess", lossy)
    data = Data(str(demo.CALIBRATION), count=4)
    with pytest.raises(GoalNotMetError, match=r"no form for nvidia-t4 .* the best, 0\.2500") as caught:
        edgeq.tune(demo.MODEL, data, tmp_path / "bundle", target="nvidia-t4", goal=Goal(budget_s=3, strict=strict))
    assert (caught.value.record["chosen"] is None) == strict
    assert 0.25 in [form["loss"] for form in caught.value.record["trials"]]
    assert (tmp_path / "bundle").exists() != strict


def test_without_its_simulator_it_says_what_was_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the simulator, candidates are kept with a forecast of coverage, and the result gives the reason."""

    def missing(*arguments: object) -> Path:
        raise DeviceError("qnn needs the package onnxruntime-qnn, not installed here")

    monkeypatch.setattr("edgeq.backends.qnn.backend.find_library", missing)
    data = Data(str(demo.CALIBRATION), count=8)
    found = edgeq.tune(demo.MODEL, data, tmp_path / "bundle", target="hexagon-v73", fix={"N": 1}, goal=Goal(budget_s=3))
    coverage = found.proof.coverage
    assert (coverage.basis, coverage.int8_mac_share) == ("forecast", 1.0)
    assert coverage.reason == "qnn needs the package onnxruntime-qnn, not installed here"
    assert found.proof.engine == "onnxruntime"


def test_the_plan_names_methods_and_neither_threads_nor_recoveries(tmp_path: Path) -> None:
    steps = plan(Request.of(demo.MODEL, Data(demo.CALIBRATION), targets="nvidia-t4"))
    assert len(steps.candidates) == 1
    assert any("minmax" in name for name in steps.methods)
    assert steps.threads == steps.recoveries == ()
    arguments = ["tune", str(demo.MODEL), "--data", str(demo.CALIBRATION), "-t", "gemmini", "-o", str(tmp_path / "t")]
    shown = CliRunner().invoke(group, [*arguments, "--dry-run"])
    assert shown.exit_code == 0, shown.output
    assert "built and screened" in shown.output
    assert "threads" not in shown.output
    assert "if accuracy falls short: layers in float" in shown.output
