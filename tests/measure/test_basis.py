"""Test what figures are taken over: elements that mean something, real positions, matched rows, means of columns."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from edgeq_device.measure.basis import Axis, Basis, Padding
from edgeq_device.measure.rows import match_rows
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from edgeq.measure.agreement import OutputAgreement
from edgeq.measure.basis import sampled_basis
from edgeq.measure.comparison import OutputSums
from edgeq.model.graph import GraphIndex
from edgeq.run.session import open_session
from tests.graphs import model
from tests.measure.fakes import FakeSample, FakeSamples

RNG = np.random.default_rng(0)
Floats = NDArray[np.float32]


def compared(
    pairs: list[tuple[Floats, Floats]], basis: Basis | None = None, inputs: dict[str, NDArray[np.generic]] | None = None
) -> OutputAgreement:
    comparison = OutputSums(basis=basis or Basis())
    for reference, candidate in pairs:
        comparison.update({"y": reference}, {"y": candidate}, inputs or {"x": np.zeros((1, 9), np.float32)})
    (output,) = comparison.result().outputs
    return output


@pytest.mark.parametrize("fill", [-1e8, -1e4, float(np.finfo(np.float32).min), -np.inf])
def test_sentinels_of_both_models_are_left_out(fill: float) -> None:
    scores = RNG.normal(0, 1, (1, 40)).astype(np.float32)
    masked = np.where(RNG.random((1, 40)) > 0.3, scores, np.float32(fill))
    real = masked > -100
    noisy = np.where(real, masked + 0.1, masked).astype(np.float32)
    output = compared([(masked, noisy)], Basis(limits={"y": 500.0}))
    brute = 10 * math.log10((masked[real] ** 2).sum() / (0.01 * real.sum()))
    assert output.sqnr_db == pytest.approx(brute, abs=0.01)
    assert (output.nothing, output.strays) == ((~real).sum(), 0)
    assert output.max_abs_error == pytest.approx(0.1, abs=1e-4)


def test_a_sentinel_in_one_model_alone_is_counted() -> None:
    reference = RNG.normal(0, 1, (1, 40)).astype(np.float32)
    candidate = reference.copy()
    candidate[0, :8] = -1e8
    output = compared([(reference, candidate)], Basis(limits={"y": 500.0}))
    assert output.strays == 8
    assert output.sqnr_db == math.inf
    assert output.least_db == pytest.approx(-20 * math.log10(8 / 40))
    assert "mean nothing in one model alone" in output.level_note


def test_a_nan_is_an_error_even_where_sentinels_are_expected() -> None:
    reference = np.array([[1.0, 2.0, -1e8]], np.float32)
    output = compared([(reference, np.array([[np.nan, 2.0, np.inf]], np.float32))], Basis(limits={"y": 500.0}))
    assert output.nonfinite == 1
    assert output.strays == 1, "an infinity of the other sign is another mask"


def basis_of(folder: Path, body: str, weights: dict[str, NDArray[np.generic]], feeds: list[dict[str, Any]]) -> Basis:
    graph_model = model(body, weights)
    ir.save(graph_model, folder / "m.onnx")
    samples = FakeSamples([FakeSample(inputs=feed) for feed in feeds])
    return sampled_basis(GraphIndex(graph_model), open_session(folder / "m.onnx"), samples)


NONE = "m = Cast <to = 1> (legal)\n none = Sub (one, m)\n n = Mul (none, far)"


@pytest.mark.parametrize(
    "mask",
    [
        "q = MatMul (x, w)\n y = Where (legal, q, far)",
        f"q = MatMul (x, w)\n {NONE}\n y = Add (q, n)",
        f"{NONE}\n y = Gemm (x, w, n)",
    ],
)
def test_a_mask_in_the_graph_gives_the_limit(tmp_path: Path, mask: str) -> None:
    weights = {"w": RNG.normal(0, 1, (8, 8)).astype(np.float32), "far": np.float32(-1e9), "one": np.float32(1)}
    feeds = [{"x": RNG.normal(0, 1, (1, 8)).astype(np.float32), "legal": RNG.random((1, 8)) > 0.3} for _ in range(8)]
    basis = basis_of(tmp_path, f"m (float[1, 8] x, bool[1, 8] legal) => (float[1, 8] y) {{ {mask} }}", weights, feeds)
    assert 1e6 < basis.limits["y"] < 1e9


def test_boxes_beside_scores_are_not_sentinels(tmp_path: Path) -> None:
    body = """m (float[1, 4, 9] x) => (float[1, 5, 9] y) {
      far = Add (x, grid)
      score = ReduceMax <axes = [1]> (x)
      y = Concat <axis = 1> (far, score) }"""
    grid = RNG.uniform(300, 600, (1, 4, 9)).astype(np.float32)
    feeds = [{"x": RNG.uniform(0, 1, (1, 4, 9)).astype(np.float32)} for _ in range(8)]
    assert not basis_of(tmp_path, body, {"grid": grid}, feeds).limits


@given(hnp.arrays(np.float32, (12, 1, 5), elements=st.floats(-4, 4, width=16)), st.floats(-1e4, 1e4))
def test_the_figure_around_the_mean_equals_brute_force(values: Floats, offset: float) -> None:
    reference = (values + np.float32(offset)).astype(np.float32)
    candidate = np.round(reference * 4) / 4
    output = compared(list(zip(reference, candidate, strict=True)))
    r, c = (array.reshape(-1, 5).astype(np.float64) for array in (reference, candidate))
    noise = ((r - c) ** 2).sum()
    total, columns = ((r - r.mean()) ** 2).sum(), ((r - r.mean(0)) ** 2).sum()
    lowest = min(total, columns)
    if lowest > 1e-9 * (r**2).sum() and noise and output.centred_db is not None:
        assert output.centred_db == pytest.approx(10 * math.log10(lowest / noise), abs=0.05)
        assert output.least_db <= output.centred_db


def test_a_quantity_far_from_zero_is_judged_around_its_mean() -> None:
    kelvin = [RNG.normal(300, 1, (1, 1, 12, 12)).astype(np.float32) for _ in range(4)]
    output = compared([(k, np.round(k / 1.2) * np.float32(1.2)) for k in kelvin])
    assert output.sqnr_db > 50
    assert output.least_db == output.centred_db
    assert output.least_db < 12
    assert "around the mean" in output.level_note


def test_channels_of_unlike_offsets_have_a_mean_each() -> None:
    levels = np.array([300, 280, 260], np.float32).reshape(1, 3, 1, 1)
    maps = [(levels + RNG.normal(0, 1, (1, 3, 12, 12))).astype(np.float32) for _ in range(4)]
    output = compared([(k, np.round(k / 1.2) * np.float32(1.2)) for k in maps])
    assert output.least_db < 12, "around the mean of all channels it would be about 34 dB"


def test_a_constant_quantity_is_not_judged_by_its_variation() -> None:
    output = compared([(np.full((1, 9), 5, np.float32), np.full((1, 9), 5.1, np.float32)) for _ in range(9)])
    assert output.centred_db is None
    assert output.least_db == output.sqnr_db


def test_labels_from_common_to_rare_are_judged_one_by_one() -> None:
    logits = RNG.normal(np.linspace(0, -7, 14), 0.5, (50, 1, 14))
    labels = (1 / (1 + np.exp(-logits))).astype(np.float32)
    output = compared([(row, np.round(row * 255) / np.float32(255)) for row in labels])
    noise = ((labels - np.round(labels * 255) / 255) ** 2).sum((0, 1))
    brute = 10 * np.log10((labels**2).sum((0, 1)) / noise)
    assert [part.sqnr_db for part in output.slices] == pytest.approx(brute.tolist(), abs=0.01)
    assert output.top1 is None, "independent probabilities are not class scores"


def test_a_column_that_becomes_constant_is_lost() -> None:
    maps = [(RNG.random((1, 10, 8, 8)) * np.r_[np.ones(8), 1e-4, 1e-4].reshape(1, 10, 1, 1)).astype(np.float32)
            for _ in range(3)]  # fmt: skip
    output = compared([(m, np.round(m * 255) / np.float32(255)) for m in maps])
    assert (output.lost_columns, output.columns) == (2, 10)
    assert output.least_db == pytest.approx(-20 * math.log10(0.2))
    assert "2 of 10 columns" in output.level_note


def test_a_composition_is_not_a_classifier() -> None:
    parts = RNG.dirichlet([90, 5, 1, 0.2], 40).astype(np.float32)[:, None]
    output = compared([(row, np.round(row * 255) / np.float32(255)) for row in parts])
    assert output.top1 is None
    assert len(output.slices) == 4


def detections(count: int, order: NDArray[np.intp], shift: float = 0.0) -> Floats:
    corners = np.random.default_rng(5).uniform(0, 500, (count, 2))
    classes = np.arange(count) % 3
    rows = np.column_stack([corners, corners + 60 + np.arange(count)[:, None], np.linspace(0.9, 0.1, count), classes])
    rows[:, :4] += shift
    return rows[order][None].astype(np.float32)


def test_rows_without_a_place_are_matched() -> None:
    straight, mixed = np.arange(20), np.random.default_rng(1).permutation(20)
    basis = Basis(ranked={"y": Axis(1, "TopK 'k'")})
    output = compared([(detections(20, straight), detections(20, mixed, 1.0))], basis)
    assert output.rows_found == 1
    assert output.max_abs_error == pytest.approx(1, abs=1e-3)
    in_place = compared([(detections(20, straight), detections(20, mixed, 1.0))])
    assert in_place.sqnr_db < 10 < 40 < output.sqnr_db


def test_rows_that_are_not_found_again_are_counted() -> None:
    reference = detections(20, np.arange(20))
    candidate = reference.copy()
    candidate[0, :4, :4] += 300
    output = compared([(reference, candidate)], Basis(ranked={"y": Axis(1, "TopK 'k'")}))
    assert output.rows_found == pytest.approx(16 / 20)
    assert output.least_db == pytest.approx(-20 * math.log10(0.2))
    assert output.mismatched == 0


def test_a_different_number_of_rows_is_no_mismatch() -> None:
    reference, fewer = detections(20, np.arange(20)), detections(20, np.arange(15))
    output = compared([(reference, fewer)], Basis(ranked={"y": Axis(1, "NonMaxSuppression 'n'")}))
    assert (output.mismatched, output.rows_found) == (0, 15 / 20)


def test_outputs_of_one_order_are_matched_together() -> None:
    boxes, order = detections(12, np.arange(12)), np.random.default_rng(2).permutation(12)
    basis = Basis(ranked={name: Axis(1, "TopK 'k'") for name in ("boxes", "scores", "classes")})
    outputs = {"boxes": boxes[..., :4], "scores": boxes[..., 4], "classes": boxes[..., 5].astype(np.int64)}
    comparison = OutputSums(basis=basis)
    comparison.update(outputs, {name: array[:, order] for name, array in outputs.items()})
    result = comparison.result()
    assert [output.rows_found for output in result.outputs] == [1, 1, 1]
    assert all(output.sqnr_db == math.inf for output in result.outputs)
    assert result.outputs[2].same == 1


@given(st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_matching_equals_brute_force_for_distinct_rows(count: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    rows = np.column_stack([random.normal(0, 1, (count, 3)) + 10 * np.arange(count)[:, None]])
    order = random.permutation(count)
    places, second = match_rows([rows], [rows[order]])
    assert [int(order[place]) for place in second] == places.tolist() == list(range(count))


def test_batches_match_rows_within_a_sample() -> None:
    basis = Basis(ranked={"y": Axis(1, "TopK 'k'")})
    both = np.concatenate([detections(8, np.arange(8)), detections(8, np.arange(8), 3.0)])
    candidate = np.concatenate([detections(8, np.arange(8)[::-1]), detections(8, np.arange(8)[::-1], 3.5)])
    together, separate = OutputSums(basis=basis), OutputSums(basis=basis)
    inputs = {"x": np.zeros((2, 3), np.float32)}
    together.update({"y": both}, {"y": candidate}, inputs, rows=2)
    for row in (slice(0, 1), slice(1, 2)):
        separate.update({"y": both[row]}, {"y": candidate[row]}, {"x": inputs["x"][row]})
    assert together.result() == separate.result()


def test_padded_positions_are_left_out() -> None:
    mask = np.array([[1, 1, 1, 0, 0, 0]])
    reference = RNG.normal(0, 1, (1, 6, 4)).astype(np.float32)
    candidate = reference.copy()
    candidate[:, 3:] += 5
    padding = Padding({"mask": False}, {"y": Axis(1, "mask")})
    output = compared([(reference, candidate)], Basis(padding=padding), {"mask": mask})
    assert (output.sqnr_db, output.elements, output.hidden) == (math.inf, 12, 12)
    assert "over 3 real of 6 positions" in output.basis_note
