from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from edgeq.calibration.instrumented import InstrumentedModel
from edgeq.calibration.layout import without_conversions
from edgeq.errors import DataError
from edgeq.model.convert import to_proto
from edgeq.model.load import read_model
from tests.graphs import model

from .models import images, small_cnn


def optimised(channels: int, reader: str = "com.microsoft.nchwc.ReorderInput") -> onnx.GraphProto:
    """Return conv → plain → Clip → blocked → conv, as ONNX Runtime writes it when the plain tensors are observed."""
    written = model(
        f"""g (float x, float w, float low, float high) => (float conv, float y) {{
            blocked1 = com.microsoft.nchwc.Conv (x, w)
            conv = com.microsoft.nchwc.ReorderOutput <channels = {channels}> (blocked1)
            clip = Clip (conv, low, high)
            blocked2 = {reader} (clip)
            y = com.microsoft.nchwc.Conv (blocked2, w)
        }}""",
        imports=', "com.microsoft.nchwc": 1',
    )
    return to_proto(written).graph


def kinds(graph: onnx.GraphProto) -> list[str]:
    return [node.op_type for node in graph.node]


def test_conversions_that_serve_only_the_observation_go() -> None:
    graph = optimised(32)
    assert without_conversions(graph, ["conv", "y"]) == {"conv": "blocked1"}
    assert kinds(graph) == ["Conv", "Clip", "Conv"]
    _, clip, conv = graph.node
    assert clip.input == ["blocked1", "low", "high"]
    assert conv.input[0] == clip.output[0]
    assert [value.name for value in graph.output] == ["blocked1", "y"]


def test_blocks_that_are_not_full_stay() -> None:
    graph = optimised(24)
    assert without_conversions(graph, ["conv"]) == {}
    assert kinds(graph) == ["Conv", "ReorderOutput", "Clip", "ReorderInput", "Conv"]


def test_a_clip_that_a_plain_operator_reads_stays_plain() -> None:
    graph = optimised(32, reader="Sigmoid")
    assert without_conversions(graph, ["conv"]) == {"conv": "blocked1"}
    assert kinds(graph) == ["Conv", "ReorderOutput", "Clip", "Sigmoid", "Conv"]


def test_tensors_that_are_not_wanted_are_not_touched() -> None:
    graph = optimised(32, reader="Sigmoid")
    assert without_conversions(graph, ["conv"], keep_layout=["conv"]) == {}
    assert "ReorderOutput" in kinds(graph)


@pytest.mark.parametrize("channels", [32, 20])
def test_values_are_those_of_the_plain_session(tmp_path: Path, channels: int) -> None:
    path = small_cnn(tmp_path / "m.onnx", channels)
    names, item = ["conv1", "clip1", "conv2", "sum", "relu", "y"], images(1)[0]
    kept = InstrumentedModel(read_model(path), names, keep_layout=names).run(item, "s")
    free = InstrumentedModel(read_model(path), names).run(item, "s")
    assert kept[0].shape == (1, channels, 12, 12)
    for a, b in zip(kept, free, strict=True):
        assert np.array_equal(np.sort(a, axis=None), np.sort(b, axis=None))


def test_a_refused_sample_is_named(tmp_path: Path) -> None:
    path = small_cnn(tmp_path / "m.onnx")
    with pytest.raises(DataError, match=r"sample cat\.jpg"):
        InstrumentedModel(read_model(path), ["y"]).run({"wrong": np.zeros(3)}, "cat.jpg")
