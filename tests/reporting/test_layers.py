"""Test the layers that a report shows."""

from __future__ import annotations

from pathlib import Path

import pytest

import edgeq
from edgeq import demo
from edgeq.data.samples import open_samples
from edgeq.model.prepare import prepare_model
from edgeq.reporting import layers
from edgeq.run.session import SessionSettings


@pytest.mark.parametrize(("large", "count"), [(1_000_000_000, 4), (1_000, 2)])
def test_a_large_model_is_compared_on_fewer_samples(
    large: int, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "_LARGE_MACS", large)
    prepared = prepare_model(demo.MODEL, tmp_path)
    edgeq.quantize(demo.MODEL, demo.CALIBRATION, tmp_path / "int8.onnx", timed=False)
    samples = open_samples(demo.CALIBRATION, prepared.signature)
    found = layers.layer_record(prepared.graph, tmp_path / "int8.onnx", samples, SessionSettings())
    assert found["samples"] == count
    assert found["activations"]
