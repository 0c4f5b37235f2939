"""Test the families that answer with vectors or classes, and voice activity over recordings."""

from __future__ import annotations

import wave
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from edgeq_device.answers.decode import decode
from edgeq_device.answers.families.voice import FAMILY, find_speech
from edgeq_device.answers.head import Head, parse_head
from edgeq_device.answers.recording import run_recording, run_windows
from edgeq_device.errors import BundleError, DataError
from edgeq_device.prepare.wave import read_wave
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.answers.heads import find, floats, of

LABELS = [f"class {number}" for number in range(10)]


def test_embeddings_have_length_one() -> None:
    vector = np.random.default_rng(0).normal(size=(1, 64))
    outputs = {"y": floats(vector * 7)}
    assert find("embedding", outputs, named=False) is None
    assert find("embedding", {"y": floats(vector / np.linalg.norm(vector))}, named=False) is not None
    answer = decode(outputs, of("embedding", outputs))
    np.testing.assert_allclose(answer.vector, vector[0] / np.linalg.norm(vector), rtol=1e-6)
    outputs = {"logits": floats(np.ones((1, 4))), "image_embeds": floats(vector)}
    assert of("embedding", outputs, named=False).outputs == {"vector": "image_embeds"}
    zeros = {"y": floats(np.zeros((1, 64)))}
    assert not decode(zeros, of("embedding", zeros)).vector.any()


@pytest.mark.parametrize("scale", ["logits", "probabilities"])
def test_several_labels_can_apply(scale: str) -> None:
    row = np.array([[0.9, 0.1, 0.6, 0.2, 0.3, 0.1, 0.45, 0.05, 0.02, 0.5]])
    outputs = {"y": floats(np.log(row / (1 - row)) if scale == "logits" else row)}
    # Logits may belong to classes that exclude each other.
    assert (find("multi-label", outputs, labels=LABELS, named=False) is None) == (scale == "logits")
    assert (find("classify", outputs, labels=LABELS, named=False) is None) == (scale == "probabilities")
    answer = decode(outputs, of("multi-label", outputs, labels=LABELS))
    assert [entry["name"] for entry in answer.to_json()["classes"]] == ["class 0", "class 2", "class 9"]
    assert answer.top[0] == pytest.approx(0.9)


def test_regressed_values_get_their_unit() -> None:
    outputs = {"age": floats([[0.31]])}
    assert find("regression", outputs, named=False) is None
    answer = decode(outputs, of("regression", outputs, scale=100, offset=2))
    assert answer.vector == pytest.approx([33])
    assert answer.to_json() == {"task": "regression", "vector": [33.0]}


def speech_reference(values: list[float], windows: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the parts of speech, by a search for each part's end through all later windows."""
    quiet, shortest = windows
    parts, place = [], 0
    while place < len(values):
        if values[place] < 0.5:
            place += 1
            continue
        end = next_start = len(values)
        for candidate in range(place, len(values)):
            # The first low window after the last high one.
            if values[candidate] < 0.35 and not any(v < 0.35 for v in _since_high(values, place, candidate)):
                until = candidate + quiet
                if until < len(values) and _stays_below(values, candidate, until):
                    end, next_start = candidate, until + 1
                    break
        if end - place >= shortest:
            parts.append((place, end))
        place = next_start
    return parts


def _since_high(values: list[float], start: int, end: int) -> list[float]:
    high = max(i for i in range(start, end + 1) if values[i] >= 0.5 or i == start)
    return values[high:end]


def _stays_below(values: list[float], start: int, until: int) -> bool:
    """Return whether no window up to the first low one from `until` on is high."""
    return all(value < 0.5 for value in values[start : until + 1]) and values[until] < 0.35


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sampled_from([0.1, 0.2, 0.6, 0.9]), max_size=40))
def test_speech_equals_a_slow_search(values: list[float]) -> None:
    # Four windows of 32 ms are the first above 100 ms, and eight the first of at least 250 ms.
    expected = speech_reference(values, (4, 8))
    segments = find_speech(np.array(values), 512 / 16000, FAMILY.thresholds)
    np.testing.assert_allclose(segments, np.array(expected, float).reshape(-1, 2) * 0.032)


