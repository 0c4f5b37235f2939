from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from edgeq.calibration.files import ARRAYS, JSON, load_statistics, save_statistics
from edgeq.calibration.observer import Observer
from edgeq.calibration.statistics import Nonfinite, Statistics, TensorStatistics
from edgeq.errors import CalibrationError, OutputError


def some_statistics() -> Statistics:
    random = np.random.default_rng(0)
    tensors = {}
    for name, axis, shape in (("b", 1, (2, 3)), ("a", None, (50,)), ("empty", None, (0, 4)), ("ünï", None, ())):
        running = Observer(TensorStatistics(), axis)
        for _ in range(3):
            running.observe(np.asarray(random.normal(size=shape) * 1e3, np.float32))
        tensors[name] = running.freeze()
    return Statistics("model", "data", 3, tensors)


def test_loads_saved_statistics(tmp_path: Path) -> None:
    before = some_statistics()
    save_statistics(before, tmp_path / "CAL")
    assert load_statistics(tmp_path / "CAL") == before
    assert list(before.tensors) == ["a", "b", "empty", "ünï"]


def test_saves_and_merges_nonfinite_counts(tmp_path: Path) -> None:
    running = Observer(TensorStatistics(), 1)
    running.observe(np.float32([[1, -np.inf], [np.nan, np.inf]]))
    parts = [Statistics("model", data, 1, {"x": running.freeze()}) for data in ("one", "two")]
    for part in parts:
        save_statistics(part, tmp_path / part.data_digest)
    loaded = [load_statistics(tmp_path / part.data_digest) for part in parts]
    assert loaded == parts
    merged = loaded[0].merge(loaded[1]).tensors["x"]
    assert (merged.nonfinite, merged.count, merged.minimum, merged.maximum) == (Nonfinite(2, 2, 2), 2, 1, 1)


def test_the_same_statistics_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_statistics(some_statistics(), tmp_path / name)
    for name in (JSON, ARRAYS):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_statistics_of_nothing(tmp_path: Path) -> None:
    save_statistics(Statistics("m", "d", 0, {}), tmp_path / "CAL")
    assert load_statistics(tmp_path / "CAL").tensors == {}


def test_an_existing_directory_is_kept_without_force(tmp_path: Path) -> None:
    (tmp_path / "CAL").mkdir()
    (tmp_path / "CAL" / "mine").write_text("x")
    with pytest.raises(OutputError, match="exists already"):
        save_statistics(some_statistics(), tmp_path / "CAL")
    assert (tmp_path / "CAL" / "mine").exists()


def test_a_place_without_statistics_is_named(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="contains no calibration statistics"):
        load_statistics(tmp_path)


def damage_json(folder: Path, **changes: object) -> None:
    described = json.loads((folder / JSON).read_text("utf-8"))
    (folder / JSON).write_text(json.dumps({**described, **changes}), "utf-8")


def test_an_unknown_version_is_refused(tmp_path: Path) -> None:
    save_statistics(some_statistics(), tmp_path / "CAL")
    damage_json(tmp_path / "CAL", version=99)
    with pytest.raises(CalibrationError, match="version 99"):
        load_statistics(tmp_path / "CAL")


@pytest.mark.parametrize("changes", [{"tensors": []}, {"samples": -1}, {"samples": "3"}, {"format": "x"}])
def test_a_damaged_description_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    save_statistics(some_statistics(), tmp_path / "CAL")
    damage_json(tmp_path / "CAL", **changes)
    with pytest.raises(CalibrationError, match="damaged"):
        load_statistics(tmp_path / "CAL")


def rewrite_array(folder: Path, name: str, content: bytes) -> None:
    with zipfile.ZipFile(folder / ARRAYS) as archive:
        entries = {n: archive.read(n) for n in archive.namelist()}
    entries[f"{name}.npy"] = content
    with zipfile.ZipFile(folder / ARRAYS, "w") as archive:
        for entry, data in entries.items():
            archive.writestr(entry, data)


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=True)
    return stream.getvalue()


def test_hostile_arrays_are_refused(tmp_path: Path) -> None:
    pickled = npy(np.array([{"x": 1}], dtype=object))
    whole = npy(np.zeros(4, np.int64))
    too_long = whole.replace(b"(4,), }             ", b"(4000000000000,), } ")
    assert too_long != whole
    for content in (pickled, too_long, whole[:-8], b"", npy(np.full(4, -1)), npy(np.zeros((2, 2), np.int64))):
        save_statistics(some_statistics(), tmp_path / "CAL", force=True)
        rewrite_array(tmp_path / "CAL", "bins", content)
        with pytest.raises(CalibrationError, match="damaged"):
            load_statistics(tmp_path / "CAL")


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    save_statistics(some_statistics(), tmp_path / "CAL")
    whole = (tmp_path / "CAL" / ARRAYS).read_bytes()
    for length in range(0, len(whole) - 1, 97):
        (tmp_path / "CAL" / ARRAYS).write_bytes(whole[:length])
        with pytest.raises(CalibrationError):
            load_statistics(tmp_path / "CAL")
