from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
import pytest

from edgeq.calibration.methods import mse
from edgeq.calibration.methods.entropy import FLOOR, divergences, entropy_range, windows
from edgeq.calibration.methods.mse import moments_of, mse_range, squared_errors
from edgeq.calibration.methods.percentile import percentile_range
from edgeq.calibration.observer import Observer
from edgeq.calibration.ranges import Range, derive_ranges
from edgeq.calibration.statistics import BINS, Linear, Statistics, TensorStatistics, histogram_of, linear_of
from edgeq.errors import CalibrationError, UsageError
from edgeq.model.quant_params import Grid, grid_of

_RANDOM = np.random.default_rng(3)
DATA = {
    "normal": _RANDOM.normal(size=20_000),
    "heavy": _RANDOM.standard_t(2, size=20_000),
    "one-sided": np.abs(_RANDOM.normal(size=20_000)) * 40,
    "relu": np.maximum(_RANDOM.normal(size=20_000), 0),
    "bimodal": np.concatenate([_RANDOM.normal(-5, 0.1, 9000), _RANDOM.normal(0.3, 0.01, 11000)]),
    "negative": -_RANDOM.exponential(3, 5000) - 0.1,
    "constant": np.full(100, 2.75),
    "zeros": np.zeros(50),
    "one": np.array([-1e-30]),
    "lopsided": np.concatenate([_RANDOM.exponential(1, 9000) - 0.28, [30.0]]),
}
VALUES = {name: values.astype(np.float32) for name, values in DATA.items()}


def statistics_of(**tensors: np.ndarray) -> Statistics:
    done = {}
    for name, values in tensors.items():
        running = Observer(TensorStatistics())
        running.observe(values)
        done[name] = running.freeze()
    return Statistics("m", "d", 1, done)


EVERYTHING = statistics_of(**VALUES)


