from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgeq.data.array_store import ArrayStore


def test_arrays_on_disk_keep_dtype_and_shape(tmp_path: Path) -> None:
    store = ArrayStore(tmp_path, 0)
    store.add(3, {"a/b": np.array([[1, 2]], np.int8), "c": np.array(2.5)})
    assert 3 in store
    assert 4 not in store
    found = store.get(3)
    assert found["a/b"].dtype == np.int8
    assert found["a/b"].tolist() == [[1, 2]]
    assert found["c"].shape == ()


def test_texts_stay_in_memory(tmp_path: Path) -> None:
    store = ArrayStore(tmp_path, 0)
    store.add(0, {"label": np.array(["cat"], object)})
    assert store.get(0)["label"].tolist() == ["cat"]
    assert list(tmp_path.iterdir()) == []


def test_stores_nothing_beyond_the_limit_of_the_disk(tmp_path: Path) -> None:
    store = ArrayStore(tmp_path, memory=8, disk=8)
    for key in range(3):
        store.add(key, {"x": np.full(2, key, np.float32)})
    assert [key in store for key in range(3)] == [True, True, False]
    assert store.get(1)["x"].tolist() == [1, 1]


@pytest.mark.parametrize("memory", [0, 1 << 20])
def test_a_selection_reads_and_writes_the_store(tmp_path: Path, memory: int) -> None:
    store = ArrayStore(tmp_path, memory)
    store.add(2, {"x": np.array([2])})
    selection = store.select([0, 2, 4]).select([1, 2])
    assert 0 in selection
    assert selection.get(0)["x"].tolist() == [2]
    selection.add(1, {"x": np.array([4])})
    assert store.get(4)["x"].tolist() == [4]
