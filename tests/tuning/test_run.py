"""Run `edgeq tune` from end to end on the embedded demo model with made-up timings (see steady.py)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from edgeq_device.bundle.package import open_bundle

import edgeq
from edgeq import demo
from edgeq.cli import group
from edgeq.data.open_source import Data
from edgeq.errors import GoalNotMetError, HardwareError, OutputError
from edgeq.hardware.detect import detect_machine
from edgeq.hardware.target import resolve
from edgeq.jobs.candidates import plan
from edgeq.jobs.tune import Tuned
from edgeq.measure.task import make_task
from edgeq.prove.request import Request
from edgeq.reporting.bundle import report_bundle
from edgeq.reporting.page import DIGITS
from edgeq.tuning.goal import Goal
from edgeq.util.records import plain, round_floats
from tests.graphs import proto
from tests.tuning.fakes import Interrupting
from tests.tuning.steady import steady_timings

GOAL = Goal(budget_s=60)
REPOSITORY = Path(__file__).resolve().parents[2]


def tuned(output: Path, **changes: Any) -> Tuned:
    arguments: dict[str, Any] = {
        "val": Data(demo.VALIDATION),
        "task": "classification",
        "goal": GOAL,
        "engines": "onnxruntime",
        **changes,
    }
    return edgeq.tune(demo.MODEL, Data(demo.CALIBRATION, count=20), output, **arguments)


@pytest.fixture(scope="module", autouse=True)
def _undisturbed() -> Iterator[None]:
    with steady_timings():
        yield


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    return tuned(tmp_path_factory.mktemp("tune") / "tuned")


def test_the_bundle_verifies_and_holds_the_record(labelled: Tuned) -> None:
    assert edgeq.verify(labelled.bundle).passed
    record = json.loads((labelled.bundle / "report.json").read_text())["tuning"]
    returned = round_floats(plain(labelled.record), DIGITS)
    # The bundle's record cannot count the time that writing the bundle takes.
    assert {**record, "elapsed_s": 0} == {**returned, "elapsed_s": 0}
    assert sum(stage["seconds"] for stage in record["stages"]) < record["elapsed_s"] < returned["elapsed_s"]
    chosen = next(c for c in record["candidates"] if c["name"] == record["chosen"])
    assert chosen["status"] == "chosen"
    assert chosen["timing"]["speedup"]["low"] > 1
    assert chosen["accuracy"]["complete"]
    assert max(chosen["accuracy"]["drop"], chosen["accuracy"]["expected"]) <= GOAL.limit
    assert all(c["reason"] for c in record["candidates"])
    assert not list(labelled.bundle.parent.glob("*.tuning"))


def test_the_bundle_is_of_the_winner(labelled: Tuned) -> None:
    winner = labelled.outcome.winner
    assert winner is not None
    with open_bundle(labelled.bundle) as bundle:
        variant = bundle.components["model"][0]
        assert variant.info["scheme"] == plain(winner.candidate.scheme)
        assert variant.info.get("threads", 0) == winner.candidate.threads
        assert variant.model is not None
        assert variant.model.stat().st_size == winner.screening.bytes if winner.screening else False


def test_the_record_has_the_keys_that_are_documented(labelled: Tuned) -> None:
    text = (REPOSITORY / "docs" / "reference" / "tune.md").read_text("utf-8")
    for key in [*labelled.record, *labelled.record["candidates"][0], *labelled.record["candidates"][0]["screening"]]:
        assert key in text, key


def test_without_labels_float_is_the_judge(tmp_path: Path) -> None:
    result = tuned(tmp_path / "t.edgeq", val=None, task=None, goal=GOAL)
    assert result.record["data"] == {
        "calibration_samples": 20,
        "validation_samples": 20,
        "held_out": False,
        "labelled": False,
    }
    assert result.record["metric"]["name"] == "agreement"
    assert result.outcome.winner is not None
    assert result.outcome.winner.assessment is not None
    assert result.outcome.winner.assessment.basis == "agreement"
    assert edgeq.verify(tmp_path / "t.edgeq").passed


def filters(folder: Path) -> tuple[Path, Path]:
    """Write a convolution and samples for it. Its outputs are not classes and are never equal in int8."""
    random = np.random.default_rng(0)
    weights = {"w": random.normal(0, 1, (8, 3, 3, 3)).astype(np.float32)}
    body = """filters (float[N, 3, 16, 16] x) => (float[N, 8, 16, 16] y) {
        [conv] y = Conv<pads = [1, 1, 1, 1]>(x, w)
    }"""
    (folder / "filters.onnx").write_bytes(proto(body, weights).SerializeToString())
    np.save(folder / "noise.npy", random.random((10, 3, 16, 16), np.float32))
    return folder / "filters.onnx", folder / "noise.npy"


def test_a_strict_goal_that_cannot_be_met_is_an_error_with_the_front_and_leaves_nothing(tmp_path: Path) -> None:
    model, data = filters(tmp_path)
    with pytest.raises(GoalNotMetError, match=r"no candidate loses at most 0\.00 points") as caught:
        edgeq.tune(model, Data(data), tmp_path / "t", goal=Goal(max_drop=0, budget_s=5, strict=True))
    record = caught.value.record
    assert record["chosen"] is None
    assert record["needed"]
    assert record["metric"]["name"] == "cosine"
    assert any(c["timing"] for c in record["candidates"])
    assert not (tmp_path / "t").exists()
    assert report_bundle(tmp_path / "t.tuning").verdict.status == "Goal not met"


def test_writes_the_nearest_candidate_of_a_missed_goal(tmp_path: Path) -> None:
    model, data = filters(tmp_path)
    with pytest.raises(GoalNotMetError, match=r"^goal missed: no candidate .* comes closest") as caught:
        edgeq.tune(model, Data(data), tmp_path / "t", goal=Goal(max_drop=0, budget_s=5))
    record = caught.value.record
    assert (record["bundle"], record["goal_met"]) == (str(tmp_path / "t"), False)
    assert edgeq.verify(tmp_path / "t").passed
    for place in (tmp_path / "t", tmp_path / "t.tuning"):
        found = report_bundle(place)
        assert found.verdict.status == "Goal not met"
        assert f"{record['chosen']} comes closest" in found.verdict.sentence
    # A resumed run meets a new limit with the measurements in the journal, and leaves nothing behind.
    edgeq.tune(model, Data(data), tmp_path / "t", goal=Goal(max_drop=0.5, budget_s=30), resume=True, force=True)
    assert json.loads((tmp_path / "t" / "report.json").read_text())["tuning"]["goal_met"]


def test_an_interrupted_run_goes_on_and_only_with_the_same_settings(tmp_path: Path) -> None:
    output = tmp_path / "t"
    with pytest.raises(KeyboardInterrupt):
        tuned(output, progress=Interrupting())
    journal = output.with_name("t.tuning") / "journal.jsonl"
    known = len(journal.read_text().splitlines())
    assert known > 3
    with pytest.raises(OutputError, match="resume"):
        tuned(output)
    with pytest.raises(OutputError, match="another objective"):
        tuned(output, goal=Goal("size"), resume=True)
    with pytest.raises(OutputError, match="another calibration data"):
        edgeq.tune(
            demo.MODEL,
            Data(demo.CALIBRATION, count=21),
            output,
            val=Data(demo.VALIDATION),
            task=make_task("classification"),
            goal=GOAL,
            resume=True,
        )
    result = tuned(output, goal=Goal(max_drop=0.02, budget_s=60), resume=True)
    assert result.outcome.winner is not None
    assert not journal.parent.exists()


def test_a_target_that_neither_runs_nor_is_simulated_here_is_refused() -> None:
    machine = detect_machine()
    elsewhere = next(name for name in ("raspberry-pi-5", "generic-x86-64") if resolve(name).profile.missing(machine))
    with pytest.raises(HardwareError, match="does not run here"):
        plan(Request.of(demo.MODEL, Data(demo.CALIBRATION), targets=elsewhere))


def test_the_plan_of_a_dry_run(tmp_path: Path) -> None:
    arguments = ["tune", str(demo.MODEL), "--data", str(demo.CALIBRATION), "-o", str(tmp_path / "t"), "--dry-run"]
    shown = CliRunner().invoke(group, [*arguments, "--json", "-q"])
    assert shown.exit_code == 0, shown.output
    steps = json.loads(shown.stdout)
    assert steps["candidates"]
    assert steps["goal"] == {
        "objective": "latency",
        "max_drop": 0.01,
        "budget_s": None,
        "thorough": False,
        "strict": False,
    }
    human = CliRunner().invoke(group, arguments)
    assert steps["candidates"][0]["name"] in human.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", ["--data", "--val"])
@pytest.mark.parametrize(
    ("source", "line"),
    [("nothere.npz", "nothere.npz does not exist. Check"), ("none/*.npz", "none/*.npz matches no file. Correct")],
)
def test_a_dry_run_looks_whether_the_samples_are_there(tmp_path: Path, option: str, source: str, line: str) -> None:
    given = {"--data": str(demo.CALIBRATION), "--val": str(demo.VALIDATION), option: str(tmp_path / source)}
    words = [word for pair in given.items() for word in pair]
    shown = CliRunner().invoke(group, ["tune", str(demo.MODEL), *words, "-o", str(tmp_path / "t"), "--dry-run"])
    assert shown.exit_code == 4
    assert shown.stdout == ""
    assert shown.stderr.count("\n") == 1
    assert line in shown.stderr


def test_the_command_says_the_verdict_first(tmp_path: Path) -> None:
    arguments = ["tune", str(demo.MODEL), "--data", str(demo.CALIBRATION), "--count", "10", "--budget", "60s"]
    # test_engines.py tests races with other engines.
    shown = CliRunner().invoke(group, [*arguments, "--engine", "onnxruntime", "-o", str(tmp_path / "t")])
    assert shown.exit_code == 0, shown.output
    opening = shown.stdout.splitlines()[0]
    assert "times float32's speed" in opening
    assert "it loses" in opening
    # One sentence and a table: no candidate that was dropped, and no long list.
    assert "eliminated" not in shown.stdout
    assert len(shown.output.splitlines()) <= 25
    assert (tmp_path / "t" / "manifest.json").exists()


def test_the_command_fails_with_its_own_code_and_shows_what_there_is(tmp_path: Path) -> None:
    model, data = filters(tmp_path)
    arguments = ["tune", str(model), "--data", str(data), "--max-drop", "0", "--budget", "4s"]
    shown = CliRunner().invoke(group, [*arguments, "-o", str(tmp_path / "t"), "-q", "--json"])
    assert shown.exit_code == 11, shown.output
    assert json.loads(shown.stdout)["goal_met"] is False
    assert "no candidate" in shown.stderr
