from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edgeq.errors import DataError, EdgeqError, UsageError
from edgeq.measure.tasks.classification import Classification, rank_labels
from tests.measure.fakes import FakeSample


def run(task: Classification, *pairs: tuple[np.ndarray, object]) -> dict[str, float]:
    meter = task.start()
    for scores, label in pairs:
        meter.update({"y": np.asarray(scores)}, FakeSample(label=label))
    return dict(meter.result())


@given(hnp.arrays(np.float32, (4, 7), elements=st.integers(-3, 3)), st.lists(st.integers(0, 6), min_size=4, max_size=4))
def test_ranks_equal_a_stable_sort(scores: np.ndarray, labels: list[int]) -> None:
    expected = [np.argsort(-row, kind="stable").tolist().index(y) for row, y in zip(scores, labels, strict=True)]
    assert rank_labels(scores, np.array(labels)).tolist() == expected


def test_top1_is_arg_max_even_on_a_tie() -> None:
    scores = np.zeros((1, 3))
    assert run(Classification(), (scores, 0))["top1"] == 1
    assert run(Classification(), (scores, 1))["top1"] == 0


def test_top5_only_where_it_means_something() -> None:
    scores = np.arange(8.0)[None]
    assert run(Classification(), (scores, 3)) == {"top1": 0.0, "top5": 1.0}
    assert run(Classification(), (scores, 2)) == {"top1": 0.0, "top5": 0.0}
    assert set(run(Classification(), (scores[:, :5], 2))) == {"top1"}


def test_the_class_offset_skips_the_background() -> None:
    scores = np.array([[9.0, 0.0, 1.0]])
    assert run(Classification(class_offset=1), (scores, 1))["top1"] == 1
    assert run(Classification(), (scores, 1))["top1"] == 0


def test_a_batch_with_a_label_a_row() -> None:
    scores = np.eye(3)[:, :, None, None]
    assert run(Classification(), (scores, [0, 1, 0]))["top1"] == pytest.approx(2 / 3)


def test_one_score_is_a_binary_classifier() -> None:
    task = Classification()
    pairs = [(np.array([[p]], np.float32), y) for p, y in [(0.9, 1), (0.2, 0), (0.5, 1), (0.6, 0)]]
    assert run(task, *pairs) == {"top1": 0.5}
    assert run(task, (np.array([0.9]), 1)) == {"top1": 1.0}


def test_integer_scores_do_not_wrap_around() -> None:
    assert run(Classification(), (np.array([[200, 3, 255]], np.uint8), 2))["top1"] == 1


def test_nan_is_never_right() -> None:
    assert run(Classification(), (np.array([[np.nan, 1.0, 0.0]]), 0))["top1"] == 0
    assert run(Classification(), (np.array([[np.nan, 1.0, 0.0]]), 1))["top1"] == 0
    assert run(Classification(), (np.array([[-np.inf, 1.0, 0.0]]), 1))["top1"] == 1


