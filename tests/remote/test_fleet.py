"""Test one benchmark on many boards: tables by board and by kind. A failure is a row."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from edgeq import demo
from edgeq.cli import group
from edgeq.reporting.timing import FleetRow, LatencyFigures, board_table, failures, kind_table, summarise_boards
from edgeq.util.records import plain
from tests.remote.conftest import FakeBoard

FAST = ("--duration", "0.02", "--queries", "3")


def row(name: str, kind: str, **p50: float) -> FleetRow:
    return FleetRow(name, kind, latency={m: LatencyFigures(v, p90_ms=2 * v, p99_ms=3 * v) for m, v in p50.items()})


def test_summarises_boards_of_one_kind() -> None:
    boards = [row("a", "x", float32=4, int8=1), row("b", "x", float32=6, int8=2), row("c", "x", float32=5, int8=1.5)]
    found = summarise_boards([*boards, FleetRow("d", "y", reason="it is off")], "single-stream")
    float32, int8 = found.kinds
    assert (float32.p50_ms, float32.p90_ms, float32.p99_ms, float32.boards, float32.best) == (5, 10, 15, 3, False)
    assert (int8.p50_ms, int8.best) == (1.5, True)
    assert float32.spread == pytest.approx(2 / 5)
    assert [r[2] for r in board_table(found)[1]] == ["float32", "int8"] * 3 + ["failed"]
    assert failures(found) == ["d: it is off"]
    assert len(kind_table(found)[1]) == 2
    assert summarise_boards([row("a", "x", int8=1)], "s").kinds[0].spread is None


def test_a_fleet(make_board: Callable[[str], FakeBoard], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_board("one")
    make_board("two").fails("ssh: connect to host two port 22: No route to host")
    text = '[devices.one]\nhost = "one"\nkind = "k"\n[devices.two]\nhost = "two"\nkind = "k"\n'
    (tmp_path / "fleet.toml").write_text(text)
    done = CliRunner().invoke(group, ["bench", str(demo.MODEL), "--on", "fleet.toml", *FAST, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    one, two = found["boards"]
    assert one["latency"]["model.onnx"]["p50_ms"] > 0
    assert "cannot be reached" in two["reason"]
    assert [(k["kind"], k["boards"]) for k in found["kinds"]] == [("k", 1)]

    (tmp_path / "fleet.json").write_text(done.stdout)
    report = CliRunner().invoke(group, ["report", str(_record(tmp_path)), "--fleet", "fleet.json", "-o", "page.html"])
    assert report.exit_code == 0, report.output
    page = (tmp_path / "page.html").read_text("utf-8")
    assert 'id="fleet"' in page
    assert "cannot be reached" in page


def _record(folder: Path) -> Path:
    path = folder / "record.json"
    path.write_text(json.dumps({"schema": "edgeq.report/1", "name": "x", "variants": {"v": {"bytes": 10}}}))
    return path


def test_no_board_at_all(
    make_board: Callable[[str], FakeBoard], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        make_board(name).fails("ssh: connect to host x port 22: Connection refused")
    done = CliRunner().invoke(group, ["bench", str(demo.MODEL), "--on", "ssh://one", "--on", "ssh://two", *FAST])
    assert done.exit_code == 8
    assert done.stdout.count("no SSH server listens") == 2


def test_a_file_that_is_no_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.json").write_text(json.dumps(plain({"boards": 1})))
    done = CliRunner().invoke(group, ["report", str(_record(tmp_path)), "--fleet", "x.json", "-o", "p.html"])
    assert done.exit_code == 4
    assert "x.json: boards is 1" in done.stderr
