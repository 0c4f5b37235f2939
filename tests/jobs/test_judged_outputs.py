"""Test that a job judges and repairs the part of an output that matters, on models of a few layers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from edgeq_device.bundle.package import open_bundle
from numpy.typing import NDArray

from edgeq.jobs.package import package
from edgeq.jobs.quantize import Quantized, quantize
from tests.graphs import proto

Feeds = dict[str, NDArray[np.generic]]
RNG = np.random.default_rng(35)


def normal(*shape: int, scale: float = 1.0) -> NDArray[np.float32]:
    return RNG.normal(0, scale, shape).astype(np.float32)


def quantized(folder: Path, body: str, weights: Feeds, calibration: Feeds, target: str = "auto") -> Quantized:
    onnx.save(proto(body, weights), folder / "m.onnx")
    np.savez(folder / "c.npz", **calibration)
    return quantize(
        folder / "m.onnx",
        data=folder / "c.npz",
        output=folder / "q.onnx",
        target=target,
        timed=False,
        emulate=False,
    )


def answers(path: Path, samples: Feeds) -> NDArray[np.float64]:
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    count = len(next(iter(samples.values())))
    return np.concatenate(
        [session.run(None, {name: array[k] for name, array in samples.items()})[0] for k in range(count)]
    ).astype(np.float64)


def level(reference: NDArray[np.float64], candidate: NDArray[np.float64]) -> float:
    return float(10 * np.log10((reference**2).sum() / ((reference - candidate) ** 2).sum()))


POLICY = """m (float[1, 24] obs, bool[1, 40] legal) => (float[1, 40] q) {
  a = Gemm (obs, w1, b1)
  r = Relu (a)
  s = Gemm (r, w2, b2)
  q = Where (legal, s, far) }"""


@pytest.mark.parametrize("far", [-1e8, -1e4, float(np.finfo(np.float32).min), -np.inf])
def test_masked_scores_are_judged_without_the_mask(tmp_path: Path, far: float) -> None:
    units = np.tile(np.array([2e4, 300, 1, 1, 0.02, 0.02], np.float32), 4)
    weights = {"w1": normal(24, 64, scale=0.2) / units[:, None], "b1": normal(64, scale=0.1),
               "w2": normal(64, 40, scale=0.125), "b2": np.zeros(40, np.float32), "far": np.float32(far)}  # fmt: skip
    samples: Feeds = {"obs": normal(60, 1, 24) * units, "legal": RNG.random((60, 1, 40)) > 0.3}
    (output,) = quantized(tmp_path, POLICY, weights, samples).proof.agreement.outputs
    reference, candidate = (answers(tmp_path / name, samples) for name in ("m.onnx", "q.onnx"))
    legal = samples["legal"][:, 0].astype(bool)
    assert output.sqnr_db == pytest.approx(level(reference[legal], candidate[legal]), abs=3)
    assert level(reference[legal], candidate[legal]) > 20
    assert output.nothing


KELVIN = """m (float[1, 3, 12, 12] x) => (float[1, 1, 12, 12] y) {
  a = Conv <pads = [1, 1, 1, 1]> (x, w1)
  b = Relu (a)
  c = Conv <pads = [1, 1, 1, 1]> (b, w2)
  d = Relu (c)
  y = Conv <pads = [1, 1, 1, 1]> (d, w3, offset) }"""


def test_a_temperature_keeps_its_variation(tmp_path: Path) -> None:
    weights: Feeds = {"w1": normal(16, 3, 3, 3, scale=0.3), "w2": normal(16, 16, 3, 3, scale=0.13),
                      "w3": normal(1, 16, 3, 3, scale=0.05), "offset": np.array([300], np.float32)}  # fmt: skip
    samples: Feeds = {"x": normal(32, 1, 3, 12, 12)}
    found = quantized(tmp_path, KELVIN, weights, samples)
    reference, candidate = (answers(tmp_path / name, samples) for name in ("m.onnx", "q.onnx"))
    mean = reference.mean()
    assert level(reference - mean, candidate - mean) > 20
    whole = level(reference, candidate)
    assert found.proof.agreement.sqnr_db == pytest.approx(whole, abs=0.5)
    assert found.proof.agreement.least_db < whole - 20, "300 K are not part of the level that decides"
    assert found.proof.coverage.int8_mac_share is not None
    assert found.proof.coverage.int8_mac_share > 0.8


def test_the_self_test_of_a_temperature_is_strict(tmp_path: Path) -> None:
    weights: Feeds = {"w1": normal(16, 3, 3, 3, scale=0.3), "w2": normal(16, 16, 3, 3, scale=0.13),
                      "w3": normal(1, 16, 3, 3, scale=0.05), "offset": np.array([300], np.float32)}  # fmt: skip
    onnx.save(proto(KELVIN, weights), tmp_path / "m.onnx")
    np.savez(tmp_path / "c.npz", x=normal(32, 1, 3, 12, 12))
    package(tmp_path / "m.onnx", data=tmp_path / "c.npz", output=tmp_path / "dist", timed=False, emulate=False)
    with open_bundle(tmp_path / "dist") as bundle:
        (variant, *_) = bundle.components["model"]
    assert variant.tolerance["y"] < 0.5, "2.5 % of 300 K would allow 7.5 K"


LABELS = """m (float[1, 20] x) => (float[1, 14] p) {
  a = Gemm (x, w1, b1)
  b = Relu (a)
  c = Gemm (b, w2, bias)
  p = Sigmoid (c) }"""


@pytest.mark.usefixtures("exact_kernels")
def test_rare_labels_keep_their_own_figures(tmp_path: Path) -> None:
    weights: Feeds = {"w1": normal(20, 64, scale=0.22), "b1": normal(64, scale=0.1),
                      "w2": normal(64, 14, scale=0.2), "bias": np.linspace(0, -7, 14, dtype=np.float32)}  # fmt: skip
    samples: Feeds = {"x": normal(48, 1, 20)}
    found = quantized(tmp_path, LABELS, weights, samples)
    reference, candidate = (answers(tmp_path / name, samples) for name in ("m.onnx", "q.onnx"))
    figures = [level(reference[:, k], candidate[:, k]) for k in range(14)]
    assert min(figures) > 15
    assert found.proof.agreement.sqnr_db == pytest.approx(min(figures), abs=0.5), "the figure is the worst label's"


LANDMARKS = """m (float[1, 3, 16, 16] x) => (float[1, 61] y) {
  a = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (x, w1)
  b = Relu (a)
  g = GlobalAveragePool (b)
  f = Flatten (g)
  y = Gemm <transB = 1> (f, w2, bias) }"""


def test_a_presence_beside_landmarks_survives_on_arm(tmp_path: Path) -> None:
    weights: Feeds = {"w1": normal(32, 3, 3, 3, scale=0.3),
                      "w2": np.concatenate([normal(60, 32, scale=60), normal(1, 32, scale=0.3)]),
                      "bias": np.r_[np.full(60, 96), 0].astype(np.float32)}  # fmt: skip
    samples: Feeds = {"x": normal(32, 1, 3, 16, 16) * RNG.uniform(0.2, 2, (32, 1, 1, 1, 1)).astype(np.float32)}
    found = quantized(tmp_path, LANDMARKS, weights, samples, "raspberry-pi-5")
    reference, candidate = (answers(tmp_path / name, samples) for name in ("m.onnx", "q.onnx"))
    assert level(reference[:, 60], candidate[:, 60]) > 20
    assert found.proof.repair is None or len(found.proof.repair.steps) <= 2


RANKED = """m (float[1, 3, 32, 32] x) => (float[1, 10, 6] y) {
  a = Conv <pads = [1, 1, 1, 1], strides = [4, 4]> (x, w1)
  b = Relu (a)
  h = Conv (b, w2, bias)
  r = Reshape (h, flat)
  box, logit = Split <axis = 1> (r, parts)
  size = Softplus (box)
  lt, rb = Split <axis = 1> (size, halves)
  low = Sub (grid, lt)
  high = Add (grid, rb)
  corners = Concat <axis = 1> (low, high)
  scores = Sigmoid (logit)
  bt = Transpose <perm = [0, 2, 1]> (corners)
  best = ReduceMax <axes = [1], keepdims = 0> (scores)
  v, i = TopK <axis = 1> (best, k)
  e = Unsqueeze (i, last)
  t = Tile (e, four)
  rows = GatherElements <axis = 1> (bt, t)
  st = Transpose <perm = [0, 2, 1]> (scores)
  class = ArgMax <axis = 2, keepdims = 0> (st)
  own = GatherElements <axis = 1> (class, i)
  label = Cast <to = 1> (own)
  lu = Unsqueeze (label, last)
  vu = Unsqueeze (v, last)
  y = Concat <axis = 2> (rows, vu, lu) }"""


def test_int8_is_not_given_up_for_an_order(tmp_path: Path) -> None:
    across, down = np.meshgrid(np.arange(8), np.arange(8))
    weights: Feeds = {
        "w1": normal(32, 3, 3, 3, scale=0.3),
        "w2": normal(9, 32, 1, 1, scale=0.3),
        "bias": np.r_[np.ones(4), np.full(5, -2)].astype(np.float32),
        "flat": np.array([1, 9, 64]),
        "parts": np.array([4, 5]),
        "halves": np.array([2, 2]),
        "grid": np.stack([across, down]).reshape(1, 2, 64).astype(np.float32) + np.float32(0.5),
        "k": np.array([10]),
        "last": np.array([2]),
        "four": np.array([1, 1, 4]),
    }
    y, x = np.mgrid[0:32, 0:32] / 32.0
    waves = np.sin(RNG.normal(0, 6, (24, 1, 3, 1, 1)) * x + RNG.normal(0, 6, (24, 1, 3, 1, 1)) * y)
    found = quantized(tmp_path, RANKED, weights, {"x": waves.astype(np.float32)})
    (output,) = found.proof.agreement.outputs
    assert output.rows_found is not None
    assert output.rows_found > 0.85
    assert found.proof.coverage.int8_mac_share is not None
    assert found.proof.coverage.int8_mac_share > 0.8
    assert "no fixed place" in output.basis_note
