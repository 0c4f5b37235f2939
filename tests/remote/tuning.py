"""Provide a small `edgeq tune --on` with repeatable timings, and a link that is cut on the way. benchmarks/boards.py
also uses it.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from edgeq_device.bundle.package import open_bundle
from edgeq_device.measure.claim import RaceRules, SettlingRules, SpeedRanking, rank_until_settled
from edgeq_device.measure.latency import Bursts, WarmUp

import edgeq
from edgeq import demo
from edgeq.data.open_source import Data
from edgeq.jobs.tune import Tuned
from edgeq.measure.task import make_task
from edgeq.remote import clock as clocks
from edgeq.remote.clock import BoardClock
from edgeq.remote.devices import find_board
from edgeq.remote.link import Channel
from edgeq.remote.session import BoardGuest
from edgeq.run.engines import choose_engine
from edgeq.tuning.goal import Goal
from edgeq.tuning.space import kernel_candidates
from tests.tuning.steady import SteadyRunner

HOW = {"top": None, "keep": "a", "tie": 0.05, "min_rounds": 2, "max_duration_s": 0.5}
FEW = RaceRules(1, WarmUp(min_s=0.0, max_s=0.05), Bursts(0.002, 0.0), HOW)


@contextmanager
def steady_boards() -> Iterator[None]:
    """Replace a board's measurements with times that are the same on every machine (see tests/tuning/steady.py), and
    make the search small: two ways to build, each with one way to calibrate.
    """
    real, race, every = clocks._parse_ranking, BoardClock.race, kernel_candidates

    def steady(session: Any, answer: Mapping[str, Any], arrays: Mapping[str, Any]) -> SpeedRanking:
        names = real(session, answer, arrays).distributions
        return rank_until_settled(
            {n: SteadyRunner(n, lambda: None) for n in names}, rules=SettlingRules(keep=next(iter(names)))
        )

    def short(
        clock: BoardClock, models: Any, feed: Any, rules: RaceRules, on_round: Callable[[], None]
    ) -> SpeedRanking:
        how = {**HOW, "keep": rules.arguments["keep"], "max_duration_s": 0.05}
        return race(clock, models, feed, dataclasses.replace(FEW, arguments=how), on_round)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clocks, "_parse_ranking", steady)
        patch.setattr(BoardClock, "race", short)
        patch.setattr("edgeq.tuning.race.RACE_S", 0.6)
        patch.setattr("edgeq.jobs.candidates.kernel_candidates", lambda *given, **named: every(*given, **named)[:2])
        patch.setattr("edgeq.tuning.build.method_candidates", lambda kernel, profile: ())
        yield


def tuned(output: Path, boards: Sequence[str], **changes: Any) -> Tuned:
    """Tune the demo model for boards, given by their addresses."""
    with BoardClock([find_board(board) for board in boards]) as clock:
        return edgeq.tune(
            demo.MODEL,
            Data(demo.CALIBRATION, count=8),
            output,
            val=Data(demo.VALIDATION, count=20),
            task=make_task("classification"),
            goal=Goal(max_drop=0.05, budget_s=60),
            clock=clock,
            engines=[choose_engine("onnxruntime")],
            **changes,
        )


def models(bundle: Path) -> dict[str, str]:
    """Return the SHA-256 of each model of a bundle, by name."""
    with open_bundle(bundle) as opened:
        return {name: record.sha256 for name, record in opened.files.items() if name.endswith(".onnx")}


@contextmanager
def cut_at(number: int, cut: Callable[[], None]) -> Iterator[list[str]]:
    """Call `cut` at request number `number` to a board, counted from 1; 0 means never. An odd request is cut while the
    board works on it, an even one before that. Yield the list of requests so far.
    """
    seen: list[str] = []

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, request: Mapping[str, Any], *more: Any) -> Any:
            seen.append(request["do"])
            if len(seen) == number:
                if number % 2:
                    threading.Timer(0.002, cut).start()
                else:
                    cut()
            return real(self, request, *more)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for kind, name in ((Channel, "ask"), (BoardGuest, "exchange")):
            patch.setattr(kind, name, counted(getattr(kind, name)))
        yield seen
