from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx import helper

from edgeq.calibrate.groups import scale_groups, share_ranges
from edgeq.calibrate.ranges import Range
from edgeq.model.load import read_model

from .models import value, write


def model(path: Path) -> ir.Model:
    weights = {"shape": np.int64([1, -1]), "constant": np.ones((1, 2, 4, 4), np.float32), "sizes": np.int64([1, 1])}
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("MaxPool", ["a"], ["b"], kernel_shape=[1, 1]),
        helper.make_node("Concat", ["b", "x", "constant"], ["c"], axis=1),
        helper.make_node("Split", ["y"], ["d", "e"], axis=0),
        helper.make_node("Neg", ["d"], ["f"]),
        helper.make_node("Reshape", ["f", "shape"], ["g"]),
    ]
    return read_model(
        write(
            path,
            nodes,
            [value("x", [1, 2, 4, 4]), value("y", [2, 3])],
            [value("c", [1, 6, 4, 4]), value("e", [1, 3]), value("g", [1, 3])],
            weights,
        )
    )


def test_groups_follow_operators_that_only_move_values(tmp_path: Path) -> None:
    assert scale_groups(model(tmp_path / "m.onnx")) == (("a", "b", "c", "x"), ("d", "e", "y"), ("f", "g"))
    assert scale_groups(model(tmp_path / "m.onnx"), ["Concat"]) == (("b", "c", "x"),)


def test_a_group_has_the_range_that_holds_all_of_its_members(tmp_path: Path) -> None:
    ranges = {"a": Range(0, 2), "b": Range(0, 1), "c": Range(-3, 2), "f": Range(-1, 0), "other": Range(-9, 9)}
    shared = share_ranges(model(tmp_path / "m.onnx"), ranges)
    assert {name: shared[name] for name in "abc"} == dict.fromkeys("abc", Range(-3, 2))
    assert shared["f"] == Range(-1, 0)
    assert shared["other"] == Range(-9, 9)
    assert ranges["a"] == Range(0, 2)
    assert set(shared) == set(ranges)
