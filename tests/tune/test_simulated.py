from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeq import demo
from edgeq.errors import GoalNotMetError
from edgeq.measure.task import TaskOptions, make_task
from edgeq.pipeline.job import Data
from edgeq.tune import simulated
from edgeq.tune.simulated import Sensitivity, Trial, fewest, find_form, is_simulated, tune_simulated


def losing(bad: set[str], each: float = 0.01) -> object:
    def measured(kept: Sequence[str]) -> Trial:
        return Trial("minmax", tuple(kept), 0.5, each * len(bad - set(kept)))

    return measured


@pytest.mark.parametrize(("needed", "layers"), [(1, 10), (3, 10), (7, 10), (10, 10)])
def test_the_fewest_layers_are_found(needed: int, layers: int) -> None:
    order = [f"layer{i}" for i in range(layers)]
    found = fewest(order, losing(set(order[:needed])), 0.0, lambda: False)  # type: ignore[arg-type]
    assert found is not None
    assert found.kept == tuple(order[:needed])


def test_none_is_found_where_all_are_not_enough() -> None:
    assert fewest(["a", "b"], losing({"elsewhere"}), 0.0, lambda: False) is None  # type: ignore[arg-type]
    assert fewest([], losing(set()), 0.0, lambda: False) is None  # type: ignore[arg-type]


def test_the_budget_ends_the_search() -> None:
    assert fewest(["a", "b"], losing(set()), 0.0, lambda: True) is None  # type: ignore[arg-type]


def test_targets_without_kernels_here_are_simulated() -> None:
    assert is_simulated("jetson-orin")
    assert not is_simulated("this-machine")


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demo") / "validation.npz"
    with np.load(demo.VALIDATION) as archive:
        np.savez(path, **{name: archive[name][:100] for name in archive.files})
    return path


@pytest.mark.slow
def test_a_bundle_for_elsewhere(labelled: Path, tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    result = tune_simulated(
        demo.MODEL,
        Data(str(demo.CALIBRATION), count=50),
        out,
        target="nvidia-t4",
        validation=Data(str(labelled)),
        task=make_task("classification", TaskOptions()),
    )
    assert result.chosen.loss is not None
    assert result.chosen.loss <= 0.01
    assert result.to_dict()["simulated"] is True
    run = [sys.executable, str(out / "edgeq_run.py"), "info", "--json"]
    report = json.loads(subprocess.run(run, capture_output=True, check=True, text=True).stdout)
    by_name = {variant["variant"]: variant for variant in report["variants"]}
    checks = {check["name"]: check["kind"] for check in by_name["nvidia-t4"]["info"]["checks"]}
    assert checks["accuracy"] == checks["self-test"] == "modelled"
    if not by_name["nvidia-t4"]["runs_here"]:
        assert by_name["nvidia-t4"]["reasons"]
        assert report["chosen"] in ("cpu-float32", "cuda-float16")


def test_what_cannot_be_reached_is_said_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hopeless(bench: Any, methods: Any, max_drop: float, expired: Any) -> None:
        bench.trials.append(Trial("entropy", (), 1.0, 0.25))

    monkeypatch.setattr(simulated, "find_form", hopeless)
    data = Data(str(demo.CALIBRATION), count=4)
    with pytest.raises(GoalNotMetError, match=r"no form for nvidia-t4 .* the best, 0\.2500") as refusal:
        tune_simulated(demo.MODEL, data, tmp_path / "bundle", target="nvidia-t4")
    assert refusal.value.record["trials"][0]["loss"] == 0.25
    assert not (tmp_path / "bundle").exists()


class FakeBench:
    """Layers a to d; a and b cost accuracy."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []

    def screened(self, method: str) -> float:
        return {"entropy": 0.1, "minmax": 0.4}[method]

    def measured(self, method: str, kept: Sequence[str]) -> Trial:
        self.asked.append(tuple(kept))
        return Trial(method, tuple(kept), 0.9, 0.02 * len({"a", "b"} - set(kept)))

    def sensitivities(self, method: str) -> dict[str, Sensitivity]:
        noise = {"a": 0.5, "c": 0.3, "b": 0.2, "d": 0.1}
        return {name: Sensitivity(value, 10) for name, value in noise.items()}


def test_the_method_with_the_least_noise_and_the_layers_that_matter() -> None:
    bench = FakeBench()
    found = find_form(bench, ("minmax", "entropy"), 0.01, lambda: False)  # type: ignore[arg-type]
    assert found is not None
    assert found.method == "entropy"
    # "c" was taken on the way to "b", and put back.
    assert set(found.kept) == {"a", "b"}


def test_no_layer_goes_to_float_where_none_has_to() -> None:
    bench = FakeBench()
    found = find_form(bench, ("entropy",), 0.05, lambda: False)  # type: ignore[arg-type]
    assert found is not None
    assert found.kept == ()
    assert bench.asked == [()]
