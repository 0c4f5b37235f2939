from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edgeq.errors import DataError
from edgeq.measure.accuracy import compare_sessions, evaluate_sessions
from edgeq.measure.comparison import OutputComparison, OutputSums
from edgeq.measure.power_ratios import decibels
from edgeq.util.records import plain
from tests.measure.fakes import FakeSamples, FakeSession, vectors

numbers = st.floats(-1e3, 1e3, width=32)


@st.composite
def pairs(draw: st.DrawFn) -> list[tuple[np.ndarray, np.ndarray]]:
    shape = (draw(st.integers(1, 3)), draw(st.integers(2, 5)))
    array = hnp.arrays(np.float32, shape, elements=numbers)
    return draw(st.lists(st.tuples(array, array), min_size=1, max_size=5))


@given(pairs())
def test_streaming_equals_brute_force(samples: list[tuple[np.ndarray, np.ndarray]]) -> None:
    comparison = OutputComparison("y")
    for r, c in samples:
        comparison.update(r, c)
    agreement = comparison.result(classes=True)

    r = np.concatenate([r for r, _ in samples]).astype(np.float64)
    c = np.concatenate([c for _, c in samples]).astype(np.float64)
    noise = ((r - c) ** 2).sum()
    assert agreement.elements == r.size
    assert agreement.max_abs_error == np.abs(r - c).max()
    assert agreement.top1 == np.mean(r.argmax(axis=1) == c.argmax(axis=1))
    if noise == 0:
        assert agreement.sqnr_db == math.inf
        assert agreement.equal
    elif (r**2).sum() > 0:
        assert agreement.sqnr_db == pytest.approx(10 * math.log10((r**2).sum() / noise), abs=1e-6)
        assert not agreement.equal
    if np.linalg.norm(r) > 0 and np.linalg.norm(c) > 0:
        expected = (r * c).sum() / np.linalg.norm(r) / np.linalg.norm(c)
        assert agreement.cosine == pytest.approx(expected, abs=1e-9)


@given(pairs(), st.randoms(use_true_random=False))
def test_order_of_samples_does_not_matter(samples: list[tuple[np.ndarray, np.ndarray]], random: object) -> None:
    def total(order: list[tuple[np.ndarray, np.ndarray]]) -> OutputComparison:
        comparison = OutputComparison("y")
        for r, c in order:
            comparison.update(r, c)
        return comparison

    shuffled = list(samples)
    random.shuffle(shuffled)
    ordered, reordered = (total(order).result(classes=True) for order in (samples, shuffled))
    assert ordered.sqnr_db == pytest.approx(reordered.sqnr_db)
    assert ordered.top1 == reordered.top1


def test_equal_outputs_have_no_noise_and_plain_json() -> None:
    comparison = OutputComparison("y")
    comparison.update(np.array([[1.0, -2.0]]), np.array([[1.0, -2.0]]))
    record = plain(comparison.result())
    assert record["sqnr_db"] is None
    assert record["equal"] is True
    assert record["cosine"] == pytest.approx(1.0)
    assert json.loads(json.dumps(record, allow_nan=False)) == record


def test_zeros() -> None:
    assert decibels(0.0, 0.0) == math.inf
    assert decibels(0.0, 1.0) == -math.inf
    both = OutputComparison("y")
    both.update(np.zeros((1, 2)), np.zeros((1, 2)))
    assert both.result().cosine == 1.0
    silent = OutputComparison("y")
    silent.update(np.ones((1, 2)), np.zeros((1, 2)))
    assert silent.result().cosine == 0.0


def test_nonfinite_pairs_are_counted_not_summed() -> None:
    comparison = OutputComparison("y")
    r = np.array([[1.0, -np.inf, np.nan, 2.0, 3.0]])
    c = np.array([[1.0, -np.inf, np.nan, np.nan, np.inf]])
    comparison.update(r, c)
    agreement = comparison.result()
    assert agreement.nonfinite == 2
    assert agreement.elements == 1
    assert not agreement.equal


def test_shapes_that_differ_are_counted() -> None:
    comparison = OutputComparison("boxes")
    comparison.update(np.zeros((3, 4)), np.zeros((2, 4)))
    agreement = comparison.result()
    assert agreement.mismatched == 1
    assert agreement.elements == 0
    assert not agreement.equal
    assert agreement.sqnr_db == -math.inf


def test_samples_of_another_size_count_as_not_the_same() -> None:
    comparison = OutputSums()
    later_sums = OutputSums()
    for candidate_size, count, into in ((3, 3, comparison), (3, 2, later_sums), (2, 2, later_sums), (1, 2, comparison)):
        boxes, labels = np.ones((candidate_size, 4), np.float32), np.full(candidate_size, 7)
        into.update(
            {"boxes": boxes, "labels": labels},
            {"boxes": boxes[:1].repeat(count, 0), "labels": labels[:1].repeat(count)},
        )
    comparison.merge(later_sums)
    result = comparison.result()
    boxes_found, labels_found = result.outputs
    assert boxes_found.mismatched == labels_found.mismatched == 2
    assert labels_found.same == 5 / 10, "5 of 5 elements, and 3 and 2 that have no counterpart"
    assert not boxes_found.equal
    notes = result.mismatch_notes()
    assert (
        notes[0]
        == "output 'boxes': 2 of 4 samples are left out of its figures, because its size differs from float32's"
    )
    assert len(notes) == 2


