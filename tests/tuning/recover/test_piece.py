"""Test `edgeq.tuning.recover.piece`: some nodes of a model run in a session of their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from edgeq.model.convert import to_bytes
from edgeq.model.graph import GraphIndex
from edgeq.model.load import read_model
from edgeq.run.session import SessionSettings
from edgeq.tuning.recover.piece import open_piece
from tests.graphs import model

NET = """
net (float[N,2] x, bool c) => (float[N,2] z)
<float[2,2] w = {1, 2, 3, 4}, float[2] b = {10, 20}>
{
  [product] h = MatMul (x, w)
  [choice] y = If (c) <
    then_branch = one () => (float[N,2] p) { p = Add (h, b) },
    else_branch = two () => (float[N,2] q) { q = Neg (h) }
  >
  [last] z = Abs (y)
}
"""
X = np.array([[1, 1]], np.float32)


def _run(net: ir.Model, names: list[str], feed: dict[str, np.ndarray], output: str) -> np.ndarray:
    nodes = [GraphIndex(net).nodes[name] for name in names]
    found: np.ndarray = open_piece(net, nodes, feed, [output], SessionSettings()).run([output], feed)[0]
    return found


@pytest.mark.parametrize("external", [False, True])
def test_weights_come_along_wherever_they_are(tmp_path: Path, external: bool) -> None:
    net = model(NET)
    if external:
        ir.save(net, tmp_path / "m.onnx", external_data="m.data", size_threshold_bytes=0)
        net = read_model(tmp_path / "m.onnx")
    np.testing.assert_array_equal(_run(net, ["product"], {"x": X}, "h"), [[4, 6]])


def test_pieces_include_tensors_that_bodies_read() -> None:
    feed = {"h": X, "c": np.array(True)}
    np.testing.assert_array_equal(_run(model(NET), ["choice", "last"], feed, "z"), [[11, 21]])


def test_a_weight_can_be_fed() -> None:
    net = model(NET)
    before = to_bytes(net)
    feed = {"x": X, "w": np.eye(2, dtype=np.float32)}
    np.testing.assert_array_equal(_run(net, ["product"], feed, "h"), X)
    assert to_bytes(net) == before
