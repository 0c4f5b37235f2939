"""Test niceness during timing: which threads change, which do not, and that all changes are undone."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest
from edgeq_device.errors import UsageError
from edgeq_device.measure.environment import SETTING, Precedence
from edgeq_device.measure.latency import measure_interleaved


class System:
    """Imitate threads 11 and 12 with their niceness."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path, **nice: int) -> None:
        self.root, self.nice = root, {int(name[1:]): value for name, value in nice.items()}
        for thread in self.nice:
            (root / "proc/self/task" / str(thread)).mkdir(parents=True)
        self.refused = False
        monkeypatch.setenv(SETTING, os.environ.get(SETTING, "-20"))
        monkeypatch.setattr(os, "getpriority", lambda kind, thread: self.nice[thread])
        monkeypatch.setattr(os, "setpriority", self.give)

    def give(self, kind: int, thread: int, nice: int) -> None:
        if self.refused:
            raise PermissionError
        if thread not in self.nice:
            raise ProcessLookupError
        self.nice[thread] = nice

    def precedence(self) -> Precedence:
        """Return the precedence of a user who asks for it."""
        return Precedence(root=self.root)


def test_every_thread_has_precedence_and_its_own_niceness_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = System(monkeypatch, tmp_path, t11=0, t12=-5)
    taken = system.precedence()
    taken.take()
    assert system.nice == {11: -20, 12: -20}
    del system.nice[12]
    taken.release()
    assert system.nice == {11: 0}


@pytest.mark.parametrize("inherited", [0, -20])
def test_a_thread_that_is_started_meanwhile_has_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inherited: int
) -> None:
    system = System(monkeypatch, tmp_path, t11=0, t12=-20)
    taken = system.precedence()
    taken.take()
    system.nice[13] = inherited
    (tmp_path / "proc/self/task/13").mkdir()
    taken.take()
    assert system.nice == dict.fromkeys((11, 12, 13), -20)
    taken.release()
    assert system.nice == {11: 0, 12: -20, 13: 0}


def test_nice_processes_stay_nice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = System(monkeypatch, tmp_path, t11=10, t12=19)
    taken = system.precedence()
    taken.take()
    taken.release()
    assert system.nice == {11: 10, 12: 19}


def test_refused_precedence_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = System(monkeypatch, tmp_path, t11=0, t12=0)
    system.refused = True
    taken = system.precedence()
    taken.take()
    system.refused = False
    taken.take()
    assert system.nice == {11: 0, 12: 0}, "it is requested once"
    Precedence(root=tmp_path / "none").take()


@pytest.mark.parametrize(("text", "nice"), [("0", 0), ("-3", -3), ("-20", -20), ("", 0)])
def test_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, nice: int) -> None:
    monkeypatch.setenv(SETTING, text)
    system = System(monkeypatch, tmp_path, t11=0)
    system.precedence().take()
    assert system.nice == {11: nice}


@pytest.mark.parametrize("text", ["much", "-21", "1.5", "5"])
def test_a_setting_that_is_none(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(SETTING, text)
    with pytest.raises(UsageError, match=f"EDGEQ_NICE={text} gives no precedence"):
        Precedence()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="niceness of threads is Linux's")
@pytest.mark.parametrize("asked", [None, "-20"])
def test_this_process_takes_precedence_only_if_asked(monkeypatch: pytest.MonkeyPatch, asked: str | None) -> None:
    monkeypatch.delenv(SETTING, raising=False)
    if asked is not None:
        monkeypatch.setenv(SETTING, asked)

    def own() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before, seen = own(), set()
    measure_interleaved({"a": lambda: seen.add(own())}, min_duration_s=0.01, min_runs=1)
    granted = asked is not None and before <= 0 and os.geteuid() == 0
    assert own() == before
    assert seen <= ({-20, before} if granted else {before})