def test_rows_without_a_counterpart_have_another_top1() -> None:
    comparison = OutputComparison("y")
    scores = np.array([[0.1, 0.9]] * 3)
    comparison.update(scores, scores)
    comparison.update(scores[:1], scores)
    assert comparison.result(classes=True).top1 == 3 / 4


def test_claims_nothing_without_compared_outputs() -> None:
    assert OutputSums().result().sqnr_db == -math.inf
    comparison = OutputSums()
    comparison.update({"boxes": np.zeros((3, 4))}, {"boxes": np.zeros((2, 4))})
    result = comparison.result()
    assert (result.sqnr_db, result.cosine, result.compared) == (-math.inf, 0.0, False)
    assert plain(result)["outputs"][0]["sqnr_db"] is None
    (note,) = result.mismatch_notes()
    assert note.startswith("output 'boxes': none of its 1 samples could be compared")
    comparison.update({"score": np.array([1.0])}, {"score": np.array([1.0])})
    assert comparison.result().sqnr_db == -math.inf


def test_an_output_that_is_always_empty_says_nothing_of_the_others() -> None:
    comparison = OutputSums()
    empty = np.zeros((0, 4), np.float32)
    comparison.update({"boxes": empty, "score": np.array([1.0])}, {"boxes": empty, "score": np.array([1.1])})
    result = comparison.result()
    assert result.sqnr_db == pytest.approx(20.0)
    assert not result.outputs[0].equal


def test_integer_and_boolean_outputs_are_compared_and_text_is_not() -> None:
    comparison = OutputSums()
    r = {"i": np.array([[250, 3]], np.uint8), "b": np.array([True, False]), "s": np.array(["a"], dtype=object)}
    c = {"i": np.array([[3, 250]], np.uint8), "b": np.array([True, True]), "s": np.array(["a"], dtype=object)}
    comparison.update(r, c, {})
    outputs = {output.name: output for output in comparison.result().outputs}
    assert set(outputs) == {"i", "b"}
    assert outputs["i"].max_abs_error == 247
    assert outputs["i"].top1 is None
    assert outputs["b"].max_abs_error == 1


def test_indices_are_the_same_or_not_and_do_not_stand_for_the_outputs() -> None:
    labels, scores = np.array([3, 8, 1, 0]), np.array([0.5, 2.0], np.float32)
    comparison = OutputSums()
    comparison.update({"label": labels, "score": scores}, {"label": np.array([3, 3, 1, 0]), "score": scores + 0.001})
    agreement = comparison.result()
    assert {output.name: output.same for output in agreement.outputs} == {"label": 0.75, "score": None}
    assert agreement.same is None
    assert agreement.sqnr_db == pytest.approx(decibels(4.25, 2e-6), abs=0.1)
    only = OutputSums()
    only.update({"label": labels, "found": labels > 2}, {"label": np.array([3, 3, 1, 0]), "found": labels > 2})
    assert only.result().same == 0.75


def test_whole_numbers_of_few_bits_are_values() -> None:
    comparison = OutputSums()
    comparison.update({"image": np.array([100, 200], np.uint8)}, {"image": np.array([101, 200], np.uint8)})
    assert comparison.result().outputs[0].same is None


def test_sessions_are_compared_over_all_samples() -> None:
    samples = vectors([np.array([[0.75, 0.25]]), np.array([[0.0, 1.0]])])
    reference = FakeSession(lambda feed: {"y": feed["x"][:, :, None]}, ["y"])
    flipped = FakeSession(lambda feed: {"y": feed["x"][:, ::-1, None]}, ["y"])
    agreement = compare_sessions(reference, flipped, samples)
    assert agreement.samples == 2
    assert agreement.top1 == 0.0
    assert agreement.sqnr_db == pytest.approx(10 * math.log10(1.625 / 2.5))
    assert plain(agreement)["outputs"][0]["name"] == "y"


def test_many_candidates_share_one_pass() -> None:
    samples = vectors([np.array([[1.0, 2.0]])] * 3)
    identity = FakeSession(lambda feed: {"y": feed["x"]}, ["y"])
    double = FakeSession(lambda f: {"y": 2 * f["x"]}, ["y"])
    sessions = {"reference": identity, "same": identity, "double": double}
    agreements = evaluate_sessions(sessions, samples, reference="reference").agreement
    assert samples.decoded == 3
    assert agreements["same"].sqnr_db == math.inf
    assert agreements["double"].sqnr_db == pytest.approx(0.0)


def test_no_samples_are_refused() -> None:
    identity = FakeSession(lambda feed: {"y": feed["x"]}, ["y"])
    with pytest.raises(DataError, match="no samples"):
        compare_sessions(identity, identity, FakeSamples([]))
