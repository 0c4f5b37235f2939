from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from edgeq_device.measure.bench_settings import BenchSettings
from edgeq_device.measure.latency import WarmUp

from edgeq.errors import RuntimeUnavailableError, UsageError
from edgeq.measure.latency import Measurement, measure_models
from edgeq.measure.timed_model import bench_model
from edgeq.run.session import SessionSettings
from edgeq.util.display import Advance
from edgeq.util.records import plain

from .fakes import matmul_file

QUICK = BenchSettings(min_duration_s=0.02, min_queries=10, warm_up=WarmUp(min_s=0, max_s=0.02))


class Counting:
    """Add up the reported progress."""

    def __init__(self) -> None:
        self.totals: list[int | None] = []
        self.steps: list[int] = []

    @contextmanager
    def stage(self, title: str, total: int | None = None) -> Iterator[Advance]:
        self.totals.append(total)
        yield self.steps.append

    def note(self, text: str) -> None:
        del text


@pytest.fixture
def measured(tmp_path: Path) -> Measurement:
    models = [bench_model(n, matmul_file(tmp_path / f"{n}.onnx", width)) for n, width in (("a", 512), ("b", 8))]
    return measure_models(models, QUICK)


def test_a_measurement_carries_machine_versions_and_settings(measured: Measurement) -> None:
    assert measured.machine["cpu_name"]
    assert set(measured.versions) == {"python", "onnxruntime", "numpy"}
    assert measured.settings["min_queries"] == 10
    assert measured.models["a"]["providers"] == ["CPUExecutionProvider"]
    assert measured.latency("a")["count"] >= 10
    ratio = measured.ratio("b")
    # Next to other tests there may be too few undisturbed runs for a claim.
    assert ratio["reason"] if ratio["estimate"] is None else ratio["low"] <= ratio["estimate"] <= ratio["high"]
    assert plain(measured)["notes"] == list(measured.notes)
    assert "single-stream" in measured.text()


def test_progress_only_moves_forward_and_reaches_the_end(tmp_path: Path) -> None:
    progress = Counting()
    settings = BenchSettings(
        scenarios=("single-stream", "server"), min_duration_s=0.02, min_queries=10, warm_up=QUICK.warm_up
    )
    measure_models([bench_model("a", matmul_file(tmp_path / "a.onnx", 8))], settings, progress=progress)
    assert progress.totals == [200]
    assert all(step >= 0 for step in progress.steps)
    assert sum(progress.steps) == 200


def test_session_settings_reach_the_session_and_the_memory_measurement(tmp_path: Path) -> None:
    settings = SessionSettings(optimization="none", config={"session.disable_prepacking": "1"}, intra_op_threads=5)
    model = bench_model("a", matmul_file(tmp_path / "a.onnx", 8), settings)
    options = model.open(2).get_session_options()
    assert options.intra_op_num_threads == 2
    assert options.get_session_config_entry("session.disable_prepacking") == "1"
    assert model.memory is not None
    assert model.memory(1, {"x": (1, 64)}).process_peak_bytes > 0


def test_errors_of_the_device_side_become_edgeqs(tmp_path: Path) -> None:
    model = bench_model("a", matmul_file(tmp_path / "a.onnx", 8))
    with pytest.raises(UsageError, match="no input 'z'"):
        measure_models([model], QUICK, shapes={"z": (1,)})


def test_a_model_that_onnxruntime_refuses(tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"nonsense")
    with pytest.raises(RuntimeUnavailableError, match=r"bad\.onnx"):
        measure_models([bench_model("bad", tmp_path / "bad.onnx")], QUICK)


def test_samples_come_from_the_caller(tmp_path: Path) -> None:
    feeds = [{"x": np.ones((3, 64), np.float32)}]
    model = bench_model("a", matmul_file(tmp_path / "a.onnx", 8))
    assert not any("made up" in n for n in measure_models([model], QUICK, feeds=lambda session: feeds).notes)
