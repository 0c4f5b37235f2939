from __future__ import annotations

from pathlib import Path

import numpy as np

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
