"""A session with ONNX Runtime's default optimisation computes the biases of int8 layers as the file specifies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from .nets import LAYERS, Bench, bench, chain


def sqnr(net: Bench, path: Path, level: str) -> float:
    """Return the SQNR in dB against the float model, in a plain session."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    x = dict(next(iter(net.samples)).inputs)
    expected, got = (
        onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"]).run(None, x)[0]
        for path, options in ((net.prepared.path, None), (path, options))
    )
    return float(10 * np.log10(np.sum(expected**2) / np.sum((expected - got) ** 2)))


@pytest.mark.parametrize(("rest", "per_channel"), [("float16", True), ("float16", False), ("float32", True)])
@pytest.mark.parametrize("layer", LAYERS)
def test_no_optimisation_changes_the_answer(tmp_path: Path, layer: str, rest: str, per_channel: bool) -> None:
    net = bench(tmp_path, chain(layer))
    built = net.build(rest=rest, per_channel=per_channel)
    assert all(node["precision"] == "int8" for node in built.details["placement"]["nodes"])
    saved = sqnr(net, built.model, "ORT_DISABLE_ALL")
    assert saved > 30
    for level in ("ORT_ENABLE_BASIC", "ORT_ENABLE_ALL"):
        assert sqnr(net, built.model, level) == pytest.approx(saved, abs=0.5)
