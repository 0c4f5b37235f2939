"""Compare the uncertainty of a loss with many new sets of samples."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from edgeq.data.sample import Sample
from edgeq.errors import DataError
from edgeq.measure.accuracy import evaluate_sessions
from edgeq.measure.inference import Outputs
from edgeq.measure.resample import HALVES, ResampledMeter, draw_halves, loss_error
from edgeq.measure.task import Task
from edgeq.measure.tasks.anomaly import Anomaly
from edgeq.measure.tasks.classification import Classification
from edgeq.measure.tasks.similarity import Similarity
from tests.measure.fakes import FakeSession, vectors


class F1:
    """Define a user's task that has only `update` and `result`, and refuses a sample that comes twice."""

    name, primary, higher_is_better = "f1", "f1", True

    def start(self) -> F1Meter:
        return F1Meter()


class F1Meter:
    def __init__(self) -> None:
        self.right = self.said = self.wanted = 0
        self.seen: set[str] = set()

    def update(self, outputs: Outputs, sample: Sample) -> None:
        if sample.name in self.seen:
            raise DataError("twice", "")
        self.seen.add(sample.name)
        said, label = int(outputs["y"].argmax()), int(sample.label)
        self.right += said == label == 1
        self.said += said == 1
        self.wanted += label == 1

    def result(self) -> Mapping[str, float]:
        if not self.wanted:
            raise DataError("nothing to find", "")
        return {"f1": 2 * self.right / (self.said + self.wanted)}


def draw(random: np.random.Generator, task: Task, count: int) -> tuple[ResampledMeter, ResampledMeter]:
    """Measure float32 and a candidate on `count` new samples."""
    meters = ResampledMeter(task), ResampledMeter(task)
    for i in range(count):
        label = int(random.integers(0, 2))
        noise, more = random.normal(0, 1, 2)
        for meter, value in zip(meters, (noise, noise + 0.7 * more), strict=True):
            if isinstance(task, Anomaly):
                error = np.float64(np.exp(0.5 * (label + value)))
                sample, outputs = Sample(f"{i}", {"x": np.zeros((1, 1))}, label), {"y": np.full((1, 1), error)}
            elif isinstance(task, Similarity):
                angle = np.clip(1.5 - label - 0.3 * value, 0, 3)
                pair = np.array([[1, 0], [np.cos(angle), np.sin(angle)]])
                sample, outputs = Sample(f"{i}", {}, label), {"y": pair}
            else:
                sample, outputs = Sample(f"{i}", {}, label), {"y": np.array([[0.0, label - 0.5 + value]])}
            meter.update(outputs, sample)
    return meters


@pytest.mark.parametrize("task", [Classification(), Anomaly(), Similarity(), F1()], ids=lambda task: task.name)
def test_the_error_is_that_of_samples_drawn_anew(task: Task) -> None:
    random = np.random.default_rng(0)
    losses, errors = [], []
    for _ in range(30):
        reference, candidate = (meter.measured() for meter in draw(random, task, 60))
        error = loss_error(reference, candidate, further=0.0)
        assert error is not None
        errors.append(error)
        losses.append(reference.metrics[task.primary] - candidate.metrics[task.primary])
    assert np.mean(errors) == pytest.approx(np.std(losses), rel=0.35)


@pytest.mark.parametrize("task", [Anomaly(), Similarity()], ids=lambda task: task.name)
def test_a_meters_own_halves_are_those_of_meters_that_saw_them(task: Task) -> None:
    random = np.random.default_rng(1)
    halves = draw_halves(30)
    assert halves.shape == (HALVES, 30)
    assert (halves[:, :20] == draw_halves(20)).all(), "more samples leave the halves of the first as they are"
    full_meter = task.start()
    parts = [task.start() for _ in range(3)]
    for i in range(30):
        label, inputs = i % 2, {"x": np.zeros((1, 2))}
        outputs = {"y": random.normal(0, 1, (2, 2) if isinstance(task, Similarity) else (1, 2))}
        for meter in (full_meter, *(part for k, part in enumerate(parts) if halves[k, i])):
            meter.update(outputs, Sample(f"{i}", inputs, label))
    values = full_meter.resampled(halves)  # type: ignore[attr-defined]
    assert values[:3] == pytest.approx([part.result()[task.primary] for part in parts])


def test_a_half_without_a_value_is_left_out_and_too_few_say_nothing() -> None:
    meter = ResampledMeter(F1())
    meter.update({"y": np.array([[0.0, 1.0]])}, Sample("a", {}, 1))
    halves = meter.measured().halves
    assert np.isnan(halves).any()
    assert np.isfinite(halves).any()
    metrics = meter.measured()
    assert loss_error(metrics, metrics, further=0.0) == 0.0
    none = ResampledMeter(Anomaly())
    for i in range(2):
        none.update({"y": np.full((1, 1), float(i))}, Sample(f"{i}", {"x": np.zeros((1, 1))}, i))
    assert np.isnan(none.measured().halves).any()


def test_no_change_is_not_certainty() -> None:
    meter = ResampledMeter(Classification())
    for i in range(8):
        meter.update({"y": np.eye(2)[[i % 2]]}, Sample(f"{i}", {}, i % 2))
    metrics = meter.measured()
    assert loss_error(metrics, metrics, further=1 / 8) == 1 / 8


def evaluated(random: np.random.Generator, task: Task, count: int) -> tuple[float, tuple[float, float] | None]:
    """Return the loss of a candidate on `count` new samples, and its interval."""
    labels = random.integers(0, 2, count)
    noise, more = random.normal(0, 1, (2, count))
    arrays = [np.array([[label, a, a + 0.7 * b]]) for label, a, b in zip(labels, noise, more, strict=True)]

    def session(column: int) -> FakeSession:
        return FakeSession(lambda feed: {"y": np.array([[0.0, feed["x"][0, 0] - 0.5 + feed["x"][0, column]]])}, ["y"])

    sessions = {"float": session(1), "int8": session(2)}
    evaluation = evaluate_sessions(sessions, vectors(arrays, labels.tolist()), task=task, reference="float")
    return evaluation.accuracy["int8"].loss_against(evaluation.accuracy["float"]), evaluation.loss_interval.get("int8")


def test_the_interval_of_the_proof_covers_the_loss_on_many_other_samples() -> None:
    random = np.random.default_rng(0)
    truth, _ = evaluated(random, Classification(), 20000)
    evaluations = [evaluated(random, Classification(), 64) for _ in range(100)]
    covered = sum(
        low <= truth <= high for _, interval in evaluations if interval is not None for low, high in [interval]
    )
    assert len([1 for _, interval in evaluations if interval is not None]) == 100
    assert covered >= 92
    assert all(low < loss < high for loss, interval in evaluations if interval is not None for low, high in [interval])


def test_a_meter_that_shows_no_spread_has_no_interval() -> None:
    _, interval = evaluated(np.random.default_rng(0), F1(), 32)
    assert interval is None
