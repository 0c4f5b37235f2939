"""Test accuracy and latency in one pass: the figures are those of a plain evaluation, whatever the race does."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from edgeq_device.measure.latency import Runner
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeq.data.array_store import ArrayStore
from edgeq.errors import DataError
from edgeq.measure import timed_evaluation
from edgeq.measure.accuracy import evaluate_sessions
from edgeq.measure.inference import infer
from edgeq.measure.tasks.classification import Classification
from edgeq.measure.timed_evaluation import evaluate_timed
from edgeq.util.display import SILENT
from tests.measure.fakes import FakeSamples, FakeSession, vectors


class Counted(FakeSession):
    """Multiply the input's first five elements by a factor, and count the runs of each input."""

    def __init__(self, factor: np.ndarray) -> None:
        super().__init__(lambda feed: {"y": feed["x"].reshape(1, -1)[:, :5] * factor}, ["y"])
        self.seen: dict[bytes, int] = {}

    def run(self, names: Sequence[str] | None, feed: Mapping[str, np.ndarray]) -> list[Any]:
        self.seen[feed["x"].tobytes()] = self.seen.get(feed["x"].tobytes(), 0) + 1
        return super().run(names, feed)


def made_up(count: int, lengths: Sequence[int]) -> FakeSamples:
    values = np.random.default_rng(count)
    arrays = [values.normal(size=(1, lengths[i % len(lengths)])).astype(np.float32) for i in range(count)]
    return vectors(arrays, [int(i) for i in values.integers(0, 5, count)])


def sessions(each: int = 1) -> dict[str, list[Counted]]:
    values = np.random.default_rng(0)
    return {name: [Counted(f)] * each for name in ("float32", "int8") for f in [values.normal(size=5)]}


def race_of(seed: int, rounds: int) -> Callable[..., dict[str, str]]:
    """Return a race in which models take turns of different lengths, at least one run each."""

    def race(models: Mapping[str, Sequence[Runner]], on_round: Callable[[], None]) -> dict[str, str]:
        draw = random.Random(seed)
        for number in range(rounds):
            for runners in draw.sample(list(models.values()), len(models)):
                for _ in range(draw.choice([1, 1, 3, 20])):
                    runners[number % len(runners)]()
            on_round()
        return dict.fromkeys(models, "measured")

    return race


@settings(max_examples=60)
@given(
    count=st.integers(1, 50),
    lengths=st.lists(st.sampled_from([5, 7, 9]), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
    rounds=st.integers(1, 40),
    known=st.sets(st.integers(0, 49)),
)
def test_the_figures_are_those_of_a_plain_evaluation(
    count: int, lengths: list[int], seed: int, rounds: int, known: set[int]
) -> None:
    options: dict[str, Any] = {"task": Classification(), "reference": "float32"}
    samples, models = made_up(count, lengths), sessions(each=2)
    float_outputs, store = [infer(sessions()["float32"][0], sample) for sample in made_up(count, lengths)], ArrayStore()
    for place in known.intersection(range(count)):
        store.add(place, float_outputs[place])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timed_evaluation, "race", race_of(seed, rounds))
        evaluation, latency = evaluate_timed(models, samples, known_outputs={"float32": store}, **options)
    expected = evaluate_sessions(
        {name: model_sessions[0] for name, model_sessions in sessions().items()}, made_up(count, lengths), **options
    )
    assert evaluation == expected
    assert latency == {"float32": "measured", "int8": "measured"}
    assert samples.decoded == count
    for name, (session, _) in models.items():
        first_count, *further_counts = (session.seen.get(sample.inputs["x"].tobytes(), 0) for sample in samples)
        assert first_count >= 1, name
        once = [int(name != "float32" or place not in known) for place in range(1, count)]
        assert further_counts == once, "nothing but the first sample is run again, and nothing that is known"
    for place, outputs in enumerate(float_outputs):
        assert {n: a.tolist() for n, a in store.get(place).items()} == {n: a.tolist() for n, a in outputs.items()}


def test_the_race_is_real() -> None:
    evaluation, latency = evaluate_timed(sessions(), made_up(3, [5]), reference="float32")
    assert evaluation.samples == 3
    assert {name: d.count > 0 for name, d in latency.items()} == {"float32": True, "int8": True}


def test_large_outputs_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    sample_bytes = 20 + 2 * 40  # float32[5] as the input, and float64[5] from each of two models
    monkeypatch.setattr(timed_evaluation, "_MOST_BYTES", 3 * sample_bytes)
    samples, ahead = made_up(30, [5]), []

    def race(models: Mapping[str, Sequence[Runner]], on_round: Callable[[], None]) -> dict[str, str]:
        for _ in range(20):
            for runners in models.values():
                runners[0]()
            on_round()
            ahead.append(samples.decoded)
        return {}

    monkeypatch.setattr(timed_evaluation, "race", race)
    evaluate_timed(sessions(), samples, reference="float32")
    assert ahead == [min(30, 4 + i) for i in range(20)]


def test_a_session_in_another_process_is_timed_there(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere(Counted):
        def query_runner(self, feeds: Sequence[Mapping[str, np.ndarray]], **options: Any) -> Runner:
            (feed,) = feeds
            return lambda: timed.append(float(feed["x"][0, 0]))

    timed: list[float] = []
    samples, models = made_up(10, [5]), sessions()
    models["int8"] = [Elsewhere(np.ones(5))]
    monkeypatch.setattr(timed_evaluation, "race", race_of(0, 5))
    evaluate_timed(models, samples, reference="float32")
    assert set(models["int8"][0].seen.values()) == {1}, "evaluated once each"
    assert set(timed) == {float(next(iter(samples)).inputs["x"][0, 0])}


def test_no_samples() -> None:
    with pytest.raises(DataError, match="no samples to evaluate"):
        evaluate_timed(sessions(), vectors([]))


def test_a_sample_that_a_model_refuses() -> None:
    def refuse(feed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        if feed["x"][0, 0] == 3:
            raise ValueError("no threes")
        return {"y": feed["x"]}

    arrays = [np.full((1, 5), i, np.float32) for i in range(5)]
    with pytest.raises(DataError, match="sample3: int8 refuses it: no threes"):
        evaluate_timed({**sessions(), "int8": [FakeSession(refuse, ["y"])]}, vectors(arrays), reference="float32")


def test_shows_the_notes_of_meters(monkeypatch: pytest.MonkeyPatch) -> None:
    class Notes:
        def __init__(self) -> None:
            self.seen: list[str] = []

        def stage(self, title: str, total: int | None = None) -> Any:
            return SILENT.stage(title, total)

        def note(self, text: str) -> None:
            self.seen.append(text)

    monkeypatch.setattr(timed_evaluation, "race", race_of(0, 3))
    arrays = [np.eye(5, dtype=np.float32)[[(i + 1) % 5]] for i in range(40)]
    one_behind = FakeSession(lambda feed: {"y": feed["x"]}, ["y"])
    evaluation, _ = evaluate_timed(
        {"int8": [one_behind]}, vectors(arrays, [i % 5 for i in range(40)]), task=Classification()
    )
    (doubt,) = evaluation.accuracy["int8"].doubts
    assert "the best class is the label plus 1 in 32 of 40 rows" in doubt