@pytest.mark.parametrize(
    ("scores", "label", "kind", "message"),
    [
        (np.zeros((1, 3)), None, DataError, "has no label"),
        (np.zeros((1, 3)), "cat", DataError, "not a class index"),
        (np.zeros((1, 3)), 3, DataError, "label 3 is not one of the model's 3 classes"),
        (np.zeros((1, 3)), -1, DataError, "label -1"),
        (np.zeros((2, 3)), 1, DataError, r"1 label\(s\), but scores of shape \[2, 3\]"),
        (np.zeros((1, 3, 4)), 1, DataError, r"shape \[1, 3, 4\]"),
        (np.zeros((1, 0)), 1, DataError, r"shape \[1, 0\]"),
        (np.zeros((1, 1), np.uint8), 1, DataError, "one integer score"),
    ],
)
def test_refuses_samples_that_cannot_be_scored(
    scores: np.ndarray, label: object, kind: type[EdgeqError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        run(Classification(), (scores, label))


def test_offsets_that_make_no_sense() -> None:
    with pytest.raises(UsageError, match="-1"):
        Classification(class_offset=-1)
    with pytest.raises(UsageError, match="leaves no class"):
        run(Classification(class_offset=3), (np.zeros((1, 3)), 0))


def test_the_output_is_chosen_by_name() -> None:
    outputs = {"features": np.zeros((1, 9)), "scores": np.array([[0.0, 1.0]])}
    meter = Classification(output="scores").start()
    meter.update(outputs, FakeSample(label=1))
    assert meter.result() == {"top1": 1.0}
    with pytest.raises(UsageError, match="features, scores"):
        Classification().start().update(outputs, FakeSample(label=1))
    with pytest.raises(UsageError, match="no output 'logits'"):
        Classification(output="logits").start().update(outputs, FakeSample(label=1))


def test_scores_beside_class_numbers_need_no_name() -> None:
    meter = Classification().start()
    meter.update({"label": np.array([1]), "scores": np.array([[0.1, 0.9]])}, FakeSample(label=1))
    assert dict(meter.result())["top1"] == 1
    with pytest.raises(UsageError, match=r"outputs are a, b\. Choose one with `task_output`"):
        meter.update({"a": np.zeros((1, 2)), "b": np.zeros((1, 2))}, FakeSample(label=1))


@pytest.mark.parametrize(
    ("shift", "note"),
    [(1, "the label plus 1 in 8 of 10 rows and the label in 1: ⟨class_offset⟩ 1"), (-1, "count the labels from 0")],
)
def test_labels_counted_from_another_number_are_noted(shift: int, note: str) -> None:
    labels = np.array([1, 2, 3, 4, 1, 2, 3, 4, 2, 2])
    best = labels + shift
    best[-2:] = (2, 5)  # one right, one with another class
    meter = Classification().start()
    parts = []
    for part in (slice(0, 5), slice(5, 10)):
        part_meter = Classification().start()
        part_meter.update(
            {"y": np.eye(6)[best[part]]}, FakeSample("s", {"x": np.zeros((5, 1))}, label=tuple(labels[part]))
        )
        parts.append(part_meter)
        assert part_meter.notes() == ()  # too few samples for a note
        meter.take(part_meter.collected())
    assert len(meter.notes()) == 1
    assert note in meter.notes()[0]
    right = Classification().start()
    right.update({"y": np.eye(6)[labels]}, FakeSample("s", {"x": np.zeros((10, 1))}, label=tuple(labels)))
    assert right.notes() == ()


def test_answers_of_a_guess_are_doubted() -> None:
    random = np.random.default_rng(0)
    labels = random.integers(0, 10, 200)

    def doubts(best: np.ndarray) -> tuple[str, ...]:
        """Return the notes on these answers."""
        meter = Classification().start()
        rows = FakeSample("s", {"x": np.zeros((200, 1))}, label=tuple(labels))
        meter.update({"y": np.eye(10)[best]}, rows)
        return meter.notes()

    assert "no better than a guess (10." in doubts(random.permutation(labels))[0]
    assert "⟨classes⟩ FILE" in doubts(np.zeros(200, int))[0]
    assert doubts(np.where(np.arange(200) % 3, random.integers(0, 10, 200), labels)) == ()


@pytest.mark.parametrize(("background", "classes", "expected"), [(1, 10, 1), (0, 10, 0), (0, 11, 0)])
def test_labels_decide_on_a_score_in_front(background: int, classes: int, expected: int) -> None:
    labels = np.arange(40) % 10
    scores = np.eye(classes + background)[labels + background]
    pairs = [(FakeSample(label=int(label)), {"y": row[None]}) for label, row in zip(labels, scores, strict=True)]
    task, choice = Classification().settled(iter(pairs))
    assert task.class_offset == expected
    assert bool(choice) == bool(expected)
    fixed = Classification(class_offset=0)
    assert fixed.settled(iter(pairs)) == (fixed, "")
