"""Test CTC text and the regions of text detection by round trips and slow references."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from edgeq_device.answers.decode import decode
from edgeq_device.answers.rectangles import find_rectangle
from edgeq_device.errors import DataError
from edgeq_device.prepare.frame import Frame
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.answers.heads import find, floats, of

ALPHABET = "abcdefghij"


def encode(numbers: list[int], blank: int, count: int, seed: int) -> Any:
    """Return logits [T, count] that spell symbols, each over one or more steps."""
    random = np.random.default_rng(seed)
    steps = [blank]
    for place, number in enumerate(numbers):
        # Only a blank separates equal symbols.
        apart = place > 0 and numbers[place - 1] == number
        steps += [blank] * int(random.integers(apart, 3)) + [number] * int(random.integers(1, 4))
    steps += [blank] * (len(steps) + 3)
    logits = random.normal(size=(len(steps), count))
    logits[np.arange(len(steps)), steps] = 9
    return logits


@settings(deadline=None, max_examples=80)
@given(
    st.text(ALPHABET, min_size=1, max_size=12),
    st.sampled_from([0, "last"]),
    st.sampled_from(["NTC", "TNC", "NCT"]),
    st.sampled_from(["inside", "outside", "space"]),
    st.sampled_from(["logits", "probabilities"]),
    st.integers(0, 999),
)
def test_text_survives_ctc(text: str, blank: Any, layout: str, alphabet: str, scores: str, seed: int) -> None:
    blank = 0 if alphabet == "space" else blank
    symbols = [*ALPHABET, *([" "] if alphabet == "space" else [])]
    place = 0 if blank == 0 else len(symbols)
    symbols.insert(place, "-")
    labels = symbols if alphabet == "inside" else list(ALPHABET)
    steps = encode([symbols.index(character) for character in text], place, len(symbols), seed)
    if scores == "probabilities":
        steps = np.exp(steps) / np.exp(steps).sum(axis=1, keepdims=True)
    array = {"NTC": steps[None], "TNC": steps[:, None], "NCT": steps.T[None]}[layout]
    outputs = {"y": floats(array)}
    hints = {"layout": "CT" if layout == "NCT" else "TC"} if abs(len(steps) - len(labels)) <= 2 else {}
    head = of("ctc", outputs, labels=labels, named=False, **hints)
    answer = decode(outputs, head)
    assert answer.text == text
    assert head.parameters["blank"] == blank
    assert answer.confidence is not None
    assert answer.confidence > 0.99
    assert answer.to_json()["text"] == text
    assert "objects" not in answer.to_json()


def test_marks_of_words_become_spaces() -> None:
    labels = ["<pad>", "<unk>", "|", "h", "i"]
    outputs = {"logits": floats(np.eye(5)[[0, 3, 4, 2, 2, 1, 3, 4, 0, 2]] * 5)[None]}
    head = of("ctc", outputs, labels=labels, named=False)
    assert head.parameters == {"layout": "TC", "blank": 0, "space": "|"}
    assert decode(outputs, head).text == "hi hi"
    labels = ["<blk>", "\u2581he", "llo", "\u2581you"]
    outputs = {"logits": floats(np.eye(4)[[1, 2, 0, 3]])[None]}
    assert find("ctc", outputs, labels=labels, named=False) is None
    assert decode(outputs, of("ctc", outputs, labels=labels)).text == "hello you"


def test_text_needs_an_alphabet() -> None:
    outputs = {"y": floats(np.eye(5)[[0, 3, 3, 0, 4]] * 5)[None]}
    assert find("ctc", outputs, named=False) is None
    assert find("ctc", outputs, labels=["O", "B-PER", "I-PER", "B-LOC", "I-LOC"], named=False) is None
    assert decode(outputs, of("ctc", outputs)).text == "3 4"
    head = of("ctc", outputs, blank=7)
    with pytest.raises(DataError, match="the blank is 7"):
        decode(outputs, head)


def corners_of(centre: Any, half: Any, angle: float) -> Any:
    along = np.array([np.cos(angle), np.sin(angle)])
    across = np.array([-along[1], along[0]])
    return np.array(
        [centre + x * half[0] * along + y * half[1] * across for x, y in ((-1, -1), (1, -1), (1, 1), (-1, 1))]
    )


@settings(deadline=None, max_examples=40)
@given(st.floats(-1.2, 1.2), st.floats(30, 60), st.floats(6, 14), st.floats(-9, 9), st.sampled_from([1.0, 0.5]))
def test_regions_become_grown_rectangles(
    angle: float, length: float, height: float, shift: float, ratio: float
) -> None:
    frame = Frame.of(160, 140).resized(160, 140).placed(16, 26, (192, 192))
    centre, half = np.array([80.3 + shift, 70.6]), np.array([length, height])
    scale = 192 * ratio
    grid = (np.stack(np.meshgrid(np.arange(scale), np.arange(scale)), axis=-1) + 0.5) / ratio
    offsets = frame.to_original(grid) - centre
    inside = np.stack([offsets @ [np.cos(angle), np.sin(angle)], offsets @ [-np.sin(angle), np.cos(angle)]], axis=-1)
    values = floats(0.95 * (np.abs(inside) <= half).all(axis=-1))[None, None]
    outputs = {"p": values}
    answer = decode(outputs, of("db-text", outputs, frame.size), frame)
    assert len(answer) == 1
    assert answer.polygons is not None
    # A thin slanted region has steps, so some pixels inside the rectangle do not belong to it.
    assert answer.scores[0] > 0.75
    margin = 4 * length * height * 1.5 / (4 * (length + height))
    expected = corners_of(centre, half + margin, angle)
    apart = np.abs(answer.polygons[0][:, None] - expected[None]).max(axis=-1).min(axis=0)
    # The steps hide where a slanted edge runs within a pixel of the map.
    assert apart.max() <= 1 / ratio


def test_upright_lines_are_exact() -> None:
    values = np.zeros((1, 1, 64, 128), np.float32)
    values[0, 0, 10:20, 8:68] = 0.9
    values[0, 0, 40:50, 30:40] = 0.5
    values[0, 0, 60:62, 5:50] = 0.9
    frame = Frame.of(256, 128).resized(128, 64)
    outputs = {"p": values}
    head = of("db-text", outputs, (128, 64))
    answer = decode(outputs, head, frame)
    margin = 600 * 1.5 / 140
    expected = np.array([8 - margin, 10 - margin, 68 + margin, 20 + margin]) * 2
    assert answer.polygons is not None
    np.testing.assert_allclose(answer.boxes, [expected])
    np.testing.assert_allclose(answer.polygons[0][[0, 2]].ravel(), expected)
    np.testing.assert_allclose(answer.polygons[0][1], expected[[2, 1]])
    assert find("db-text", outputs, (128, 64), named=False) is None


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(-9, 9)), min_size=1, max_size=30))
def test_rectangles_are_the_smallest(points: list[tuple[int, int]]) -> None:
    array = np.array(points, np.float64)
    rectangle = find_rectangle(array)
    assert rectangle.grown(1e-9).contains(array).all()
    turns = np.deg2rad(np.arange(0, 90, 0.5))
    axes = np.stack([np.stack([np.cos(turns), np.sin(turns)], -1), np.stack([-np.sin(turns), np.cos(turns)], -1)], 1)
    spans = np.ptp(np.einsum("aik,nk->ain", axes, array), axis=2)
    assert 4 * rectangle.half.prod() <= spans.prod(axis=1).min() + 1e-9
