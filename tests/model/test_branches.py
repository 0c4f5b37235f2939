"""Test convolutions of one tensor whose results are added: merged if one kernel covers the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from edgeq.model.branches import merge_branches

from .build import model, node, rand, run, write

CHANNELS = 4


def network(branches: list[tuple[str, Any]], sums: tuple[str, ...], extra: list[onnx.NodeProto]) -> onnx.ModelProto:
    """Return branches of x that are added one after the other, then a Relu.

    A branch is a kernel with the attributes of a Conv, or ("norm", None).
    """
    weights, nodes = {}, []
    for number, (kernel, attributes) in enumerate(branches):
        if kernel == "norm":
            names = [f"n{number}_{part}" for part in range(4)]
            values = [rand(CHANNELS, seed=number + part) for part in range(4)]
            values[3] = np.abs(values[3]) + np.float32(0.5)
            weights |= dict(zip(names, values, strict=True))
            nodes.append(node("BatchNormalization", ["x", *names], [f"t{number}"], name=f"branch{number}"))
            continue
        sizes = [int(size) for size in kernel.split("x")]
        weights[f"w{number}"] = rand(CHANNELS, CHANNELS // attributes.get("group", 1), *sizes, seed=number)
        weights[f"b{number}"] = rand(CHANNELS, seed=20 + number)
        inputs = ["x", f"w{number}", *([f"b{number}"] if number % 2 else [])]
        nodes.append(node("Conv", inputs, [f"t{number}"], name=f"branch{number}", **attributes))
    before = "t0"
    for number, operator in enumerate(sums):
        nodes.append(node(operator, [before, f"t{number + 1}"], [f"s{number}"], name=f"sum{number}"))
        before = f"s{number}"
    nodes.append(node("Relu", [before], ["y"], name="relu"))
    return model(
        [*nodes, *extra], {"x": ["N", CHANNELS, "H", "W"]}, ["y", *(o for n in extra for o in n.output)], weights
    )


def merge(tmp_path: Path, proto: onnx.ModelProto) -> tuple[list[str], int]:
    """Merge branches, check the results, and return the remaining operators and the number of merged sums."""
    graph = ir.serde.deserialize_model(proto)
    merged = merge_branches(graph)
    after = ir.serde.serialize_model(graph)
    feeds = {"x": rand(2, CHANNELS, 9, 7, seed=99)}
    expected, found = run(write(tmp_path / "a.onnx", proto), feeds), run(write(tmp_path / "b.onnx", after), feeds)
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5)
    return [n.op_type for n in after.graph.node], merged


PAD1, PAD2 = {"pads": [1] * 4}, {"pads": [2] * 4}


@pytest.mark.parametrize(
    ("branches", "sums"),
    [
        ([("3x3", PAD1), ("1x1", {}), ("norm", None)], ("Add", "Add")),
        ([("1x1", {}), ("3x3", PAD1)], ("Sub",)),
        ([("norm", None), ("1x1", {})], ("Sub",)),
        ([("1x1", {"group": 4}), ("norm", None), ("3x3", {**PAD1, "group": 4})], ("Add", "Add")),
        ([("3x3", {**PAD1, "group": 2}), ("norm", None)], ("Add",)),
        ([("5x5", {**PAD2, "strides": [2, 2]}), ("3x3", {**PAD1, "strides": [2, 2]})], ("Add",)),
        ([("3x3", {**PAD2, "dilations": [2, 2]}), ("1x1", {})], ("Add",)),
        ([("3x3", PAD1), ("1x3", {"pads": [0, 1, 0, 1]}), ("3x1", {"pads": [1, 0, 1, 0]})], ("Add", "Add")),
        ([("3x3", {"pads": [2, 2, 0, 0]}), ("1x1", {})], ("Add",)),
    ],
)
def test_branches_become_one_convolution(
    tmp_path: Path, branches: list[tuple[str, Any]], sums: tuple[str, ...]
) -> None:
    assert merge(tmp_path, network(branches, sums, [])) == (["Conv", "Relu"], len(sums))


@pytest.mark.parametrize(
    "branches",
    [
        # One kernel that covers both has more taps than the two together.
        [("1x3", {"pads": [0, 1, 0, 1]}), ("3x1", {"pads": [1, 0, 1, 0]})],
        # Its taps are between those of the dilated kernel.
        [("3x3", {**PAD2, "dilations": [2, 2]}), ("3x3", PAD1)],
        # The two results have the same size for this test's input, but maybe not for other inputs.
        [("1x1", {"strides": [2, 2]}), ("3x3", {"strides": [2, 2], "pads": [1, 1, 1, 1], "group": 2})],
        [("3x3", {"auto_pad": "SAME_UPPER"}), ("1x1", {})],
        [("norm", None), ("norm", None)],
    ],
)
def test_others_stay(tmp_path: Path, branches: list[tuple[str, Any]]) -> None:
    _, merged = merge(tmp_path, network(branches, ("Add",), []))
    assert not merged


def test_a_branch_that_is_read_elsewhere_stays(tmp_path: Path) -> None:
    extra = [node("Sigmoid", ["t1"], ["z"], name="gate")]
    _, merged = merge(tmp_path, network([("3x3", PAD1), ("1x1", {})], ("Add",), extra))
    assert not merged


def test_weights_that_are_computed_stay(tmp_path: Path) -> None:
    proto = network([("3x3", PAD1), ("1x1", {})], ("Add",), [])
    proto.graph.node.insert(0, node("Abs", ["w1"], ["w1_abs"], name="abs"))
    next(n for n in proto.graph.node if n.name == "branch1").input[1] = "w1_abs"
    _, merged = merge(tmp_path, proto)
    assert not merged