@pytest.mark.parametrize("method", ["minmax", "moving-average", "percentile", "entropy", "mse"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_zero_is_inside_and_ranges_stay_in_the_data(method: str, symmetric: bool) -> None:
    for name, span in derive_ranges(EVERYTHING, method, symmetric=symmetric).items():
        values = VALUES[name]
        assert span.low <= 0 <= span.high
        assert span.bound <= np.abs(values).max()
        if symmetric:
            assert span.low == -span.high
        else:
            assert span.low >= min(values.min(), 0)
            assert span.high <= max(values.max(), 0)


def test_minmax_is_exact() -> None:
    for name, span in derive_ranges(EVERYTHING).items():
        assert span == Range(float(min(VALUES[name].min(), 0)), float(max(VALUES[name].max(), 0)))


def test_moving_average_is_the_mean_over_samples() -> None:
    running = Observer(TensorStatistics())
    for values in ([-1.0, 5.0], [-3.0, 6.0], []):
        running.observe(np.float32(values))
    statistics = Statistics("m", "d", 3, {"t": running.freeze()})
    assert derive_ranges(statistics, "moving-average")["t"] == Range(-2.0, 5.5)


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("percentile", [50.0, 90.0, 99.0, 99.9, 99.99, 99.999, 100.0])
def test_percentiles_are_within_one_bin_of_the_order_statistics(name: str, percentile: float) -> None:
    values = VALUES[name]
    low, high = percentile_range(histogram_of(values), percentile, symmetric=False)
    cut = (100.0 - percentile) / 200.0
    exact_low = np.quantile(values.astype(np.float64), cut, method="inverted_cdf")
    exact_high = np.quantile(values.astype(np.float64), 1.0 - cut, method="inverted_cdf")
    _, bound = percentile_range(histogram_of(values), percentile, symmetric=True)
    exact_bound = np.quantile(np.abs(values).astype(np.float64), percentile / 100, method="inverted_cdf")
    for got, exact in ((low, exact_low), (high, exact_high), (bound, exact_bound)):
        assert abs(got - exact) <= abs(exact) / 1024 + 2.0**-136
    assert low <= exact_low
    assert high >= exact_high
    assert bound >= exact_bound


@pytest.mark.parametrize("percentile", [0.0, -1.0, 100.1, math.nan])
def test_a_percentile_that_makes_no_sense(percentile: float) -> None:
    with pytest.raises(UsageError):
        derive_ranges(EVERYTHING, "percentile", options={"percentile": percentile})


@pytest.mark.parametrize("name", VALUES)
def test_linear_bins_hold_the_same_values(name: str) -> None:
    values = VALUES[name][VALUES[name] != 0].astype(np.float64)
    linear = linear_of(histogram_of(VALUES[name]))
    assert linear.counts.sum() == values.size
    if not values.size:
        return
    assert math.log2(linear.width).is_integer()
    used = np.flatnonzero(linear.counts)
    reach = max(BINS - used[0], used[-1] + 1 - BINS)
    assert 2048 < reach <= BINS
    exact = np.bincount((np.floor(values / linear.width).astype(int) + BINS).clip(0, 2 * BINS - 1), minlength=2 * BINS)
    inside = np.abs(np.arange(2 * BINS) - BINS + 0.5) < BINS / 2
    # Below the top octave, bins are nested. But a negative value on an edge belongs to the bin farther from zero.
    edges = np.abs(values / linear.width) % 1 == 0
    assert np.abs(linear.counts - exact)[inside].sum() <= 2 * edges.sum()


def plain_divergence(counts: np.ndarray, start: int, stop: int, levels: int) -> float:
    """Return D(P‖Q) of one window, computed as the method is described, level by level."""
    inside = counts[start:stop]
    p = inside.copy()
    p[0] += counts[:start].sum()
    p[-1] += counts[stop:].sum()
    q = np.zeros_like(inside)
    for level in range(levels):
        begin, end = (level * inside.size) // levels, ((level + 1) * inside.size) // levels
        filled = p[begin:end] > 0
        if filled.any():
            q[begin:end][filled] = max(inside[begin:end].sum(), FLOOR) / filled.sum()
    p, q = p / counts.sum(), q / max(inside.sum(), FLOOR)
    return float(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0))


@pytest.mark.parametrize(
    "name", ["normal", "heavy", "one-sided", "relu", "bimodal", "negative", "constant", "lopsided"]
)
@pytest.mark.parametrize(("levels", "symmetric"), [(256, False), (255, True)])
def test_entropy_equals_the_plain_reference(name: str, levels: int, symmetric: bool) -> None:
    linear = linear_of(histogram_of(VALUES[name]))
    start, stop = windows(linear.counts, levels, symmetric=symmetric)
    fast = divergences(linear.counts, start, stop, levels)
    held = [linear.counts[a:b].sum() >= 0.5 * linear.counts.sum() for a, b in zip(start, stop, strict=True)]
    best = int(np.argmin(np.where(held, fast, np.inf)))
    for i in {0, best, *range(0, start.size, 16)}:
        plain = plain_divergence(linear.counts, int(start[i]), int(stop[i]), levels)
        assert fast[i] == pytest.approx(plain, rel=1e-9, abs=1e-11)
    low, high = entropy_range(linear, levels=levels, symmetric=symmetric)
    assert (low, high) == ((start[best] - BINS) * linear.width, (stop[best] - BINS) * linear.width)


@pytest.mark.parametrize(("least", "symmetric"), [(0.5, True), (0.1, True), (0.1, False), (0.9, False)])
def test_entropy_of_data_away_from_zero_does_not_clip_all_of_it(least: float, symmetric: bool) -> None:
    """The entropy method does not choose a window without data, although such a window has no divergence."""
    values = np.random.default_rng(0).uniform(least, 1, 10000).astype(np.float32)
    for sign in (1, -1):
        span = derive_ranges(
            statistics_of(t=sign * values),
            "entropy",
            activation_type="int8" if symmetric else "uint8",
            symmetric=symmetric,
        )["t"]
        assert 0.8 < span.bound <= 1


def test_entropy_cuts_outliers_that_minmax_keeps() -> None:
    span = derive_ranges(EVERYTHING, "entropy")["heavy"]
    assert 3 < span.bound < 0.5 * float(np.abs(VALUES["heavy"]).max())


def plain_error(linear: Linear, low: float, high: float, grid: Grid) -> float:
    """Quantize every bin's centre as ONNX's QuantizeLinear does, dequantize, and sum the squared errors."""
    x = linear.centres()
    least, most = (-127, 127) if grid.dtype is ir.DataType.INT8 else (0, 255)
    if grid.symmetric:
        scale, zero = 2 * high / (most - least), np.rint((least + most) / 2)
    else:
        scale = (high - low) / (most - least)
        zero = np.clip(np.rint(least - low / scale), least, most)
    q = np.clip(np.rint(x / scale) + zero, least, most)
    return float((linear.counts * (x - (q - zero) * scale) ** 2).sum())


GRIDS = [grid_of("uint8", False), grid_of("int8", True), grid_of("uint8", True)]


@pytest.mark.parametrize("name", ["normal", "heavy", "one-sided", "bimodal", "negative", "constant", "lopsided"])
@pytest.mark.parametrize("grid", GRIDS)
def test_mse_equals_the_plain_reference(name: str, grid: Grid) -> None:
    linear, values = linear_of(histogram_of(VALUES[name])), VALUES[name]
    low, high = min(float(values.min()), 0.0), max(float(values.max()), 0.0)
    if grid.symmetric:
        high = max(-low, high)
        low = -high
    shares = _RANDOM.uniform(0.05, 1, (50, 2))
    lows, highs = low * shares[:, 0], high * shares[:, 0 if grid.symmetric else 1]
    fast = squared_errors(moments_of(linear), grid.params(lows, highs))
    plain = np.array([plain_error(linear, a, b, grid) for a, b in zip(lows, highs, strict=True)])
    np.testing.assert_allclose(fast, plain, rtol=1e-6, atol=1e-9 * plain.max())
    best = plain_error(linear, *mse_range(linear, float(values.min()), float(values.max()), grid), grid)
    whole = plain_error(linear, low, high, grid)
    assert best <= min(plain.min(), whole) * 1.005


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("grid", GRIDS)
def test_mse_leaves_out_no_range_that_would_win(name: str, grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    values = VALUES[name]
    linear, ends = linear_of(histogram_of(values)), (float(values.min()), float(values.max()))
    found = mse_range(linear, *ends, grid)
    monkeypatch.setattr(mse, "PRELIMINARY", 1000)
    assert found == mse_range(linear, *ends, grid)


@pytest.mark.parametrize("name", ["normal", "heavy", "lopsided"])
def test_mse_finds_about_the_best_that_a_dense_search_of_the_data_finds(name: str) -> None:
    values = VALUES[name].astype(np.float64)

    def error(bound: float) -> float:
        scale = bound / 127
        return float(((values - np.clip(np.rint(values / scale), -127, 127) * scale) ** 2).mean())

    span = derive_ranges(statistics_of(t=VALUES[name]), "mse", activation_type="int8", symmetric=True)["t"]
    top = float(np.abs(values).max())
    assert error(span.bound) <= 1.02 * min(error(top * share) for share in np.geomspace(0.01, 1, 300))


def test_ranges_scale_with_the_data() -> None:
    for method in ("percentile", "entropy", "mse"):
        base = derive_ranges(statistics_of(t=VALUES["heavy"]), method)["t"]
        scaled = derive_ranges(statistics_of(t=VALUES["heavy"] * np.float32(2**30)), method)["t"]
        assert scaled == Range(base.low * 2**30, base.high * 2**30)


def test_a_tensor_without_elements_has_an_empty_range() -> None:
    empty = statistics_of(t=np.zeros((0, 3), np.float32))
    for method in ("minmax", "moving-average", "percentile", "entropy", "mse"):
        assert derive_ranges(empty, method) == {"t": Range(0.0, 0.0)}


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("magic", {}, "unknown calibration method 'magic'. Known: entropy, minmax"),
        ("minmx", {}, "Did you mean minmax?"),
        ("minmax", {"percentile": 99}, "no option"),
        ("entropy", {"bins": 128}, "no option"),
    ],
)
def test_unknown_methods_and_options_are_named(method: str, options: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        derive_ranges(EVERYTHING, method, options=options)


def test_unfinished_tensors_are_refused() -> None:
    mixed = {"a": EVERYTHING.tensors["normal"], "b": TensorStatistics()}
    with pytest.raises(CalibrationError, match="'a' are unfinished"):
        derive_ranges(Statistics("m", "d", 0, mixed, 5))
