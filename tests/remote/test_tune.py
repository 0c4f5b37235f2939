"""`edgeq tune --on`: races and self-tests on a board, everything else here; a cut link is a pause."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgeq_device.latency import Bursts, WarmUp
from edgeq_device.package import open_bundle
from edgeq_device.ranking import Ranking, rank_until_settled

import edgeq
from edgeq import demo
from edgeq.engines import choose_engine
from edgeq.errors import BoardError, UsageError
from edgeq.measure.task import make_task
from edgeq.pipeline.job import Data
from edgeq.remote import clock as clocks
from edgeq.remote.clock import BoardClock
from edgeq.remote.devices import one_board
from edgeq.remote.guest import BoardGuest
from edgeq.remote.machine import State
from edgeq.session import SessionSettings
from edgeq.tune.goal import Goal
from edgeq.tune.run import Tuned
from edgeq.tune.space import kernel_candidates
from tests.remote.conftest import FakeBoard
from tests.tune.steady import SteadyRunner

HOW = {"top": None, "keep": "a", "tie": 0.05, "min_rounds": 2, "max_duration_s": 0.5}
FEW = {
    "sessions": 1,
    "warmup": WarmUp(min_s=0.0, max_s=0.05),
    "bursts": Bursts(0.002, 0.0),
    "how": HOW,
    "on_round": lambda: None,
}


@pytest.fixture
def _steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a board measured is replaced by what takes the same time on every machine: see tests/tune/steady.py."""
    real = clocks._ranking

    def steady(session: Any, answer: Mapping[str, Any], arrays: Mapping[str, Any]) -> Ranking:
        names = real(session, answer, arrays).distributions
        return rank_until_settled({n: SteadyRunner(n, lambda: None) for n in names}, keep=next(iter(names)))

    race = BoardClock.race

    def short(clock: BoardClock, models: Any, feed: Any, **given: Any) -> Ranking:
        return race(
            clock, models, feed, **{**FEW, "how": {**HOW, "keep": given["how"]["keep"], "max_duration_s": 0.05}}
        )

    monkeypatch.setattr(clocks, "_ranking", steady)
    monkeypatch.setattr(BoardClock, "race", short)
    monkeypatch.setattr("edgeq.tune.timing.MOST_S", 0.6)
    # A small search: two ways to build, each with one way to calibrate.
    every = kernel_candidates
    monkeypatch.setattr("edgeq.tune.run.kernel_candidates", lambda *given, **named: every(*given, **named)[:2])
    monkeypatch.setattr("edgeq.tune.screening.method_candidates", lambda kernel, profile: ())


def tuned(output: Path, boards: list[FakeBoard], **changes: Any) -> Tuned:
    with BoardClock([one_board(board.address) for board in boards]) as clock:
        return edgeq.tune(
            demo.MODEL,
            Data(demo.CALIBRATION, count=8),
            output,
            validation=Data(demo.VALIDATION, count=20),
            task=make_task("classification"),
            goal=Goal(max_drop=0.05, budget_s=60),
            clock=clock,
            engines=[choose_engine("onnxruntime")],
            **changes,
        )


def attempt(output: Path, board: FakeBoard, *, resume: bool) -> Tuned | None:
    try:
        return tuned(output, [board], resume=resume)
    except BoardError:
        return None


def models(bundle: Path) -> dict[str, str]:
    with open_bundle(bundle) as opened:
        return {name: record.sha256 for name, record in opened.files.items() if name.endswith(".onnx")}


@pytest.mark.slow
@pytest.mark.usefixtures("_steady")
def test_a_cut_link_is_a_pause(board: FakeBoard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut again and again, later each time: each run goes on where the one before stopped, to the same bundle."""
    whole = tuned(tmp_path / "whole", [board])
    assert whole.record["boards"].keys() == {board.address}
    assert whole.proof.coverage.how == f"{board.address}, over SSH"
    assert edgeq.verify(whole.bundle).passed

    real, left, cuts = BoardGuest.exchange, 4, 0

    def exchange(self: BoardGuest, *arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            board.cut()
        return real(self, *arguments)

    monkeypatch.setattr(BoardGuest, "exchange", exchange)
    while True:
        left = (8, 40, 1000)[min(cuts, 2)]
        again = attempt(tmp_path / "again", board, resume=cuts > 0)
        if again is not None:
            break
        cuts += 1
        assert not (tmp_path / "again").exists()
    assert cuts == 2
    assert again.record["chosen"] == whole.record["chosen"]
    assert models(again.bundle) == models(whole.bundle)
    assert not any((board.cache / "tmp").iterdir())


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    from tests.graphs import proto

    (tmp_path / "tiny.onnx").write_bytes(
        proto("tiny (float[1,4] x) => (float[1,4] y) { y = Relu(x) }").SerializeToString()
    )
    return tmp_path / "tiny.onnx"


def test_a_race_on_a_board(board: FakeBoard, tiny: Path) -> None:
    plain = SessionSettings(intra_op_threads=1)
    with BoardClock([one_board(board.address)]) as clock:
        found = clock.race({"a": (tiny, plain), "b": (tiny, plain)}, {"x": np.ones((1, 4), np.float32)}, **FEW)
        assert clock.peak_memory(tiny, plain, {"x": [1, 4]}) > 0
    assert set(found.order) == {"a", "b"}
    assert found.distributions["a"].p50 > 0


def test_boards_take_turns_and_one_that_fails_is_left_out(
    make_board: Callable[[str], FakeBoard], tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = make_board("one"), make_board("two")
    race = {"a": (tiny, SessionSettings(intra_op_threads=1))}
    with BoardClock([one_board(b.address) for b in (one, two)]) as clock:
        for board in (None, one, None):
            if board is not None:
                board.cut()
            clock.race(race, {"x": np.ones((1, 4), np.float32)}, **FEW)
        assert list(clock.record()) == ["ssh://one", "ssh://two"]
        two.cut()
        with pytest.raises(BoardError, match="ssh://two: the link was cut"):
            clock.race(race, {"x": np.ones((1, 4), np.float32)}, **FEW)


def test_a_board_that_throttles_rests_and_is_left_out(
    board: FakeBoard, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    throttles = iter(range(100))
    real = clocks.describe_board
    with BoardClock([one_board(board.address)], sleep=slept.append) as clock:
        monkeypatch.setattr(
            clocks,
            "describe_board",
            lambda session: type(real(session))(clock.machine, {}, State(thermal_throttles=next(throttles))),
        )
        with pytest.raises(BoardError, match="throttles for heat again"):
            clock.race({"a": (tiny, SessionSettings())}, {"x": np.ones((1, 4), np.float32)}, **FEW)
    assert slept == [clocks.COOL_S]


def test_boards_of_different_kinds(make_board: Callable[[str], FakeBoard], monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    one, two = make_board("one"), make_board("two")
    real, names = clocks.describe_board, iter(["a CPU", "another CPU"])

    def describe(session: Any) -> Any:
        found = real(session)
        return dataclasses.replace(found, machine=dataclasses.replace(found.machine, cpu_name=next(names)))

    monkeypatch.setattr(clocks, "describe_board", describe)
    with pytest.raises(UsageError, match="ssh://one is a CPU, ssh://two is another CPU"):
        BoardClock([one_board(b.address) for b in (one, two)]).__enter__()
    assert json.loads((one.cache / "lock").read_text())["who"]
