"""Test that 16-bit types do not round indices, large whole numbers and large angles."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from edgeq.jobs.quantize import quantize
from tests.backends.build import random
from tests.graphs import proto

BODIES = {
    "index": "a = Mul (p, sixteen) b = Add (a, three) i = Cast <to = 7> (b) e = Gather (table, i) s = Add (e, x)",
    "comparison": """q = Add (p, sixteen) d = Sub (q, limit) m = Less (d, three) u = Unsqueeze (m, two)
                     o = Neg (x) s = Where (u, x, o)""",
    "angle": "u = Unsqueeze (p, two) a = Mul (u, rates) r = Sin (a) s = Add (r, x)",
}
REASONS = {"index": "leads to an index", "comparison": "has whole numbers up to", "angle": "is an angle up to"}


@pytest.mark.parametrize("target", ["jetson-orin", "generic-x86-64"])
@pytest.mark.parametrize("kind", BODIES)
def test_exact_numbers_stay_in_float32(kind: str, target: str, tmp_path: Path) -> None:
    onnx_model = proto(
        f"""g (int64[1, 16] n, float[1, 16, 64] x) => (float[1, 16, 64] y)
            <float[5200, 64] table, float[64] rates, float[64, 64] w, int64[1] two = {{2}}, float limit = {{2600}},
             float sixteen = {{16}}, float three = {{3}}>
            {{ p = Cast <to = 1> (n) {BODIES[kind]} h = MatMul (s, w) y = Tanh (h) }}"""
    )
    generator = np.random.default_rng(0)
    weights = {"table": generator.normal(size=(5200, 64)), "w": generator.normal(0, 0.15, (64, 64))}
    weights["rates"] = np.geomspace(1, 1e-4, 64)
    onnx_model.graph.initializer.extend(numpy_helper.from_array(v.astype(np.float32), k) for k, v in weights.items())
    source = tmp_path / "m.onnx"
    onnx.save(onnx_model, source)
    low, high = (2580, 2596) if kind == "comparison" else (0, 5000) if kind == "angle" else (0, 324)
    samples = [{"n": generator.integers(low, high, (1, 16)), "x": random(1, 16, 64, seed=seed)} for seed in range(8)]
    result = quantize(source, samples, tmp_path / "q.onnx", target=target, timed=False, emulate=False)
    assert result.proof.agreement.sqnr_db > 25
    if target == "jetson-orin":
        assert any(REASONS[kind] in note for note in result.notes)


def test_small_whole_numbers_and_angles_are_in_16_bits(tmp_path: Path) -> None:
    onnx_model = proto(
        """g (int64[1, 16] n, float[1, 16, 16] x) => (float[1, 16, 16] y) <float[16, 16] w, int64[1] two = {2}>
           { p = Cast <to = 1> (n) u = Unsqueeze (p, two) r = Sin (u) s = Add (r, x) y = MatMul (s, w) }"""
    )
    onnx_model.graph.initializer.append(numpy_helper.from_array(random(16, 16), "w"))
    source = tmp_path / "m.onnx"
    onnx.save(onnx_model, source)
    samples = [{"n": np.arange(16)[None], "x": random(1, 16, 16, seed=seed)} for seed in range(4)]
    result = quantize(source, samples, tmp_path / "q.onnx", target="jetson-orin", timed=False, emulate=False)
    assert not any("stays in fp32" in note for note in result.notes)
