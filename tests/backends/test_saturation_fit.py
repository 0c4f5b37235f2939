"""Test scales that grow just enough that no pair of neighbours overflows 16 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeq.backends.cpu import CpuBackend
from edgeq.emulate.audit import audit, largest_sums
from edgeq.errors import UsageError
from edgeq.measure.coverage import source_names
from edgeq.model.saturation import PAIR_LIMIT, pair_sums
from edgeq.quantization.qdq import fit_factors
from edgeq.scheme import Scheme
from tests.backends.build import bench, mixed, residual, weights


def integers(rows: np.ndarray, factors: np.ndarray) -> np.ndarray:
    largest = np.abs(rows).max(axis=1)
    scale = np.where(largest > 0, largest * factors / 127, 1).astype(np.float32)
    return np.rint(rows / scale[:, None])


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 2**31), st.booleans())
def test_no_pair_overflows_and_none_grows_without_need(n: int, k: int, seed: int, per_channel: bool) -> None:
    random = np.random.default_rng(seed)
    rows = (random.standard_t(3, (n, k)) * random.random((n, 1))).astype(np.float32)
    factors = fit_factors(rows, per_channel=per_channel)
    if per_channel:
        assert (pair_sums(integers(rows, factors)) <= PAIR_LIMIT).all()
        fits = (pair_sums(integers(rows, np.ones(n, np.float32))) <= PAIR_LIMIT).all(axis=1)
        np.testing.assert_array_equal(factors == 1, fits)
        assert factors.max() <= 2.02
    else:
        assert len(set(factors.tolist())) == 1


def test_rows_of_zeros_are_left_alone() -> None:
    assert fit_factors(np.zeros((2, 4), np.float32)).tolist() == [1, 1]


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("network", [residual, mixed])
def test_nothing_saturates_in_what_is_built(tmp_path: Path, network, per_channel: bool) -> None:  # type: ignore[no-untyped-def]
    net = bench(tmp_path, network())
    full = net.build("full.onnx", per_channel=per_channel)
    fitted = net.build("fitted.onnx", per_channel=per_channel, fit_pairs=True)
    assert not audit(full.model, full.settings()).safe
    assert audit(fitted.model, fitted.settings()).safe


def test_weights_that_fit_stay_as_they_are(tmp_path: Path) -> None:
    net = bench(tmp_path, residual())
    full, fitted = weights(net.build("full.onnx")), weights(net.build("fitted.onnx", fit_pairs=True))
    assert full.keys() == fitted.keys()
    np.testing.assert_array_equal(full["w2_quantized"], fitted["w2_quantized"])  # depthwise kernels are exact
    assert not np.array_equal(full["w1_quantized"], fitted["w1_quantized"])
    assert np.abs(fitted["w3_quantized"].astype(int)).max() > 64


def test_ranges_fitted_to_samples_grow_less_and_bear_the_samples(tmp_path: Path) -> None:
    net = bench(tmp_path, residual())
    full = net.build("full.onnx")
    reach = largest_sums(full.model, full.settings(), net.samples, source_names(net.prepared.model))
    assert set(reach) == {"first", "last", "fc"}, "depthwise: its kernel is exact"
    assert max(values.max() for values in reach.values()) > 1
    scheme = Scheme(fit_pairs=True, fit_seen=True)
    seen = CpuBackend().fitting(reach).build(net.prepared, net.ranges(scheme), scheme, tmp_path / "seen.onnx")
    fitted = net.build("fitted.onnx", fit_pairs=True)
    for name, scale in weights(full).items():
        if name.startswith("w") and name.endswith("_scale"):
            assert (weights(seen)[name] >= scale * 0.9999).all()
            assert (weights(seen)[name] <= weights(fitted)[name] * 1.0001).all()
    found = audit(seen.model, seen.settings(), samples=net.samples)
    assert not found.safe
    assert found.clipped == 0
    source = onnx.load(net.prepared.path).graph.initializer
    exact = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in source}
    noise = [_noise(weights(artifact), weights(full), exact) for artifact in (full, seen, fitted)]
    assert noise[0] <= noise[1] < noise[2]


def _noise(held: dict[str, Any], full: dict[str, Any], exact: dict[str, Any]) -> float:
    """Return the power of the rounding error of two layers' weights, in steps of the full range."""
    total = 0.0
    for name in ("w1", "w3"):
        scale, step = (values[f"{name}_scale"].reshape(-1, 1, 1, 1) for values in (held, full))
        total += float((((held[f"{name}_quantized"] * scale - exact[name]) / step) ** 2).sum())
    return total


def test_fitting_to_samples_needs_fitting_of_pairs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="fit_seen needs fit_pairs"):
        bench(tmp_path, residual()).build(fit_seen=True)
