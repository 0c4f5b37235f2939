from __future__ import annotations

import numpy as np
import pytest

from edgeq.data.samples import open_samples
from edgeq.errors import DataError
from edgeq.measure.accuracy import evaluate, evaluate_sessions
from edgeq.measure.rows import split_rows
from edgeq.measure.tasks.classification import Classification
from edgeq.signature import Signature, TensorSpec
from tests.measure.fakes import FakeSample, FakeSession

FIXED = Signature((TensorSpec("x", np.dtype(np.float32), (4, 3)),), ())


def test_rows_that_only_fill_a_batch_do_not_count() -> None:
    items = [(np.eye(3, dtype=np.float32)[i % 3], i % 3 if i < 5 else (i + 1) % 3) for i in range(6)]
    samples = open_samples(items, FIXED)
    session = FakeSession(lambda feed: {"y": feed["x"]}, ["y"])
    accuracy = evaluate(session, samples, Classification())
    assert accuracy.samples == 6
    assert accuracy.value == pytest.approx(5 / 6)
    agreement = evaluate_sessions({"a": session, "b": session}, samples, reference="a").agreement["b"]
    assert agreement.samples == 6
    assert agreement.outputs[0].elements == 18


def test_other_samples_pass_as_they_are() -> None:
    sample = FakeSample(label=[1, 0])
    outputs = {"m": {"y": np.zeros((2, 3))}}
    assert list(split_rows(sample, outputs)) == [(sample, outputs)]


def test_each_row_has_its_own_label_context_and_name() -> None:
    batch = {"x": np.arange(3.0)[:, None], "k": np.array(7.0)}
    sample = FakeSample("s", batch, (4, 5), {"rows": ({"file": "a"}, {"file": "b"}), "valid": 2})
    first_row, second = (row for row, _ in split_rows(sample, {"m": {"y": np.arange(3)}}))
    assert (first_row.name, first_row.label, first_row.context["file"]) == ("s, row 0", 4, "a")
    assert second.inputs["x"].tolist() == [[1.0]]
    assert second.inputs["k"] == 7.0


def test_outputs_that_do_not_count_the_rows_are_refused() -> None:
    sample = FakeSample("s", {"x": np.zeros((3, 1))}, None, {"rows": ({}, {}), "valid": 2})
    with pytest.raises(DataError, match=r"a batch of 3, but output 'y' has shape \[5, 6\]"):
        list(split_rows(sample, {"m": {"y": np.zeros((5, 6))}}))
