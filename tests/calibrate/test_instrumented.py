from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from edgeq.calibrate.instrumented import InstrumentedModel, without_conversions
from edgeq.errors import DataError
from edgeq.model.load import read_model

from .models import images, small_cnn

BLOCKED = "com.microsoft.nchwc"


def optimised(channels: int, reader: str = "ReorderInput") -> onnx.ModelProto:
    """conv → plain → Clip → blocked → conv, as ONNX Runtime writes it when the plain tensors are observed."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["blocked1"], domain=BLOCKED),
        helper.make_node("ReorderOutput", ["blocked1"], ["conv"], domain=BLOCKED, channels=channels),
        helper.make_node("Clip", ["conv", "low", "high"], ["clip"]),
        helper.make_node(reader, ["clip"], ["blocked2"], domain=BLOCKED if reader.startswith("Reorder") else ""),
        helper.make_node("Conv", ["blocked2", "w"], ["y"], domain=BLOCKED),
    ]
    graph = helper.make_graph(nodes, "g", [], [onnx.ValueInfoProto(name="conv"), onnx.ValueInfoProto(name="y")])
    return helper.make_model(graph)


def kinds(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def test_conversions_that_serve_only_the_observation_go() -> None:
    model = optimised(32)
    assert without_conversions(model, {"conv"}) == {"conv": "blocked1"}
    assert kinds(model) == ["Conv", "Clip", "Conv"]
    assert list(model.graph.node[1].input) == ["blocked1", "low", "high"]
    assert model.graph.node[2].input[0] == "clip"


def test_blocks_that_are_not_full_stay() -> None:
    model = optimised(24)
    assert without_conversions(model, {"conv"}) == {}
    assert kinds(model) == ["Conv", "ReorderOutput", "Clip", "ReorderInput", "Conv"]


def test_a_clip_that_a_plain_operator_reads_stays_plain() -> None:
    model = optimised(32, reader="Sigmoid")
    assert without_conversions(model, {"conv"}) == {"conv": "blocked1"}
    assert kinds(model) == ["Conv", "ReorderOutput", "Clip", "Sigmoid", "Conv"]


def test_tensors_that_are_not_wanted_are_not_touched() -> None:
    model = optimised(32, reader="Sigmoid")
    assert without_conversions(model, set()) == {}
    assert "ReorderOutput" in kinds(model)


@pytest.mark.parametrize("channels", [32, 20])
def test_values_are_those_of_the_plain_session(tmp_path: Path, channels: int) -> None:
    path = small_cnn(tmp_path / "m.onnx", channels)
    names, item = ["conv1", "clip1", "conv2", "sum", "relu", "y"], images(1)[0]
    kept = InstrumentedModel(read_model(path), path, names, keep_layout=names).run(item, "s")
    free = InstrumentedModel(read_model(path), path, names).run(item, "s")
    assert kept[0].shape == (1, channels, 12, 12)
    for a, b in zip(kept, free, strict=True):
        assert np.array_equal(np.sort(a, axis=None), np.sort(b, axis=None))


def test_a_refused_sample_is_named(tmp_path: Path) -> None:
    path = small_cnn(tmp_path / "m.onnx")
    with pytest.raises(DataError, match=r"sample cat\.jpg"):
        InstrumentedModel(read_model(path), path, ["y"]).run({"wrong": np.zeros(3)}, "cat.jpg")
