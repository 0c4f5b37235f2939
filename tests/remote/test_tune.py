"""Test `edgeq tune --on`: races and self-tests run on a board, everything else runs here. A cut link is a pause."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeq
from edgeq.errors import BoardError, UsageError
from edgeq.measure.kernels import profile
from edgeq.remote import clock as clocks
from edgeq.remote.clock import BoardClock
from edgeq.remote.devices import find_board
from edgeq.remote.machine import BoardState
from edgeq.remote.session import open_board, start_board_guest
from edgeq.run.session import SessionSettings
from tests.remote.conftest import FakeBoard
from tests.remote.tuning import FEW, cut_at, models, steady_boards, tuned


@pytest.fixture
def _steady() -> Iterator[None]:
    with steady_boards():
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("_steady")
def test_a_cut_link_is_a_pause(board: FakeBoard, tmp_path: Path) -> None:
    """The link is cut several times, later each time. Each run continues where the one before stopped, to the same
    bundle. `scripts/benchmark boards --cuts 20` does the same at twenty points of a run.
    """
    with cut_at(0, board.cut) as requests:
        whole = tuned(tmp_path / "whole", [board.address])
    assert whole.record["boards"].keys() == {board.address}
    assert whole.proof.coverage.how == f"{board.address}, over SSH"
    assert edgeq.verify(whole.bundle).passed

    # A run that reuses what the first one sent needs as few as 0.6 times as many requests.
    for resume, number in enumerate((5, len(requests) // 3)):
        with cut_at(number, board.cut), pytest.raises(BoardError, match="ssh://pi: the link was cut") as caught:
            tuned(tmp_path / "again", [board.address], resume=resume > 0)
        assert str(caught.value).isprintable()
        assert not (tmp_path / "again").exists()
    again = tuned(tmp_path / "again", [board.address], resume=True)
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
    with BoardClock([find_board(board.address)]) as clock:
        found = clock.race(
            {"a": (tiny, plain), "b": (tiny, plain)}, {"x": np.ones((1, 4), np.float32)}, FEW, lambda: None
        )
        assert clock.peak_memory(tiny, plain, {"x": [1, 4]}) > 0
    assert set(found.order) == {"a", "b"}
    assert found.distributions["a"].p50 > 0


def test_boards_take_turns_and_one_that_fails_is_left_out(
    make_board: Callable[[str], FakeBoard], tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = make_board("one"), make_board("two")
    race = {"a": (tiny, SessionSettings(intra_op_threads=1))}
    with BoardClock([find_board(b.address) for b in (one, two)]) as clock:
        for board in (None, one, None):
            if board is not None:
                board.cut()
            clock.race(race, {"x": np.ones((1, 4), np.float32)}, FEW, lambda: None)
        assert list(clock.record()) == ["ssh://one", "ssh://two"]
        two.cut()
        with pytest.raises(BoardError, match="ssh://two: the link was cut"):
            clock.race(race, {"x": np.ones((1, 4), np.float32)}, FEW, lambda: None)


def test_why_the_link_was_cut_is_what_the_first_connection_says(board: FakeBoard) -> None:
    """The first connection reports why the link was cut. The others, which share it, end without a message."""
    says = "Timeout, server pi not responding."
    board.python(f'case "$*" in *" serve "*) echo "{says}" >&2;; esac; exec {sys.executable} "$@"')
    with open_board(find_board(board.address)) as session, start_board_guest(session) as guest:
        board.cut()
        with pytest.raises(BoardError, match="cannot be reached"):
            guest.exchange({"do": "features", "masked": [], "runtime": False})


def test_a_profile_goes_on_on_the_next_board(make_board: Callable[[str], FakeBoard], tiny: Path) -> None:
    boards = [make_board(name) for name in ("one", "two")]

    def opener(model: Path, settings: SessionSettings) -> Any:
        session = clock.open_profiled(model, settings)
        boards[0].cut()
        return session

    with BoardClock([find_board(board.address) for board in boards]) as clock:
        found = profile(tiny, SessionSettings(), {"x": np.ones((1, 4), np.float32)}, opener=opener)
        assert [kernel.op_type for kernel in found.kernels] == ["Relu"]
        assert list(clock.record()) == ["ssh://two"]


def test_a_board_that_throttles_rests_and_is_left_out(
    board: FakeBoard, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    throttles = iter(range(100))
    real = clocks.describe_board
    with BoardClock([find_board(board.address)], sleep=slept.append) as clock:
        monkeypatch.setattr(
            clocks,
            "describe_board",
            lambda session: type(real(session))(clock.machine, {}, BoardState(thermal_throttles=next(throttles))),
        )
        with pytest.raises(BoardError, match="throttles for heat again"):
            clock.race({"a": (tiny, SessionSettings())}, {"x": np.ones((1, 4), np.float32)}, FEW, lambda: None)
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
        BoardClock([find_board(b.address) for b in (one, two)]).__enter__()
    assert json.loads((one.cache / "lock").read_text())["who"]
