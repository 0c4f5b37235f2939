"""Test `edgeq.tuning.recover.expansion`: integer operators that are written out give the same outputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from edgeq.data.sample import Sample
from edgeq.errors import ModelError
from edgeq.model.graph import GraphIndex
from edgeq.model.load import read_model
from edgeq.tuning.recover.expansion import PLAIN, expand_integers
from edgeq.tuning.recover.run import Recoverer
from tests.graphs import model as text_model
from tests.tuning.recover.graphs import nets
from tests.tuning.recover.nets import SCHEME, FewSamples, Net, few, job_of, run, target

pytestmark = pytest.mark.usefixtures("exact_kernels")


def _same(path: Path, feed: dict[str, np.ndarray]) -> set[str]:
    model = read_model(path)
    plain = expand_integers(model)
    assert not {n.op_type for n in plain.graph} & {"QLinearConv", "QLinearMatMul", "QGemm"}
    for a, b in zip(run(model, feed, optimization="none"), run(plain, feed, optimization="none"), strict=True):
        # Integer and float sums may be rounded to different sides of a half.
        step = np.abs(a).max() / 100
        assert np.mean(np.abs(a - b) > 1e-5 + 1e-6 * step) < 0.03
        np.testing.assert_allclose(a, b, atol=4 * step)
    return {n.op_type for n in model.graph}


@pytest.mark.usefixtures("only_exact_kernels")
@given(drawn=nets(chain=("layer", "layer")))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_networks(tmp_path_factory: pytest.TempPathFactory, drawn: tuple) -> None:
    model, feed = drawn
    folder = tmp_path_factory.mktemp("expand")
    job = job_of(model, folder, FewSamples((Sample("s", feed),)), prepare=True)
    scheme = SCHEME.replace(format="QOperator")
    try:
        state = Recoverer(job, target(), folder).state(scheme, [], folder / "q.onnx")
    except ModelError:
        return  # nothing in this model can be quantized
    assert state.artifact is not None
    _same(state.artifact.model, feed)


@pytest.mark.parametrize("per_channel", [False, True])
def test_all_three_forms(tmp_path: Path, per_channel: bool) -> None:
    net = Net()
    net.conv("x", "c", 3, 4, 3, channels=[0.1, 1.0, 5.0, 20.0])
    net.node("GlobalAveragePool", ["c_out"], "p")
    net.node("Flatten", ["p"], "f")
    weight = net.random.normal(size=(6, 4)) * np.array([[0.1], [1], [2], [10], [0.3], [1]])
    net.node("Gemm", ["f", net.constant("w", weight), net.constant("b", np.ones(6))], "g", transB=1)
    net.node("Gemm", ["g", net.constant("v", weight)], "h")
    net.node("MatMul", ["h", net.constant("m", weight.T)], "y")
    model = net.model({"x": [1, 3, 6, 6]}, ["y"])
    samples = few(4, [1, 3, 6, 6])
    state = Recoverer(job_of(model, tmp_path, samples), target(), tmp_path).state(
        SCHEME.replace(format="QOperator", per_channel=per_channel), [], tmp_path / "q.onnx"
    )
    assert state.artifact is not None
    found = _same(state.artifact.model, dict(samples.samples[0].inputs))
    assert found >= {"QLinearConv", "QGemm", "QLinearMatMul"}


def test_batched_weights_have_their_channels_last() -> None:
    weights = np.arange(24).reshape(2, 4, 3)
    model = text_model(f"""
    net (uint8[2,5,4] x) => (uint8[2,5,3] y)
    <float xs = {{0.1}}, uint8 xz = {{3}}, int8[2,4,3] w = {{{", ".join(map(str, weights.ravel()))}}},
     float[3] ws = {{0.1, 0.2, 0.4}}, int8[3] wz = {{0, 0, 0}}, float ys = {{0.5}}, uint8 yz = {{10}}>
    {{ [m] y = QLinearMatMul (x, xs, xz, w, ws, wz, ys, yz) }}""")
    x = np.random.default_rng(0).integers(0, 9, (2, 5, 4)).astype(np.uint8)
    made = expand_integers(model)
    (value,) = run(made, {"x": x}, optimization="none")
    exact = ((x.astype(np.float64) - 3) * 0.1) @ (weights * np.array([0.1, 0.2, 0.4]))
    wanted = np.clip(np.rint(exact / 0.5) + 10, 0, 255)
    assert np.abs(value - wanted).max() <= 1
    assert "y" + PLAIN in GraphIndex(made).values


def test_bias_counts_in_the_unit_of_a_scaled_product() -> None:
    """A QGemm with alpha is written out as ONNX Runtime computes it: the bias is added before the scaling."""
    model = text_model("""
    net (uint8[1,2] a) => (float[1,2] y)
    <float as = {0.1}, uint8 az = {0}, int8[2,2] b = {1, 0, 0, 1}, float bs = {0.5}, int8 bz = {0},
     int32[2] c = {100, -50}>
    { [gemm] y = com.microsoft.QGemm <alpha = 2.0> (a, as, az, b, bs, bz, c) }""")
    feed = {"a": np.array([[10, 20]], np.uint8)}
    (wanted,) = run(model, feed)
    np.testing.assert_allclose(run(expand_integers(model), feed)[0], wanted, rtol=1e-6)
