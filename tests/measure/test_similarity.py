from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeq.errors import DataError
from edgeq.measure.rank_statistics import mean_ranks
from edgeq.measure.task import TaskOptions, make_task
from edgeq.measure.tasks.similarity import Similarity, pool_embeddings
from tests.measure.fakes import FakeSample


def pair(cosine: float, label: object, **inputs: np.ndarray) -> tuple[dict[str, np.ndarray], FakeSample]:
    """Return two embeddings with this cosine, and a sample. Their lengths differ, because lengths must not matter."""
    rows = np.array([[3.0, 0.0], [5.0 * cosine, 5.0 * np.sqrt(1 - cosine**2)]])
    return {"y": rows}, FakeSample(inputs=inputs, label=label)


def measured(*pairs: tuple[dict[str, np.ndarray], FakeSample]) -> dict[str, float]:
    meter = Similarity().start()
    for outputs, sample in pairs:
        meter.update(outputs, sample)
    return dict(meter.result())


def test_the_order_decides_and_not_the_distance() -> None:
    metrics = measured(pair(0.1, 0.0), pair(0.2, 1.0), pair(0.9, 1.5))
    assert metrics["spearman"] == pytest.approx(1.0)
    assert metrics["pearson"] == pytest.approx(np.corrcoef([0.1, 0.2, 0.9], [0.0, 1.0, 1.5])[0, 1])


def test_the_reverse_order_is_minus_one() -> None:
    assert measured(pair(0.9, 1), pair(0.5, 2), pair(0.1, 3))["spearman"] == pytest.approx(-1.0)


def test_several_pairs_in_one_batch() -> None:
    alone = measured(pair(0.1, 1.0), pair(0.7, 0.5), pair(0.3, 2.0))
    parts = [pair(c, None)[0]["y"] for c in (0.1, 0.7, 0.3)]
    meter = Similarity().start()
    meter.update({"y": np.concatenate(parts)}, FakeSample(label=[1.0, 0.5, 2.0]))
    assert dict(meter.result()) == pytest.approx(alone)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20))
def test_ranks_share_ties(values: list[int]) -> None:
    ranks = mean_ranks(np.array(values, float))
    for value, rank in zip(values, ranks, strict=True):
        below = sum(v < value for v in values)
        assert rank == below + (values.count(value) + 1) / 2


def test_positions_that_the_mask_leaves_out_do_not_count() -> None:
    states = np.array([[[1.0, 2.0], [3.0, 4.0], [100.0, np.nan]]])
    sample = FakeSample(inputs={"ids": np.ones((1, 3)), "attention_mask": np.array([[1, 1, 0]])})
    assert pool_embeddings(states, sample).tolist() == [[2.0, 3.0]]


def test_without_a_mask_all_positions_count() -> None:
    states = np.array([[[1.0, 2.0], [3.0, 6.0]]])
    assert pool_embeddings(states, FakeSample(inputs={"ids": np.ones((1, 2))})).tolist() == [[2.0, 4.0]]


def test_nan_gives_nan_and_no_warning() -> None:
    meter = Similarity().start()
    for value, label in ((np.nan, 1.0), (1.0, 2.0)):
        meter.update({"y": np.array([[1.0, 0.0], [value, 1.0]])}, FakeSample(label=label))
    assert np.isnan(meter.result()["spearman"])


def test_a_constant_model_correlates_with_nothing() -> None:
    assert measured(pair(0.5, 1.0), pair(0.5, 2.0))["spearman"] == 0.0


@pytest.mark.parametrize(
    ("output", "label", "message"),
    [
        (np.ones((3, 4)), 1.0, "3 rows for 1 scores"),
        (np.ones((2, 4)), None, "has no label"),
        (np.ones((2, 4)), "good", "is not a score"),
        (np.ones((2, 4)), float("nan"), "is not a score"),
        (np.ones((2, 4, 5, 6)), 1.0, "is not an embedding"),
    ],
)
def test_refuses_pairs_that_cannot_be_scored(output: np.ndarray, label: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Similarity().start().update({"y": output}, FakeSample(label=label))


def test_equal_scores_are_refused() -> None:
    with pytest.raises(DataError, match="all 2 pairs have the same score"):
        measured(pair(0.1, 1.0), pair(0.2, 1.0))


def test_it_is_chosen_by_name() -> None:
    assert make_task("similarity", TaskOptions(output="pooled")) == Similarity(output="pooled")
