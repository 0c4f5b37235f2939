from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeq.errors import DataError
from edgeq.measure.average_precision import match
from edgeq.measure.operating_point import ScoredEvents, find_operating_point, find_threshold, list_events, measure_at

EVENTS = st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=10)


def events(rows: list[tuple[int, bool]], missed: int = 0) -> ScoredEvents:
    scores, right = np.array([r[0] / 10 for r in rows]), np.array([r[1] for r in rows], bool)
    return ScoredEvents(scores, right, int(right.sum()) + missed)


@given(EVENTS, st.integers(1, 3), st.integers(0, 10))
def test_the_threshold_against_all(rows: list[tuple[int, bool]], missed: int, tenths: int) -> None:
    samples, recall = [events(rows, missed)], tenths / 10
    # Each interval between two scores has one figure.
    reached = [t for t in np.arange(-0.05, 1.05, 0.1) if measure_at(samples, float(t)).recall >= recall - 1e-9]
    threshold = find_threshold(samples, recall)
    assert (threshold is None) == (not reached)
    if threshold is not None:
        figures = measure_at(samples, threshold)
        assert figures.recall >= recall - 1e-9
        assert measure_at(samples, float(max(reached))).recall == pytest.approx(figures.recall)


@given(EVENTS, st.floats(0, 1))
def test_figures_against_a_loop(rows: list[tuple[int, bool]], threshold: float) -> None:
    above = [right for score, right in rows if score / 10 > threshold]
    figures = measure_at([events(rows, 2)], threshold)
    assert figures.recall == pytest.approx(sum(above) / (sum(right for _, right in rows) + 2))
    assert figures.precision == pytest.approx(sum(above) / len(above) if above else 1)


def test_lower_scores_are_restored_on_other_samples() -> None:
    random = np.random.default_rng(1)
    reference, candidate = [], []
    for _ in range(60):
        right = random.random(12) < 0.6
        scores = np.clip(random.normal(np.where(right, 0.5, 0.25), 0.15), 0, 1)
        reference.append(ScoredEvents(scores, right, 8 + int(right.sum())))
        candidate.append(ScoredEvents(scores * 0.8, right, 8 + int(right.sum())))
    point = find_operating_point(reference, candidate, 0.4)
    assert point.held_out
    assert point.candidate.recall < point.reference.recall - 0.05
    assert point.restored is not None
    assert point.restored.threshold == pytest.approx(0.32, abs=0.01)
    assert point.restored.recall == pytest.approx(point.reference.recall, abs=0.02)
    assert "chosen on other samples" in point.sentence


def test_few_positives_choose_and_judge() -> None:
    sample = events([(9, True), (5, False), (3, True)])
    point = find_operating_point([sample], [events([(4, True), (3, False)], 1)], 0.5)
    assert not point.held_out
    assert (point.reference.recall, point.candidate.recall) == (0.5, 0)
    assert point.restored is not None
    assert (point.restored.recall, point.restored.precision) == (0.5, 1)
    point = find_operating_point([sample], [events([], 2)], 0.2)
    assert point.restored is None
    assert point.sentence.endswith("no threshold gives float's recall")
    with pytest.raises(DataError, match="no object"):
        find_operating_point([events([(5, False)])], [events([(5, False)])], 0.5)


def test_detections_as_events() -> None:
    objects, crowd = np.array([[0.0, 0, 10, 10], [20, 0, 10, 10], [40, 0, 10, 10]]), np.array([False, False, True])
    boxes = np.array([[0.0, 0, 10, 10], [0, 0, 10, 9], [40, 0, 10, 10], [0, 50, 5, 5]])
    listed = list_events({1: match(boxes, np.array([0.9, 0.8, 0.7, 0.6]), objects, crowd)})
    assert listed.scores.tolist() == [0.9, 0.8, 0.6]
    assert listed.right.tolist() == [True, False, False]
    assert listed.positives == 2
    assert list_events({}).positives == 0