def test_values_between_the_thresholds_continue_speech() -> None:
    values = [0.4] * 3 + [0.6] + [0.4] * 20 + [0.3] * 4
    segments = find_speech(np.array(values), 0.05, FAMILY.thresholds)
    np.testing.assert_allclose(segments, [[0.15, 1.2]])


class Counter:
    """Return the mean of each window, and the number of runs as its state."""

    def get_inputs(self) -> list[Any]:
        return [
            SimpleNamespace(name="wave", type="tensor(float)", shape=["batch", 12]),
            SimpleNamespace(name="state", type="tensor(float)", shape=[2, "batch", 3]),
            SimpleNamespace(name="sr", type="tensor(int64)", shape=[]),
        ]

    def get_outputs(self) -> list[Any]:
        return [SimpleNamespace(name="y"), SimpleNamespace(name="stateN")]

    def __call__(self, feeds: Any) -> Any:
        assert feeds["sr"] == 8000
        assert feeds["wave"].shape == (1, 12)
        assert feeds["wave"].dtype == np.float32
        return {"y": feeds["wave"][:, 2:].mean(axis=1, keepdims=True), "stateN": feeds["state"] + 1}


def test_states_and_context_pass_through_a_recording() -> None:
    model = Counter()
    inputs = {"wave": floats(np.zeros((1, 12))), "state": floats(np.zeros((2, 1, 3))), "sr": np.array(8000)}
    head = of("voice", model(inputs), inputs=inputs, named=False, context=2)
    head = parse_head(Head(head.family, head.outputs, head.parameters, head.thresholds).to_dict())
    assert head.parameters["states"] == {"stateN": "state"}
    assert head.parameters["rate"] == 8000
    samples = floats(np.arange(25) / 100)
    runs = list(run_windows(model, model, head, samples))
    assert [feeds["state"].max() for feeds, _ in runs] == [0, 1, 2]
    np.testing.assert_allclose(runs[1][0]["wave"][0], np.arange(8, 20) / 100, rtol=1e-6)
    answer = decode(run_recording(model, model, head, samples), head)
    np.testing.assert_allclose(answer.vector, [0.045, 0.145, 0.11], rtol=1e-6)
    assert decode(run_recording(model, model, head, samples[:0]), head).to_json()["segments"] == []


@pytest.mark.parametrize(
    "change",
    [
        {"states": {"stateN": "missing"}},
        {"states": {"missing": "state"}},
        {"states": {"stateN": ["state"]}},
        {"states": "state"},
        {"constants": {"sr": "fast"}},
        {"input": []},
        {"window": 0},
        {"window": 1e9},
        {"context": -1},
        {"rate": "16000"},
    ],
)
def test_a_loop_that_does_not_belong_to_the_model_is_refused(change: dict[str, Any]) -> None:
    loop = {"input": "wave", "window": 10, "context": 2, "states": {"stateN": "state"}, "constants": {"sr": 8000}}
    head = Head("voice", {"probability": "y"}, {**loop, **change})
    with pytest.raises(BundleError, match="how the model runs over a recording"):
        run_recording(Counter(), Counter(), head, np.zeros(30, np.float32))


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("channels", [1, 2])
def test_recordings_are_read_at_every_width(tmp_path: Path, width: int, channels: int) -> None:
    limit = 2 ** (8 * width - 1)
    values = np.random.default_rng(1).integers(-limit, limit, (50, channels))
    stored = (values + 128).astype("u1").tobytes() if width == 1 else values.astype("<i8").view("u1")
    if width > 1:
        stored = stored.reshape(50, channels, 8)[..., :width].tobytes()
    path = tmp_path / "speech.wav"
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, width, 16000, 0, "NONE", ""))
        file.writeframes(stored)
    np.testing.assert_allclose(read_wave(path, 16000), (values / limit).mean(axis=1), rtol=1e-6, atol=1e-7)
    with pytest.raises(DataError, match="16000 samples a second, the model takes 8000"):
        read_wave(path, 8000)
    path.write_bytes(path.read_bytes()[:30])
    with pytest.raises(DataError, match="cannot be read as a recording"):
        read_wave(path, 16000)
