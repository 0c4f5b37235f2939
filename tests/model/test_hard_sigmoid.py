"""Test hard sigmoids in the forms that exporters write."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from edgeq.model.hard_sigmoid import write_hard_sigmoids
from tests.graphs import proto

from .build import rand, run, write

NUMBERS = {"three": [3.0], "zero": 0.0, "six": 6.0, "sixth": np.float32(1) / 6, "seven": 7.0}
CLIP = "[add] a = Add(x, three) [clip] c = Clip(a, zero, six)"


def written_out(nodes: str) -> onnx.ModelProto:
    weights = {name: np.asarray(value, np.float32) for name, value in NUMBERS.items()}
    return proto(f"g (float[N, 8] x, float[N, 8] z) => (float[] y) {{ {nodes} }}", weights)


def rewritten(given: onnx.ModelProto) -> tuple[onnx.ModelProto, int]:
    graph = ir.serde.deserialize_model(given)
    count = write_hard_sigmoids(graph)
    return ir.serde.serialize_model(graph), count


@pytest.mark.parametrize(
    ("nodes", "left"),
    [
        (f"{CLIP} y = Div(c, six)", ["HardSigmoid"]),
        (f"{CLIP} y = Mul(sixth, c)", ["HardSigmoid"]),
        (f"{CLIP} m = Mul(x, c) y = Div(m, six)", ["HardSigmoid", "Mul"]),
        (f"{CLIP} m = Mul(c, z) y = Mul(m, sixth)", ["HardSigmoid", "Mul"]),
        (f"{CLIP} d = Div(c, six) y = Mul(d, x)", ["HardSigmoid", "Mul"]),
    ],
)
def test_the_forms_of_exporters(tmp_path: Path, nodes: str, left: list[str]) -> None:
    given = written_out(nodes)
    after, count = rewritten(given)
    assert (count, [n.op_type for n in after.graph.node]) == (1, left)
    assert after.graph.node[-1].output[0] == "y"
    feeds = {"x": 4 * rand(32, 8), "z": rand(32, 8, seed=1)}
    expected = run(write(tmp_path / "before.onnx", given), feeds)[0]
    np.testing.assert_allclose(run(write(tmp_path / "after.onnx", after), feeds)[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "nodes",
    [
        f"{CLIP} y = Div(c, seven)",
        f"{CLIP} y = Div(six, c)",
        f"{CLIP} y = Mul(c, z)",
        f"{CLIP} d = Div(c, six) y = Add(d, c)",
        f"{CLIP} d = Div(c, six) y = Add(d, a)",
        "c = Clip(x, zero, six) y = Div(c, six)",
        "a = Add(x, three) c = Relu(a) y = Div(c, six)",
        "a = Add(x, z) c = Clip(a, zero, six) y = Div(c, six)",
    ],
)
def test_other_formulas_stay(nodes: str) -> None:
    given = written_out(nodes)
    after, count = rewritten(given)
    assert (count, [n.op_type for n in after.graph.node]) == (0, [n.op_type for n in given.graph.node])


def test_float64_stays() -> None:
    weights = {name: np.asarray(value, np.float64) for name, value in NUMBERS.items()}
    body = f"g (double[N, 8] x) => (double[] y) {{ {CLIP} y = Div(c, six) }}"
    assert rewritten(proto(body, weights))[1] == 0
