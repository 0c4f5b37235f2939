from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from edgeq.backends.cpu import CpuBackend
from edgeq.calibration.statistics import Statistics
from edgeq.model.digests import model_digest
from edgeq.run.session import open_session
from edgeq.scheme import Scheme
from edgeq.tuning.recover.base import RecoveryState
from edgeq.tuning.recover.methods.smoothquant import (
    ObservedInput,
    SmoothQuant,
    find_best_factor,
    find_product_groups,
    smooth,
)
from edgeq.util.display import SILENT
from tests.backends.networks import operators, sqnr_db
from tests.tuning.recover.encoder import Sentences, encoder

pytestmark = pytest.mark.usefixtures("exact_kernels")

DYNAMIC = Scheme(mode="dynamic", dynamic_weight_types={"MatMul": "int8"})


def answer(model: Path) -> np.ndarray:
    session = open_session(model)
    return np.concatenate([session.run(None, dict(s.inputs))[0].ravel() for s in Sentences()])


@pytest.mark.parametrize("pre_norm", [False, True])
def test_the_smoothed_model_computes_the_same(tmp_path: Path, pre_norm: bool) -> None:
    prepared = encoder(tmp_path, pre_norm=pre_norm)
    result = smooth(prepared, Sentences(), tmp_path / "smoothed.onnx", DYNAMIC)
    assert result.factors
    smoothed = result.prepared
    assert sqnr_db(answer(prepared.path), answer(smoothed.path)) > 100
    assert smoothed.digest == model_digest(smoothed.path) != prepared.digest
    onnx.checker.check_model(onnx.load(smoothed.path), full_check=True)
    kept = {n.name: n.op_type for n in onnx.load(prepared.path).graph.node}
    found = {n.name: n.op_type for n in onnx.load(smoothed.path).graph.node}
    assert kept.items() <= found.items(), "nodes keep their names"


def test_quantized_it_is_better(tmp_path: Path) -> None:
    prepared = encoder(tmp_path)
    smoothed = smooth(prepared, Sentences(), tmp_path / "smoothed.onnx", DYNAMIC).prepared
    exact = answer(prepared.path)
    plain, better = (
        sqnr_db(exact, answer(CpuBackend().build(model, {}, DYNAMIC, tmp_path / f"{i}.onnx").model))
        for i, model in enumerate((prepared, smoothed))
    )
    assert better > plain + 3


def test_a_normalization_that_feeds_nothing_else_takes_the_division_up(tmp_path: Path) -> None:
    for pre_norm, made in ((True, False), (False, True)):
        folder = tmp_path / str(pre_norm)
        folder.mkdir()
        result = smooth(encoder(folder, pre_norm=pre_norm), Sentences(), folder / "smoothed.onnx", DYNAMIC)
        assert "norm1" in result.factors
        assert ("norm1/smoothed" in {n.name for n in onnx.load(result.prepared.path).graph.node}) is made
        assert ("norm1" in result.folded) is not made


def test_excluded_nodes_are_left_alone(tmp_path: Path) -> None:
    prepared = encoder(tmp_path)
    names = {n.name for n in onnx.load(prepared.path).graph.node if n.op_type in ("MatMul", "Gemm")}
    result = smooth(prepared, Sentences(), tmp_path / "smoothed.onnx", DYNAMIC.replace(exclude=tuple(names)))
    assert (result.prepared, result.factors) == (prepared, {})
    assert not (tmp_path / "smoothed.onnx").exists()


def test_products_that_share_an_input_are_one_group(tmp_path: Path) -> None:
    groups = {g.tensor: list(g.products) for g in find_product_groups(encoder(tmp_path).model)}
    assert groups["norm0"] == ["q.mm", "k.mm", "v.mm"]
    assert "q.t" not in groups, "a product of two activations has no weights to take the scale"


def observed(rows: np.ndarray) -> tuple[ObservedInput, ObservedInput]:
    """Return the record of a tensor that has these rows in each half of the samples."""
    half = ObservedInput(rows.min(axis=0, initial=0), rows.max(axis=0, initial=0), rows)
    return half, half


def test_outliers_get_a_factor_and_equal_channels_none() -> None:
    random = np.random.default_rng(0)
    rows = random.uniform(-1, 1, (64, 16)).astype(np.float32)
    rows[0] = 1
    matrix = random.uniform(-1, 1, (16, 24)).astype(np.float32)
    matrix[:, 0] = 1
    assert find_best_factor(observed(rows), matrix, Scheme()) is None
    rows[:, 3] *= 100
    for symmetric in (False, True):
        factor = find_best_factor(observed(rows), matrix, Scheme(activation_symmetric=symmetric))
        assert factor is not None
        assert factor.argmax() == 3


def test_the_step_is_that_of_all_rows() -> None:
    """The factor allows for rare tokens that widen some channels, although the rows at hand do not contain them."""
    random = np.random.default_rng(0)
    rows = random.uniform(-1, 1, (64, 16)).astype(np.float32)
    matrix = random.uniform(-1, 1, (16, 24)).astype(np.float32)
    rare = observed(rows)
    rare[0].high[3] = 50
    factor = find_best_factor(rare, matrix, Scheme())
    assert factor is not None
    assert factor.argmax() == 3


def test_the_factor_leaves_room_for_samples_that_it_has_not_seen() -> None:
    """With all channels at one magnitude, any of them may exceed the range on other samples."""
    random = np.random.default_rng(0)
    matrix = random.uniform(-1, 1, (64, 24)).astype(np.float32)
    rows = (random.uniform(-1, 1, (256, 64)) * np.geomspace(0.1, 10, 64)).astype(np.float32)
    rare = rows.copy()
    # In the other half, each channel is three times as large once.
    rare[np.arange(64), np.arange(64)] *= 3
    every = np.concatenate([rows, rare])
    cautious, keen = (
        find_best_factor(halves, matrix, Scheme(), 0.0)
        for halves in ((observed(rows)[0], observed(rare)[0]), observed(every))
    )
    assert cautious is not None
    assert keen is not None
    assert np.ptp(np.log(cautious)) < np.ptp(np.log(keen))


def test_dead_channels_stay_finite() -> None:
    random = np.random.default_rng(0)
    rows = random.normal(0, 1, (64, 16)).astype(np.float32)
    rows[:, 3] *= 100
    rows[:, 5] = 0
    matrix = random.normal(0, 1, (16, 24)).astype(np.float32)
    matrix[7] = 0
    factor = find_best_factor(observed(rows), matrix, Scheme())
    assert factor is not None
    assert np.isfinite(factor).all()
    assert (factor > 0).all()
    assert factor[5] == factor[7] == 1


def test_as_a_recovery(tmp_path: Path) -> None:
    prepared = encoder(tmp_path)
    state = RecoveryState(prepared, Statistics("", "", 0, {}, 0), {}, DYNAMIC)
    after = SmoothQuant().apply(state, Sentences(), tmp_path, SILENT)
    assert after.prepared.path.parent == tmp_path
    assert "Mul" in operators(after.prepared.path)
    assert after.notes[-1].startswith("smoothquant: ")
