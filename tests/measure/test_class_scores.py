"""Test when the agreement of the top-1 class means something, and when it must not be reported."""

from __future__ import annotations

import numpy as np
import pytest

from edgeq.measure.class_scores import is_class_scores, probabilities
from edgeq.measure.comparison import OutputSums
from edgeq.measure.tasks.anomaly import Anomaly
from edgeq.measure.tasks.classification import Classification

RANDOM = np.random.default_rng(0)
IMAGE = np.zeros((1, 3, 8, 8), np.float32)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((1, 10), True),
        ((2, 10, 1, 1), True),
        ((1, 1, 5), True),
        ((1, 1), False),
        ((10,), False),
        ((1, 4, 4), False),
        ((0, 3), False),
    ],
)
def test_class_scores_by_shape(shape: tuple[int, ...], expected: bool) -> None:
    assert is_class_scores(np.zeros(shape)) is expected


def top1(*outputs: dict[str, np.ndarray], inputs: np.ndarray = IMAGE, task: object = None) -> float | None:
    """Return the top-1 agreement of outputs with themselves."""
    comparison = OutputSums(task)  # type: ignore[arg-type]
    for output in outputs:
        comparison.update(output, output, {"x": inputs})
    return comparison.result().top1


def logits(classes: int, rows: int = 1, scale: float = 6.0) -> np.ndarray:
    return (scale * np.eye(classes)[RANDOM.integers(0, classes, rows)]).astype(np.float32)


def test_probabilities_and_logits_are_class_scores() -> None:
    assert top1({"y": np.array([[0.2, 0.8]], np.float32)}) == 1.0
    assert top1(*({"y": logits(10)} for _ in range(20))) == 1.0
    assert top1({"output_logits": np.array([[-3.0, 2.0]], np.float32)}) == 1.0


@pytest.mark.parametrize(
    "made",
    [
        lambda: {"boxes": RANDOM.random((1, 9, 4)), "scores": logits(2, 9)},  # anchors of a detector
        lambda: {"features": np.abs(RANDOM.normal(0, 1, (1, 256)))},
        lambda: {"y": logits(12), "state": np.tanh(RANDOM.normal(0, 1, (1, 64)))},  # a recurrent network
        lambda: {"y": logits(95, 605)},  # 605 positions of one image
        lambda: {"landmarks": np.arange(20.0)[None] + RANDOM.normal(0, 0.1, (1, 20))},
        lambda: {"angles": 20 * RANDOM.normal(0, 1, (1, 3))},
        lambda: {"y": logits(10).astype(np.int32)},
    ],
)
def test_other_models_than_classifiers_have_no_top1(made: object) -> None:
    assert top1(*(made() for _ in range(20))) is None  # type: ignore[operator]


def test_an_output_of_the_inputs_shape_is_a_reconstruction() -> None:
    row = logits(10)
    assert top1(*({"y": logits(10)} for _ in range(20)), inputs=row) is None


def test_the_task_decides_where_there_is_one() -> None:
    outputs = [{"y": np.array([[3.0, 1.0]], np.float32), "z": np.array([[1.0, 2.0]], np.float32)}]
    assert top1(*outputs, task=Classification(output="y")) == 1.0
    comparison = OutputSums(Classification(output="y"))
    comparison.update(outputs[0], outputs[0], {})
    assert [output.top1 for output in comparison.result().outputs] == [1.0, None]
    assert top1({"y": np.array([[0.2, 0.8]], np.float32)}, task=Anomaly()) is None


@pytest.mark.filterwarnings("error")
def test_scores_that_are_no_numbers_give_no_warning() -> None:
    values = probabilities(np.array([[np.nan, np.nan], [np.nan, 2.0], [-np.inf, 2.0]]))
    np.testing.assert_allclose(values, [[0.5, 0.5], [0, 1], [0, 1]])
