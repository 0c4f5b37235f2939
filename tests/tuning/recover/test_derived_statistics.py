"""Compare the statistics of models that recoveries rewrote with those of a pass over the rewritten model."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeq.calibration import rescaled
from edgeq.calibration.channel_values import ChannelValues, observe_channels
from edgeq.calibration.collect import collect
from edgeq.calibration.hazards import find_hazards
from edgeq.calibration.ranges import derive_ranges
from edgeq.calibration.rescaled import RescaledTensor, derive_statistics, rescale_statistics
from edgeq.calibration.statistics import Statistics, TensorStatistics, histogram_of, in_units
from edgeq.data.sample import Sample
from edgeq.model.prepare import PreparedModel
from edgeq.tuning.recover.methods.split_gates import VALUE
from edgeq.tuning.recover.run import Recoverer
from tests.tuning.recover.graphs import nets
from tests.tuning.recover.nets import SCHEME, FewSamples, Net, few, job_of, target, two_gates, uneven

SHAPE = [1, 3, 12, 12]
MODEL_RECOVERIES = ("cross-layer-equalization", "smoothquant", "split-gates")


def _compare(found: Statistics, prepared: PreparedModel, samples: FewSamples) -> None:
    """Compare statistics with those of a pass: extrema within 2% of the range, quantiles nearby, the same hazards."""
    wanted = collect(prepared.graph, samples, model_digest=prepared.digest)
    assert found.tensors.keys() == wanted.tensors.keys()
    assert found.complete
    assert found.model_digest == prepared.digest
    for method, options, share in (
        ("minmax", {}, 0.02),
        ("moving-average", {}, 0.02),
        ("percentile", {"percentile": 99.9}, 0.15),
    ):
        ranges = [derive_ranges(part, method, options=options) for part in (found, wanted)]
        for name, right in ranges[1].items():
            width = right.high - right.low
            assert abs(ranges[0][name].low - right.low) <= share * width, (method, name)
            assert abs(ranges[0][name].high - right.high) <= share * width, (method, name)
    assert dict(prepared.hazards) == dict(find_hazards(prepared.graph, wanted))


@given(nets(chain=("layer", "silu", "layer", "relu", "layer")), st.integers(1, 40))
@settings(max_examples=25)
def test_statistics_of_rewritten_graphs_are_those_of_a_pass(drawn: Any, count: int) -> None:
    model, feed = drawn
    random = np.random.default_rng(count)
    inputs = [random.normal(0, 1, feed["x"].shape).astype(np.float32) for _ in range(count)]
    samples = FewSamples(tuple(Sample(f"s{i}", {"x": values}) for i, values in enumerate(inputs)))
    with tempfile.TemporaryDirectory() as folder:
        job = job_of(model, Path(folder), samples)
        state = Recoverer(job, target(), Path(folder)).ranged(SCHEME, MODEL_RECOVERIES)
        if state.prepared.digest != job.prepared.digest:
            assert state.statistics is not None
            _compare(state.statistics, state.prepared, samples)


def _equalizable(clip: bool) -> Any:
    net = Net()
    source = net.conv("x", "first", 3, 8, channels=uneven(8))
    if clip:
        source = net.node("Clip", [source, net.constant("low", 0.0), net.constant("high", 6.0)], "act")
    else:
        source = net.node("MaxPool", [net.node("Relu", [source], "act")], "pool", kernel_shape=[2, 2])
    net.conv(net.silu(net.conv(source, "second", 8, 8, channels=uneven(8)), "gated"), "last", 8, 4, 1)
    return net.model({"x": SHAPE}, ["last_out"])


@pytest.mark.parametrize("model", [two_gates(uneven), _equalizable(False), _equalizable(True)])
def test_no_pass_observes_all_tensors_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    samples = few(40, SHAPE)
    job = job_of(model, tmp_path, samples)
    monkeypatch.setattr(rescaled, "collect", None)
    state = Recoverer(job, target(), tmp_path).ranged(SCHEME, MODEL_RECOVERIES)
    assert "split-gates" in " ".join(state.notes)
    assert state.prepared.digest != job.prepared.digest
    assert state.statistics is not None
    _compare(state.statistics, state.prepared, samples)


@pytest.mark.parametrize("samples", [few(40, SHAPE), few(3, SHAPE)])
def test_a_pass_observes_tensors_of_unknown_relation_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samples: FewSamples
) -> None:
    job = job_of(two_gates(uneven), tmp_path, samples)
    split = Recoverer(job, target(), tmp_path).ranged(SCHEME, ("split-gates",)).prepared
    observed: list[str] = []

    def record(model: Any, samples: Any, names: Sequence[str], **options: Any) -> Statistics:
        observed.extend(names)
        return collect(model, samples, names, **options)

    monkeypatch.setattr(rescaled, "collect", record)
    assert job.statistics is not None
    found = derive_statistics(job.statistics, job.prepared, split, None, samples)
    second = {name for name in found.tensors if name.endswith(VALUE)}
    assert second
    assert second < set(observed) < set(found.tensors)
    wanted = collect(split.graph, samples)
    assert {n: found.tensors[n] for n in observed} == {n: wanted.tensors[n] for n in observed}
    _compare(found, split, samples)


def test_a_relu_that_was_zero_in_the_compared_samples_is_scaled_too(tmp_path: Path) -> None:
    """Only a few samples are compared, and a ReLU of a scaled tensor may be zero in all of them."""
    weight = np.diag([1.0, 1.0]).astype(np.float32)

    def prepared(factor: float) -> Any:
        net = Net()
        scaled = net.node("MatMul", ["x", net.constant("w", weight * np.float32([factor, 1.0]))], "scaled")
        net.node(
            "MatMul",
            [net.node("Relu", [scaled], "act"), net.constant("w2", weight / np.float32([[factor], [1.0]]))],
            "y",
        )
        folder = tmp_path / str(factor)
        folder.mkdir()
        return job_of(net.model({"x": [1, 2]}, ["y"]), folder, samples)

    values = [np.full((1, 2), 1.0 if i == 1 else -1.0, np.float32) for i in range(40)]
    samples = FewSamples(tuple(Sample(f"s{i}", {"x": value}) for i, value in enumerate(values)))
    before, after = prepared(1.0), prepared(4.0)
    assert before.statistics is not None
    derived = derive_statistics(before.statistics, before.prepared, after.prepared, None, samples)
    assert derived.tensors["act"].maximum == 4.0


def _statistics_of(parts: Sequence[np.ndarray]) -> TensorStatistics:
    """Return the statistics of a tensor with one part per sample."""
    every = np.concatenate([part.ravel() for part in parts])
    sums = (sum(in_units(float(end(part))) for part in parts) for end in (np.min, np.max))
    return TensorStatistics(
        "float32",
        len(parts),
        len(parts),
        every.size,
        float(every.min()),
        float(every.max()),
        *sums,
        histogram_of(every),
    )


@given(st.integers(0, 10**6), st.integers(1, 60), st.integers(1, 12), st.integers(1, 400))
def test_rescaled_statistics_are_those_of_the_scaled_values(
    seed: int, samples: int, channels: int, positions: int
) -> None:
    random = np.random.default_rng(seed)
    parts = list(random.normal(0, 1, (samples, 1, channels, positions)).astype(np.float32))
    factor = 2.0 ** random.integers(-4, 5, channels)  # exact, so that both sides round alike
    values = ChannelValues(
        np.stack([part[0].min(1) for part in parts]),
        np.stack([part[0].max(1) for part in parts]),
        np.concatenate([part[0].T for part in parts[:16]]),
        np.concatenate([(part[0] == part[0].min(1, keepdims=True)).T for part in parts[:16]])
        | np.concatenate([(part[0] == part[0].max(1, keepdims=True)).T for part in parts[:16]]),
    )
    found = rescale_statistics(_statistics_of(parts), RescaledTensor("x", values, factor))
    wanted = _statistics_of([part / factor.astype(np.float32)[:, None] for part in parts])
    for name in ("samples", "nonempty", "count", "minimum", "maximum", "minimum_sum", "maximum_sum"):
        assert getattr(found, name) == getattr(wanted, name), name
    if samples <= 16:
        assert found.histogram == wanted.histogram
    assert found.histogram.total == found.count or positions <= 2


def test_drawn_values_and_extrema_are_those_of_the_tensors(tmp_path: Path) -> None:
    samples = few(40, SHAPE)
    prepared = job_of(two_gates(), tmp_path, samples).prepared
    values = observe_channels(prepared, {"x": 1}, samples)["x"]
    every = np.stack([sample.inputs["x"][0].reshape(3, -1) for sample in samples])
    np.testing.assert_array_equal(values.minima, every.min(2))
    np.testing.assert_array_equal(values.maxima, every.max(2))
    for channel in range(3):
        assert np.isin(values.rows[:, channel], every[:, channel]).all()
        extremes = np.concatenate([values.minima[:, channel], values.maxima[:, channel]])
        np.testing.assert_array_equal(values.is_extreme[:, channel], np.isin(values.rows[:, channel], extremes))
