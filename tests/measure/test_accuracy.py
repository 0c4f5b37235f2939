from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from edgeq.errors import CheckFailedError, DataError, RuntimeUnavailableError, UsageError
from edgeq.measure.accuracy import Accuracy, evaluate, evaluate_many, evaluate_sessions
from edgeq.measure.tasks.anomaly import Anomaly
from edgeq.measure.tasks.classification import Classification
from edgeq.run.session import SessionSettings, open_session
from edgeq.util.records import plain
from tests.measure.fakes import FakeSession, linear_model, vectors


def rows(*values: list[float]) -> list[np.ndarray]:
    return [np.array([v], np.float32) for v in values]


SAMPLES = rows([0, 1, 2], [5, 1, 2], [0, 3, 2], [0, 1, 2])
LABELS = [2, 0, 1, 0]


def test_a_model_file_bytes_and_session_give_the_same(tmp_path: Path) -> None:
    model = linear_model()
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    settings = SessionSettings(intra_op_threads=1)
    for model_form in (path, str(path), model.SerializeToString(), open_session(path)):
        accuracy = evaluate(model_form, vectors(SAMPLES, LABELS), Classification(), settings=settings)
        assert accuracy.metrics == {"top1": 0.75}
        assert accuracy.value == 0.75
        assert accuracy.samples == 4
        assert accuracy.settings is settings


def test_a_task_by_name() -> None:
    model = linear_model().SerializeToString()
    assert evaluate(model, vectors(SAMPLES, LABELS), "classification").value == 0.75
    with pytest.raises(UsageError, match="needs annotations"):
        evaluate(model, vectors(SAMPLES, LABELS), "detection")


def test_several_sessions_share_the_decoded_samples() -> None:
    samples = vectors(SAMPLES, LABELS)
    sessions = {
        "float32": FakeSession(lambda feed: {"y": feed["x"]}, ["y"]),
        "int8": FakeSession(lambda feed: {"y": -feed["x"]}, ["y"]),
    }
    accuracies = evaluate_many(
        sessions, samples, Classification(), settings={"int8": SessionSettings(optimization="none")}
    )
    assert samples.decoded == 4
    assert accuracies["float32"].value == 0.75
    assert accuracies["int8"].value == 0.25
    assert accuracies["int8"].settings.optimization == "none"
    assert accuracies["int8"].loss_against(accuracies["float32"]) == 0.5


def test_one_pass_gives_accuracy_and_agreement() -> None:
    samples = vectors(SAMPLES, LABELS)
    identity = FakeSession(lambda feed: {"y": feed["x"]}, ["y"])
    evaluation = evaluate_sessions({"a": identity, "b": identity}, samples, task=Classification(), reference="a")
    assert samples.decoded == 4
    assert set(evaluation.accuracy) == {"a", "b"}
    assert set(evaluation.agreement) == {"b"}
    assert evaluation.agreement["b"].top1 == 1.0
    assert evaluation.samples == 4


def test_agreement_needs_no_labels() -> None:
    identity = FakeSession(lambda feed: {"y": feed["x"]}, ["y"])
    evaluation = evaluate_sessions({"a": identity, "b": identity}, vectors(SAMPLES), reference="a")
    assert not evaluation.accuracy
    assert evaluation.agreement["b"].outputs[0].equal


def test_an_unknown_reference_is_refused() -> None:
    with pytest.raises(UsageError, match="'float32'"):
        evaluate_sessions({"a": FakeSession(lambda f: {}, [])}, vectors(SAMPLES), reference="float32")


def test_count_takes_the_first_samples() -> None:
    samples = vectors(SAMPLES, LABELS)
    accuracy = evaluate(linear_model().SerializeToString(), samples, Classification(), count=2)
    assert (accuracy.value, accuracy.samples, samples.decoded) == (1.0, 2, 2)
    with pytest.raises(DataError, match="no samples"):
        evaluate(linear_model().SerializeToString(), samples, Classification(), count=0)


def test_a_sample_that_the_model_refuses_is_named() -> None:
    with pytest.raises(DataError, match=r"sample1.*refuses"):
        evaluate(linear_model().SerializeToString(), vectors(rows([1, 2, 3], [1, 2]), [0, 0]), Classification())


def test_a_failing_runtime_is_distinguished_from_bad_data() -> None:
    def fail(feed: object) -> dict[str, np.ndarray]:
        raise RuntimeError("kernel\nfailed")

    with pytest.raises(RuntimeUnavailableError, match="kernel failed"):
        evaluate(FakeSession(fail, ["y"]), vectors(SAMPLES, LABELS), Classification())


def test_a_metric_that_is_not_finite_is_refused() -> None:
    session = FakeSession(lambda feed: {"y": feed["x"] * np.nan}, ["y"])
    with pytest.raises(CheckFailedError, match="auc"):
        evaluate(session, vectors(SAMPLES, [0, 1, 0, 1]), Anomaly())


def accuracy(value: float, *, higher: bool, task: str = "t") -> Accuracy:
    return Accuracy({"m": value}, 1, task, "m", higher)


def test_loss_is_positive_when_worse() -> None:
    assert accuracy(0.5, higher=True).loss_against(accuracy(0.75, higher=True)) == 0.25
    assert accuracy(0.5, higher=False).loss_against(accuracy(0.75, higher=False)) == -0.25
    with pytest.raises(UsageError, match="cannot be compared"):
        accuracy(0.5, higher=True).loss_against(accuracy(0.5, higher=True, task="other"))


def test_plain_form() -> None:
    settings = SessionSettings(config={"b": "1", "a": "0"})
    record = plain(
        evaluate(linear_model().SerializeToString(), vectors(SAMPLES, LABELS), Classification(), settings=settings)
    )
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert list(record["settings"]["config"]) == ["a", "b"]
    assert record["metrics"] == {"top1": 0.75}
