"""Test which products of a 4-bit model get 8 bits first."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import numpy_helper

from edgeq.model.load import read_model
from edgeq.quantization.weight_only import write_weight_only
from edgeq.scheme import Scheme
from edgeq.tuning.ranking import rank_products
from tests.backends.networks import prepared
from tests.graphs import proto
from tests.measure.fakes import FakeSample, FakeSamples

NET = """g (float[1,32] x) => (float[1,64] y) <float[32,32] even, float[32,32] uneven, float[32,64] last> {
    [calm] a = MatMul(x, even) [wild] b = MatMul(a, uneven) [head] y = MatMul(b, last)
}"""
X = np.random.default_rng(0).normal(size=(1, 32)).astype(np.float32)


def test_the_noisiest_for_each_byte_come_first(tmp_path: Path) -> None:
    model = proto(NET)
    random = np.random.default_rng(0)
    held = {
        "even": np.sign(random.normal(size=(32, 32))),  # has two values, which 4 bits represent exactly
        "uneven": random.standard_t(2, (32, 32)),
        "last": random.uniform(-1, 1, (32, 64)),
    }
    model.graph.initializer.extend(numpy_helper.from_array(a.astype(np.float32), name) for name, a in held.items())
    ready = prepared(model, tmp_path)
    write_weight_only(ready, Scheme(mode="weight-only", weight_bits=4, weight_symmetric=False), tmp_path / "q.onnx")
    samples = FakeSamples([FakeSample("x", {"x": X})])
    ranking = rank_products(ready.model, read_model(tmp_path / "q.onnx"), samples)
    assert [layer.name for layer in ranking.layers] == ["wild", "head", "calm"]
    assert ranking.field == "eight_bit"
    assert ranking.costs.span == (32 * 32 + 32 * 32 + 32 * 64) // 2
