"""Each layer of `scripts/fuzz` with a few cases, and everything that it ever found."""

from __future__ import annotations

import faulthandler
import mmap
import os
from pathlib import Path

import pytest

from fuzz.layers import LAYERS, Layer, expected, make_seeds
from fuzz.run import LayerCounts, case_of, run_case, run_layer, table

CRASHES = sorted((Path(__file__).parent / "crashes").glob("*--*"))
# One case of these takes up to a second.
FEW = 3


@pytest.mark.parametrize("name", LAYERS)
def test_a_few_cases(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    layer = LAYERS[name]
    seeds = make_seeds(layer, tmp_path / "seeds")
    # Its own files come first, unchanged. Some are refused (pickle, a pattern that does not fit), not all.
    results = [run_case(layer, *case_of(layer, seeds, 0, index), tmp_path) for index in range(len(seeds))]
    assert None in results
    for index in range(len(seeds), len(seeds) + (FEW if layer.native else 20)):
        results.append(run_case(layer, *case_of(layer, seeds, 0, index), tmp_path))
    assert [error for error in results if error is not None and not expected(error)] == []


@pytest.mark.parametrize("path", CRASHES, ids=lambda path: path.name)
def test_what_was_found_is_refused(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # LAYER--what.suffix
    layer = LAYERS[path.name.partition("--")[0]]
    make_seeds(layer, tmp_path / "seeds")
    error = run_case(layer, path.name, path.read_bytes(), tmp_path)
    assert error is None or expected(error), error


def _hostile(path: Path) -> None:
    text = path.read_bytes()
    if b"crash" in text:
        faulthandler.disable()  # Its stack of the test runner would end up in the output of a run that passes.
        os.abort()
    if b"memory" in text:
        bytearray(4 << 30)
    if b"write" in text:
        (path.parents[2] / "outside").write_bytes(b"x")
    if b"wrong" in text:
        raise KeyError("wrong")


def _named(folder: Path) -> None:
    for name in ("a-fine", "crash", "memory", "write", "wrong"):
        (folder / name).write_bytes(name.encode())


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="limits are those of Linux")
def test_what_counts_as_a_finding(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    layer = Layer("hostile", _named, _hostile, lambda random, data, others: b"fine")
    counts = run_layer(layer, 0, 0, 8, tmp_path / "saved")
    assert counts.cases == 8
    assert sorted(what.split(" at ")[0].split(" /")[0] for what in counts.findings) == [
        "KeyError",
        "MemoryError",
        "ended by SIGABRT",
        "left outside outside of its folder",
        "writes",
    ]
    saved = {file.read_bytes() for file in (tmp_path / "saved").iterdir()}
    assert saved >= {b"crash", b"memory", b"write", b"wrong"}
    assert "again: scripts/fuzz hostile --seed 0 --case" in capfd.readouterr().out


def test_time_ends_a_layer_between_two_cases(tmp_path: Path) -> None:
    with mmap.mmap(-1, 1) as read:  # by the child; one more than counts, to import what it needs

        def slow(path: Path) -> None:
            read[0] += 1

        layer = Layer("slow", lambda folder: (folder / "a").write_bytes(b"a") and None, slow, lambda *_: b"b")
        assert run_layer(layer, 0, 0, 1000, tmp_path / "saved", until=lambda: read[0] > 3).cases == 3


def test_the_table() -> None:
    drawn = table({"npy": LayerCounts(5, 3, 0, 1.0, {"KeyError at x.py:1": 2}), "pb": LayerCounts(7)})
    assert "| npy | 5 | 3 | 0 | 1 | KeyError at x.py:1 (2) |" in drawn
    assert drawn.splitlines()[-1] == "| all | 12 | | | 1 | 2 |"
