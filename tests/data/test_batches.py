"""Compare the gathering of rows into a model's fixed batch with a plain loop."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edgeq.data.sample import Sample
from edgeq.data.samples import count_batches, rebatch


def make(number: int, rows: int) -> Sample:
    values = np.array([[number * 100 + r] for r in range(rows)], np.float32)
    return Sample(f"s{number}", {"x": values, "scalar": np.float32(3)}, number, {"file": f"f{number}"})


@given(st.lists(st.integers(1, 5), max_size=8), st.integers(1, 4))
def test_rows_keep_their_order_and_labels(sizes: list[int], size: int) -> None:
    samples = [make(number, rows) for number, rows in enumerate(sizes)]
    values: list[float] = []
    labels: list[int] = []
    for sample in rebatch(samples, size):
        assert sample.inputs["x"].shape == (size, 1)
        assert np.asarray(sample.inputs["scalar"]).shape == ()
        rows = sample.context.get("rows")
        valid = sample.context.get("valid", size)
        got = sample.inputs["x"][:, 0].tolist()
        values += got[:valid]
        assert got[valid:] == [got[valid - 1]] * (size - valid)
        if rows is not None:
            assert len(rows) == len(sample.label) == valid
            labels += sample.label
        else:
            labels += [sample.label] * size
    assert values == [number * 100 + r for number, rows in enumerate(sizes) for r in range(rows)]
    assert labels == [number for number, rows in enumerate(sizes) for _ in range(rows)]


def test_rows_of_different_scalars_are_not_gathered() -> None:
    samples = [replace(make(i, 1), inputs={**make(i, 1).inputs, "scalar": np.float32(i // 3)}) for i in range(4)]
    found = [(s.inputs["x"][:, 0].tolist(), float(s.inputs["scalar"])) for s in rebatch(samples, 2)]
    assert found == [([0, 100], 0), ([200, 200], 0), ([300, 300], 1)]


@given(st.integers(0, 30), st.integers(1, 8))
def test_count(rows: int, size: int) -> None:
    if size > 1:
        assert count_batches(rows, size) == len(list(rebatch([make(i, 1) for i in range(rows)], size)))
