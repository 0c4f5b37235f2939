"""Test that the worst tensors are those with the largest loss, and that the figures are those of quantizing them."""

from __future__ import annotations

import numpy as np
import pytest

from edgeq.calibration.ranges import Range, derive_ranges
from edgeq.calibration.statistics import Statistics, TensorStatistics, histogram_of
from edgeq.model.quant_params import grid_of
from edgeq.reporting.layers import BINS, quantized_tensors, sqnr_of, worst_tensors
from edgeq.scheme import Scheme
from tests.graphs import model

RANDOM = np.random.default_rng(0)


def tensor(values: np.ndarray[tuple[int], np.dtype[np.float32]]) -> TensorStatistics:
    low, high = float(values.min()), float(values.max())
    return TensorStatistics("float32", 1, 1, values.size, low, high, 0, 0, histogram_of(values))


@pytest.fixture
def statistics() -> Statistics:
    narrow = RANDOM.standard_normal(20_000).astype(np.float32)
    wide = narrow.copy()
    wide[0] = 400.0
    rectified = np.maximum(RANDOM.standard_normal(20_000).astype(np.float32), 0)
    tensors = {
        "narrow": tensor(narrow),
        "wide": tensor(wide),
        "wide_again": tensor(wide),
        "rectified": tensor(rectified),
        "constant": tensor(np.zeros(5, np.float32)),
    }
    return Statistics("m", "d", 1, tensors)


def test_the_worst_come_first_and_once(statistics: Statistics) -> None:
    scheme = Scheme()
    found = worst_tensors(statistics, derive_ranges(statistics), scheme, count=3)
    assert [f.tensor for f in found] == ["wide", "narrow", "rectified"]
    wide = found[0]
    assert wide.chosen == "minmax"
    assert len(wide.counts) == BINS
    assert len(wide.edges) == BINS + 1
    assert sum(wide.counts) == 20_000
    by_method = {t.method: t for t in wide.thresholds}
    assert by_method["mse"].sqnr_db >= by_method["minmax"].sqnr_db
    assert wide.clipped == 0
    assert found[2].zeros == pytest.approx(0.5, abs=0.02)


def test_draws_only_quantized_tensors(statistics: Statistics) -> None:
    found = worst_tensors(statistics, derive_ranges(statistics), Scheme(), among={"narrow"})
    assert [f.tensor for f in found] == ["narrow"]


def test_clipping_is_counted(statistics: Statistics) -> None:
    scheme = Scheme(method="percentile", method_options={"percentile": 99.0})
    ranges = derive_ranges(statistics, "percentile", options={"percentile": 99.0})
    found = worst_tensors(statistics, ranges, scheme, among={"narrow"})
    assert found[0].clipped == pytest.approx(0.01, abs=0.003)


def test_sqnr_is_that_of_rounding() -> None:
    values = RANDOM.uniform(-1, 1, 100_000).astype(np.float32)
    kept = Range(-1.0, 1.0)
    step = 2.0 / 255
    rounded = np.rint(values / step) * step
    true = 10 * np.log10(np.sum(values**2.0) / np.sum((values - rounded) ** 2.0))
    assert sqnr_of(histogram_of(values), kept, grid_of("uint8", False)) == pytest.approx(true, abs=0.5)
    assert sqnr_of(histogram_of(values), Range(0.0, 0.0), grid_of("uint8", False)) is None


def test_tensors_before_quantize_nodes() -> None:
    quantized = "q = QuantizeLinear (x, s) wq = QuantizeLinear (w, s)"
    made = model(f"net (float[1] x) => (uint8[1] q) <float[1] w = {{1}}, float s = {{1}}> {{ {quantized} }}")
    assert quantized_tensors(made) == {"x"}
    assert quantized_tensors(model("net (float[1] x) => (float[1] y) { y = Relu (x) }")) is None
