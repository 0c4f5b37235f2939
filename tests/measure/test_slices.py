"""Test outputs with several units: which slices are judged separately, and their figures."""

from __future__ import annotations

import math
import random as random_module
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgeq.measure.agreement import Agreement
from edgeq.measure.comparison import OutputSums
from edgeq.measure.exact_sums import ExactSums
from edgeq.measure.slices import SliceSums, like_slices

Array = NDArray[np.float32]
IMAGE = {"images": np.zeros((1, 3, 8, 8), np.float32)}
RNG = np.random.default_rng(0)
LARGEST = sys.float_info.max


def agreement(outputs: list[Array], step: float | None = None, inputs: dict[str, Array] = IMAGE) -> Agreement:
    """Return the agreement of outputs with the same outputs rounded to one scale of 255 steps, as 8 bits do."""
    low, high = (min(o.min() for o in outputs), max(o.max() for o in outputs))
    step = (max(high, 0) - min(low, 0)) / 255 if step is None else step
    comparison = OutputSums()
    for output in outputs:
        comparison.update({"y": output}, {"y": (np.round(output / step) * step).astype(np.float32)}, inputs)
    return comparison.result()


def places(agreement: Agreement) -> list[str]:
    (output,) = agreement.outputs
    return [part.location for part in output.slices]


def sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    values: NDArray[np.float64] = 1 / (1 + np.exp(-x))
    return values


def head(boxes: int = 4, classes: int = 8, anchors: int = 64, *, columns_last: bool = False) -> Array:
    box, score = RNG.uniform(0, 600, (boxes, anchors)), sigmoid(RNG.normal(-4, 1, (classes, anchors)))
    detections = np.concatenate([box, score])[None].astype(np.float32)
    return detections.transpose(0, 2, 1) if columns_last else detections


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ([head() for _ in range(4)], ["0..3 on axis 1", "4..11 on axis 1"]),
        ([head(classes=81, columns_last=True) for _ in range(4)], ["0..3 on axis 2", "4..84 on axis 2"]),
        ([head(136, 1, 1)[:, :, 0] for _ in range(8)], ["0..135 on axis 1", "136 on axis 1"]),
        ([head(1, 10, 1)[0, :, 0] for _ in range(8)], ["0 on axis 0", "1..10 on axis 0"]),
    ],
)
def test_scores_beside_pixels_are_judged_by_themselves(outputs: list[Array], expected: list[str]) -> None:
    result = agreement(outputs)
    assert places(result) == expected
    (output,) = result.outputs
    assert output.sqnr_db > 45
    assert result.sqnr_db == min(part.sqnr_db for part in output.slices) < 10
    assert result.cosine < 0.9
    worst = min(output.slices, key=lambda part: part.least_db)
    assert f"output 'y', {worst.location}: " in output.level_note


def test_regression_targets_of_six_scales() -> None:
    scales = np.array([1000, 50, 2, 0.1, 0.004, 0.0002])
    outputs = [(RNG.normal(0, 1, (1, 6)) * scales).astype(np.float32) for _ in range(16)]
    result = agreement(outputs)
    assert places(result) == [f"{column} on axis 1" for column in range(6)]
    assert result.sqnr_db == pytest.approx(0.0, abs=0.01), "the last columns are zero"
    assert result.top1 is None, "columns of several units are not a class scores"


def test_units_that_alternate() -> None:
    columns = [np.concatenate([head(2, 1) for _ in range(6)], axis=1) for _ in range(4)]
    assert len(places(agreement(columns))) == 12


def softmax() -> Array:
    raised = np.exp(RNG.normal(0, 9, (1, 100)))
    return (raised / raised.sum()).astype(np.float32)


def never_fires() -> Array:
    scores = sigmoid(RNG.normal(-2, 2, (1, 8, 30)))
    scores[:, 3] *= 1e-6
    return scores.astype(np.float32)


def padded() -> Array:
    boxes = np.zeros((1, 20, 4), np.float32)
    boxes[:, : RNG.integers(1, 6)] = RNG.uniform(1, 600, 4)
    return boxes


def channels(dead: int = 5) -> Array:
    scale = np.exp(RNG.normal(0, 0.7, 32))
    scale[dead] = 1e-4
    return (np.maximum(RNG.normal(0, 1, (1, 32, 6, 6)), 0) * scale[:, None, None]).astype(np.float32)


def near_constant() -> Array:
    means = np.random.default_rng(7).normal(0, 5, 8)
    means[2] = 0.01
    return (means + RNG.normal(0, 0.2, (1, 8))).astype(np.float32)


