"""Ranges that cut off too much, and those that hold every value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from edgeq.jobs.quantize import Quantized, quantize
from tests.graphs import proto

MODEL = """
clipped (float[N, 16, 6, 6] x) => (float[N, 16, 6, 6] y) {
    [first] a = Conv <pads = [1, 1, 1, 1]> (x, w1)
    [second] y = Conv <pads = [1, 1, 1, 1]> (a, w2)
}
"""


_CUTTING = {"method": "percentile", "method_options": {"percentile": 97.0}}


@pytest.fixture
def given(tmp_path: Path) -> tuple[Path, Path]:
    random = np.random.default_rng(0)
    model = proto(MODEL)
    for name in ("w1", "w2"):
        values = random.normal(0, 1 / 12, (16, 16, 3, 3)).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    onnx.save(model, tmp_path / "model.onnx")
    np.savez(tmp_path / "x.npz", x=random.normal(size=(4, 16, 6, 6)).astype(np.float32))
    return tmp_path / "model.onnx", tmp_path / "x.npz"


def quantized(given: tuple[Path, Path], **overrides: Any) -> Quantized:
    model, data = given
    return quantize(model, data, model.with_name("out.onnx"), target="nvidia-t4", overrides=overrides, force=True)


def test_ranges_that_cut_off_too_much_are_named(given: tuple[Path, Path]) -> None:
    cut, whole = (quantized(given, **choice).proof for choice in (_CUTTING, {"method": "minmax"}))
    assert cut.unclipped is not None
    assert cut.unclipped[0] == "percentile"
    assert cut.unclipped[1:] == pytest.approx((cut.agreement.sqnr_db, whole.agreement.sqnr_db))
    assert any("--method minmax on the same samples" in warning for warning in cut.warnings())
    assert whole.unclipped is None


def test_nothing_is_tried_where_outputs_are_good(given: tuple[Path, Path]) -> None:
    assert quantized(given, method="mse").proof.unclipped is None
