"""Compare operating points with counting, and check that the lowered threshold gives float's recall back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeq.measure.operating_point import ScoredObjects, find_operating_point


def draw(random: np.random.Generator, samples: int, shift: float) -> tuple[ScoredObjects, ScoredObjects]:
    """Return what float and a model with lower scores give for the same true objects."""
    parts: tuple[list[tuple[object, object, int]], list[tuple[object, object, int]]] = ([], [])
    for _ in range(samples):
        count = int(random.integers(1, 5))
        scores, right = random.uniform(0, 1, count + 2), np.arange(count + 2) < count
        parts[0].append((scores, right, count + 1))
        parts[1].append((np.clip(scores - shift, 0, 1), right, count + 1))
    return ScoredObjects.join(parts[0]), ScoredObjects.join(parts[1])


@given(st.integers(0, 2**32 - 1), st.floats(0, 0.3))
def test_the_lowered_threshold_is_the_highest_with_the_recall_of_float(seed: int, shift: float) -> None:
    reference, candidate = draw(np.random.default_rng(seed), 12, shift)
    point = find_operating_point(reference, candidate, 0.4)
    assert not point.halved
    hits = sum((reference.scores >= 0.4) & reference.right)
    wanted = hits / reference.objects.sum()
    assert point.float_recall == pytest.approx(wanted)
    thresholds = [0.4, *sorted((t for t in candidate.scores if t < 0.4), reverse=True)]
    reached = (t for t in thresholds if sum((candidate.scores >= t) & candidate.right) >= hits)
    best = next(reached, None)
    assert point.lowered == pytest.approx(best)
    if best is not None:
        given_objects = candidate.scores >= best
        assert point.lowered_recall is not None
        assert point.lowered_recall >= wanted - 1e-12
        precision = (candidate.right & given_objects).sum() / given_objects.sum() if given_objects.any() else 1.0
        assert point.lowered_precision == pytest.approx(precision)


def test_the_figures_of_many_objects_are_told_on_the_other_half() -> None:
    reference, candidate = draw(np.random.default_rng(1), 200, 0.1)
    point = find_operating_point(reference, candidate, 0.5)
    assert point.halved
    assert point.lowered == pytest.approx(0.4, abs=0.03)
    odd = np.arange(200) % 2 == 1
    assert point.lowered is not None
    assert point.lowered_recall == candidate.part(odd).recall(point.lowered)
    assert "told on the other" in point.sentence
    assert find_operating_point(reference, reference, 0.5).sentence == ""
