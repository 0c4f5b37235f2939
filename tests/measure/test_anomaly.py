from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeq.errors import DataError
from edgeq.measure.rank_statistics import roc_auc
from edgeq.measure.tasks.anomaly import Anomaly
from tests.measure.fakes import FakeSample


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=2, max_size=20))
def test_auc_equals_counting_pairs(labelled_scores: list[tuple[int, bool]]) -> None:
    scores, labels = np.array([s for s, _ in labelled_scores], float), np.array([int(y) for _, y in labelled_scores])
    if len(set(labels.tolist())) < 2:
        return
    p, q = scores[labels == 1], scores[labels == 0]
    expected = (p[:, None] > q).mean() + 0.5 * (p[:, None] == q).mean()
    assert roc_auc(scores, labels) == pytest.approx(expected, abs=1e-12)


def sample(value: np.ndarray, label: object) -> FakeSample:
    return FakeSample(inputs={"x": value.astype(np.float32)}, label=label)


def test_one_label_for_all_windows_of_a_recording() -> None:
    meter = Anomaly().start()
    for error, label in [(1.0, 0), (2.0, 1), (3.0, 0), (4.0, 1)]:
        meter.update({"y": np.full((5, 2), error)}, sample(np.zeros((5, 2)), label))
    assert meter.result() == {"auc": 0.75}


def test_a_label_a_row() -> None:
    meter = Anomaly().start()
    meter.update({"y": np.array([[1.0], [2.0], [3.0]])}, sample(np.zeros((3, 1)), [0, 0, 1]))
    assert meter.result() == {"auc": 1.0}


@pytest.mark.parametrize(
    ("output", "label", "message"),
    [
        (np.zeros((2, 3)), 2, "0 .normal. and 1"),
        (np.zeros((2, 3)), None, "has no label"),
        (np.zeros((2, 4)), 1, r"input \[2, 3\], but output \[2, 4\]"),
        (np.zeros((2, 3)), [0, 1, 0], "3 labels for a batch of 2"),
    ],
)
def test_refuses_samples_that_cannot_be_scored(output: np.ndarray, label: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Anomaly().start().update({"y": output}, sample(np.zeros((2, 3)), label))


def test_both_labels_are_needed() -> None:
    meter = Anomaly().start()
    meter.update({"y": np.zeros((1, 3))}, sample(np.zeros((1, 3)), 1))
    with pytest.raises(DataError, match="all 1 samples are labelled 1"):
        meter.result()
