"""Test means over whole images: they become GlobalAveragePool if a layer reads them, and stay in all other cases."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from edgeq.model.pools import write_global_pools, write_whole_pools
from tests.graphs import proto

from .build import rand, run, write

GATE = """
    weight = Constant <value = float[3, 2, 1, 1] {1, -2, 3, 4, 5, -6}> ()
    y = Conv <kernel_shape = [1, 1]> (m, weight)
"""
HEAD = """
    weight = Constant <value = float[2, 3] {1, -2, 3, 4, 5, -6}> ()
    y = MatMul (m, weight)
"""


def rewritten(tmp_path: Path, body: str, opset: int) -> tuple[list[str], int]:
    """Rewrite means, check the results, and return the remaining operators and the number of rewritten means."""
    before = proto(f"g (float[N, 2, 5, 4] x) => (y) {{ {body} }}", opset=opset)
    model = ir.serde.deserialize_model(before)
    count = write_global_pools(model)
    after = ir.serde.serialize_model(model)
    feeds = {"x": rand(2, 2, 5, 4)}
    assert all(n.name == "mean" for n in after.graph.node if n.op_type == "GlobalAveragePool")
    (expected,), (found,) = (
        run(write(tmp_path / "a.onnx", before), feeds),
        run(write(tmp_path / "b.onnx", after), feeds),
    )
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    return [n.op_type for n in after.graph.node if n.op_type != "Constant"], count


def test_rewrites_means_of_gates_and_heads(tmp_path: Path) -> None:
    attribute = "[mean] m = ReduceMean <axes = [2, 3], keepdims = 1> (x)" + GATE
    assert rewritten(tmp_path, attribute, 13) == (["GlobalAveragePool", "Conv"], 1)
    last = "axes = Constant <value = int64[2] {-1, -2}> () [mean] m = ReduceMean <keepdims = 0> (x, axes)" + HEAD
    assert rewritten(tmp_path, last, 18) == (["GlobalAveragePool", "Flatten", "MatMul"], 1)
    carried = "[mean] k = ReduceMean <axes = [2, 3]> (x) m = Flatten (k)" + HEAD
    assert rewritten(tmp_path, carried, 13) == (["GlobalAveragePool", "Flatten", "MatMul"], 1)


@pytest.mark.parametrize(
    "body",
    [
        "m = ReduceMean <axes = [3]> (x) y = Identity (m)",
        "m = ReduceMean <axes = [1, 2, 3], keepdims = 1> (x) y = Relu (m)",
        # A written-out normalization.
        "m = ReduceMean <axes = [2, 3]> (x) y = Sub (x, m)",
        "k = ReduceMean <axes = [2, 3]> (x) m = Flatten (k) y = Sqrt (m)",
        "y = ReduceMean <axes = [2, 3]> (x)",
    ],
)
def test_other_means_stay(tmp_path: Path, body: str) -> None:
    _, count = rewritten(tmp_path, body, 13)
    assert not count


@pytest.mark.parametrize(
    ("attributes", "whole"),
    [
        ("kernel_shape = [5, 4]", True),
        ("kernel_shape = [5, 4], strides = [2, 3], count_include_pad = 1", True),
        ('kernel_shape = [5, 4], auto_pad = "VALID"', True),
        ("kernel_shape = [5, 3]", False),
        ("kernel_shape = [5, 4], pads = [1, 0, 0, 0]", False),
        ("kernel_shape = [4]", False),
    ],
)
def test_rewrites_average_pools_over_the_whole_image(tmp_path: Path, attributes: str, whole: bool) -> None:
    size = "N, 2, 5, 4" if "[4]" not in attributes else "N, 2, 5"
    before = proto(f"g (float[{size}] x) => (y) {{ [pool] y = AveragePool <{attributes}> (x) }}")
    model = ir.serde.deserialize_model(before)
    assert write_whole_pools(model) == whole
    after = ir.serde.serialize_model(model)
    assert [(node.op_type, node.name) for node in after.graph.node] == [
        ("GlobalAveragePool" if whole else "AveragePool", "pool")
    ]
    feeds = {"x": rand(2, 2, 5, 4) if size.endswith("4") else rand(2, 2, 5)}
    (expected,), (found,) = (
        run(write(tmp_path / "a.onnx", before), feeds),
        run(write(tmp_path / "b.onnx", after), feeds),
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
