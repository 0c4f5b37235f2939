from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgeq.data.samples import open_samples
from edgeq.signature import Signature, TensorSpec
from edgeq.tuning.sample_store import SampleStore

SIGNATURE = Signature((TensorSpec("x:0/a", np.dtype(np.float32), (None, 3)),), ())


@pytest.mark.parametrize("memory", [0, 60, 1 << 20])
def test_samples_come_back_whole_wherever_they_are_kept(tmp_path: Path, memory: int) -> None:
    arrays = np.arange(60, dtype=np.float32).reshape(20, 3)
    samples = open_samples([({"x:0/a": a[None]}, int(a[0])) for a in arrays], SIGNATURE)
    store = SampleStore(samples, tmp_path / "kept", memory=memory)
    assert len(store) == 20
    found = sorted(int(store[i].inputs["x:0/a"][0, 0]) for i in range(20))
    assert found == [3 * i for i in range(20)]
    assert all(store[i].label == store[i].inputs["x:0/a"][0, 0] for i in range(20))
    assert len(list((tmp_path / "kept").glob("*"))) == 20 - min(20, memory // 12)


def test_the_order_is_mixed_and_always_the_same(tmp_path: Path) -> None:
    samples = open_samples([{"x:0/a": np.full((1, 3), i, np.float32)} for i in range(50)], SIGNATURE)
    orders = []
    for run in range(2):
        store = SampleStore(samples, tmp_path / str(run))
        orders.append([float(store[i].inputs["x:0/a"][0, 0]) for i in range(50)])
    assert orders[0] == orders[1]
    assert orders[0] != sorted(orders[0])
    assert 10 < np.mean(orders[0][:12]) < 40
