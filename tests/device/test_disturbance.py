"""Test which runs were disturbed, from the counters of an imitated system."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgeq_device.measure.latency import Bursts, measure_interleaved
from edgeq_device.measure.load import CompetingLoad
from edgeq_device.measure.waits import Waits
from edgeq_device.measure.watch import MachineWatch

OWN, WORKER = threading.get_native_id(), 10_000_001


class System:
    """Imitate a system whose threads run and wait as the test decides."""

    def __init__(self, root: Path, clock: Any) -> None:
        self.clock = clock
        self.tasks = root / "proc/self/task"
        self.waited = {OWN: 0.0, WORKER: 0.0}
        self.state = "S"
        self.waits = Waits(root=root, clock=clock, sleep=lambda s: None)
        self.write()
        self.waits.start()

    def write(self) -> None:
        for thread, waited in self.waited.items():
            folder = self.tasks / str(thread)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "schedstat").write_text(f"1000 {round(waited * 1e9)} 5\n")
            (folder / "stat").write_text(f"1 (a (R) b) {self.state} 1 1\n")

    def run(self, seconds: float, **waited: float) -> tuple[float, float]:
        start = self.clock.now
        self.clock.now += seconds
        self.waited[OWN] += waited.get("own", 0.0)
        self.waited[WORKER] += waited.get("worker", 0.0)
        self.write()
        self.waits.look(self.clock.now)
        return start, self.clock.now

    def disturbed(self, runs: list[tuple[float, float]]) -> list[bool]:
        return list(self.waits.find_disturbed(*(np.array(side) for side in zip(*runs, strict=True))))


@pytest.fixture
def system(tmp_path: Path, clock: Any) -> System:
    return System(tmp_path, clock)


def test_nobody_waits(system: System) -> None:
    assert system.disturbed([system.run(0.01) for _ in range(5)]) == [False] * 5


def test_a_wait_of_this_thread_is_in_the_run_in_which_it_ended(system: System) -> None:
    runs = [system.run(0.01), system.run(0.03, own=0.02), system.run(0.01)]
    assert system.disturbed(runs) == [False, True, False]


def test_a_worker_that_got_its_core_late_was_missing_in_earlier_runs(system: System) -> None:
    runs = [system.run(0.01), system.run(0.01), system.run(0.01), system.run(0.01, worker=0.015), system.run(0.01)]
    assert system.disturbed(runs) == [False, True, True, True, False]


def test_waits_too_short_to_matter_are_none(system: System) -> None:
    assert system.disturbed([system.run(0.01, own=0.0001)]) == [False]


def test_a_worker_that_still_waits_disturbs_all(system: System) -> None:
    runs = [system.run(0.01)]
    system.state = "R"
    system.write()
    assert system.disturbed(runs) == [True]


def test_a_thread_that_ended_is_no_trouble(system: System) -> None:
    for name in ("schedstat", "stat"):
        (system.tasks / str(WORKER) / name).unlink()
    (system.tasks / str(WORKER)).rmdir()
    system.waited.pop(WORKER)
    system.waits.start()
    assert system.waits.is_known


@pytest.mark.parametrize("text", ["0 0 0\n", ""])
def test_without_the_kernels_counters_nothing_is_known(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "proc/self/task" / str(OWN)
    folder.mkdir(parents=True)
    (folder / "schedstat").write_text(text)
    for root in (tmp_path, tmp_path / "absent"):
        waits = Waits(root=root)
        waits.start()
        waits.look(time.perf_counter())
        assert not waits.is_known
        assert waits.find_disturbed(np.zeros(3), np.ones(3)).size == 0
        waits.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone counts waits")
def test_on_this_machine_every_run_has_its_mark() -> None:
    measured = measure_interleaved(
        {"sum": lambda: np.arange(1000).sum()}, min_duration_s=0.02, min_runs=10, bursts=Bursts(0.005, 0.001)
    )["sum"]
    assert measured.disturbed.size in (0, measured.count)
    assert 0 <= measured.stolen <= measured.busy <= 1


@pytest.mark.parametrize(("every", "seconds"), [(0, 2.0), (50, 2.0), (2, 3.5)])
def test_on_a_busy_machine_it_goes_on_as_long_as_a_claim_is_in_reach(
    clock: Any, monkeypatch: pytest.MonkeyPatch, every: int, seconds: float
) -> None:
    """The measurement goes on if every second round is undisturbed, but not if only every fiftieth round or none is."""
    rounds = itertools.count(1)

    def disturbed(self: Waits, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        return np.full(len(starts), not every or bool(next(rounds) % every))

    monkeypatch.setattr(Waits, "find_disturbed", disturbed)
    measured = measure_interleaved(
        {"a": clock.runner([0.01])}, min_duration_s=0.5, min_runs=1, patience_s=3.0, bursts=Bursts(0.1, 0), clock=clock
    )
    assert seconds <= measured["a"].elapsed_s <= seconds + 0.3


@pytest.mark.parametrize(("busy", "seconds"), [(0.05, 3.5), (0.15, 2.4), (0.3, 2.0), (1.0, 2.0)])
def test_a_machine_that_can_no_longer_be_calm_ends_a_measurement(
    clock: Any, monkeypatch: pytest.MonkeyPatch, busy: float, seconds: float
) -> None:
    monkeypatch.setattr(MachineWatch, "measure_busy", lambda self: busy)
    rounds = itertools.count(1)
    monkeypatch.setattr(Waits, "find_disturbed", lambda _, starts, ends: np.full(len(starts), bool(next(rounds) % 2)))
    measured = measure_interleaved(
        {"a": clock.runner([0.01])}, min_duration_s=0.5, min_runs=1, patience_s=3.0, bursts=Bursts(0.1, 0), clock=clock
    )
    assert seconds - 0.2 <= measured["a"].elapsed_s <= seconds + 0.2


def test_a_process_that_waits_for_a_core_makes_the_machine_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that waits for a core counts as load. Next to a process with precedence, others hardly run."""
    stat = tmp_path / "proc/stat"
    stat.parent.mkdir()
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    others = CompetingLoad(root=tmp_path, own_cpu_s=lambda: 0.0)
    others.look()
    assert others.measure_busy() == 0, "the system does not say"
    for running in (3, 1, 9, 2):
        stat.write_text(f"cpu  1 0 0 9 0 0 0 0\nprocs_running {running}\n")
        others.look()
    assert others.measure_busy() == (2 / 4 + 0 + 1 + 1 / 4) / 4


def test_a_process_that_has_just_answered_is_not_taken_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    from edgeq_device.measure import load

    slept: list[float] = []
    # Two processes are runnable: this one, and until the sleep, the one that runs a model for it.
    monkeypatch.setattr(load, "read_runnable", lambda root: 1 if slept else 2)
    monkeypatch.setattr("time.sleep", slept.append)
    with MachineWatch(time.perf_counter) as watch:
        watch.add_outside_time(0.5)
        watch.look_around()
        assert slept
        assert watch._competing._demand == [0.0]
        watch.look_around()
        assert len(slept) == 1
        slept.clear()
        watch.look_around()
        assert watch._competing._demand[-1] > 0, "one that is still there is another process"
