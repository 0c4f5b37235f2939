from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from edgeq_device.bundle.bench_models import BenchModel, bench_models
from edgeq_device.engines.memory import MemoryUse
from edgeq_device.errors import DataError, RuntimeUnavailableError, UsageError
from edgeq_device.measure.bench_settings import BenchSettings
from edgeq_device.measure.latency import WarmUp

QUICK = BenchSettings(min_duration_s=0.0, min_queries=5, warm_up=WarmUp(window=2, min_s=0, max_s=0.01))


def test_models_are_opened_with_the_threads_and_measured(fake_session: Any) -> None:
    opened: list[int] = []
    shapes_seen: list[Any] = []

    def open_it(threads: int) -> Any:
        opened.append(threads)
        return fake_session(0.0)

    def memory(threads: int, shapes: Any) -> MemoryUse:
        shapes_seen.append(shapes)
        return MemoryUse(1, 2, 3)

    settings = BenchSettings(min_duration_s=0.0, min_queries=5, threads=3, warm_up=QUICK.warm_up)
    report = bench_models([BenchModel("m", open_it, memory)], settings, shapes={"x": (2, 4)})
    assert opened == [3]
    assert shapes_seen == [{"x": (2, 4)}]
    assert report["models"]["m"]["memory"] == {"load_bytes": 1, "session_peak_bytes": 2, "process_peak_bytes": 3}
    assert report["settings"]["threads"] == 3
    assert set(report["versions"]) == {"python", "onnxruntime", "numpy"}
    assert "the inputs were made up (random values); give data to time real ones" in report["notes"]


def test_open_sizes_are_reported_with_what_was_taken(fake_session: Any) -> None:
    session = fake_session(0.0)
    session.get_inputs = lambda: [SimpleNamespace(name="x", type="tensor(float)", shape=["n", 3, "h", 8])]
    notes = bench_models([BenchModel("m", lambda threads: session)], QUICK)["notes"]
    assert any("with 1 for open sizes (x of 1,3,1,8; --shape NAME=SIZES sets others)" in note for note in notes)


def test_given_samples_are_used_and_nothing_is_made_up(fake_session: Any) -> None:
    feeds = [{"x": np.zeros((1, 4), np.float32)}]
    report = bench_models([BenchModel("m", lambda threads: fake_session(0.0))], QUICK, feeds=lambda session: feeds)
    assert not any("made up" in n for n in report["notes"])
    assert report["models"]["m"]["memory"] is None


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not pin processes")
def test_pinned_cores_hold_while_opening_and_decide_the_threads(fake_session: Any) -> None:
    before = os.sched_getaffinity(0)
    core = max(before)
    seen: list[tuple[int, set[int]]] = []

    def open_it(threads: int) -> Any:
        seen.append((threads, os.sched_getaffinity(0)))
        return fake_session(0.0)

    settings = BenchSettings(min_duration_s=0.0, min_queries=5, pin=(core,), warm_up=QUICK.warm_up)
    report = bench_models([BenchModel("m", open_it)], settings)
    assert seen == [(1, {core})]
    assert report["settings"]["pin"] == [core]
    assert os.sched_getaffinity(0) == before


def test_memory_that_cannot_be_measured_is_a_note_and_not_a_failure(fake_session: Any) -> None:
    def memory(threads: int, shapes: Any) -> MemoryUse:
        raise RuntimeUnavailableError("the memory of m could not be measured: no such thing")

    report = bench_models([BenchModel("m", lambda threads: fake_session(0.0), memory)], QUICK)
    assert "the memory of m could not be measured: no such thing" in report["notes"]


def test_models_with_different_inputs_are_not_compared(fake_session: Any) -> None:
    other = fake_session(0.0)
    other.get_inputs = lambda: [SimpleNamespace(name="y", type="tensor(int64)", shape=[1])]
    with pytest.raises(DataError, match=r"a takes x: tensor\(float\), and b takes y: tensor\(int64\)"):
        bench_models([BenchModel("a", lambda t: fake_session(0.0)), BenchModel("b", lambda t: other)], QUICK)


def test_settings_are_checked_before_anything_is_opened() -> None:
    def never(threads: int) -> Any:
        pytest.fail("opened")

    with pytest.raises(UsageError, match="queries"):
        bench_models([BenchModel("m", never)], BenchSettings(min_queries=0))


def test_real_sessions(models: dict[str, Path]) -> None:
    import onnxruntime

    def opener(path: Path) -> Any:
        return lambda threads: onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    settings = BenchSettings(
        scenarios=("single-stream", "multi-stream", "server", "offline"),
        min_duration_s=0.05,
        min_queries=20,
        batch=4,
        warm_up=WarmUp(min_s=0, max_s=0.05),
    )
    report = bench_models([BenchModel(name, opener(path)) for name, path in models.items()], settings)
    for scenario in report["scenarios"].values():
        for result in scenario["models"].values():
            assert result["latency"]["count"] >= 1
            assert result["latency"]["min_ms"] > 0
