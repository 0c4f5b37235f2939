"""Run each layer of `scripts/fuzz` with a few cases, and with every input that it ever found."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import shutil
import signal
import sys
from pathlib import Path
from random import Random

import onnx
import pytest

from fuzz.layers import LAYERS, Layer, expected, make_seeds
from fuzz.mutate import ESCAPES, SPOOF, of_names
from fuzz.run import LayerCounts, case_of, run_case, run_layer, table

CRASHES = sorted((Path(__file__).parent / "crashes").glob("*--*"))
# Number of cases for layers where one case takes up to a second.
FEW = 3


@pytest.mark.parametrize("name", LAYERS)
def test_a_few_cases(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "web" and shutil.which("node") is None:
        pytest.skip("no node here")
    monkeypatch.chdir(tmp_path)
    layer = LAYERS[name]
    seeds = make_seeds(layer, tmp_path / "seeds")
    # A layer's own files come first, unchanged. Some are refused (pickle, a pattern that does not fit), but not all.
    results = [run_case(layer, *case_of(layer, seeds, 0, index), tmp_path) for index in range(len(seeds))]
    assert None in results
    for index in range(len(seeds), len(seeds) + (FEW if layer.native else 20)):
        results.append(run_case(layer, *case_of(layer, seeds, 0, index), tmp_path))
    assert [error for error in results if error is not None and not expected(error)] == []


@pytest.mark.parametrize("path", CRASHES, ids=lambda path: path.name)
def test_refuses_earlier_findings(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # the file is named LAYER--what.suffix
    layer = LAYERS[path.name.partition("--")[0]]
    make_seeds(layer, tmp_path / "seeds")
    error = run_case(layer, path.name, path.read_bytes(), tmp_path)
    assert error is None or expected(error), error


def _hostile(path: Path) -> None:
    text = path.read_bytes()
    if b"crash" in text:
        faulthandler.disable()  # Otherwise the runner's stack would appear in the output of a test run that passes.
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
def test_unexpected_exceptions_are_findings(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    layer = Layer("hostile", _named, _hostile, lambda random, data, others: b"fine")
    counts = run_layer(layer, 0, 0, 8, tmp_path / "saved")
    assert counts.cases == 8
    assert sorted(what.split(" at ")[0].split(" /")[0] for what in counts.findings) == [
        "KeyError",
        "MemoryError",
        "ended by signal SIGABRT",
        "left or changed outside outside of its folder",
        "writes",
    ]
    saved = {file.read_bytes() for file in (tmp_path / "saved").iterdir()}
    assert saved >= {b"crash", b"memory", b"write", b"wrong"}
    assert "again: scripts/fuzz hostile --seed 0 --case" in capfd.readouterr().out


def _planting(path: Path) -> None:
    """Write files with C calls, which Python's audit hook does not see, and print past the filter of names."""
    text = path.read_bytes()
    library = ctypes.CDLL(None)
    if b"relayed" in text:
        library.write(2, b"\x1b]0;title\x07\n", 11)
        print("\x1b[2J")
    if b"bypass" in text:
        sys.stdout.buffer.write(b"\x1b]0;title\x07\n")
    if b"direction" in text:
        sys.stderr.buffer.write("a\u202eb\n".encode())
    if b"raw" in text:
        sys.stderr.buffer.write(b"\x9b2J\n")
    if b"spoof" in text:
        print(f"a name\n{SPOOF}")
    for name, place in ((b"beside", path.parents[1]), (b"above", path.parents[2]), (b"home", Path.home())):
        if name in text:
            library.close(library.creat(os.fsencode(place / name.decode()), 0o600))
    if b"die" in text:
        sys.stdout.buffer.write(b"\x1b[31m\n")
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits and the C library are those of Linux")
def test_planted_escapes_and_files_are_found_where_libraries_run_graphs(tmp_path: Path) -> None:
    kinds = ["a-fine", "above", "beside", "bypass", "die", "direction", "home", "raw", "relayed", "spoof"]

    def seeds(folder: Path) -> None:
        for kind in kinds:
            (folder / kind).write_text(kind)

    counts = run_layer(Layer("planting", seeds, _planting, native=True), 0, 0, len(kinds), tmp_path / "saved")
    assert counts.cases == len(kinds)
    assert counts.contained == 1
    assert counts.findings == {
        "prints an escape": 5,
        **{f"left or changed {name} outside of its folder": 1 for name in ("above", "beside", "home")},
    }


def test_hostile_names_stay_a_model_that_the_checker_passes(tmp_path: Path) -> None:
    seeds = make_seeds(LAYERS["model-sizes"], tmp_path / "seeds")
    rename = of_names(onnx.ModelProto, lambda random, data, others: data)
    found = set()
    for number in range(60):
        data = rename(Random(number), seeds[number % len(seeds)].read_bytes(), [])
        onnx.checker.check_model(data)
        found |= {escape for escape in ESCAPES if escape.encode() in data}
    assert found == set(ESCAPES)


def test_time_ends_a_layer_between_two_cases(tmp_path: Path) -> None:
    # counts the child's reads: one more than its cases, because the first one imports modules
    with mmap.mmap(-1, 1) as read:

        def slow(path: Path) -> None:
            read[0] += 1

        layer = Layer("slow", lambda folder: (folder / "a").write_bytes(b"a") and None, slow, lambda *_: b"b")
        assert run_layer(layer, 0, 0, 1000, tmp_path / "saved", until=lambda: read[0] > 3).cases == 3


def test_the_table() -> None:
    drawn = table({"npy": LayerCounts(5, 3, 0, 1.0, {"KeyError at x.py:1": 2}), "pb": LayerCounts(7)})
    assert "| npy | 5 | 3 | 0 | 1 | KeyError at x.py:1 (2) |" in drawn
    assert drawn.splitlines()[-1] == "| all | 12 | | | 1 | 2 |"
