"""Test the model of a plug-in's kernels without VNNI, against the plug-in itself and against loops."""

from __future__ import annotations

import itertools

import numpy as np
import onnxruntime
import pytest
from edgeq_device.engines.catalog import describe_problem

from edgeq.emulate.kernels import compute, multiply_saturating
from edgeq.model.saturation import saturation_table
from edgeq.run.engines import Engine, load_engines
from tests.emulate.saturation.engine_layers import compare, saturating_levels
from tests.graphs import model

CASES = [
    (engine, environment)
    for engine in load_engines().values()
    if engine.int8.saturation
    for environment in saturating_levels(engine)
]


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "environment"), CASES, ids=lambda value: str(getattr(value, "name", value)))
@pytest.mark.parametrize("op", ["MatMul", "Conv"])
def test_the_kernels_of_a_plug_in_to_the_last_bit(engine: Engine, environment: dict[str, str], op: str) -> None:
    problem = describe_problem(engine, onnxruntime.__version__)
    if problem:
        pytest.skip(problem)
    assert compare(engine, environment, op, 12, plain=True) == []
    for kind in ("small", "fitted"):
        assert compare(engine, environment, op, 12, **{kind: True}) == [], "no kernel may saturate on these"


def test_pairs_of_an_odd_number_of_channels_stay_within_a_tap() -> None:
    path = saturation_table(CASES[0][0].int8.saturation).path("QLinearConv", "uint8", "int8")
    assert path is not None
    assert path.even_channels
    net = model(
        """net (uint8[1,3,2,2] x, float s, uint8 z, int8[2,3,2,2] w, int8 wz) => (uint8[1,2,1,1] y)
        { y = QLinearConv (x, s, z, w, s, wz, s, z) }"""
    )
    rng = np.random.default_rng(0)
    x = rng.choice([0, 200, 255], (1, 3, 2, 2)).astype(np.uint8)
    w = rng.choice([-127, 3, 127], (2, 3, 2, 2)).astype(np.int8)
    one, zero, none, big = np.float32(1), np.array(7, np.uint8), np.array(0, np.int8), np.float32(1024)
    found = compute(next(iter(net.graph)), [x, one, zero, w, one, none, big, zero], multiply_saturating, path)
    for channel in range(2):
        total = -7 * int(w[channel].astype(int).sum())
        for i, j in itertools.product(range(2), range(2)):
            a, b = x[0, :, i, j].astype(int), w[channel, :, i, j].astype(int)
            total += int(np.clip(a[0] * b[0] + a[1] * b[1], -32768, 32767)) + int(np.clip(a[2] * b[2], -32768, 32767))
        assert found.output[0, channel, 0, 0] == np.clip(np.rint(total / 1024) + 7, 0, 255)
