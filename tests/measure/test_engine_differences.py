"""Test the comparison of a Q/DQ model in an engine, tensor by tensor: it shows the layer that is wrong."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Self

import numpy as np
import onnx
import pytest

from edgeq.measure.engine_differences import EngineDifference, compare_engine
from edgeq.model.load import read_model
from edgeq.run.engines import EngineChoice, load_engines
from edgeq.run.session import SessionSettings, open_session
from tests.graphs import proto
from tests.measure.fakes import FakeSample, FakeSamples

PAIRED = """g (float[1,64] x) => (float[1,64] y) <float s = {0.02}, uint8 z = {128}> {
    xq = QuantizeLinear(x, s, z) xd = DequantizeLinear(xq, s, z)
    [first] a = Neg(xd) aq = QuantizeLinear(a, s, z) ad = DequantizeLinear(aq, s, z)
    [second] b = Tanh(ad) bq = QuantizeLinear(b, s, z) bd = DequantizeLinear(bq, s, z)
    [third] c = Abs(bd) cq = QuantizeLinear(c, s, z) cd = DequantizeLinear(cq, s, z)
    [last] d = Add(ad, cd) dq = QuantizeLinear(d, s, z) y = DequantizeLinear(dq, s, z)
}"""


class Wrong:
    """Imitate engines that compute Sin for Tanh."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def open(self, model: Path, settings: SessionSettings) -> Any:
        if settings.engine is None:
            return open_session(model, settings)
        changed = onnx.load(model)
        for node in changed.graph.node:
            node.op_type = {"Tanh": "Sin"}.get(node.op_type, node.op_type)
        onnx.save(changed, model.with_suffix(".wrong.onnx"))
        return open_session(model.with_suffix(".wrong.onnx"))


@pytest.fixture
def layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, EngineDifference]:
    monkeypatch.setattr("edgeq.measure.engine_differences.Engines", Wrong)
    onnx.save(proto(PAIRED), tmp_path / "m.onnx")
    random = np.random.default_rng(0)
    samples = FakeSamples([FakeSample(inputs={"x": random.normal(size=(1, 64)).astype(np.float32)}) for _ in range(3)])
    engine = EngineChoice(load_engines()["onnxruntime"])
    differences = compare_engine(read_model(tmp_path / "m.onnx"), samples, engine, tmp_path, limit=2)
    assert [layer.name for layer in differences] == ["x", "a", "b", "c", "d"]
    return {layer.name: layer for layer in differences}


def test_the_layer_that_parts_stands_out(layers: dict[str, EngineDifference]) -> None:
    assert layers["x"].op_type == "Input"
    assert layers["x"].sqnr_db == layers["a"].sqnr_db == math.inf
    worst = max(layers.values(), key=lambda layer: layer.lost_db)
    assert (worst.name, worst.node, worst.op_type) == ("b", "second", "Tanh")
    assert worst.inputs_db == math.inf
    assert worst.alone_db is not None
    assert worst.alone_db < 30
    assert worst.steps > 1


def test_layers_with_inherited_errors_are_right_alone(layers: dict[str, EngineDifference]) -> None:
    assert layers["c"].sqnr_db < 30
    assert layers["d"].inputs_db == layers["c"].sqnr_db
    behind = [layers[name] for name in "cd" if layers[name].alone_db is not None]
    assert all(layer.alone_db == math.inf for layer in behind)
