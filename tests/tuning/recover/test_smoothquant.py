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
    smoothed, changed = smooth(prepared, Sentences(), tmp_path / "smoothed.onnx")
    assert changed
    assert sqnr_db(answer(prepared.path), answer(smoothed.path)) > 100
    assert smoothed.digest == model_digest(smoothed.path) != prepared.digest
    onnx.checker.check_model(onnx.load(smoothed.path), full_check=True)
    kept = {n.name: n.op_type for n in onnx.load(prepared.path).graph.node}
    found = {n.name: n.op_type for n in onnx.load(smoothed.path).graph.node}
    assert kept.items() <= found.items(), "nodes keep their names"


def test_quantized_it_is_better(tmp_path: Path) -> None:
    prepared = encoder(tmp_path)
    smoothed, _ = smooth(prepared, Sentences(), tmp_path / "smoothed.onnx")
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
        smoothed, changed = smooth(encoder(folder, pre_norm=pre_norm), Sentences(), folder / "smoothed.onnx")
        assert "norm1" in changed
        assert ("norm1/smoothed" in {n.name for n in onnx.load(smoothed.path).graph.node}) is made


def test_excluded_nodes_are_left_alone(tmp_path: Path) -> None:
    prepared = encoder(tmp_path)
    names = {n.name for n in onnx.load(prepared.path).graph.node if n.op_type in ("MatMul", "Gemm")}
    same, changed = smooth(prepared, Sentences(), tmp_path / "smoothed.onnx", exclude=names)
    assert (same, changed) == (prepared, ())
    assert not (tmp_path / "smoothed.onnx").exists()


def test_products_that_share_an_input_are_one_group(tmp_path: Path) -> None:
    groups = {g.tensor: list(g.products) for g in find_product_groups(encoder(tmp_path).model)}
    assert groups["norm0"] == ["q.mm", "k.mm", "v.mm"]
    assert "q.t" not in groups, "a product of two activations has no weights to take the scale"


def observed(rows: np.ndarray) -> ObservedInput:
    """Return the record of a tensor that has only these rows."""
    return ObservedInput(rows.min(axis=0, initial=0), rows.max(axis=0, initial=0), rows)


def test_outliers_get_a_factor_and_equal_channels_none() -> None:
    random = np.random.default_rng(0)
    rows = random.uniform(-1, 1, (64, 16)).astype(np.float32)
    rows[0] = 1
    matrix = random.uniform(-1, 1, (16, 24)).astype(np.float32)
    matrix[:, 0] = 1
    assert find_best_factor(observed(rows), matrix, symmetric=False) is None
    rows[:, 3] *= 100
    for symmetric in (False, True):
        factor = find_best_factor(observed(rows), matrix, symmetric=symmetric)
        assert factor is not None
        assert factor.argmax() == 3


def test_the_step_is_that_of_all_rows() -> None:
    """The factor allows for rare tokens that widen some channels, although the rows at hand do not contain them."""
    random = np.random.default_rng(0)
    rows = random.uniform(-1, 1, (64, 16)).astype(np.float32)
    matrix = random.uniform(-1, 1, (16, 24)).astype(np.float32)
    rare = observed(rows)
    rare.high[3] = 50
    factor = find_best_factor(rare, matrix, symmetric=False)
    assert factor is not None
    assert factor.argmax() == 3


def test_dead_channels_stay_finite() -> None:
    random = np.random.default_rng(0)
    rows = random.normal(0, 1, (64, 16)).astype(np.float32)
    rows[:, 3] *= 100
    rows[:, 5] = 0
    matrix = random.normal(0, 1, (16, 24)).astype(np.float32)
    matrix[7] = 0
    factor = find_best_factor(observed(rows), matrix, symmetric=False)
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