def grid() -> Array:
    y, x = np.mgrid[0:20, 0:20].reshape(2, 1, -1, 1) * 8 + 4
    return np.concatenate([x, y, x + 10, y + 10], axis=-1).astype(np.float32) + RNG.normal(0, 2, (1, 400, 4)).astype(
        "f4"
    )


@pytest.mark.parametrize(
    "make",
    [
        softmax,
        never_fires,
        padded,
        channels,
        near_constant,
        grid,
        lambda: RNG.normal(0, 3, (1, 1000)).astype(np.float32),
        lambda: head()[:, :4],
        lambda: head()[:, 4:],
        lambda: np.sort(head(0, 1)[:, 0]),
        lambda: np.float32(7.0),
        lambda: np.zeros((1, 5), np.float32),
    ],
)
def test_outputs_of_one_unit_have_no_slices(make: object) -> None:
    result = agreement([np.asarray(make()) for _ in range(6)], step=0.01)  # type: ignore[operator]
    assert places(result) == []
    assert result.sqnr_db == result.outputs[0].sqnr_db


def test_rows_of_a_batch_are_not_units() -> None:
    scales = np.array([1000.0, 1.0, 0.001])[:, None]
    rows = (RNG.normal(0, 1, (3, 20)) * scales).astype(np.float32)
    assert places(agreement([rows], inputs={"x": np.zeros((3, 4), np.float32)})) == []


def test_an_axis_whose_length_varies_is_left_out() -> None:
    outputs = [head(anchors=n, columns_last=True) for n in (3, 5, 3)]
    assert places(agreement(outputs)) == ["0..3 on axis 2", "4..11 on axis 2"]
    assert places(agreement([head(anchors=1)[:, :n] for n in (12, 11)])) == []


UNITS = st.lists(st.sampled_from([0.0, 1e-3, 1.0, 300.0]), min_size=2, max_size=15)


@given(UNITS, st.lists(st.integers(1, 3), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_figures_equal_brute_force_in_any_order(
    units: list[float], rows: list[int], random: random_module.Random
) -> None:
    rng = np.random.default_rng(random.randrange(2**32))
    shapes = [(count, len(units), 2) for count in rows]
    pairs = []
    for shape in shapes:
        reference = rng.normal(0, 1, shape) * np.array(units)[:, None]
        pairs.append((reference, reference + rng.normal(0, 0.1, shape)))

    def sums(order: list[int]) -> SliceSums:
        slice_sums = SliceSums()
        for place in order:
            slice_sums.update(*pairs[place], [pairs[place][0]], rows=len(pairs[place][0]))
        return slice_sums

    order = list(range(len(pairs)))
    slices = sums(order).result()
    random.shuffle(order)
    cut = random.randrange(len(order) + 1)
    merged = sums(order[cut:])
    merged.merge(sums(order[:cut]))
    assert merged.result() == slices
    single = SliceSums()
    for r, c in pairs:
        for row in range(len(r)):
            single.update(r[row : row + 1], c[row : row + 1], [r[row : row + 1]])
    assert [part for part in single.result() if part.axis == 1] == [part for part in slices if part.axis == 1]

    r, c = (np.concatenate([pair[side] for pair in pairs]) for side in (0, 1))
    for part in slices:
        place = (slice(None),) * part.axis + (slice(part.first, part.last + 1),)
        signal, noise, candidate_power = ((array[place] ** 2).sum() for array in (r, r - c, c))
        assert part.sqnr_db == pytest.approx(10 * math.log10(signal / noise), abs=1e-4)
        assert part.cosine == pytest.approx((r * c)[place].sum() / math.sqrt(signal * candidate_power), abs=1e-3)
        assert part.peak == np.abs(r[place]).max()
        assert part.max_abs_error == np.abs((r - c)[place]).max()
    for axis in {part.axis for part in slices}:
        ends = [(part.first, part.last) for part in slices if part.axis == axis]
        assert [i for first_index, last_index in ends for i in range(first_index, last_index + 1)] == list(
            range(r.shape[axis])
        )


@given(st.lists(st.floats(0, 1e308), min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_exact_sums_of_any_size(values: list[float], random: random_module.Random) -> None:
    def total(order: list[float]) -> float:
        sums = ExactSums()
        for value in order:
            sums.add(np.array([[value]]))
        return float(sums.total()[0])

    shuffled = list(values)
    random.shuffle(shuffled)
    assert total(values) == total(shuffled)
    assert total(values) == pytest.approx(min(math.fsum(v / 64 for v in values), LARGEST / 64) * 64, rel=1e-6)


def test_nothing_but_zeros_is_of_one_unit() -> None:
    assert like_slices(np.zeros(5), np.zeros(5)) == []
